// The ceiling of bf16's dot instruction, on registers alone.
#include "sets/kernel_sets.h"

#if defined(__x86_64__)
#include "sets/avx512_math.h"

namespace diptych {
namespace {

double bf16_burst(int64_t rounds) {
  __m512 sums[24];
  _Pragma("GCC unroll 24") for (int i = 0; i < 24; ++i) sums[i] = _mm512_setzero_ps();
  __m512i a = _mm512_set1_epi32(static_cast<int>(rounds)), b = _mm512_set1_epi32(0x3f803f80);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) add_dot_bf16(sums[i], a, b);
    __asm__ volatile("" : "+v"(a), "+v"(b));
  }
  __m512 total = sums[0];
  _Pragma("GCC unroll 24") for (int i = 1; i < 24; ++i) total = _mm512_add_ps(total, sums[i]);
  volatile float sink = _mm512_cvtss_f32(total);
  (void)sink;
  return 24.0 * 64.0 * static_cast<double>(rounds);
}

}  // namespace

namespace avx512 {
extern const CeilingLoops kCeilings = {nullptr, bf16_burst, nullptr, nullptr, nullptr};  // the rest is avx512_fma's
}

}  // namespace diptych
#endif

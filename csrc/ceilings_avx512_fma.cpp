// The ceilings of AVX-512 but for bf16's dot instruction: products on registers alone, and loads that use nothing.
#include "kernel_sets.h"

#if defined(__x86_64__)
#include "avx512_math.h"

namespace diptych {
namespace {

double fp32_burst(int64_t rounds) {
  __m512 sums[24];
  _Pragma("GCC unroll 24") for (int i = 0; i < 24; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));  // equal sums would become one
  __m512 a = _mm512_set1_ps(static_cast<float>(rounds)), b = _mm512_set1_ps(0.7f);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) sums[i] = _mm512_fmadd_ps(a, b, sums[i]);
    __asm__ volatile("" : "+v"(a), "+v"(b));
  }
  __m512 total = sums[0];
  _Pragma("GCC unroll 24") for (int i = 1; i < 24; ++i) total = _mm512_add_ps(total, sums[i]);
  volatile float sink = _mm512_cvtss_f32(total);
  (void)sink;
  return 24.0 * 32.0 * static_cast<double>(rounds);
}

double int8_burst(int64_t rounds) {
  __m512i sums[24];
  _Pragma("GCC unroll 24") for (int i = 0; i < 24; ++i) sums[i] = _mm512_setzero_si512();
  __m512i a = _mm512_set1_epi32(static_cast<int>(rounds)), b = _mm512_set1_epi32(0x01010101);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) add_dot_int8(sums[i], a, b);
    __asm__ volatile("" : "+v"(a), "+v"(b));
  }
  __m512i total = sums[0];
  _Pragma("GCC unroll 24") for (int i = 1; i < 24; ++i) total = _mm512_add_epi32(total, sums[i]);
  volatile int sink = _mm512_cvtsi512_si32(total);
  (void)sink;
  return 24.0 * 128.0 * static_cast<double>(rounds);
}

void read_all(const uint8_t* data, int64_t bytes, int64_t ahead) {
  __m512i sums[8];
  for (int i = 0; i < 8; ++i) sums[i] = _mm512_setzero_si512();
  for (int64_t at = 0; at + 512 <= bytes; at += 512) {
    for (int i = 0; i < 8; ++i) {
      if (ahead != 0) _mm_prefetch(reinterpret_cast<const char*>(data + at + ahead + 64 * i), _MM_HINT_T0);
      sums[i] = _mm512_or_si512(sums[i], _mm512_load_si512(data + at + 64 * i));
    }
  }
  __m512i total = sums[0];
  for (int i = 1; i < 8; ++i) total = _mm512_or_si512(total, sums[i]);
  volatile int sink = _mm512_cvtsi512_si32(total);
  (void)sink;
}

}  // namespace

namespace avx512_fma {
extern const CeilingLoops kCeilings = {fp32_burst, fp32_burst, int8_burst, read_all};
}

}  // namespace diptych
#endif

// The ceiling of whole numbers by vpdpbusd on 256 bits; all else is avx2's.
#include "sets/kernel_sets.h"

#if defined(__x86_64__)
#define DIPTYCH_ENCODING "%{vex%} "
#include "sets/avx_vnni.h"

namespace diptych {
namespace {

double int8_burst(int64_t rounds) {
  __m256i sums[12];
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) sums[i] = _mm256_set1_epi32(i);  // equal sums would become one
  __m256i a = _mm256_set1_epi32(static_cast<int>(rounds)), b = _mm256_set1_epi32(0x01010101);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) add_dot4(sums[i], a, b);
    __asm__ volatile("" : "+x"(a), "+x"(b));
  }
  __m256i total = sums[0];
#pragma GCC unroll 12
  for (int i = 1; i < 12; ++i) total = _mm256_add_epi32(total, sums[i]);
  volatile int sink = _mm256_extract_epi32(total, 0);
  (void)sink;
  return 12.0 * 64.0 * static_cast<double>(rounds);
}

}  // namespace

namespace avx2_vnni {
extern const CeilingLoops kCeilings = {nullptr, nullptr, int8_burst, nullptr, nullptr};
}

}  // namespace diptych
#endif

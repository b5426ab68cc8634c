// The ceilings of AVX-512 but for bf16's dot instruction: products on registers alone, and loads that use nothing.
#include "sets/kernel_sets.h"

#if defined(__x86_64__)
#include "sets/avx512_math.h"

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

// Past the caches two places at a time come faster than one (Zen 4, threads far apart: 68 GB/s against 64).
template <Reading kHow, int kPlaces>
void read_places(const uint8_t* data, int64_t bytes) {
  __m512i sums[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) sums[i] = _mm512_setzero_si512();
  constexpr int kEach = 8 / kPlaces;
  const int64_t part = bytes / (kPlaces * 512) * 512;
  for (int64_t at = 0; at < part; at += 64 * kEach)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const uint8_t* from = data + i / kEach * part + at + 64 * (i % kEach);
      if (kHow == Reading::ahead) _mm_prefetch(reinterpret_cast<const char*>(from + kReadAheadBytes), _MM_HINT_T0);
      if (kHow == Reading::past) _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_NTA);
      sums[i] = _mm512_or_si512(sums[i], _mm512_load_si512(from));
    }
  __m512i total = sums[0];
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) total = _mm512_or_si512(total, sums[i]);
  volatile int sink = _mm512_cvtsi512_si32(total);
  (void)sink;
}

void read_all(const uint8_t* data, int64_t bytes, Reading how) {
  if (how == Reading::past) return read_places<Reading::past, 2>(data, bytes);
  how == Reading::ahead ? read_places<Reading::ahead, 1>(data, bytes) : read_places<Reading::plain, 1>(data, bytes);
}

}  // namespace

namespace avx512_fma {
extern const CeilingLoops kCeilings = {fp32_burst, fp32_burst, int8_burst, nullptr, read_all};
}

}  // namespace diptych
#endif

// Without dot instructions bf16 is multiplied as fp32, int8 as pairs of int16, and codes of fewer bits as bytes: these are then the ceilings.
#include "sets/kernel_sets.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace diptych {
namespace {

double fp32_burst(int64_t rounds) {
  __m256 sums[12];
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));  // equal sums would become one
  __m256 a = _mm256_set1_ps(static_cast<float>(rounds)), b = _mm256_set1_ps(0.5f);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sums[i] = _mm256_fmadd_ps(a, b, sums[i]);
    __asm__ volatile("" : "+x"(a), "+x"(b));
  }
  __m256 total = sums[0];
#pragma GCC unroll 12
  for (int i = 1; i < 12; ++i) total = _mm256_add_ps(total, sums[i]);
  volatile float sink = _mm256_cvtss_f32(total);
  (void)sink;
  return 12.0 * 16.0 * static_cast<double>(rounds);
}

double int8_burst(int64_t rounds) {
  __m256i sums[12];
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) sums[i] = _mm256_setzero_si256();
  const __m256i a = _mm256_set1_epi16(static_cast<int16_t>(rounds)), b = _mm256_set1_epi16(3);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) {  // as assembly: otherwise all products are one, or sums wait in memory
      __m256i products;
      __asm__ volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums[i]), "=&x"(products) : "x"(a), "x"(b));
    }
  }
  __m256i total = sums[0];
#pragma GCC unroll 12
  for (int i = 1; i < 12; ++i) total = _mm256_add_epi32(total, sums[i]);
  volatile int sink = _mm256_extract_epi32(total, 0);
  (void)sink;
  return 12.0 * 32.0 * static_cast<double>(rounds);
}

// Eight pairs of products of codes by bytes, 16 * 15 * 127 at most, are summed in 16 bits before they are widened.
double int4_burst(int64_t rounds) {
  constexpr int kSums = 5;
  __m256i sums[kSums];
#pragma GCC unroll 5
  for (int i = 0; i < kSums; ++i) sums[i] = _mm256_setzero_si256();
  const __m256i codes = _mm256_set1_epi8(static_cast<char>(rounds & 15)), x = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
  for (int64_t round = 0; round < rounds; ++round) {
    __m256i pairs[kSums];
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step)
#pragma GCC unroll 5
      for (int i = 0; i < kSums; ++i) {  // as assembly, as above
        __m256i products;
        if (step == 0) __asm__ volatile("vpmaddubsw %2, %1, %0" : "=x"(pairs[i]) : "x"(codes), "x"(x));
        else __asm__ volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(pairs[i]), "=&x"(products) : "x"(codes), "x"(x));
      }
#pragma GCC unroll 5
    for (int i = 0; i < kSums; ++i) __asm__ volatile("vpmaddwd %2, %1, %1\n\tvpaddd %1, %0, %0" : "+x"(sums[i]), "+x"(pairs[i]) : "x"(ones));
  }
  __m256i total = sums[0];
#pragma GCC unroll 5
  for (int i = 1; i < kSums; ++i) total = _mm256_add_epi32(total, sums[i]);
  volatile int sink = _mm256_extract_epi32(total, 0);
  (void)sink;
  return 64.0 * 8.0 * kSums * static_cast<double>(rounds);
}

// In four places at a time, which some processors read faster than one; asked for ahead, in one.
template <Reading kHow, int kPlaces>
void read_places(const uint8_t* data, int64_t bytes) {
  __m256i sums[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) sums[i] = _mm256_setzero_si256();
  constexpr int kEach = 8 / kPlaces;  // registers
  const int64_t part = bytes / (kPlaces * 256) * 256;
  for (int64_t at = 0; at < part; at += 32 * kEach)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const uint8_t* from = data + i / kEach * part + at + 32 * (i % kEach);
      if (kHow == Reading::ahead && i % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(from + kReadAheadBytes), _MM_HINT_T0);
      if (kHow == Reading::past && i % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_NTA);
      sums[i] = _mm256_or_si256(sums[i], _mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
    }
  __m256i total = sums[0];
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) total = _mm256_or_si256(total, sums[i]);
  volatile int sink = _mm256_extract_epi32(total, 0);
  (void)sink;
}

void read_all(const uint8_t* data, int64_t bytes, Reading how) {
  if (how == Reading::past) return read_places<Reading::past, 4>(data, bytes);
  how == Reading::ahead ? read_places<Reading::ahead, 1>(data, bytes) : read_places<Reading::plain, 4>(data, bytes);
}

}  // namespace

namespace avx2 {
extern const CeilingLoops kCeilings = {fp32_burst, fp32_burst, int8_burst, int4_burst, read_all};
}

}  // namespace diptych
#endif

// What AVX2 lacks beside AVX-512, of eight lanes. Included by simd.h alone, for the units of that set.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace diptych {
namespace DIPTYCH_ISA {

// The nearest whole number stands in the low bits of what a large number is added to, as the exponent of its power: 0 at -127 and below.
static inline __attribute__((always_inline)) __m256 weight_exp2(__m256 x) {
  const __m256 large = _mm256_set1_ps(12582912.0f + 127.0f);
  x = _mm256_max_ps(_mm256_set1_ps(-127.0f), x);  // NaN stays NaN
  const __m256 shifted = _mm256_add_ps(x, large), r = _mm256_sub_ps(x, _mm256_sub_ps(shifted, large));
  __m256 p = _mm256_fmadd_ps(r, _mm256_set1_ps(0.055008865892887115f), _mm256_set1_ps(0.2422109693288803f));
  p = _mm256_fmadd_ps(r, p, _mm256_set1_ps(0.693282961845398f));
  p = _mm256_fmadd_ps(r, p, _mm256_set1_ps(1.0f));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}

// The E4M3 in the upper bytes of 8 words as fp32, exact but for 2^-8: shifted by the wider exponent they are fp16, those without
// an exponent, too. NaN becomes 480.
static inline __attribute__((always_inline)) __m256 widen_e4m3_words(__m128i words) {
  return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
}

// To the nearest bf16, even where two are; the upper halves of the result's 32-bit lanes are zero.
static inline __attribute__((always_inline)) __m256i round_bf16(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i high = _mm256_srli_epi32(bits, 16);
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan);
  __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
  __m256i is_tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  return _mm256_blendv_epi8(rounded, _mm256_and_si256(high, _mm256_set1_epi32(0x8000)), is_tiny);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych

// What AVX2 (gemm_groups_pairs.inl), and with DIPTYCH_DOT4 AVX-VNNI (gemm_groups_parts.inl), have for tiles of weights in groups. Included by gemm_avx2.inl.

using Operand = __m256i;

#include "gemm/gemm_group_forms.inl"

inline Lanes widen_halves(const uint8_t* at) { return (Lanes)_mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(at))); }
inline Lanes widen_bf16(const uint8_t* at) {
  return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(at))), 16);
}
inline Lanes widen_s8(const uint8_t* at) {
  return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
inline Whole widen_u8(const uint8_t* at) { return (Whole)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))); }
// E4M3 without signs: its fields are f16's, whose exponents begin 8 lower.
inline Lanes widen_e4m3(const uint8_t* at) {
  const __m128i fields = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))), 7);
  return (Lanes)_mm256_mul_ps(_mm256_cvtph_ps(fields), _mm256_set1_ps(256.0f));
}

// Step `word` of the four of 16 inputs, of a piece of the lanes: codes, or what the table has for them.
template <CodeForm kForm>
DIPTYCH_FORCED Operand operand_of(const uint8_t* unit, const uint8_t* tops, int word, int part, const Operand& table) {
  const auto step = [&](int i) __attribute__((always_inline)) {
    __m256i words = load_words(unit + i * kStepBytes, part);
    if (!has_tops(kForm)) __asm__("" : "+x"(words));  // once, where registers are left for it
    return words;
  };
  if constexpr (kForm == CodeForm::bytes) return step(word);
  constexpr bool kIsPairs = kForm == CodeForm::twos || kForm == CodeForm::threes || kForm == CodeForm::threes_table;
  const __m256i packed = step(kIsPairs ? 0 : word / 2);
  const int shift = kIsPairs ? 2 * word : word % 2 * 4;
  const __m256i shifted = shift == 0 ? packed : _mm256_srli_epi16(packed, shift);
  __m256i codes = _mm256_and_si256(shifted, _mm256_set1_epi8(kIsPairs ? 3 : 15));
  if constexpr (kForm == CodeForm::sixes) {
    const __m256i pairs = step(2), high = word == 3 ? _mm256_srli_epi16(pairs, 2) : _mm256_slli_epi16(pairs, 4 - 2 * word);
    codes = _mm256_or_si256(codes, _mm256_and_si256(high, _mm256_set1_epi8(48)));
  }
  if constexpr (has_tops(kForm)) {  // bit 8 i + j of these 32 is byte 8 i + j's
    int32_t bits;
    std::memcpy(&bits, tops + word * 8 + part * 4, 4);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own);
    codes = _mm256_or_si256(codes, _mm256_and_si256(is_set, _mm256_set1_epi8(kIsPairs ? 4 : 16)));
  }
  return is_table(kForm) ? _mm256_shuffle_epi8(table, codes) : codes;
}

#if defined(DIPTYCH_DOT4)
constexpr int32_t kSignedBase = 128;  // signed levels are met as u8
constexpr int kLeastRowsOfOne = 3, kMostRowsOfOne = 8;  // a sum waits for itself: as many as the registers hold

inline Operand load_table(const LinearShape& shape) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table_of(shape))));
  return _mm256_add_epi8(levels, _mm256_set1_epi8(static_cast<char>(kSignedBase)));
}

// The dot products of 16 inputs of a row, joined to whole sums.
DIPTYCH_FORCED Whole add_16(Whole sum, const Operand (&operands)[4], const uint8_t* x) {
  __m256i whole = (__m256i)sum;
#pragma GCC unroll 4
  for (int word = 0; word < 4; ++word) add_dot4(whole, operands[word], broadcast_word(x + word * 4));
  return (Whole)whole;
}
#include "gemm/gemm_groups_parts.inl"
#else
#include "gemm/gemm_groups_pairs.inl"
#endif

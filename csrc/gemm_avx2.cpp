// AVX2 kernels (with FMA and F16C): tiles of up to 4 rows x 16 lanes, of groups 8; the rest is the generic text under this file's flags.
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "kernel_sets.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace diptych {
namespace {

#include "lanes.inl"

#include "gemm_generic.inl"

#include "gemm_avx2.inl"

// Each pair of bf16 as two fp32 products, the even input first.
template <int kRows>
void tile_bf16(const TileArgs& args) {
  __m256 sums[kRows][kHalves];
  float* acc = static_cast<float*>(args.acc);
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < kHalves; ++half)
      sums[row][half] = args.resume ? _mm256_load_ps(acc + row * kPanelLanes + half * 8) : _mm256_setzero_ps();
  const __m256i odd_bits = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (int64_t step = 0; step < args.units; ++step) {
    __m256 even[kHalves], odd[kHalves];
    for (int half = 0; half < kHalves; ++half) {
      const __m256i words = load_words(args.strip + step * kStepBytes, half);
      even[half] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
      odd[half] = _mm256_castsi256_ps(_mm256_and_si256(words, odd_bits));
    }
    for (int row = 0; row < kRows; ++row) {
      const __m256i word = broadcast_word(args.x[row] + step * 4);
      const __m256 x0 = _mm256_castsi256_ps(_mm256_slli_epi32(word, 16));
      const __m256 x1 = _mm256_castsi256_ps(_mm256_and_si256(word, odd_bits));
      for (int half = 0; half < kHalves; ++half)
        sums[row][half] = _mm256_fmadd_ps(odd[half], x1, _mm256_fmadd_ps(even[half], x0, sums[row][half]));
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < kHalves; ++half) _mm256_store_ps(acc + row * kPanelLanes + half * 8, sums[row][half]);
}

// Of whole words of x.
inline int32_t sum_bytes(const uint8_t* x, int64_t words) {
  __m256i sum = _mm256_setzero_si256();
  for (int64_t word = 0; word < words; word += 8) {
    const __m256i wanted = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(words - word)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i values = _mm256_maskload_epi32(reinterpret_cast<const int*>(x + word * 4), wanted);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), values);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
  int32_t total = 0;
  for (const int32_t lane : lanes) total += lane;
  return total;
}

// u8 = level + 128 x s8. Two products fit 16 bits, 2 * 127 * 127, where the signs of levels have gone over to x; 128 times the sum of x is
// added at the end.
template <int kRows>
void tile_int8(const TileArgs& args) {
  __m256i sums[kRows][kHalves];
  int32_t* acc = static_cast<int32_t*>(args.acc);
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < kHalves; ++half) sums[row][half] = _mm256_setzero_si256();
  const __m256i offset = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
  for (int64_t step = 0; step < args.units; ++step) {
    __m256i levels[kHalves], magnitudes[kHalves];
    for (int half = 0; half < kHalves; ++half) {
      levels[half] = _mm256_xor_si256(load_words(args.strip + step * kStepBytes, half), offset);
      magnitudes[half] = _mm256_abs_epi8(levels[half]);
    }
    for (int row = 0; row < kRows; ++row) {
      const __m256i word = broadcast_word(args.x[row] + step * 4);
      for (int half = 0; half < kHalves; ++half) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitudes[half], _mm256_sign_epi8(word, levels[half]));
        sums[row][half] = _mm256_add_epi32(sums[row][half], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    const __m256i lacking = _mm256_set1_epi32(128 * sum_bytes(args.x[row], args.units));
    for (int half = 0; half < kHalves; ++half) {
      __m256i* to = reinterpret_cast<__m256i*>(acc + row * kPanelLanes + half * 8);
      const __m256i sum = _mm256_add_epi32(sums[row][half], lacking);
      _mm256_store_si256(to, args.resume ? _mm256_add_epi32(sum, _mm256_load_si256(to)) : sum);
    }
  }
}

// Sums of code times x fit 16 bits over 32 inputs, 16 * 15 * 127 of each pair of bytes; a group's are multiplied by its unit, and its zero by the sum of x.
template <int kRows>
void tile_int4(const TileArgs& args) {
  __m256i sums[kHalves][kRows];
  int32_t* acc = static_cast<int32_t*>(args.acc);
  for (int half = 0; half < kHalves; ++half)
    for (int row = 0; row < kRows; ++row) sums[half][row] = _mm256_setzero_si256();
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  for (int64_t group = 0; group < args.units; ++group) {
    const uint8_t *head = args.strip + head_of_group(args.group, group), *w = args.strip + steps_of_group(args.group, group);
    if (args.is_stream)
      for (int64_t line = 0; line < args.group / 8; ++line) __builtin_prefetch(w + kInt4AheadBytes + line * kStepBytes, 0, 3);
    for (int half = 0; half < kHalves; ++half) {
      __m256i dots[kRows];
      for (int row = 0; row < kRows; ++row) dots[row] = _mm256_setzero_si256();
      for (int64_t from = 0; from < args.group; from += 32) {
        __m256i pairs[kRows];
        for (int row = 0; row < kRows; ++row) pairs[row] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int64_t at = from; at < from + 32; at += 8) {
          const __m256i both = load_words(w + at / 8 * kStepBytes, half);
          const __m256i low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
          for (int row = 0; row < kRows; ++row) {
            const uint8_t* x = args.x[row] + group * args.group + at;
            pairs[row] = _mm256_add_epi16(pairs[row], _mm256_maddubs_epi16(low, broadcast_word(x)));
            pairs[row] = _mm256_add_epi16(pairs[row], _mm256_maddubs_epi16(high, broadcast_word(x + 4)));
          }
        }
        for (int row = 0; row < kRows; ++row) dots[row] = _mm256_add_epi32(dots[row], _mm256_madd_epi16(pairs[row], ones));
      }
      const __m256i grid = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(head) + half));
      const __m256i unit = _mm256_and_si256(grid, _mm256_set1_epi32(255)), zero = _mm256_srli_epi32(grid, 8);
      for (int row = 0; row < kRows; ++row) {
        const __m256i x = _mm256_set1_epi32(args.group_sums[row * args.units + group]);
        sums[half][row] = _mm256_add_epi32(sums[half][row], _mm256_add_epi32(_mm256_mullo_epi32(unit, dots[row]), _mm256_mullo_epi32(zero, x)));
      }
    }
  }
  for (int half = 0; half < kHalves; ++half)
    for (int row = 0; row < kRows; ++row) _mm256_store_si256(reinterpret_cast<__m256i*>(acc + row * kPanelLanes + half * 8), sums[half][row]);
}

#include "gemm_fp8.inl"

}  // namespace

namespace avx2 {

extern const Tiles kBf16Tiles = {
    {{1, 1, XForm::rows, tile_bf16<1>}, {2, 1, XForm::rows, tile_bf16<2>}, {3, 1, XForm::rows, tile_bf16<3>}, {4, 1, XForm::rows, tile_bf16<4>}},
    {4, 1, XForm::rows, tile_bf16<4>},
};
extern const Tiles kInt8Tiles = {
    {{1, 1, XForm::rows, tile_int8<1>}, {2, 1, XForm::rows, tile_int8<2>}, {3, 1, XForm::rows, tile_int8<3>}, {4, 1, XForm::rows, tile_int8<4>}},
    {4, 1, XForm::rows, tile_int8<4>},
};
extern const Tiles kInt4Tiles = {
    {{1, 1, XForm::rows, tile_int4<1>}, {2, 1, XForm::rows, tile_int4<2>}, {3, 1, XForm::rows, tile_int4<3>}, {4, 1, XForm::rows, tile_int4<4>}},
    {4, 1, XForm::rows, tile_int4<4>},
};
extern const Tiles kFp8Tiles = {};
extern const LinearKernels kLinear = {
    nullptr, nullptr, finish, transpose_words, load_inputs, round_inputs, abs_max, quantize_int8, quantize_row,
    sum_groups, quantize_group, expand_int4, expand_fp8,
};
extern const GroupTiles kGroupTiles = {
    {kDirectTiles<false>, kDirectTiles<true>}, {kExpandedRows, 1, tile_expanded}, {kExpandedRows, 1, tile_expanded_wide}, ready_rows_of_pairs, expand_pairs,
    quantize_groups<load_inputs, abs_max, quantize_int8>, {}, row_form_of_pairs, {8, 8},
};

}  // namespace avx2

}  // namespace diptych
#endif

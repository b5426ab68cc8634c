// AVX2 kernels (with FMA and F16C): tiles of up to 4 rows x 16 lanes; the rest is the generic text under this file's flags.
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

constexpr int kHalves = 2;  // registers of 8 lanes in a strip

inline __m256i broadcast_word(const uint8_t* x) { return _mm256_set1_epi32(*reinterpret_cast<const int*>(x)); }

inline __m256i load_words(const uint8_t* w, int half) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(w) + half);
}

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

// u8 x s8 as 16-bit products: vpmaddubsw would saturate, so even and odd bytes are widened and multiplied exactly.
template <int kRows>
void tile_int8(const TileArgs& args) {
  __m256i sums[kRows][kHalves];
  int32_t* acc = static_cast<int32_t*>(args.acc);
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < kHalves; ++half) {
      const __m256i* from = reinterpret_cast<const __m256i*>(acc + row * kPanelLanes + half * 8);
      sums[row][half] = args.resume ? _mm256_load_si256(from) : _mm256_setzero_si256();
    }
  const __m256i even_bytes = _mm256_set1_epi16(0xff);
  for (int64_t step = 0; step < args.units; ++step) {
    __m256i even[kHalves], odd[kHalves];
    for (int half = 0; half < kHalves; ++half) {
      const __m256i words = load_words(args.strip + step * kStepBytes, half);
      even[half] = _mm256_and_si256(words, even_bytes);
      odd[half] = _mm256_srli_epi16(words, 8);
    }
    for (int row = 0; row < kRows; ++row) {
      const __m256i word = broadcast_word(args.x[row] + step * 4);
      const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(word, 8), 8), x_odd = _mm256_srai_epi16(word, 8);
      for (int half = 0; half < kHalves; ++half) {
        const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(even[half], x_even), _mm256_madd_epi16(odd[half], x_odd));
        sums[row][half] = _mm256_add_epi32(sums[row][half], both);
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < kHalves; ++half)
      _mm256_store_si256(reinterpret_cast<__m256i*>(acc + row * kPanelLanes + half * 8), sums[row][half]);
}

#include "gemm_fp8.inl"

#include "gemm_groups_avx2.inl"

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
extern const Tiles kInt4Tiles = {};
extern const Tiles kFp8Tiles = {};
extern const LinearKernels kLinear = {
    nullptr, nullptr, finish, transpose_words, load_inputs, round_inputs, abs_max, quantize_int8, quantize_row,
    sum_groups, quantize_group, expand_int4, expand_fp8,
};
extern const GroupTiles kGroupTiles = {
    {kDirectTiles<false>, kDirectTiles<true>}, {}, {}, ready_rows, nullptr, quantize_groups<load_inputs, abs_max, quantize_int8>,
};

}  // namespace avx2

}  // namespace diptych
#endif

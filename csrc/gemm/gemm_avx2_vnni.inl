// Whole numbers by vpdpbusd on 256 bits, the text of gemm_avx2_vnni.cpp and of gemm_avx2_vnni_twin.cpp.
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "sets/kernel_sets.h"

#if defined(__x86_64__)
#include "sets/avx_vnni.h"

namespace diptych {
namespace {

#define DIPTYCH_DOT4
#include "sets/lanes.inl"

#include "gemm/gemm_generic.inl"

#include "gemm/gemm_avx2.inl"

constexpr int64_t kInt4AheadBytes = 4096;

template <int kRows>
void tile_int8(const TileArgs& args) {
  __m256i sums[kRows][kHalves];
  int32_t* acc = static_cast<int32_t*>(args.acc);
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 6
    for (int half = 0; half < kHalves; ++half)
      sums[row][half] = args.resume ? _mm256_load_si256(reinterpret_cast<const __m256i*>(acc + row * kPanelLanes) + half) : _mm256_setzero_si256();
  for (int64_t step = 0; step < args.units; ++step) {
    const __m256i low = load_words(args.strip + step * kStepBytes, 0), high = load_words(args.strip + step * kStepBytes, 1);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const __m256i word = broadcast_word(args.x[row] + step * 4);
      add_dot4(sums[row][0], low, word);
      add_dot4(sums[row][1], high, word);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 6
    for (int half = 0; half < kHalves; ++half) _mm256_store_si256(reinterpret_cast<__m256i*>(acc + row * kPanelLanes) + half, sums[row][half]);
}

// Codes meet x as they are; a group's sums are multiplied by its unit, and its zero by the sum of x. More rows take int8's tiles.
template <int kRows>
void tile_int4(const TileArgs& args) {
  __m256i sums[kRows][kHalves];
  int32_t* acc = static_cast<int32_t*>(args.acc);
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 6
    for (int half = 0; half < kHalves; ++half) sums[row][half] = _mm256_setzero_si256();
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int64_t group = 0; group < args.units; ++group) {
    const uint8_t *head = args.strip + head_of_group(args.group, group), *w = args.strip + steps_of_group(args.group, group);
    __m256i dots[kRows][kHalves];
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 6
      for (int half = 0; half < kHalves; ++half) dots[row][half] = _mm256_setzero_si256();
    for (int64_t step = 0; step < args.group / 8; ++step) {
      if (args.is_stream) __builtin_prefetch(w + kInt4AheadBytes + step * kStepBytes, 0, 3);
#pragma GCC unroll 6
      for (int half = 0; half < kHalves; ++half) {
        const __m256i both = load_words(w + step * kStepBytes, half);
        const __m256i first = _mm256_and_si256(both, nibble), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          const uint8_t* x = args.x[row] + group * args.group + step * 8;
          add_dot4(dots[row][half], first, broadcast_word(x));
          add_dot4(dots[row][half], second, broadcast_word(x + 4));
        }
      }
    }
#pragma GCC unroll 6
    for (int half = 0; half < kHalves; ++half) {
      const __m256i grid = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(head) + half));
      const __m256i unit = _mm256_and_si256(grid, _mm256_set1_epi32(255)), zero = _mm256_srli_epi32(grid, 8);
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const __m256i x = _mm256_set1_epi32(args.group_sums[row * args.sums_stride + group]);
        sums[row][half] = _mm256_add_epi32(sums[row][half], _mm256_add_epi32(_mm256_mullo_epi32(unit, dots[row][half]), _mm256_mullo_epi32(zero, x)));
      }
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 6
    for (int half = 0; half < kHalves; ++half) _mm256_store_si256(reinterpret_cast<__m256i*>(acc + row * kPanelLanes) + half, sums[row][half]);
}

}  // namespace

namespace DIPTYCH_ISA {

#define DIPTYCH_TILE(kernel, height) {height, 1, XForm::rows, kernel<height>}
extern const Tiles kInt8Tiles = {
    {DIPTYCH_TILE(tile_int8, 1), DIPTYCH_TILE(tile_int8, 2), DIPTYCH_TILE(tile_int8, 3), DIPTYCH_TILE(tile_int8, 4), DIPTYCH_TILE(tile_int8, 5),
     DIPTYCH_TILE(tile_int8, 6)},
    DIPTYCH_TILE(tile_int8, 6),
};
extern const Tiles kInt4Tiles = {{DIPTYCH_TILE(tile_int4, 1), DIPTYCH_TILE(tile_int4, 2), DIPTYCH_TILE(tile_int4, 3)}, {}};
#undef DIPTYCH_TILE
extern const GroupTiles kGroupTiles = {
    {kDirectTiles<false>, kDirectTiles<true>}, {}, {}, ready_rows_of_parts, nullptr, quantize_groups,
};

}  // namespace DIPTYCH_ISA

}  // namespace diptych
#endif

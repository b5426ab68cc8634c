// The scalar twin: the plainest form of every kernel, right on any CPU and the text to read first.
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "sets/kernel_sets.h"

#if defined(__SSE2__)
#include <emmintrin.h>  // x86-64 has it at the least
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace diptych {
namespace {

#include "sets/lanes.inl"

#include "gemm/gemm_generic.inl"

// Both bf16 of a lane are halves of a word, taken apart as such: compilers make of the words' own lanes what they do not of every second.
void row_bf16(const TileArgs& args, int row) {
  float* acc = static_cast<float*>(args.acc) + row * kPanelLanes;
  float sums[kStripLanes] = {};
  if (args.resume) std::memcpy(sums, acc, sizeof sums);
  const uint16_t* x = reinterpret_cast<const uint16_t*>(args.x[row]);
  for (int64_t step = 0; step < args.units; ++step) {
    uint32_t w[kStripLanes];
    std::memcpy(w, args.strip + step * kStepBytes, sizeof w);
    const float x0 = from_bf16(x[step * 2]), x1 = from_bf16(x[step * 2 + 1]);
    for (int lane = 0; lane < kStripLanes; ++lane)
      sums[lane] = (sums[lane] + from_bits(w[lane] << 16) * x0) + from_bits(w[lane] & 0xffff0000u) * x1;
  }
  std::memcpy(acc, sums, sizeof sums);
}

// The scalar tiles are 1 row x 16 lanes, of bf16 2 too, as rows may come in pairs.
template <int kRows>
void tile_bf16(const TileArgs& args) {
  for (int row = 0; row < kRows; ++row) row_bf16(args, row);
}

void tile_int8(const TileArgs& args) {
  int32_t* sums = static_cast<int32_t*>(args.acc);
  if (!args.resume) std::memset(sums, 0, sizeof(int32_t) * kStripLanes);
  const int8_t* x = reinterpret_cast<const int8_t*>(args.x[0]);
  for (int64_t step = 0; step < args.units; ++step) {
    const uint8_t* w = args.strip + step * kStepBytes;
    for (int lane = 0; lane < kStripLanes; ++lane)
      for (int j = 0; j < 4; ++j) sums[lane] += w[lane * 4 + j] * x[step * 4 + j];
  }
}

#include "gemm/gemm_fp8.inl"

#include "gemm/gemm_groups.inl"

}  // namespace

namespace scalar {

extern const Tiles kBf16Tiles = {{{1, 1, XForm::rows, tile_bf16<1>}, {2, 1, XForm::rows, tile_bf16<2>}}, {2, 1, XForm::rows, tile_bf16<2>}};
extern const Tiles kInt8Tiles = {{{1, 1, XForm::rows, tile_int8}}, {1, 1, XForm::rows, tile_int8}};
extern const Tiles kInt4Tiles = {};
extern const Tiles kFp8Tiles = {};
extern const LinearKernels kLinear = {
    nullptr, nullptr, nullptr, finish, transpose_words, load_inputs, round_inputs, abs_max, quantize_int8, quantize_row,
    sum_groups, quantize_group, expand_int4, expand_fp8,
};
extern const GroupTiles kGroupTiles = {
    {}, {1, 1, tile_groups<1, tile_int8, false>},
    {1, 1, tile_groups<1, tile_int8, true>}, ready_rows, expand_groups<load_inputs>,
    quantize_groups,
};

}  // namespace scalar

}  // namespace diptych

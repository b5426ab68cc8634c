// The scalar twin: the plainest form of every kernel, right on any CPU and the text to read first.
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "gemm_kernels.h"

namespace diptych {
namespace {

#include "lanes.inl"

#include "gemm_generic.inl"

// The scalar tiles are 1 row x 16 lanes.
void tile_bf16(const TileArgs& args) {
  float* sums = static_cast<float*>(args.acc);
  if (!args.resume) std::memset(sums, 0, sizeof(float) * kStripLanes);
  const uint16_t* x = reinterpret_cast<const uint16_t*>(args.x[0]);
  for (int64_t step = 0; step < args.units; ++step) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(args.strip + step * kStepBytes);
    const float x0 = from_bf16(x[step * 2]), x1 = from_bf16(x[step * 2 + 1]);
    for (int lane = 0; lane < kStripLanes; ++lane)
      sums[lane] = (sums[lane] + from_bf16(w[lane * 2]) * x0) + from_bf16(w[lane * 2 + 1]) * x1;
  }
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

void tile_int4(const TileArgs& args) {
  float* totals = static_cast<float*>(args.acc);
  if (!args.resume) std::memset(totals, 0, sizeof(float) * kStripLanes);
  const int64_t steps = args.group / 8, group_bytes = steps * kStepBytes + kGroupTailBytes;
  for (int64_t group = 0; group < args.units; ++group) {
    const uint8_t* w = args.strip + group * group_bytes;
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(w + steps * kStepBytes);
    const int8_t* x = reinterpret_cast<const int8_t*>(args.x[0]) + group * args.group;
    for (int lane = 0; lane < kStripLanes; ++lane) {
      int32_t sum = 0;
      for (int64_t step = 0; step < steps; ++step)
        for (int j = 0; j < 4; ++j) {
          const uint8_t pair = w[step * kStepBytes + lane * 4 + j];
          sum += (pair & 15) * x[step * 8 + j] + (pair >> 4) * x[step * 8 + 4 + j];
        }
      totals[lane] = std::fma(static_cast<float>(sum), from_bf16(scales[lane]), totals[lane]);
      totals[lane] = std::fma(args.group_sums[0][group], from_bf16(scales[kStripLanes + lane]), totals[lane]);
    }
  }
}

}  // namespace

const KernelTable& scalar_kernels() {
  static const KernelTable table{
      {{{1, 1, false, tile_bf16}}, {{1, 1, false, tile_int8}}, {{1, 1, false, tile_int4}}},
      {{1, 1, false, tile_bf16}, {1, 1, false, tile_int8}, {1, 1, false, tile_int4}},
      nullptr,  // no interleaved shape
      finish,
      transpose_words,
      load_inputs,
      round_inputs,
      abs_max,
      quantize_int8,
      sum_int8,
      quantize_group,
  };
  return table;
}

}  // namespace diptych

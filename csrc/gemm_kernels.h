// Inside of the linear layers: what one instruction set provides (KernelTable) and the layout all of them share.
//
// Panel of 64 lanes, K in ascending steps of 256 bytes, one 32-bit word per lane and step:
//   bf16  word = inputs k, k+1                               step = 2 inputs
//   int8  word = 4 inputs, u8 = q + 128, q in [-127, 127]    step = 4 inputs
//   int4  word = 8 inputs q in [0, 15]: byte j holds input k+j in its low and k+4+j in its high nibble; step = 8 inputs.
//         After the steps of one group come 64 bf16 scales and 64 bf16 minima: w = scale * q + minimum.
// Gated weights interleave 16 gate lanes with the 16 up lanes of the same features.
#pragma once

#include "gemm.h"

namespace diptych {

constexpr int64_t kStepBytes = kPanelLanes * 4;
constexpr int64_t kGroupTailBytes = kPanelLanes * 4;  // bf16 scales and minima of one int4 group
constexpr int kMaxTileRows = 8;                       // no set uses a higher register tile

// One register tile: rows x 64 lanes over one block of K. acc [rows][64] is fp32 (bf16, int4) or int32 (int8), 64-byte
// aligned; with resume it holds the partial sums of the earlier blocks of K, otherwise it is only written.
struct TileArgs {
  const uint8_t* panel;                   // first step of the block
  const uint8_t* x[kMaxTileRows];         // rows of x at the block's first input
  const float* group_sums[kMaxTileRows];  // int4: sums of the block's groups
  int64_t units;                          // steps (bf16, int8) or groups (int4) in the block
  int64_t group;                          // int4
  void* acc;
  bool resume;
  const uint8_t* prefetch;     // memory wanted next, read ahead while this tile computes; may be null
  int64_t prefetch_bytes;
};
using TileKernel = void (*)(const TileArgs& args);

// The last act of a tile: scales, bias, activation, store. Lanes at or past n_outputs are not stored.
struct FinishArgs {
  const PackedLinear* w;
  int64_t panel;
  int64_t rows;
  const void* acc;                       // as TileArgs
  const float* row_scales[kMaxTileRows]; // int8 and int4: one value each
  const int32_t* row_sums[kMaxTileRows]; // int8: one value each
  void* out[kMaxTileRows];               // row starts in the output, fp32 or bf16
  float row_weights[kMaxTileRows];       // add_f32
  Store store;
  Activation activation;
};
using FinishKernel = void (*)(const FinishArgs& args);

// Packing works on 64 lanes of one panel. words [64][n_words], lane stride `stride` words -> out [n_words][64].
using TransposeWords = void (*)(const uint32_t* words, int64_t stride, int64_t n_words, uint8_t* out);
using LoadInputs = void (*)(const void* row, Source source, int64_t begin, int64_t count, float* out);
using RoundInputs = void (*)(const float* x, int64_t count, uint16_t* out);  // to bf16, nearest even
using AbsMax = float (*)(const float* x, int64_t count);
using QuantizeInt8 = void (*)(const float* x, int64_t count, float inverse_scale, int8_t* out);
// One int4 group: x [group] -> scale, minimum (bf16 bits) and group / 8 words.
using QuantizeGroup = void (*)(const float* x, int64_t group, uint16_t* scale, uint16_t* minimum, uint32_t* words);
using SumInt8 = int32_t (*)(const int8_t* x, int64_t count);

struct KernelTable {
  int64_t tile_rows;                     // highest tile; entries 1..tile_rows are set
  TileKernel tile[3][kMaxTileRows + 1];  // [Format][rows]
  FinishKernel finish;
  TransposeWords transpose_words;
  LoadInputs load_inputs;
  RoundInputs round_inputs;
  AbsMax abs_max;
  QuantizeInt8 quantize_int8;
  SumInt8 sum_int8;
  QuantizeGroup quantize_group;
};

const KernelTable& scalar_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
#endif
const KernelTable& active_kernels();

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Row of W (checkpoint order) <-> lane of the packed form.
inline int64_t packed_lanes(const LinearShape& shape) {
  const int64_t lanes = shape.gated ? round_up(shape.n / 2, 16) * 2 : shape.n;
  return round_up(lanes, kPanelLanes);
}
inline int64_t row_of_lane(const LinearShape& shape, int64_t lane) {  // -1: padding
  if (!shape.gated) return lane < shape.n ? lane : -1;
  const int64_t feature = lane / 32 * 16 + lane % 16, features = shape.n / 2;
  if (feature >= features) return -1;
  return lane % 32 < 16 ? feature : features + feature;
}
inline int64_t lane_of_row(const LinearShape& shape, int64_t row) {
  if (!shape.gated) return row;
  const int64_t features = shape.n / 2, feature = row % features;
  return feature / 16 * 32 + feature % 16 + (row < features ? 0 : 16);
}

inline int64_t inputs_per_step(Format format) {
  return format == Format::bf16 ? 2 : format == Format::int8 ? 4 : 8;
}
inline int64_t padded_inputs(const LinearShape& shape) {
  return round_up(shape.k, shape.format == Format::int4 ? shape.group : 32);
}
inline int64_t bytes_of_panel(const LinearShape& shape) {
  const int64_t k = padded_inputs(shape);
  const int64_t steps = k / inputs_per_step(shape.format) * kStepBytes;
  return shape.format == Format::int4 ? steps + k / shape.group * kGroupTailBytes : steps;
}

}  // namespace diptych

// Body of one kernels_<set>.cpp: every kernel written once over simd.h, and their tables.
#include "kernel_sets.h"
#include "simd.h"

#include "norm.inl"
#include "draw.inl"
#include "rope.inl"
#include "attention.inl"

namespace diptych {
namespace DIPTYCH_ISA {

int64_t scratch_bytes(const AttentionShape& shape) {
  const int64_t rows = most_rows(shape), d = shape.head_dim, dv = (d + 15) / 16 * 16;
  const int64_t floats = 2 * rows + rows * dv + kRows * kTileTokens + 2 * kTileTokens;
  const int64_t halves = rows * d + kRows * kTileTokens + kTileTokens * (d + dv);
  return (floats * 4 + halves * 2 + 10 * 64 + 4095) / 4096 * 4096;
}

extern const AttentionKernels kAttention = {attention, attention_combine, scratch_bytes};
extern const StepKernels kStep = {rms_norm_row, rotate_token, add_row, softcap_row, embed_row, softmax_row, find_best, draw_row};

}  // namespace DIPTYCH_ISA
}  // namespace diptych

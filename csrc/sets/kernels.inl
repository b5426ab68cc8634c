// Body of one kernels_<set>.cpp: every kernel written once over simd.h, and their tables.
#include "sets/kernel_sets.h"
#include "sets/simd.h"

#include "rows/norm.inl"
#include "rows/draw.inl"
#include "rows/rope.inl"
#include "rows/latent.inl"
#include "attention/attention.inl"
#include "rows/lora.inl"
#include "rows/states.inl"
#include "rows/entries.inl"
#include "rows/streams.inl"

namespace diptych {
namespace DIPTYCH_ISA {

extern const StepKernels kStep = {rms_norm_row, layer_norm_row, rotate_token,     cache_latent, rotate_query, cache_index, pool_index,
                                  cache_row,    turn_query,     turn_back,        move_entries,
                                  add_row,      softcap_row,    embed_row,        softmax_row,  sigmoid_row,  gate_row,
                                  find_best,    draw_row,       shrink_rows,      expand_rows,  expand_blocks, mix_rows,
                                  row_product,  match_row,      weigh_row,        sparse_gate_row, curve_row, move_state,
                                  state_scratch_floats};

}  // namespace DIPTYCH_ISA
}  // namespace diptych

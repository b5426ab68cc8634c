// How one step's attention is cut into tasks. The cut never changes a sum: a row's tiles are joined in one order whether one
// task walks them all or several tasks leave partials (see attention.inl).
#pragma once

#include <vector>

#include "sets/kernels.h"

namespace diptych {

struct AttentionPlan {
  std::vector<AttentionTask> tasks;     // heaviest first
  std::vector<AttentionTask> combines;  // row ranges whose tiles were split, tile_end is the last tile
  int64_t partial_floats = 0;
};

struct AttentionBatch {
  const int32_t* query_start;  // [S + 1]
  const int32_t* positions;    // [T]
  int64_t n_sequences;
  const int32_t* both_ways = nullptr;       // [S] 1 where queries see what stands behind them too; null: nowhere
  const int32_t* context_tokens = nullptr;  // [S], read where the other says 1
};

void plan_attention_tasks(const AttentionShape& shape, const AttentionBatch& batch, int threads, AttentionPlan& plan);

}  // namespace diptych

#include "attention/attention_plan.h"

#include <algorithm>

namespace diptych {
namespace {

int64_t work_of(const AttentionTask& task) {
  return static_cast<int64_t>(task.tile_end - task.tile_begin) * (4 + task.token_end - task.token_begin);
}

// All row ranges of the step, each with every tile it can see.
void list_row_ranges(const AttentionShape& shape, const AttentionBatch& batch, std::vector<AttentionTask>& tasks) {
  const int64_t group = shape.n_heads / shape.n_kv_heads;
  const int64_t tokens_per_task = std::max<int64_t>(1, kTaskRows / group);
  for (int64_t s = 0; s < batch.n_sequences; ++s) {
    const int32_t whole = batch.both_ways != nullptr && batch.both_ways[s] != 0 ? batch.context_tokens[s] : 0;
    for (int64_t begin = batch.query_start[s], end; begin < batch.query_start[s + 1]; begin = end) {
      end = std::min<int64_t>(begin + tokens_per_task, batch.query_start[s + 1]);
      if (shape.is_listed || batch.positions[end - 1] >= shape.most) end = begin + 1;  // each token has a list, or a choice, of its own
      const int64_t low = shape.first_seen(batch.positions[begin], whole), last = shape.last_seen(batch.positions[end - 1], whole);
      for (int64_t kv_head = 0; kv_head < shape.n_kv_heads; ++kv_head) {
        AttentionTask task{};
        task.sequence = static_cast<int32_t>(s), task.kv_head = static_cast<int32_t>(kv_head);
        task.token_begin = static_cast<int32_t>(begin), task.token_end = static_cast<int32_t>(end);
        task.tile_begin = task.first_tile = static_cast<int32_t>(low / kTileTokens);
        task.tile_end = static_cast<int32_t>(last / kTileTokens + 1);
        task.whole = whole;
        tasks.push_back(task);
      }
    }
  }
}

// Whether whole ranges, dealt heaviest first, leave some thread idle for more than a sixth of the time.
bool is_unbalanced(const std::vector<AttentionTask>& tasks, int threads) {
  if (threads == 1 || static_cast<int64_t>(tasks.size()) >= 8 * threads) return false;
  std::vector<int64_t> loads(threads, 0);
  int64_t total = 0;
  for (const AttentionTask& task : tasks) {
    *std::min_element(loads.begin(), loads.end()) += work_of(task);
    total += work_of(task);
  }
  return *std::max_element(loads.begin(), loads.end()) * threads * 6 > total * 7;
}

void split(const AttentionShape& shape, int threads, AttentionPlan& plan) {
  const int64_t group = shape.n_heads / shape.n_kv_heads, dv = whole_vectors(shape.v_head_dim);
  int64_t tiles = 0;
  for (const AttentionTask& task : plan.tasks) tiles += task.tile_end - task.tile_begin;
  const int64_t piece = std::max<int64_t>(1, tiles / (4 * threads));
  std::vector<AttentionTask> pieces;
  for (AttentionTask task : plan.tasks) {
    const int64_t n = task.tile_end - task.tile_begin;
    if (n <= piece) {
      pieces.push_back(task);
      continue;
    }
    task.is_split = true;
    task.partial_begin = plan.partial_floats;
    plan.partial_floats += n * (task.token_end - task.token_begin) * group * (dv + 2);
    plan.combines.push_back(task);
    for (int64_t t = task.first_tile; t < task.tile_end; t += piece) {
      AttentionTask part = task;
      part.tile_begin = static_cast<int32_t>(t);
      part.tile_end = static_cast<int32_t>(std::min<int64_t>(t + piece, task.tile_end));
      pieces.push_back(part);
    }
  }
  plan.tasks.swap(pieces);
}

}  // namespace

void plan_attention_tasks(const AttentionShape& shape, const AttentionBatch& batch, int threads, AttentionPlan& plan) {
  plan.tasks.clear();
  plan.combines.clear();
  plan.partial_floats = 0;
  list_row_ranges(shape, batch, plan.tasks);
  auto heavier = [](const AttentionTask& a, const AttentionTask& b) { return work_of(a) > work_of(b); };
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(), heavier);
  if (!is_unbalanced(plan.tasks, threads)) return;
  split(shape, threads, plan);
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(), heavier);
}

}  // namespace diptych

// Operations of a Program on an index, which chooses what tokens attend to.
#include <algorithm>
#include <cstring>
#include <limits>

#include "program/program_run.h"

namespace diptych {

namespace {

// Beside what is attended to, or in a layer of their own.
KvLayer index_keys(const KvCache& kv, int64_t layer) {
  const KvLayer of_layer = kv.layer(layer);
  return of_layer.shape.index_dim != 0 ? of_layer.index() : of_layer;
}

// The blocks of the highest scores of each head of a token, the last `local` up to its own among them.
void choose_blocks(const ChooseOp& op, const AttentionKernels& kernels, int64_t position, float* scores, int64_t stride, int32_t* chosen) {
  const int64_t own = position / op.shape.block, most = op.shape.most / op.shape.block;
  for (int64_t h = 0; h < op.shape.n_heads; ++h) {
    float* of_head = scores + h * (stride / op.shape.n_heads);
    std::fill(of_head + std::max<int64_t>(own + 1 - op.local, 0), of_head + own + 1, std::numeric_limits<float>::infinity());
    kernels.choose_row(of_head, own + 1, most, chosen + h * most);
  }
}

// How many whole pools there are up to a position; their scores, each that of its last position, come to the front.
int64_t keep_scores_of_pools(int64_t position, int64_t pool, float* scores) {
  const int64_t whole = (position + 1) / pool;
  for (int64_t i = 0; i < whole; ++i) scores[i] = scores[i * pool + pool - 1];
  return whole;
}

// The pools of the highest scores, and all positions behind the last whole pool.
void choose_pools(const AttentionShape& shape, const AttentionKernels& kernels, int64_t position, float* scores, int32_t* chosen) {
  const int64_t pool = shape.pool, n = keep_scores_of_pools(position, pool, scores), most = (shape.most + 1) / pool - 1;
  kernels.choose_row(scores, n, most, chosen);
  for (int64_t i = most - 1; i >= 0; --i)  // the last first, as they lie where the first ones come to
    for (int64_t at = pool - 1, first = chosen[i] * pool; at >= 0; --at) chosen[i * pool + at] = static_cast<int32_t>(first + at);
  for (int64_t at = n * pool; at <= position; ++at) chosen[most * pool + at - n * pool] = static_cast<int32_t>(at);
}

// The whole blocks of the highest scores, and behind them the number of the one that is not whole.
void choose_by_means(const AttentionShape& shape, const AttentionKernels& kernels, int64_t position, float* scores, int32_t* chosen) {
  const int64_t whole = keep_scores_of_pools(position, shape.block, scores), most = shape.most / shape.block;
  kernels.choose_row(scores, whole, most, chosen);
  chosen[most] = static_cast<int32_t>(whole);
}

constexpr int64_t kScoresAtOnce = 4 << 20;  // tokens whose scores lie there together meet the keys together; 16 MiB

}  // namespace

void Program::plan_choice(const Step& step) {
  ChoicePlan& plan = choice_plan_;
  plan.tokens.clear(), plan.sequences.clear();
  if (most_chosen_ == INT64_MAX) return;
  int64_t longest = 0;
  for (int64_t s = 0; s < step.n_sequences; ++s) {
    longest = std::max<int64_t>(longest, step.context_tokens[s]);
    for (int32_t t = step.query_start[s]; t < step.query_start[s + 1]; ++t)
      if (positions_[t] >= most_chosen_) plan.tokens.push_back(t), plan.sequences.push_back(static_cast<int32_t>(s));
  }
  const int64_t scored = (longest + chosen_block_ - 1) / chosen_block_;
  plan.stride = choosing_heads_ * ((scored + kGroupTokens - 1) / kGroupTokens * kGroupTokens);
  plan.at_once = std::min<int64_t>(std::max<int64_t>(pool_.size(), kScoresAtOnce / plan.stride), static_cast<int64_t>(plan.tokens.size()));
  const int64_t bytes = plan.at_once * plan.stride * 4;
  if (bytes > index_scores_.bytes()) index_scores_ = PageBuffer(bytes + bytes / 4);
}

void Program::Run::run(const CacheIndexOp& op, size_t, int thread, int threads) const {
  const RopeTable& rope = program.ropes_[op.rope];
  IndexKeyCall call;
  call.kv = index_keys(kv, op.layer);
  call.rows = buffer(op.x).f32();
  call.n_gates = op.n_gates, call.pooled = op.pooled;
  call.norm = op.norm == -1 ? nullptr : vector(op.norm), call.bias = op.bias == -1 ? nullptr : vector(op.bias), call.norm_eps = op.norm_eps;
  call.rotary_dim = 2 * static_cast<int64_t>(rope.inverse_frequency.size());
  call.cos_table = rope.cosine.data(), call.sin_table = rope.sine.data();
  call.positions = program.positions_.data(), call.slots = program.slots_.data();
  const Range part = share(step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) kernels.cache_index(call, t, reinterpret_cast<float*>(scratch(thread)));
}

void Program::Run::run(const PoolIndexOp& op, size_t, int thread, int threads) const {
  const KvLayer index = index_keys(kv, op.layer);
  int32_t slots[kMostPool];
  const int64_t block_tokens = index.shape.block_tokens;
  for (int64_t s = 0; s < step.n_sequences; ++s) {
    const Range part = share(step.query_start[s + 1] - step.query_start[s], thread, threads);
    for (int64_t t = step.query_start[s] + part.begin; t < step.query_start[s] + part.end; ++t) {
      const int64_t end = program.positions_[t] + 1;
      if (end % op.pool != 0) continue;
      for (int64_t i = 0; i < op.pool; ++i) {
        const int64_t position = end - op.pool + i;
        slots[i] = static_cast<int32_t>(step.block_table[s * step.table_width + position / block_tokens] * block_tokens + position % block_tokens);
      }
      kernels.pool_index(index, slots, op.pool, vector(op.offsets), reinterpret_cast<float*>(scratch(thread)));
    }
  }
}

void Program::Run::run(const ChooseOp& op, size_t, int thread, int threads) const {
  const ChoicePlan& plan = program.choice_plan_;
  const int64_t n = static_cast<int64_t>(plan.tokens.size()), heads = op.shape.n_heads, d = op.shape.head_dim, stride = plan.stride;
  if (n == 0) return;
  const RopeTable& rope = program.ropes_[op.rope];
  const int64_t half = static_cast<int64_t>(rope.inverse_frequency.size());
  uint16_t* queries = reinterpret_cast<uint16_t*>(buffer(op.queries).data);
  const Range part = share(n * heads, thread, threads);
  for (int64_t i = part.begin; i < part.end; ++i) {
    const int64_t token = plan.tokens[i / heads], at = program.positions_[token] * half;
    const int64_t own = op.width == 0 ? d : op.width;
    const float* q = buffer(op.q).f32() + token * buffer(op.q).width + (op.first_head + i % heads) * own;
    if (op.turns_last) {
      kernels.turn_query(q, d, nullptr, 0.0f, half, rope.cosine.data() + at, rope.sine.data() + at, reinterpret_cast<float*>(scratch(thread)), queries + (token * heads + i % heads) * d);
      continue;
    }
    float *turned = reinterpret_cast<float*>(scratch(thread)), *normed = turned + whole_vectors(d) + 16;
    if (op.norm != -1) kernels.rms_norm_row(q, vector(op.norm), d, op.norm_eps, normed), q = normed;
    uint16_t* to = queries + (token * heads + i % heads) * d;
    kernels.rotate_query(q, own, 2 * half, rope.cosine.data() + at, rope.sine.data() + at, turned, to);
    std::memset(to + own, 0, static_cast<size_t>(d - own) * 2);
  }
  IndexCall call;
  call.heads.shape = op.shape;
  if (op.shape.by_means) call.heads.shape.block = 1;
  call.heads.kv = index_keys(kv, op.layer);
  call.heads.q = queries;
  call.heads.positions = program.positions_.data();
  call.heads.block_table = step.block_table, call.heads.table_width = step.table_width;
  if (op.weights != -1) call.weights = buffer(op.weights).f32();
  float* scores = reinterpret_cast<float*>(program.index_scores_.data());
  int32_t* choice = reinterpret_cast<int32_t*>(buffer(op.choice).data);
  for (int64_t first = 0; first < n; first += plan.at_once) {
    barrier(thread);
    const int64_t end = std::min(first + plan.at_once, n);
    for (int64_t begin = first, next; begin < end; begin = next) {  // tokens of one sequence
      for (next = begin + 1; next < end && plan.sequences[next] == plan.sequences[begin];) ++next;
      const int64_t last = program.positions_[plan.tokens[next - 1]];
      for (int64_t tile = (thread + begin) % threads; tile * kTileTokens <= last; tile += threads)
        set.attention->index_tile(call, plan.sequences[begin], tile, plan.tokens.data() + begin, next - begin,
                                  scores + (begin - first) * stride, stride, scratch(thread));
    }
    barrier(thread);
    for (int64_t i = first + thread; i < end; i += threads) {
      const int64_t token = plan.tokens[i];
      if (op.shape.is_listed) {  // the key of an entry lies with the last of its tokens
        float* of_entries = scores + (i - first) * stride;
        const int64_t whole = keep_scores_of_pools(program.positions_[token], op.shape.entry_tokens, of_entries);
        set.attention->choose_row(of_entries, whole, op.shape.most, choice + token * op.shape.most);
        continue;
      }
      if (op.shape.by_means) {
        choose_by_means(op.shape, *set.attention, program.positions_[token], scores + (i - first) * stride, choice + token * (op.shape.most / op.shape.block + 1));
        continue;
      }
      if (op.shape.block != 1) {
        choose_blocks(op, *set.attention, program.positions_[token], scores + (i - first) * stride, stride, choice + token * heads * (op.shape.most / op.shape.block));
        continue;
      }
      if (op.shape.pool != 1) {
        choose_pools(op.shape, *set.attention, program.positions_[token], scores + (i - first) * stride, choice + token * op.shape.most);
        continue;
      }
      set.attention->choose_row(scores + (i - first) * stride, program.positions_[token] + 1, op.shape.most, choice + token * op.shape.most);
    }
  }
}

}  // namespace diptych

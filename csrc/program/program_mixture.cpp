// A mixture of experts in a step of a Program: who is chosen, and their rows through their weights.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "program/program_run.h"

namespace diptych {

// Experts outside the best groups are chosen never. A group is as good as the sum of its best few.
void Program::Run::leave_best_groups(const MoeOp& op, float* choice, float* worths) const {
  const float none = -std::numeric_limits<float>::infinity();
  const int64_t size = op.n_scored() / op.n_groups;
  for (int64_t g = 0; g < op.n_groups; ++g) {
    float best[kMostGroupBest];  // descending
    std::fill(best, best + op.group_best, none);
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      float value = choice[e];
      for (int64_t i = 0; i < op.group_best; ++i)
        if (value > best[i]) std::swap(value, best[i]);
    }
    worths[g] = 0.0f;
    for (int64_t i = 0; i < op.group_best; ++i) worths[g] += best[i];
  }
  for (int64_t g = 0; g < op.n_groups; ++g) {
    int64_t better = 0;
    for (int64_t other = 0; other < op.n_groups; ++other)
      better += worths[other] > worths[g] || (worths[other] == worths[g] && other < g);
    if (better >= op.groups_per_token) std::fill(choice + g * size, choice + (g + 1) * size, none);
  }
}

// A chosen expert's weight by sparsemixer: its part of a softmax over what is left and near. choice: products, -inf for those gone.
static float sparse_weight(const float* choice, int64_t n, int64_t best, float margin) {
  const float most = choice[best];
  float sum = 0.0f;
  for (int64_t e = 0; e < n; ++e) {
    if (choice[e] == -std::numeric_limits<float>::infinity()) continue;
    if (most - choice[e] <= margin * std::max(std::fabs(choice[e]), most)) sum += std::exp(choice[e] - most);
  }
  return 1.0f / sum;
}

// Scores of all experts, the k best (lowest index first among equals), kept in ascending order of expert.
void Program::Run::route_token(const MoeOp& op, int64_t token, float* choice) const {
  const int64_t n_experts = op.n_scored(), top_k = op.top_k;
  float* scores = buffer(op.scores).f32() + token * n_experts;
  if (op.score_scale != 1.0f)
    for (int64_t e = 0; e < n_experts; ++e) scores[e] *= op.score_scale;
  if (op.softcap > 0.0f) kernels.softcap_row(scores, n_experts, op.softcap);
  if (op.by == Scores::softmax) kernels.softmax_row(scores, n_experts);
  if (op.by == Scores::sigmoid) kernels.sigmoid_row(scores, n_experts);
  if (op.by == Scores::root_softplus) {
    kernels.curve_row(scores, n_experts, Curve::softplus, nullptr, scores);
    for (int64_t e = 0; e < n_experts; ++e) scores[e] = std::sqrt(scores[e]);
  }
  std::memcpy(choice, scores, static_cast<size_t>(n_experts) * 4);
  if (op.by == Scores::late_sigmoid) kernels.sigmoid_row(scores, n_experts);
  if (op.choice_bias != -1) kernels.add_row(vector(op.choice_bias), n_experts, 1.0f, choice);
  if (op.n_groups > 1) leave_best_groups(op, choice, choice + n_experts);
  int32_t* ids = program.routing_.expert_ids.data() + token * top_k;
  float* weights = program.routing_.expert_weights.data() + token * top_k;
  float total = 0.0f;
  const float* own = op.by_token == -1 ? nullptr : vector(op.by_token) + step.token_ids[token] * top_k;
  for (int64_t j = 0; j < top_k; ++j) {
    Best most;
    if (own == nullptr) kernels.find_best(choice, n_experts, 0, &most);
    const int32_t best = own == nullptr ? most.index : static_cast<int32_t>(own[j]);
    const float weight = op.by == Scores::sparsemixer ? sparse_weight(choice, n_experts, best, op.margin) : scores[best];
    choice[best] = -std::numeric_limits<float>::infinity();
    total += weight;
    int64_t at = j;
    for (; at > 0 && ids[at - 1] > best; --at) ids[at] = ids[at - 1], weights[at] = weights[at - 1];
    ids[at] = best, weights[at] = weight;
  }
  for (int64_t j = 0; j < top_k; ++j) {
    if (op.renormalises) weights[j] /= std::max(total, 1e-20f);
    if (op.routed_scale != 1.0f) weights[j] *= op.routed_scale;
    if (op.scales != -1) weights[j] *= vector(op.scales)[ids[j]];
  }
}

void Program::Run::group_by_expert(const MoeOp& op) const {
  Routing& routing = program.routing_;
  const int64_t n_experts = op.n_scored(), choices = step.n_tokens * op.top_k;
  int32_t* begin = routing.expert_begin.data();
  std::memset(begin, 0, static_cast<size_t>(n_experts + 1) * 4);
  for (int64_t i = 0; i < choices; ++i) ++begin[routing.expert_ids[i] + 1];
  for (int64_t e = 0; e < n_experts; ++e) begin[e + 1] += begin[e];
  for (int64_t i = 0; i < choices; ++i) {  // begin[e] walks to the end of expert e, then all move back by one
    const int32_t row = begin[routing.expert_ids[i]]++;
    routing.source_rows[row] = static_cast<int32_t>(i / op.top_k);
    routing.expanded_rows[i] = row;
  }
  for (int64_t e = n_experts; e > 0; --e) begin[e] = begin[e - 1];
  begin[0] = 0;
  auto is_site = [&](int weight) { return program.adapted_.have_site(weight); };
  auto have_site = [&](const std::vector<int>& weights) { return std::any_of(weights.begin(), weights.end(), is_site); };
  routing.is_adapted = have_site(op.gate_up) || have_site(op.up) || have_site(op.down);
  if (routing.is_adapted) program.adapted_experts_.plan(program.adapted_, routing.source_rows.data(), choices);
}

// Every expert's rows through its weight; the expert rows of the output are consecutive.
void Program::Run::run_experts(const std::vector<int>& weights, const Rows& rows, bool is_gathered,
                               const Epilogue& epilogue, int thread, int threads) const {
  const Routing& routing = program.routing_;
  if (routing.is_adapted) {
    const AdapterCalls calls{weights.data(), routing.expert_begin.data(), static_cast<int64_t>(weights.size()),
                             is_gathered ? routing.source_rows.data() : nullptr};
    program.adapted_experts_.shrink(set, calls, rows, thread, threads);
    barrier(thread);
  }
  for (size_t e = 0; e < weights.size(); ++e) {
    const int64_t begin = routing.expert_begin[e], n = routing.expert_begin[e + 1] - begin;
    if (n == 0) continue;
    Epilogue target = epilogue;
    const int64_t element = epilogue.store == Store::bf16 ? 2 : 4;
    target.out = static_cast<uint8_t*>(epilogue.out) + begin * epilogue.out_stride * element;
    const AdapterBiases biases(set, program.adapted_experts_, weights[e], program.linears_[weights[e]], begin);
    if (routing.is_adapted && program.adapted_experts_.have_site(weights[e])) target.biases = &biases;
    const int32_t* row_ids = is_gathered ? routing.source_rows.data() + begin : program.row_numbers_.data() + begin;
    linear(set, program.linears_[weights[e]], rows, row_ids, n, target, thread, threads);
  }
}

// The experts' gated rows, in the form that `down` reads.
void Program::Run::gate_experts(const MoeOp& op, size_t index, int thread, int threads) const {
  const bool is_direct = !op.joins_apart && !op.has_hidden;
  const int out = op.joins_apart ? op.wide : op.has_hidden ? op.hidden : op.hidden_rows;
  const Store store = is_direct ? Store::bf16 : op.up.empty() || op.joins_apart ? Store::f32 : Store::gate_f32;
  if (!op.up.empty()) {
    const int64_t column = op.hidden_column + (op.joins_apart ? program.linears_[op.gate_up[0]].n_outputs : 0);
    run_experts(op.up, buffer(op.up_rows).rows, true, epilogue_to(out, Store::f32, op.activation, column), thread, threads);
    barrier(thread);
  }
  run_experts(op.gate_up, buffer(op.rows).rows, true, epilogue_to(out, store, op.activation, op.hidden_column), thread, threads);
  meet(thread, index);  // their columns are those of all ranks
  if (is_direct) return;
  const Buffer& from = buffer(out);
  const Rows& rows = buffer(op.hidden_rows).rows;
  const int64_t n_given = program.routing_.expert_begin[op.down.size()];  // rows of experts that have weights
  if (op.joins_apart) {
    const Range part = share(step.n_tokens * op.top_k, thread, threads);
    float* row = reinterpret_cast<float*>(scratch(thread));
    for (int64_t choice = part.begin; choice < part.end; ++choice) {
      const int64_t i = program.routing_.expanded_rows[choice];
      if (i >= n_given) continue;
      const float scale = op.weighs_input ? program.routing_.expert_weights[choice] : 1.0f;  // of the input: products are linear
      if (op.is_gated) kernels.gate_row(from.f32() + i * from.width, from.width / 2, scale, op.gate, row);
      else kernels.curve_row(from.f32() + i * from.width, from.width, op.curve, nullptr, row);
      prepare_row(set, rows, i, row);
    }
  } else {
    const Range part = share(n_given, thread, threads);
    prepare_rows(set, rows, from.f32(), from.width, part.begin, part.end);
  }
  barrier(thread);
}

void Program::Run::run(const MoeOp& op, size_t index, int thread, int threads) const {
  const Range tokens = share(step.n_tokens, thread, threads);
  linear(set, program.linears_[op.router], buffer(op.router_rows).rows, nullptr, step.n_tokens,
         epilogue_to(op.scores, Store::f32, Activation::silu, 0), thread, threads);
  barrier(thread);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) route_token(op, t, reinterpret_cast<float*>(scratch(thread)));
  barrier(thread);
  if (thread == 0) group_by_expert(op);
  barrier(thread);
  gate_experts(op, index, thread, threads);
  const Rows& hidden_rows = buffer(op.hidden_rows).rows;
  run_experts(op.down, hidden_rows, false, epilogue_to(op.expanded, Store::f32, op.activation, op.column), thread, threads);
  meet(thread, index, 1);  // their columns are those of all ranks
  const Buffer &expanded = buffer(op.expanded), &out = buffer(op.out);
  const Range summed = part_of_rows(out, step.n_tokens, thread, threads);
  const int64_t n_experts = static_cast<int64_t>(op.down.size());
  for (int64_t t = summed.begin; t < summed.end; ++t) {
    float* y = out.f32() + t * out.width;
    std::memset(y, 0, static_cast<size_t>(out.width) * 4);
    for (int64_t j = t * op.top_k; j < (t + 1) * op.top_k; ++j) {
      const bool is_identity = program.routing_.expert_ids[j] >= n_experts;
      const float* row = is_identity ? buffer(op.given).f32() + t * out.width : expanded.f32() + program.routing_.expanded_rows[j] * out.width;
      if (op.behind != -1) {
        float* normed = reinterpret_cast<float*>(scratch(thread));
        kernels.weigh_row(row, vector(op.behind), out.width, normed);
        kernels.rms_norm_row(normed, vector(op.behind) + out.width, out.width, op.behind_eps, normed);
        row = normed;
      }
      kernels.add_row(row, out.width, op.weighs_input ? 1.0f : program.routing_.expert_weights[j], y);
    }
  }
}

void Program::reserve_routing(const MoeOp& op, int64_t tokens) {
  routing_.resize(tokens, op.top_k, op.n_scored());
  for (int64_t i = static_cast<int64_t>(row_numbers_.size()); i < tokens * op.top_k; ++i)
    row_numbers_.push_back(static_cast<int32_t>(i));
}

}  // namespace diptych

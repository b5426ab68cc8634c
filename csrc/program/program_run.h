// One step of a Program in flight: what its operations share (program_run.cpp, program_index.cpp, program_mixture.cpp, program_streams.cpp).
#pragma once

#include <algorithm>
#include <atomic>
#include <variant>
#include <vector>

#include "program/program.h"

namespace diptych {

// Steps up to here take each weight from memory in one pass.
constexpr int64_t kFewTokens = 24;

struct Program::Run {
  Program& program;
  const Step& step;
  KvCache& kv;
  float* logits;  // [R, vocab], or null and
  Best* best;     // [threads, R], or null and
  float* hidden;  // [R, D]
  const KernelSet& set;
  const StepKernels& kernels;
  std::vector<std::atomic<int32_t>>& counters;
  std::atomic<bool>& is_left;  // set in a meeting alone, so that all threads see it at the same operation

  uint8_t* scratch(int thread) const { return program.scratch_.data() + thread * program.scratch_stride_; }
  const Buffer& buffer(int index) const { return program.buffers_[index]; }
  const float* vector(int index) const { return program.vectors_[index].data(); }
  // The task that follows, where each thread has begun with that of its own number: a counter that all of them write to goes to and fro.
  int32_t next_task(size_t op, int32_t n_tasks, int threads) const {
    return n_tasks <= threads ? n_tasks : threads + counters[op].fetch_add(1, std::memory_order_relaxed);
  }
  // A thread that waits brings in its first weights of the next linear layer: memory has nothing else to do.
  void barrier(int thread) const {
    ReadAhead& ahead = program.waiting_[thread].ahead;
    program.pool_.barrier([&] { ahead.line() ? static_cast<void>(0) : ThreadPool::relax(); });
  }
  // All threads of all ranks: those of one, and the last of them for it. Once the team is broken nothing that is computed counts.
  void meet(int thread, size_t op, size_t of_op = 0) const {
    if (program.team_ == nullptr) return barrier(thread);
    ReadAhead& ahead = program.waiting_[thread].ahead;
    auto idle = [&] { ahead.line() ? static_cast<void>(0) : ThreadPool::relax(); };
    auto all = [&] {
      return program.team_->is_linked() ? program.exchange(program.first_meeting_[op] + of_op, step, nullptr) : program.team_->meet(idle);
    };
    program.pool_.barrier(idle, [&] { is_left.store(is_left.load() || !all()); });
  }
  // The thread's part of the rows of a buffer: of all of them, or of the rank's where ranks share it.
  Range part_of_rows(const Buffer& out, int64_t rows, int thread, int threads) const {
    if (!out.shared) return share(rows, thread, threads);
    const Range own = share(rows, program.team_->rank(), program.team_->size());
    const Range part = share(own.end - own.begin, thread, threads);
    return {own.begin + part.begin, own.begin + part.end};
  }
  void look_ahead(size_t op, int thread, int threads) const {
    const int weight = program.next_weight_[op];
    const bool is_small = step.n_tokens <= kFewTokens && weight >= 0;
    program.waiting_[thread].ahead = is_small ? first_weights(program.linears_[weight], thread, threads) : ReadAhead{};
  }

  void run(const EmbedOp& op, size_t, int thread, int threads) const;
  void run(const TiedEmbedOp& op, size_t, int thread, int threads) const;
  void add_position(const LearnedPositions& positions, int64_t token, int64_t width, int thread, float* x) const;
  void run(const NormOp& op, size_t, int thread, int threads) const;
  void run(const AddNormOp& op, size_t, int thread, int threads) const;
  void run(const AddOp& op, size_t, int thread, int threads) const;
  void run(const PrepareOp& op, size_t, int thread, int threads) const;
  void run(const LinearOp& op, size_t, int thread, int threads) const;
  void run(const RotateOp& op, size_t, int thread, int threads) const;
  void run(const AttentionOp& op, size_t index, int thread, int threads) const;
  void run(const MoeOp& op, size_t index, int thread, int threads) const;
  void run(const HeadOp& op, size_t, int thread, int threads) const;
  void run(const StateOp& op, size_t index, int thread, int threads) const;
  void run(const InputOp& op, size_t, int thread, int threads) const;
  void run(const TapOp& op, size_t, int thread, int threads) const;
  void run(const MeetOp&, size_t, int, int) const {}
  void run(const HeadsOp& op, size_t, int thread, int threads) const;
  void run(const CacheLatentsOp& op, size_t, int thread, int threads) const;
  void run(const CacheIndexOp& op, size_t, int thread, int threads) const;
  void run(const PoolIndexOp& op, size_t, int thread, int threads) const;
  void run(const CacheRowsOp& op, size_t, int thread, int threads) const;
  void run(const TurnQueriesOp& op, size_t, int thread, int threads) const;
  void run(const TurnBackOp& op, size_t, int thread, int threads) const;
  void run(const MoveEntriesOp& op, size_t, int thread, int threads) const;
  void run(const ChooseOp& op, size_t, int thread, int threads) const;
  void run(const ScaleQueriesOp& op, size_t, int thread, int threads) const;
  void run(const RotateQueriesOp& op, size_t, int thread, int threads) const;
  void run(const WeighOp& op, size_t, int thread, int threads) const;
  void run(const SparseGateOp& op, size_t, int thread, int threads) const;
  void run(const BentGateOp& op, size_t, int thread, int threads) const;
  void run(const CurveOp& op, size_t, int thread, int threads) const;
  void run(const BranchOp& op, size_t, int thread, int threads) const;
  void run(const GateHeadsOp& op, size_t, int thread, int threads) const;
  void run(const MatchOp& op, size_t, int thread, int threads) const;
  void run(const CopyColumnsOp& op, size_t, int thread, int threads) const;
  void run(const PredictOp& op, size_t, int thread, int threads) const;
  void run(const CorrectOp& op, size_t, int thread, int threads) const;
  void run(const ConnectionsOp& op, size_t, int thread, int threads) const;
  void run(const GatherOp& op, size_t, int thread, int threads) const;
  void run(const SpreadOp& op, size_t, int thread, int threads) const;
  void run(const MingleOp& op, size_t, int thread, int threads) const;
  void run(const FoldOp& op, size_t, int thread, int threads) const;
  void run(const InjectOp& op, size_t, int thread, int threads) const;
  void run(const MeetKeysOp& op, size_t, int thread, int threads) const;
  void run(const IdsOp& op, size_t, int thread, int threads) const;
  void run(const NgramsOp& op, size_t, int thread, int threads) const;
  void run(const LayerInputsOp& op, size_t, int thread, int threads) const;
  void connect(const Buffer& c, int64_t token, int64_t first, int64_t n, float magnitude, float eps, float* out) const;
  void route_streams(int routed, int weight, float scale, int64_t token, int64_t n, float* out) const;
  bool is_idle(const OpBody& op) const {  // a tap that the step does not ask for
    const auto* tap = std::get_if<TapOp>(&op);
    return tap != nullptr && std::find(step.tapped, step.tapped + step.n_tapped, tap->number) == step.tapped + step.n_tapped;
  }

  void norm(const float* x, int weight, int bias, bool is_centred, int64_t n, float eps, float* out) const {
    const float* shift = bias == -1 ? nullptr : vector(bias);
    if (is_centred) return kernels.layer_norm_row(x, vector(weight), shift, n, eps, out);
    kernels.rms_norm_row(x, vector(weight), n, eps, out);
    if (shift != nullptr) kernels.add_row(shift, n, 1.0f, out);
  }
  Epilogue epilogue_to(int out, Store store, Activation activation, int64_t column) const;
  void route_token(const MoeOp& op, int64_t token, float* choice) const;
  void leave_best_groups(const MoeOp& op, float* choice, float* worths) const;
  void gate_experts(const MoeOp& op, size_t index, int thread, int threads) const;
  void group_by_expert(const MoeOp& op) const;
  void run_experts(const std::vector<int>& weights, const Rows& rows, bool is_gathered, const Epilogue& epilogue,
                   int thread, int threads) const;
};

}  // namespace diptych

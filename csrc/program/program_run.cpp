// One step of a Program: what each operation does in its phases.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "program/program_run.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace diptych {
namespace {

int64_t now_ns() {
  using std::chrono::steady_clock;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// Denormals are zero on every thread alike, whatever the caller's thread was set to: bits must not depend on the thread.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr((before_ & ~0x6000u) | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushDenormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    set((before_ & ~uint64_t{0x7 << 22}) | uint64_t{1 << 24});  // FZ; nearest even, no traps changed
  }
  ~FlushDenormals() { set(before_); }

 private:
  static void set(uint64_t fpcr) { __asm__ volatile("msr fpcr, %0" : : "r"(fpcr)); }
  uint64_t before_;
#endif
};

}  // namespace

void Program::Run::add_position(const LearnedPositions& positions, int64_t token, int64_t width, int thread, float* x) const {
  float* row = reinterpret_cast<float*>(scratch(thread));
  auto add = [&](int number, int64_t at) {
    if (number == -1) return;
    const Table& table = program.tables_[number];
    const int64_t row_bytes = width * (table.source == Source::f32 ? 4 : 2);
    kernels.embed_row(table.data + at * row_bytes, table.source, width, 1.0f, row);
    kernels.add_row(row, width, 1.0f, x);
  };
  add(positions.types, step.second == nullptr ? 0 : program.types_[token]);
  add(positions.table, positions.first + program.positions_[token]);
}

void Program::Run::run(const EmbedOp& op, size_t, int thread, int threads) const {
  const Table& table = program.tables_[op.table];
  const Buffer& x = buffer(op.x);
  const int64_t row_bytes = table.width * (table.source == Source::f32 ? 4 : 2);
  const Range part = part_of_rows(x, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    kernels.embed_row(table.data + step.token_ids[t] * row_bytes, table.source, x.width, op.scale, x.f32() + t * x.width);
    add_position(op.positions, t, x.width, thread, x.f32() + t * x.width);
  }
}

void Program::Run::run(const TiedEmbedOp& op, size_t, int thread, int threads) const {
  const PackedLinear& head = program.linears_[op.head];
  const Buffer& x = buffer(op.x);
  const bool is_bf16 = head.shape.format == Format::bf16;
  const Range part = share(step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    const int64_t token = step.token_ids[t] - op.first;
    if (token < 0 || token >= head.n_outputs) continue;  // another rank has it
    if (is_bf16) {
      read_bf16_row(head, token, reinterpret_cast<uint16_t*>(scratch(thread)));
    } else {
      read_group_row(head, token, reinterpret_cast<float*>(scratch(thread)));
    }
    kernels.embed_row(scratch(thread), is_bf16 ? Source::bf16 : Source::f32, x.width, op.scale, x.f32() + t * x.width);
    add_position(op.positions, t, x.width, thread, x.f32() + t * x.width);
  }
}

void Program::Run::run(const NormOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &out = buffer(op.out);
  float* row = reinterpret_cast<float*>(scratch(thread));
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    float* target = out.kind == BufferKind::rows ? row : out.f32() + t * out.width;
    const float* from = x.f32() + t * x.width;
    const int64_t width = x.width / op.parts;
    if (op.parts == 1) norm(from, op.weight, op.bias, op.is_centred, width, op.eps, target);
    else
      for (int64_t at = 0; at < x.width; at += width) kernels.rms_norm_row(from + at, vector(op.weight) + at, width, op.eps, target + at);
    if (out.kind == BufferKind::rows) prepare_row(set, out.rows, t, row);
  }
}

void Program::Run::run(const AddNormOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &y = buffer(op.y);
  float* row = reinterpret_cast<float*>(scratch(thread));
  const Range part = part_of_rows(x, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    kernels.rms_norm_row(y.f32() + t * y.width, vector(op.weight), y.width, op.eps, row);
    kernels.add_row(row, x.width, op.scale, x.f32() + t * x.width);
  }
}

void Program::Run::run(const AddOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &y = buffer(op.y);
  const Range part = part_of_rows(x, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    float scale = op.scale;
    if (op.gate != -1) {
      scale = buffer(op.gate).f32()[t];
      kernels.sigmoid_row(&scale, 1);
    }
    kernels.add_row(y.f32() + t * y.width, x.width, scale, x.f32() + t * x.width);
  }
}

void Program::Run::run(const PrepareOp& op, size_t, int thread, int threads) const {
  const Buffer& x = buffer(op.x);
  const Rows& rows = buffer(op.rows).rows;
  const Range part = part_of_rows(buffer(op.rows), step.n_tokens * x.rows_per_token, thread, threads);
  if (x.kind == BufferKind::bf16) {
    prepare_rows(set, rows, reinterpret_cast<const uint16_t*>(x.data), x.width, part.begin, part.end);
  } else {
    prepare_rows(set, rows, x.f32(), x.width, part.begin, part.end);
  }
}

Epilogue Program::Run::epilogue_to(int out, Store store, Activation activation, int64_t column) const {
  const Buffer& target = buffer(out);
  Epilogue epilogue;
  epilogue.store = store;
  epilogue.activation = activation;
  epilogue.out = target.data;
  epilogue.out_stride = target.width;
  if (target.kind == BufferKind::rows) {
    epilogue.out = target.rows.data;
    epilogue.out_stride = target.rows.stride_bytes / 2;
  }
  epilogue.out = static_cast<uint8_t*>(epilogue.out) + column * (store == Store::bf16 ? 2 : 4);
  return epilogue;
}

void Program::Run::run(const LinearOp& op, size_t, int thread, int threads) const {
  const PackedLinear& weight = program.linears_[op.weight];
  const Rows& rows = buffer(op.rows).rows;
  Epilogue epilogue = epilogue_to(op.out, op.store, op.activation, op.column);
  const AdapterBiases biases(set, program.adapted_, op.weight, weight);
  if (program.adapted_.have_site(op.weight)) {
    const int32_t all[2] = {0, static_cast<int32_t>(step.n_tokens)};
    program.adapted_.shrink(set, {&op.weight, all, 1}, rows, thread, threads);
    barrier(thread);
    epilogue.biases = &biases;
  }
  linear(set, weight, rows, nullptr, step.n_tokens, epilogue, thread, threads);
}

void Program::Run::run(const RotateOp& op, size_t, int thread, int threads) const {
  RotateCall call;
  call.shape = op.shape;
  if (op.has_q_norm) call.shape.q_norm = vector(op.q_norm);
  if (op.has_k_norm) call.shape.k_norm = vector(op.k_norm);
  if (op.has_rope) {
    const RopeTable& rope = program.ropes_[op.rope];
    call.shape.rotary_dim = 2 * static_cast<int64_t>(rope.inverse_frequency.size());
    call.shape.cos_table = rope.cosine.data();
    call.shape.sin_table = rope.sine.data();
  }
  call.kv = kv.layer(op.layer);
  call.qkv = buffer(op.qkv).f32();
  call.q_out = reinterpret_cast<uint16_t*>(buffer(op.q).data);
  call.positions = program.positions_.data();
  call.slots = program.slots_.data();
  call.n_tokens = step.n_tokens;
  float* memory = reinterpret_cast<float*>(scratch(thread));
  const int64_t heads = op.shape.n_kv_heads;
  const Range part = share(step.n_tokens * heads, thread, threads);
  for (int64_t i = part.begin; i < part.end; ++i) kernels.rotate_token(call, i / heads, i % heads, memory);
}

void Program::Run::run(const AttentionOp& op, size_t index, int thread, int threads) const {
  const AttentionPlan& plan = program.attention_plans_[program.plan_of_op_[index]];
  const Buffer& out = buffer(op.out);
  AttentionCall call;
  call.shape = op.shape;
  if (op.sinks != -1) call.shape.sinks = vector(op.sinks);
  if (op.slopes != -1) call.shape.slopes = vector(op.slopes);
  if (op.distances != -1) call.shape.distances = vector(op.distances);
  if (op.places != -1) call.shape.places = vector(op.places), call.of_queries = buffer(op.of_queries).f32(), call.of_keys = buffer(op.of_keys).f32();
  call.kv = kv.layer(op.layer);
  call.q = reinterpret_cast<const uint16_t*>(buffer(op.q).data);
  call.positions = program.positions_.data();
  call.block_table = step.block_table;
  call.table_width = step.table_width;
  call.out_stride = out.width;
  call.partials = reinterpret_cast<float*>(program.partials_.data());
  if (op.choice != -1) call.choice = reinterpret_cast<const int32_t*>(buffer(op.choice).data);
  if (out.kind == BufferKind::rows) {
    call.out_bf16 = reinterpret_cast<uint16_t*>(out.rows.data) + op.column;
    call.out_stride = out.rows.stride_bytes / 2;
  } else {
    call.out_f32 = out.f32() + op.column;
  }
  const int32_t n_tasks = static_cast<int32_t>(plan.tasks.size());
  for (int32_t i = thread; i < n_tasks; i = next_task(index, n_tasks, threads)) {
    const int32_t following = i + threads;  // likely the next of this thread
    set.attention->run(call, plan.tasks[i], following < n_tasks ? &plan.tasks[following] : nullptr, scratch(thread));
  }
  if (plan.combines.empty()) return;
  barrier(thread);
  const int64_t group = op.shape.n_heads / op.shape.n_kv_heads;
  for (const AttentionTask& task : plan.combines) {
    const Range rows = share((task.token_end - task.token_begin) * group, thread, threads);
    set.attention->combine(call, task, rows.begin, rows.end, scratch(thread));
  }
}

// ---- latent attention ----

void Program::Run::run(const CacheLatentsOp& op, size_t, int thread, int threads) const {
  const RopeTable& rope = program.ropes_[op.rope];
  LatentCall call;
  call.kv = kv.layer(op.layer);
  call.rank = op.rank;
  call.rows = buffer(op.kv).f32();
  call.norm = vector(op.norm), call.norm_eps = op.norm_eps;
  call.cos_table = rope.cosine.data(), call.sin_table = rope.sine.data();
  call.positions = program.positions_.data(), call.slots = program.slots_.data();
  const Range part = share(step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) kernels.cache_latent(call, t, reinterpret_cast<float*>(scratch(thread)));
}

void Program::Run::run(const ScaleQueriesOp& op, size_t, int thread, int threads) const {
  const Buffer& q = buffer(op.q);
  const Range part = share(step.n_tokens, thread, threads);
  const int64_t n_heads = op.by_head == -1 ? 1 : program.vector_size(op.by_head) / 2, width = q.width / n_heads;
  for (int64_t t = part.begin; t < part.end; ++t) {
    const int32_t position = program.positions_[t];
    const float log_position = std::log(static_cast<float>(position + 1));
    for (int64_t head = 0; head < n_heads; ++head) {
      const float factor = op.by_head == -1 ? op.scale.at(position) : vector(op.by_head)[head] * log_position + vector(op.by_head)[n_heads + head];
      float* row = q.f32() + t * q.width + head * width;
      for (int64_t i = 0; factor != 1.0f && i < width; ++i) row[i] *= factor;
    }
  }
}

void Program::Run::run(const RotateQueriesOp& op, size_t, int thread, int threads) const {
  const RopeTable& rope = program.ropes_[op.rope];
  const Buffer &q = buffer(op.q), &out = buffer(op.out);
  const int64_t half = static_cast<int64_t>(rope.inverse_frequency.size()), from = q.width / op.n_heads, to = out.width / op.n_heads;
  const Range part = share(step.n_tokens * op.n_heads, thread, threads);
  for (int64_t i = part.begin; i < part.end; ++i) {
    const int64_t at = program.positions_[i / op.n_heads] * half;
    kernels.rotate_query(q.f32() + (i + 1) * from - 2 * half, 2 * half, 2 * half, rope.cosine.data() + at, rope.sine.data() + at,
                         reinterpret_cast<float*>(scratch(thread)), reinterpret_cast<uint16_t*>(out.data) + (i + 1) * to - 2 * half);
  }
}

void Program::Run::run(const HeadsOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &out = buffer(op.out);
  const Rows& rows = buffer(op.rows).rows;
  const int64_t heads = static_cast<int64_t>(op.weights.size());
  const Range part = share(step.n_tokens * heads, thread, threads);
  for (int64_t i = part.begin; i < part.end; ++i) prepare_row(set, rows, i, x.f32() + i / heads * x.width + op.first + i % heads * op.head_stride);
  barrier(thread);
  for (int64_t head = 0; head < heads; ++head) {
    Epilogue epilogue;
    epilogue.store = op.store;
    epilogue.out = out.data + (op.column + head * op.out_head_stride) * (op.store == Store::bf16 ? 2 : 4);
    epilogue.out_stride = out.width;
    linear(set, program.linears_[op.weights[head]], rows, program.head_rows_.data() + head * step.n_tokens, step.n_tokens, epilogue, thread,
           threads);
  }
}

// What comes after the head's product, where a tile's logits lie in cache: the softcap, and the best where nothing else is wanted.
class HeadReader final : public OutputReader {
 public:
  HeadReader(const StepKernels& kernels, const HeadOp& op, Best* best) : kernels_(kernels), op_(op), best_(best) {}

  void read(int64_t row, int64_t rows, int64_t first, int64_t count, float* outputs, int64_t stride) override {
    for (int64_t i = 0; i < rows; ++i) {
      float* logits = outputs + i * stride;
      if (op_.has_softcap) kernels_.softcap_row(logits, count, op_.softcap);
      if (best_ != nullptr) join(logits, count, op_.first + first, best_ + row + i);
    }
  }

 private:
  // Tiles mostly come in ascending order, and then find_best goes on where it was.
  void join(const float* logits, int64_t count, int64_t first, Best* best) {
    if (first > best->index) return kernels_.find_best(logits, count, first, best);
    Best other;
    kernels_.find_best(logits, count, first, &other);
    if (other.is_before(*best)) *best = other;
  }

  const StepKernels& kernels_;
  const HeadOp& op_;
  Best* best_;  // [R] of the thread
};

void Program::Run::run(const InputOp& op, size_t, int thread, int threads) const {
  const Buffer& x = buffer(op.x);
  const Range part = share(step.n_tokens * x.width, thread, threads, 64);
  std::memcpy(x.f32() + part.begin, step.input + part.begin, static_cast<size_t>(part.end - part.begin) * 4);
}

void Program::Run::run(const TapOp& op, size_t, int thread, int threads) const {
  const Buffer& x = buffer(op.x);
  const Range part = share(step.n_tokens * x.width, thread, threads, 64);
  for (int64_t i = 0; i < step.n_tapped; ++i)  // who asks twice gets two
    if (step.tapped[i] == op.number)
      std::memcpy(step.taps + i * step.n_tokens * x.width + part.begin, x.f32() + part.begin,
                  static_cast<size_t>(part.end - part.begin) * 4);
}

void Program::Run::run(const HeadOp& op, size_t, int thread, int threads) const {
  if (step.n_logits == 0 || (logits == nullptr && best == nullptr && hidden == nullptr)) return;
  const Buffer& x = buffer(op.x);
  const Rows& rows = buffer(op.rows).rows;
  float* row = reinterpret_cast<float*>(scratch(thread));
  const Range part = share(step.n_logits, thread, threads);
  for (int64_t r = part.begin; r < part.end; ++r) {
    float* target = hidden != nullptr ? hidden + r * x.width : row;
    const float* source = x.f32() + step.logits_rows[r] * x.width;
    if (op.has_norm)
      norm(source, op.norm, op.bias, op.is_centred, x.width, op.eps, target);
    else
      std::memcpy(target, source, static_cast<size_t>(x.width) * 4);
    if (hidden != nullptr) continue;
    if (op.scale != 1.0f)
      for (int64_t i = 0; i < x.width; ++i) row[i] *= op.scale;
    prepare_row(set, rows, r, row);
  }
  if (hidden != nullptr) return;
  barrier(thread);
  Epilogue epilogue;
  epilogue.out = logits == nullptr ? nullptr : logits + op.first;
  epilogue.out_stride = program.vocab_;
  const AdapterBiases biases(set, program.adapted_head_, op.weight, program.linears_[op.weight]);
  if (program.adapted_head_.have_site(op.weight)) {
    const int32_t all[2] = {0, static_cast<int32_t>(step.n_logits)};
    program.adapted_head_.shrink(set, {&op.weight, all, 1}, rows, thread, threads);
    barrier(thread);
    epilogue.biases = &biases;
  }
  HeadReader reader(kernels, op, best != nullptr ? best + thread * step.n_logits : nullptr);
  if (best != nullptr || op.has_softcap) epilogue.reader = &reader;
  linear(set, program.linears_[op.weight], rows, nullptr, step.n_logits, epilogue, thread, threads);
}

// ---- the step ----

void Program::run(const Step& step, KvCache& kv, float* logits) {
  const int64_t bytes = step.n_logits * vocab_ * 4;
  Results results;
  std::shared_ptr<SharedPages> shared;
  if (team_ != nullptr) shared = team_->outputs(bytes);
  results.logits = shared != nullptr ? reinterpret_cast<float*>(shared->data()) : logits;
  execute(step, kv, Want::logits, results);
  if (team_ != nullptr && team_->is_linked()) {
    if (!exchange(meetings_.size() - 1, step, results.logits)) throw TeamBroken("a rank is gone");
    if (!is_rank_0()) team_->give_back_outputs();
  } else {
    meet();
  }
  if (is_rank_0() && results.logits != logits) std::memcpy(logits, results.logits, static_cast<size_t>(bytes));
}

void Program::run_hidden(const Step& step, KvCache& kv, float* hidden) {
  Results results;
  results.hidden = hidden;  // none of ranks but 0, whose rows are whole
  execute(step, kv, Want::hidden, results);
  meet();
}

namespace {

void join_best(Best* best, int64_t rows, int64_t n) {  // of n times `rows`, into the first
  for (int64_t i = rows; i < rows * n; ++i)
    if (best[i].is_before(best[i % rows])) best[i % rows] = best[i];
}

}  // namespace

std::vector<Best> Program::run_best(const Step& step, KvCache& kv) {
  const int64_t rows = step.n_logits;
  std::vector<Best> best(pool_.size() * rows);
  Results results;
  results.best = best.data();
  execute(step, kv, Want::best, results);
  join_best(best.data(), rows, pool_.size());
  best.resize(rows);
  if (team_ == nullptr) return best;
  const int64_t size = team_->size(), bytes = size * rows * static_cast<int64_t>(sizeof(Best));
  const std::shared_ptr<SharedPages> shared = team_->outputs(bytes);
  Best* all = reinterpret_cast<Best*>(shared->data());
  std::copy(best.begin(), best.end(), all + team_->rank() * rows);
  if (!team_->gather(shared->data(), rows * static_cast<int64_t>(sizeof(Best)))) throw TeamBroken("a rank is gone");
  if (!is_rank_0()) return {};
  join_best(all, rows, size);
  best.assign(all, all + rows);
  return best;
}

void Program::execute(const Step& step, KvCache& kv, Want want, const Results& results) {
  check(step, kv);
  const bool tells = team_ != nullptr && is_rank_0();
  if (tells && team_->is_broken()) throw TeamBroken("a rank is gone");
  if (tells) post(step, kv, want);
  try {
    compute(step, kv, results);
  } catch (...) {
    if (team_ != nullptr) team_->break_up();  // the others are in the middle of the step
    throw;
  }
}

void Program::compute(const Step& step, KvCache& kv, const Results& results) {
  if (team_ != nullptr && team_->is_linked() && written_.empty()) throw std::logic_error("a rank does not know what the others write");
  take_settled();
  reserve(step.n_tokens);
  place_tokens(step, kv.shape().block_tokens);
  plan_attention(step);
  plan_choice(step);
  adapted_.plan(step.adapters, step.query_start, step.n_sequences, adapters_);
  adapted_head_.plan(adapted_, step.logits_rows, step.n_logits);
  int64_t positions = 0;
  for (int64_t s = 0; s < step.n_sequences; ++s) positions = positions < step.context_tokens[s] ? step.context_tokens[s] : positions;
  for (RopeTable& rope : ropes_) rope.grow(positions);
  for (const Op& op : ops_) {
    if (const auto* moe = std::get_if<MoeOp>(&op.body)) reserve_routing(*moe, step.n_tokens);
    if (const auto* heads = std::get_if<HeadsOp>(&op.body)) number_head_rows(static_cast<int64_t>(heads->weights.size()), step.n_tokens);
  }
  if (counters_.size() != ops_.size()) counters_ = std::vector<std::atomic<int32_t>>(ops_.size());
  for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
  nanoseconds_.fill(0);

  std::atomic<bool> is_left{false};
  const Run run{*this, step, kv, results.logits, results.best, results.hidden, kernels_, *kernels_.step, counters_, is_left};
  pool_.run([&](int thread, int threads) {
    const FlushDenormals flush;
    int64_t before = thread == 0 ? now_ns() : 0;
    run.look_ahead(0, thread, threads);
    for (size_t i = 0; i < ops_.size(); ++i) {
      if (run.is_idle(ops_[i].body)) continue;
      std::visit([&](const auto& op) { run.run(op, i, thread, threads); }, ops_[i].body);
      if (first_weight(ops_[i].body) >= 0) run.look_ahead(i, thread, threads);
      meets_[i] != 0 ? run.meet(thread, i, std::holds_alternative<MoeOp>(ops_[i].body) ? 2 : 0) : run.barrier(thread);
      if (is_left.load(std::memory_order_relaxed)) return;
      if (thread != 0) continue;
      const int64_t after = now_ns();
      nanoseconds_[static_cast<size_t>(ops_[i].category)] += after - before;
      before = after;
    }
  });
  if (is_left) throw TeamBroken("a rank is gone");
}

void Program::number_head_rows(int64_t heads, int64_t tokens) {
  if (static_cast<int64_t>(head_rows_.size()) == heads * tokens) return;
  head_rows_.resize(heads * tokens);
  for (int64_t i = 0; i < heads * tokens; ++i) head_rows_[i] = static_cast<int32_t>(i % tokens * heads + i / tokens);
}

void Program::argmax(const float* logits, int64_t rows, int64_t vocab, int64_t* ids) {
  const StepKernels& kernels = *kernels_.step;
  auto some = [&](int thread, int threads) {
    const Range part = share(rows, thread, threads);
    for (int64_t r = part.begin; r < part.end; ++r) {
      Best best;
      kernels.find_best(logits + r * vocab, vocab, 0, &best);
      ids[r] = best.index;
    }
  };
  rows == 1 ? some(0, 1) : pool_.run(some);
}

void Program::draw(const float* logits, int64_t vocab, const int32_t* rows, int64_t n, const float* temperatures,
                   const double* quantiles, Drawn* drawn) {
  const StepKernels& kernels = *kernels_.step;
  auto some = [&](int thread, int threads) {
    const Range part = share(n, thread, threads);
    for (int64_t i = part.begin; i < part.end; ++i)
      kernels.draw_row(logits + rows[i] * vocab, vocab, temperatures[i], quantiles[i], drawn + i);
  };
  n == 1 ? some(0, 1) : pool_.run(some);
}

}  // namespace diptych

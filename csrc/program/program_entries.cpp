// Operations of a Program on entries, and on rows that all heads meet as they are.
#include "program/program_run.h"

namespace diptych {

void Program::Run::run(const CacheRowsOp& op, size_t, int thread, int threads) const {
  const RopeTable& rope = program.ropes_[op.rope];
  RowCall call;
  call.kv = op.is_index ? kv.layer(op.layer).index() : kv.layer(op.layer);
  call.rows = buffer(op.x).f32();
  call.norm = vector(op.norm), call.norm_eps = op.norm_eps, call.tokens = op.tokens;
  call.half = static_cast<int64_t>(rope.inverse_frequency.size());
  call.cos_table = rope.cosine.data(), call.sin_table = rope.sine.data();
  call.positions = program.positions_.data(), call.slots = program.slots_.data();
  const Range part = share(step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) kernels.cache_row(call, t, reinterpret_cast<float*>(scratch(thread)));
}

void Program::Run::run(const TurnQueriesOp& op, size_t, int thread, int threads) const {
  const RopeTable& rope = program.ropes_[op.rope];
  const int64_t half = static_cast<int64_t>(rope.inverse_frequency.size()), d = buffer(op.q).width / op.n_heads;
  uint16_t* out = reinterpret_cast<uint16_t*>(buffer(op.out).data);
  const Range part = share(step.n_tokens * op.n_heads, thread, threads);
  for (int64_t i = part.begin; i < part.end; ++i) {
    const int64_t at = program.positions_[i / op.n_heads] * half;
    kernels.turn_query(buffer(op.q).f32() + i * d, d, vector(op.norm), op.norm_eps, half, rope.cosine.data() + at, rope.sine.data() + at,
                       reinterpret_cast<float*>(scratch(thread)), out + i * d);
  }
}

void Program::Run::run(const TurnBackOp& op, size_t, int thread, int threads) const {
  const RopeTable& rope = program.ropes_[op.rope];
  const int64_t half = static_cast<int64_t>(rope.inverse_frequency.size()), d = buffer(op.x).width / op.n_heads;
  const Range part = share(step.n_tokens * op.n_heads, thread, threads);
  for (int64_t i = part.begin; i < part.end; ++i) {
    const int64_t at = program.positions_[i / op.n_heads] * half;
    kernels.turn_back(buffer(op.x).f32() + i * d, d, half, rope.cosine.data() + at, rope.sine.data() + at);
  }
}

}  // namespace diptych

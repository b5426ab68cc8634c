// What ranks of a Program say to each other: rank 0 posts a step, the others follow, all meet at its end.
#include <algorithm>
#include <cstring>

#include "program/program.h"
#include "program/program_uses.h"

namespace diptych {
namespace {

constexpr int32_t kStepMessage = 0;

// How a step is told to other ranks; its arrays follow in the order of Step.
struct StepMessage {
  int32_t want, cache;
  int64_t n_tokens, n_sequences, table_width, n_logits, n_adapters, n_both_ways, n_second, n_states, n_saves;
  int64_t words() const {
    return n_tokens + 2 * n_sequences + 1 + n_sequences * table_width + n_logits + n_adapters + n_both_ways + n_second + 2 * n_states + 3 * n_saves;
  }
};

}  // namespace

void Program::post(const Step& step, const KvCache& kv, Want want) {
  const int64_t n_adapters = step.adapters == nullptr ? 0 : step.n_sequences;
  const int64_t n_both_ways = step.both_ways == nullptr ? 0 : step.n_sequences;
  const StepMessage head{static_cast<int32_t>(want), kv.number,     step.n_tokens, step.n_sequences,
                         step.table_width,           step.n_logits, n_adapters,    n_both_ways,
                         step.second == nullptr ? 0 : step.n_sequences,
                         step.state_reads == nullptr ? 0 : step.n_sequences,       step.n_saves};
  const int64_t bytes = static_cast<int64_t>(sizeof head) + head.words() * 4;
  uint8_t* at = team_->message(bytes);
  std::memcpy(at, &head, sizeof head);
  at += sizeof head;
  auto put = [&](const int32_t* values, int64_t n) {
    if (n > 0) std::memcpy(at, values, static_cast<size_t>(n) * 4);
    at += n * 4;
  };
  put(step.token_ids, step.n_tokens);
  put(step.query_start, step.n_sequences + 1);
  put(step.context_tokens, step.n_sequences);
  put(step.block_table, step.n_sequences * step.table_width);
  put(step.logits_rows, step.n_logits);
  put(step.adapters, n_adapters);
  put(step.both_ways, n_both_ways);
  put(step.second, head.n_second);
  put(step.state_reads, head.n_states);
  put(step.state_writes, head.n_states);
  put(step.state_saves, 3 * head.n_saves);
  team_->post(kStepMessage, bytes);
}

std::pair<int32_t, int64_t> Program::serve(const std::vector<KvCache*>& caches) {
  while (true) {
    int32_t kind = 0;
    int64_t bytes = 0;
    if (!team_->next(&kind, &bytes)) throw TeamBroken("rank 0 has given the team up");
    if (kind != kStepMessage) return {kind, bytes};
    StepMessage head;
    std::memcpy(&head, team_->message(bytes), sizeof head);
    const int32_t* at = reinterpret_cast<const int32_t*>(team_->message(bytes) + sizeof head);
    auto take = [&](int64_t n) { return (at += n) - n; };
    Step step{};
    step.n_tokens = head.n_tokens, step.n_sequences = head.n_sequences;
    step.table_width = head.table_width, step.n_logits = head.n_logits;
    step.token_ids = take(step.n_tokens);
    step.query_start = take(step.n_sequences + 1);
    step.context_tokens = take(step.n_sequences);
    step.block_table = take(step.n_sequences * step.table_width);
    step.logits_rows = take(step.n_logits);
    if (head.n_adapters > 0) step.adapters = take(head.n_adapters);
    if (head.n_both_ways > 0) step.both_ways = take(head.n_both_ways);
    if (head.n_second > 0) step.second = take(head.n_second);
    if (head.n_states > 0) step.state_reads = take(head.n_states), step.state_writes = take(head.n_states);
    step.n_saves = head.n_saves, step.state_saves = take(3 * head.n_saves);
    KvCache& kv = *caches.at(head.cache);
    switch (static_cast<Want>(head.want)) {
      case Want::logits: run(step, kv, nullptr); break;
      case Want::best: run_best(step, kv); break;
      case Want::hidden: run_hidden(step, kv, nullptr); break;
    }
  }
}

// ---- ranks that have no memory in common ----

void Program::note_meetings(const OpBody& body) {
  first_meeting_.push_back(meetings_.size());
  if (team_ == nullptr) return;
  auto note = [&](int buffer, Part part, int64_t begin, int64_t end) { meetings_.push_back({part, buffer, {begin, end}}); };
  auto columns = [&](int buffer, int64_t begin, int64_t n) { note(buffer, Part::columns, begin, begin + n); };
  const bool meets = meets_.back() != 0;
  if (const auto* op = std::get_if<MoeOp>(&body)) {
    const int64_t beside = op->joins_apart && !op->up.empty() ? linears_[op->up[0]].n_outputs : 0;
    columns(op->joins_apart ? op->wide : op->has_hidden ? op->hidden : op->hidden_rows, op->hidden_column,
            linears_[op->gate_up[0]].n_outputs + beside);
    columns(op->expanded, op->column, linears_[op->down[0]].n_outputs);
    note(op->out, Part::rows, 0, 0);
  } else if (const auto* op = std::get_if<HeadOp>(&body)) {
    columns(-1, op->first, linears_[op->weight].n_outputs);
  } else if (!meets) {
    return;
  } else if (const auto* op = std::get_if<LinearOp>(&body)) {
    columns(op->out, op->column, linears_[op->weight].n_outputs);
  } else if (const auto* op = std::get_if<AttentionOp>(&body)) {
    columns(op->out, op->column, op->shape.n_heads * op->shape.v_head_dim);
  } else if (const auto* op = std::get_if<StateOp>(&body)) {
    columns(op->out, op->column, op->shape.n_value_heads * op->shape.value_dim);
  } else if (const auto* op = std::get_if<HeadsOp>(&body)) {
    columns(op->out, op->column, static_cast<int64_t>(op->weights.size()) * op->out_head_stride);
  } else if (const auto* op = std::get_if<MeetOp>(&body)) {
    columns(op->out, 0, 0);
  } else if (const auto* op = std::get_if<TiedEmbedOp>(&body)) {
    note(op->x, Part::tokens, op->first, op->first + linears_[op->head].n_outputs);
  } else {
    Uses uses;
    std::visit(uses, body);
    for (const int written : uses.writes)
      if (buffers_[written].shared) note(written, Part::rows, 0, 0);
  }
}

std::vector<Range> Program::written() const {
  std::vector<Range> found;
  for (const Meeting& meeting : meetings_) found.push_back(meeting.own);
  return found;
}

void Program::know_written(std::vector<std::vector<Range>> by_rank) {
  if (team_ == nullptr || static_cast<int>(by_rank.size()) != team_->size()) throw std::invalid_argument("what every rank writes must be known");
  for (const auto& one : by_rank)
    if (one.size() != meetings_.size())
      throw std::invalid_argument("a rank meets " + std::to_string(one.size()) + " times in a step, another " + std::to_string(meetings_.size()));
  written_ = std::move(by_rank);
}

// Calls see(memory, bytes) for each piece that a rank writes, in the same order on every rank.
template <class See>
void Program::visit_part(const Meeting& meeting, Range part, int rank, const Step& step, float* logits, See&& see) const {
  uint8_t* data = reinterpret_cast<uint8_t*>(logits);
  int64_t rows = step.n_logits, element = 4, stride = vocab_ * 4, width = vocab_;
  if (meeting.buffer >= 0) {
    const Buffer& buffer = buffers_[meeting.buffer];
    const bool is_rows = buffer.kind == BufferKind::rows;  // of bf16: no other is shared
    rows = step.n_tokens * buffer.rows_per_token, element = buffer.kind == BufferKind::f32 ? 4 : 2, width = buffer.width;
    data = is_rows ? buffer.rows.data : buffer.data;
    stride = is_rows ? buffer.rows.stride_bytes : width * element;
  }
  if (meeting.part == Part::rows) {
    const Range own = share(rows, rank, team_->size());
    if (own.end > own.begin) see(data + own.begin * stride, (own.end - own.begin - 1) * stride + width * element);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    if (meeting.part == Part::columns) {
      if (part.end > part.begin) see(data + row * stride + part.begin * element, (part.end - part.begin) * element);
    } else if (step.token_ids[row] >= part.begin && step.token_ids[row] < part.end) {
      see(data + row * stride, width * element);
    }
  }
}

bool Program::exchange(size_t number, const Step& step, float* logits) {
  const Meeting& meeting = meetings_[number];
  int64_t most = 0;
  for (int rank = 0; rank < team_->size(); ++rank) {
    int64_t bytes = 0;
    visit_part(meeting, written_[rank][number], rank, step, logits, [&](const uint8_t*, int64_t n) { bytes += n; });
    most = std::max(most, bytes);
  }
  if (static_cast<int64_t>(slots_of_ranks_.size()) < most * team_->size()) slots_of_ranks_.resize(most * team_->size());
  uint8_t* at = slots_of_ranks_.data() + team_->rank() * most;
  visit_part(meeting, meeting.own, team_->rank(), step, logits, [&](const uint8_t* piece, int64_t n) {
    std::memcpy(at, piece, static_cast<size_t>(n));
    at += n;
  });
  if (!team_->gather(slots_of_ranks_.data(), most)) return false;
  for (int rank = 0; rank < team_->size(); ++rank) {
    if (rank == team_->rank()) continue;
    at = slots_of_ranks_.data() + rank * most;
    visit_part(meeting, written_[rank][number], rank, step, logits, [&](uint8_t* piece, int64_t n) {
      std::memcpy(piece, at, static_cast<size_t>(n));
      at += n;
    });
  }
  return true;
}

void Program::meet() {
  if (team_ != nullptr && !team_->meet()) throw TeamBroken("a rank is gone");
}

}  // namespace diptych

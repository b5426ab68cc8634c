// What ranks of a Program say to each other: rank 0 posts a step, the others follow, all meet at its end.
#include <cstring>

#include "program.h"

namespace diptych {
namespace {

constexpr int32_t kStepMessage = 0;

// How a step is told to other ranks; its arrays follow in the order of Step.
struct StepMessage {
  int32_t want, cache;
  int64_t n_tokens, n_sequences, table_width, n_logits, n_adapters;
  int64_t words() const { return n_tokens + 2 * n_sequences + 1 + n_sequences * table_width + n_logits + n_adapters; }
};

}  // namespace

void Program::post(const Step& step, const KvCache& kv, Want want) {
  const int64_t n_adapters = step.adapters == nullptr ? 0 : step.n_sequences;
  const StepMessage head{static_cast<int32_t>(want), kv.number, step.n_tokens, step.n_sequences, step.table_width, step.n_logits, n_adapters};
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
    KvCache& kv = *caches.at(head.cache);
    switch (static_cast<Want>(head.want)) {
      case Want::logits: run(step, kv, nullptr); break;
      case Want::best: run_best(step, kv); break;
      case Want::hidden: run_hidden(step, kv, nullptr); break;
    }
  }
}

void Program::meet() {
  if (team_ != nullptr && !team_->meet()) throw TeamBroken("a rank is gone");
}

}  // namespace diptych

// Operations of a Program on states of sequences.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "program/program_run.h"

namespace diptych {
namespace {

constexpr int64_t kMostSaves = 64;  // of one sequence in one step

struct Saves {  // of a step, in its order
  const int32_t* triples;
  int64_t n;

  int32_t sequence(int64_t i) const { return triples[3 * i]; }
  int32_t rows(int64_t i) const { return triples[3 * i + 1]; }
  int32_t place(int64_t i) const { return triples[3 * i + 2]; }
  int64_t first_of(int64_t wanted) const {
    int64_t low = 0, high = n;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      sequence(middle) < wanted ? low = middle + 1 : high = middle;
    }
    return low;
  }
};

// What is left of one sequence, behind which rows and where a layer's state goes.
struct OwnSaves {
  StateSave of[kMostSaves];
  int64_t n = 0;

  OwnSaves(const Saves& saves, int64_t s, const KvCache& kv, int64_t layer) {
    for (int64_t at = saves.first_of(s); at < saves.n && saves.sequence(at) == s; ++at) of[n++] = {saves.rows(at), kv.state(layer, saves.place(at))};
  }
};

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace

// Places that are there, and each written by one sequence alone, which no other reads.
void Program::check_states(const Step& step, const KvCache& kv) const {
  const bool may_have_less = !is_rank_0();  // heads in the last of the layers
  require(kv.n_state_layers() == n_state_layers_ || (may_have_less && kv.n_state_layers() > n_state_layers_), "the KV cache has states of another number of layers");
  require(step.state_reads != nullptr && step.state_writes != nullptr, "the program has states, and the step names no places for them");
  for (const Op& op : ops_) {
    if (const auto* moves = std::get_if<StateOp>(&op.body))
      require(kv.state_floats(moves->layer) >= moves->shape.floats(), "the KV cache has states of another size");
    if (const auto* entries = std::get_if<MoveEntriesOp>(&op.body))
      require(kv.state_floats(entries->layer) >= entries_floats(buffers_[entries->out].width, entries->n_series), "the KV cache has states of another size");
  }
  const int64_t n = kv.n_places();
  std::vector<uint8_t> is_written(static_cast<size_t>(n), 0);
  auto note = [&](int64_t place) {
    require(place >= 0 && place < n, "a step names a place for a state that is not there");
    require(is_written[place] == 0, "a step leaves two states in one place");
    is_written[place] = 1;
  };
  for (int64_t s = 0; s < step.n_sequences; ++s) note(step.state_writes[s]);
  const Saves saves{step.state_saves, step.n_saves};
  for (int64_t i = 0; i < saves.n; ++i) {
    const int64_t s = saves.sequence(i);
    require(s >= 0 && s < step.n_sequences, "a state is left of a sequence that is not in the step");
    require(saves.rows(i) >= 1 && saves.rows(i) <= step.query_start[s + 1] - step.query_start[s], "a state is left behind rows that its sequence does not have");
    const bool ascends = i == 0 || saves.sequence(i - 1) < s || (saves.sequence(i - 1) == s && saves.rows(i - 1) <= saves.rows(i));
    require(ascends && (i < kMostSaves || saves.sequence(i - kMostSaves) < s), "states that are left do not ascend, or are too many");
    note(saves.place(i));
  }
  for (int64_t s = 0; s < step.n_sequences; ++s) {
    const int64_t read = step.state_reads[s];
    require(read >= -1 && read < n, "a step names a place for a state that is not there");
    require(read == -1 || is_written[read] == 0 || read == step.state_writes[s], "a state is read that another sequence writes");
  }
}

void Program::Run::run(const StateOp& op, size_t index, int thread, int threads) const {
  const Buffer& out = buffer(op.out);
  auto given = [&](int number) { return number == -1 ? nullptr : vector(number); };
  StateCall call;
  call.shape = op.shape;
  call.qkv = buffer(op.qkv).f32(), call.qkv_stride = buffer(op.qkv).width;
  if (op.rates != -1) call.rates = buffer(op.rates).f32(), call.rates_stride = buffer(op.rates).width, call.first_head = op.first_head, call.first_key_head = op.first_key_head;
  if (op.decays != -1) call.decays = buffer(op.decays).f32(), call.decays_stride = buffer(op.decays).width;
  call.taps = given(op.taps), call.tap_bias = given(op.tap_bias), call.decay = given(op.decay), call.shift = given(op.shift);
  call.skip = given(op.skip), call.norm = given(op.norm);
  call.out = out.f32() + op.column, call.out_stride = out.width;
  const Saves saves{step.state_saves, step.n_saves};
  const int64_t parts = op.shape.n_parts();
  const int32_t n_tasks = static_cast<int32_t>(step.n_sequences * parts);
  for (int32_t i = thread; i < n_tasks; i = next_task(index, n_tasks, threads)) {
    const int64_t s = i / parts, read = step.state_reads[s];
    const OwnSaves own(saves, s, kv, op.layer);
    StateTask task;
    task.part = i % parts;
    task.first_row = step.query_start[s], task.n_rows = step.query_start[s + 1] - task.first_row;
    task.read = read < 0 ? nullptr : kv.state(op.layer, read);
    task.write = kv.state(op.layer, step.state_writes[s]);
    task.saves = own.of, task.saves_end = own.of + own.n;
    kernels.move_state(call, task, reinterpret_cast<float*>(scratch(thread)));
  }
}

void Program::Run::run(const MoveEntriesOp& op, size_t index, int thread, int threads) const {
  EntriesCall call;
  call.tokens = op.tokens, call.n_series = op.n_series, call.d = buffer(op.out).width;
  call.rows = buffer(op.x).f32(), call.offsets = vector(op.offsets), call.positions = program.positions_.data(), call.out = buffer(op.out).f32();
  const Saves saves{step.state_saves, step.n_saves};
  const int64_t parts = (call.d + 15) / 16;
  const int32_t n_tasks = static_cast<int32_t>(step.n_sequences * parts);
  for (int32_t i = thread; i < n_tasks; i = next_task(index, n_tasks, threads)) {
    const int64_t s = i / parts, read = step.state_reads[s];
    const OwnSaves own(saves, s, kv, op.layer);
    EntriesTask task;
    task.first_row = step.query_start[s], task.n_rows = step.query_start[s + 1] - task.first_row, task.lane = i % parts * 16;
    task.read = read < 0 ? nullptr : kv.state(op.layer, read);
    task.write = kv.state(op.layer, step.state_writes[s]);
    task.saves = own.of, task.saves_end = own.of + own.n;
    kernels.move_entries(call, task);
  }
}

}  // namespace diptych

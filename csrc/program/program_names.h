// Whether the buffers, weights, vectors and tables that an operation of a Program names by number are there.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "program/program.h"

namespace diptych {

struct Counts {
  size_t buffers, weights, vectors, tables, ropes;
};

inline void require_below(std::initializer_list<int> numbers, size_t count, const char* what) {
  for (const int number : numbers)
    if (number < 0 || static_cast<size_t>(number) >= count)
      throw std::invalid_argument("an operation names " + std::string(what) + " " + std::to_string(number) + " of " + std::to_string(count));
}

// That what an operation names is there. Numbers it does not use are not looked at.
struct Names {
  Counts has;
  void buffers(std::initializer_list<int> numbers) const { require_below(numbers, has.buffers, "buffer"); }
  void weights(std::initializer_list<int> numbers) const { require_below(numbers, has.weights, "weight"); }
  void vectors(std::initializer_list<int> numbers) const { require_below(numbers, has.vectors, "vector"); }
  void optional_vector(int number) const {
    if (number != -1) vectors({number});
  }

  void positions(const LearnedPositions& positions) const {
    for (const int table : {positions.table, positions.types})
      if (table != -1) require_below({table}, has.tables, "table");
  }

  void operator()(const EmbedOp& op) const { require_below({op.table}, has.tables, "table"), buffers({op.x}), positions(op.positions); }
  void operator()(const TiedEmbedOp& op) const { weights({op.head}), buffers({op.x}), positions(op.positions); }
  void operator()(const NormOp& op) const { buffers({op.x, op.out}), vectors({op.weight}), optional_vector(op.bias); }
  void operator()(const AddNormOp& op) const { buffers({op.x, op.y}), vectors({op.weight}); }
  void operator()(const AddOp& op) const {
    buffers({op.x, op.y});
    if (op.gate != -1) buffers({op.gate});
  }
  void operator()(const PrepareOp& op) const { buffers({op.x, op.rows}); }
  void operator()(const LinearOp& op) const { buffers({op.rows, op.out}), weights({op.weight}); }
  void operator()(const RotateOp& op) const {
    buffers({op.qkv, op.q});
    if (op.has_rope) require_below({op.rope}, has.ropes, "rotary table");
    const RotateShape& part = op.shape;
    if (part.first_head + part.n_heads > part.row_heads || part.first_kv_head + part.n_kv_heads > part.row_kv_heads)
      throw std::invalid_argument("a row holds fewer heads than a rotation takes of it");
    if (op.has_q_norm) vectors({op.q_norm});
    if (op.has_k_norm) vectors({op.k_norm});
  }
  void operator()(const AttentionOp& op) const {
    buffers({op.q, op.out}), optional_vector(op.sinks), optional_vector(op.slopes), optional_vector(op.distances), optional_vector(op.places);
    if (op.choice != -1) buffers({op.choice});
    if (op.places != -1) buffers({op.of_queries, op.of_keys});
  }
  void operator()(const MoeOp& op) const {
    buffers({op.router_rows, op.scores, op.rows, op.hidden_rows, op.expanded, op.out}), weights({op.router});
    if (op.has_hidden) buffers({op.hidden});
    if (op.joins_apart) buffers({op.wide});
    if (op.n_identities > 0) buffers({op.given});
    optional_vector(op.choice_bias), optional_vector(op.scales), optional_vector(op.by_token), optional_vector(op.behind);
    for (size_t e = 0; e < op.down.size(); ++e) weights({op.gate_up.at(e), op.down[e]});
    for (const int up : op.up) weights({up}), buffers({op.up_rows});
  }
  void operator()(const HeadOp& op) const {
    buffers({op.x, op.rows}), weights({op.weight});
    if (op.has_norm) vectors({op.norm}), optional_vector(op.bias);
  }
  void operator()(const HeadsOp& op) const {
    buffers({op.x, op.rows, op.out});
    for (const int weight : op.weights) weights({weight});
  }
  void operator()(const CacheLatentsOp& op) const { buffers({op.kv}), vectors({op.norm}), require_below({op.rope}, has.ropes, "rotary table"); }
  void operator()(const CacheIndexOp& op) const { buffers({op.x}), optional_vector(op.norm), optional_vector(op.bias), require_below({op.rope}, has.ropes, "rotary table"); }
  void operator()(const PoolIndexOp& op) const { vectors({op.offsets}); }
  void operator()(const CacheRowsOp& op) const { buffers({op.x}), vectors({op.norm}), require_below({op.rope}, has.ropes, "rotary table"); }
  void operator()(const TurnQueriesOp& op) const { buffers({op.q, op.out}), vectors({op.norm}), require_below({op.rope}, has.ropes, "rotary table"); }
  void operator()(const TurnBackOp& op) const { buffers({op.x}), require_below({op.rope}, has.ropes, "rotary table"); }
  void operator()(const MoveEntriesOp& op) const { buffers({op.x, op.out}), vectors({op.offsets}); }
  void operator()(const ChooseOp& op) const {
    buffers({op.q, op.queries, op.choice}), optional_vector(op.norm), require_below({op.rope}, has.ropes, "rotary table");
    if (op.weights != -1) buffers({op.weights});
  }
  void operator()(const ScaleQueriesOp& op) const { buffers({op.q}), optional_vector(op.by_head); }
  void operator()(const RotateQueriesOp& op) const { buffers({op.q, op.out}), require_below({op.rope}, has.ropes, "rotary table"); }
  void operator()(const StateOp& op) const {
    buffers({op.qkv, op.out});
    for (const int number : {op.rates, op.decays})
      if (number != -1) buffers({number});
    for (const int number : {op.taps, op.tap_bias, op.decay, op.shift, op.skip, op.norm}) optional_vector(number);
  }
  void operator()(const InputOp& op) const { buffers({op.x}); }
  void operator()(const TapOp& op) const { buffers({op.x}); }
  void operator()(const MeetOp& op) const { buffers({op.out}); }
  void operator()(const WeighOp& op) const { buffers({op.x, op.out}), vectors({op.weight}); }
  void operator()(const SparseGateOp& op) const { buffers({op.x, op.out}); }
  void operator()(const BentGateOp& op) const { buffers({op.x, op.out}); }
  void operator()(const CurveOp& op) const { buffers({op.x, op.out}); }
  void operator()(const BranchOp& op) const { buffers({op.x, op.out}); }
  void operator()(const GateHeadsOp& op) const { buffers({op.gates, op.x}); }
  void operator()(const MatchOp& op) const { buffers({op.y, op.x, op.out}); }
  void operator()(const CopyColumnsOp& op) const { buffers({op.x, op.out}); }
  void operator()(const PredictOp& op) const {
    buffers({op.routed}), vectors({op.weight});
    for (const int x : op.xs) buffers({x});
  }
  void operator()(const CorrectOp& op) const {
    buffers({op.y, op.routed}), vectors({op.weight});
    for (const int x : op.xs) buffers({x});
  }
  void operator()(const ConnectionsOp& op) const {
    buffers({op.out}), vectors({op.weight, op.scale, op.base});
    for (const int x : op.xs) buffers({x});
  }
  void operator()(const GatherOp& op) const {
    buffers({op.c, op.out});
    for (const int x : op.xs) buffers({x});
  }
  void operator()(const SpreadOp& op) const {
    buffers({op.y, op.c});
    for (const int x : op.xs) buffers({x});
  }
  void operator()(const MingleOp& op) const {
    buffers({op.y, op.c});
    for (const int x : op.xs) buffers({x});
  }
  void operator()(const FoldOp& op) const { buffers({op.x, op.out}); }
  void operator()(const InjectOp& op) const { buffers({op.x, op.y, op.c}); }
  void operator()(const MeetKeysOp& op) const { buffers({op.keys, op.queries, op.values, op.out}); }
  void operator()(const IdsOp& op) const { buffers({op.out}); }
  void operator()(const NgramsOp& op) const {
    buffers({op.before, op.out});
    for (const int table : op.tables) require_below({table}, has.tables, "table");
  }
  void operator()(const LayerInputsOp& op) const {
    buffers({op.x}), vectors({op.norm});
    if (op.packed != -1) weights({op.packed}); else require_below({op.table}, has.tables, "table");
  }
};

}  // namespace diptych

// What the operations of a Program read and write, for whoever checks their order or carries results to other ranks.
#pragma once

#include <vector>

#include "program/program.h"

namespace diptych {

// The buffers that an operation reads whole, or rows of it that others wrote, and those that it writes.
struct Uses {
  std::vector<int> reads, writes;

  void operator()(const EmbedOp& op) { writes = {op.x}; }
  void operator()(const TiedEmbedOp& op) { writes = {op.x}; }
  void operator()(const NormOp& op) { reads = {op.x}, writes = {op.out}; }
  void operator()(const AddNormOp& op) { reads = {op.y}, writes = {op.x}; }
  void operator()(const AddOp& op) {
    reads = {op.y}, writes = {op.x};
    if (op.gate != -1) reads.push_back(op.gate);
  }
  void operator()(const PrepareOp& op) { reads = {op.x}, writes = {op.rows}; }
  void operator()(const LinearOp& op) { reads = {op.rows}, writes = {op.out}; }
  void operator()(const RotateOp& op) { reads = {op.qkv}, writes = {op.q}; }
  void operator()(const AttentionOp& op) {
    reads = {op.q}, writes = {op.out};
    if (op.choice != -1) reads.push_back(op.choice);
    if (op.places != -1) reads.push_back(op.of_queries), reads.push_back(op.of_keys);
  }
  void operator()(const MoeOp& op) {
    reads = {op.router_rows, op.rows}, writes = {op.scores, op.hidden_rows, op.expanded, op.out};
    if (!op.up.empty()) reads.push_back(op.up_rows);
    if (op.has_hidden) writes.push_back(op.hidden);
    if (op.joins_apart) writes.push_back(op.wide);
    if (op.n_identities > 0) reads.push_back(op.given);
  }
  void operator()(const HeadOp& op) { reads = {op.x}, writes = {op.rows}; }
  void operator()(const HeadsOp& op) { reads = {op.x}, writes = {op.rows, op.out}; }
  void operator()(const CacheLatentsOp& op) { reads = {op.kv}; }
  void operator()(const CacheIndexOp& op) { reads = {op.x}; }
  void operator()(const PoolIndexOp&) {}
  void operator()(const CacheRowsOp& op) { reads = {op.x}; }
  void operator()(const TurnQueriesOp& op) { reads = {op.q}, writes = {op.out}; }
  void operator()(const TurnBackOp& op) { reads = {op.x}, writes = {op.x}; }
  void operator()(const MoveEntriesOp& op) { reads = {op.x}, writes = {op.out}; }
  void operator()(const ChooseOp& op) {
    reads = {op.q}, writes = {op.queries, op.choice};
    if (op.weights != -1) reads.push_back(op.weights);
  }
  void operator()(const ScaleQueriesOp& op) { reads = {op.q}, writes = {op.q}; }
  void operator()(const RotateQueriesOp& op) { reads = {op.q}, writes = {op.out}; }
  void operator()(const InputOp& op) { writes = {op.x}; }
  void operator()(const TapOp& op) { reads = {op.x}; }
  void operator()(const MeetOp& op) { writes = {op.out}; }
  void operator()(const WeighOp& op) { reads = {op.x}, writes = {op.out}; }
  void operator()(const SparseGateOp& op) { reads = {op.x}, writes = {op.out}; }
  void operator()(const BentGateOp& op) { reads = {op.x}, writes = {op.out}; }
  void operator()(const CurveOp& op) { reads = {op.x}, writes = {op.out}; }
  void operator()(const BranchOp& op) { reads = {op.x}, writes = {op.out}; }
  void operator()(const GateHeadsOp& op) { reads = {op.gates, op.x}, writes = {op.x}; }
  void operator()(const MatchOp& op) { reads = {op.y, op.x}, writes = {op.out}; }
  void operator()(const CopyColumnsOp& op) { reads = {op.x}, writes = {op.out}; }
  void operator()(const PredictOp& op) { reads = {op.routed}, writes = op.xs; }
  void operator()(const CorrectOp& op) { reads = {op.y, op.routed}, writes = op.xs; }
  void operator()(const ConnectionsOp& op) { reads = op.xs, writes = {op.out}; }
  void operator()(const GatherOp& op) {
    reads = op.xs, writes = {op.out};
    reads.push_back(op.c);
  }
  void operator()(const SpreadOp& op) { reads = {op.y, op.c}, writes = op.xs; }
  void operator()(const MingleOp& op) { reads = {op.y, op.c}, writes = op.xs; }
  void operator()(const StateOp& op) {
    reads = {op.qkv}, writes = {op.out};
    for (const int number : {op.rates, op.decays})
      if (number != -1) reads.push_back(number);
  }
  void operator()(const FoldOp& op) { reads = {op.x}, writes = {op.out}; }
  void operator()(const InjectOp& op) { reads = {op.y, op.c}, writes = {op.x}; }
  void operator()(const MeetKeysOp& op) { reads = {op.keys, op.queries, op.values}, writes = {op.out}; }
  void operator()(const IdsOp& op) { writes = {op.out}; }
  void operator()(const NgramsOp& op) { reads = {op.before}, writes = {op.out}; }
  void operator()(const LayerInputsOp& op) { writes = {op.x}; }
};

}  // namespace diptych

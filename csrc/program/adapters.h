// Low-rank adapters (LoRA): y += B (A x) beside a packed linear layer, for the rows of a step that ask for one.
//
// Two phases around one barrier. `shrink` gives u = A x of every adapted row, from the rows that the product reads, so that a
// format's rounding of x is the same for both. Over rows of int8, A and B are int8 too, with a scale for each rank of A and each lane
// of B: u is rounded by blocks of 16 ranks, sums are whole, and the tiles are those of the layer. What B adds then enters as a bias of the row's own, tile by tile where the sums lie
// in cache (RowBiases), before activation and store. A row's part depends on that row and its adapter alone, summed in one order.
//
//   auto adapter = pack_adapter(set, sites);      // once; A and B in bf16, B by strips of 16 lanes as the layer is packed
//   AdaptedRows rows;  rows.plan(step, adapters)  // once per step: which rows, grouped by adapter; nothing where none asks
//   rows.shrink(set, calls, x, thread, threads);  barrier;  epilogue.biases = &AdapterBiases(...);  linear(...)
#pragma once

#include <memory>
#include <vector>

#include "sets/kernel_sets.h"

namespace diptych {

// What an adapter adds to rows [row_begin, row_end) of a layer, in checkpoint order: scaled B [row_end - row_begin, ranks] times
// A [ranks, k], fp32.
struct AdapterPart {
  int64_t row_begin, row_end, ranks;
  const float *a, *b;
};

struct AdapterParts {
  int weight;       // the layer's number in the program
  PackedLinear layer;
  std::vector<AdapterPart> parts;
};

class Adapter {
 public:
  // The ranks (of int8: blocks of them) that reach one strip's lanes: of the parts that it has lanes of, which follow one another.
  struct Strip {
    int32_t first = 0, count = 0;
    int64_t begin = 0;  // into b: [ranks][16] bf16, or into b8: [blocks][4 steps][16] words of int8
  };
  struct Site {
    bool is_whole = false;          // int8
    int64_t ranks = 0;              // of all parts; of int8: blocks, a part's last one filled up with zeros
    int64_t stride = 0;             // from row to row of a, zero behind k
    const uint16_t* a = nullptr;    // [ranks, stride] bf16
    const uint16_t* b = nullptr;
    const uint8_t* a8 = nullptr;    // [blocks][stride / 4 steps][16] words, u8 = q + 128
    const uint8_t* b8 = nullptr;
    const float* a_scales = nullptr;  // [blocks][16]
    PackedLinear lanes;             // of b: its scales [lanes]
    std::vector<Strip> strips;
  };

  const Site* site(int weight) const {
    return weight < static_cast<int>(places_.size()) && places_[weight] >= 0 ? &sites_[places_[weight]] : nullptr;
  }
  int64_t ranks() const { return most_ranks_; }  // of the site that has most
  int64_t bytes() const { return memory_.bytes(); }

 private:
  friend std::unique_ptr<Adapter> pack_adapter(const KernelSet& set, const std::vector<AdapterParts>& sites);
  std::vector<int32_t> places_;  // by weight: number of its site, or -1
  std::vector<Site> sites_;
  int64_t most_ranks_ = 0;
  PageBuffer memory_;
};

// Throws std::invalid_argument where parts overlap, are out of order or reach beyond the layer.
std::unique_ptr<Adapter> pack_adapter(const KernelSet& set, const std::vector<AdapterParts>& sites);

// Layers that read some rows, one after the other: weights[i] reads rows [begins[i], begins[i + 1]), row r of them x_rows[r], or r.
struct AdapterCalls {
  const int* weights;
  const int32_t* begins;  // [count + 1]
  int64_t count;
  const int32_t* x_rows = nullptr;

  int64_t row(int64_t r) const { return x_rows != nullptr ? x_rows[r] : r; }
};

// The rows of one step that have an adapter: its tokens, those that the head reads, or those of experts.
class AdaptedRows {
 public:
  // adapter_of [S] names one of `adapters` or is -1; null: nobody asks. Single thread.
  void plan(const int32_t* adapter_of, const int32_t* query_start, int64_t n_sequences,
            const std::vector<std::unique_ptr<Adapter>>& adapters);
  // Of n rows, each made of a token of `tokens`. Single thread.
  void plan(const AdaptedRows& tokens, const int32_t* token_of, int64_t n);

  bool have_site(int weight) const {
    for (const Group& group : groups_)
      if (group.adapter->site(weight) != nullptr) return true;
    return false;
  }

  // This thread's share of u = A x. x as the layers read it.
  void shrink(const KernelSet& set, const AdapterCalls& calls, const Rows& x, int thread, int threads) const;

 private:
  friend class AdapterBiases;
  struct Group {
    const Adapter* adapter;
    int64_t begin, end;  // into rows_
  };
  std::vector<Group> groups_;
  std::vector<int32_t> rows_;      // group by group, ascending within one
  std::vector<int32_t> places_;    // [rows of the step] into rows_, or -1; only while there are groups
  std::vector<int32_t> group_of_;  // [rows of the step] number of the group, or -1
  std::vector<float> shrunk_;      // u [rows, most ranks]
  int64_t stride_ = 0;
  std::vector<ShrunkBlock> blocks_;  // [rows, most ranks]
  // Some rows of a group that read one layer, which is a site of its adapter.
  struct Some {
    const Adapter::Site* site;
    int64_t begin, end;  // into rows_
  };

  void reserve();
  template <class Function>
  void each(const AdapterCalls& calls, Function&& function) const;
  void shrink_some(const KernelSet& set, const Some& some, const AdapterCalls& calls, const Rows& x, Range units, uint16_t* wide) const;
  void shrink_whole(const KernelSet& set, const Some& some, const AdapterCalls& calls, const Rows& x, Range units) const;
};

// Of one call of linear() over rows [first, ...) in their order.
class AdapterBiases final : public RowBiases {
 public:
  AdapterBiases(const KernelSet& set, const AdaptedRows& rows, int weight, const PackedLinear& layer, int64_t first = 0)
      : set_(set), rows_(rows), weight_(weight), layer_(layer), first_(first) {}
  bool write(int64_t row, int64_t n_rows, int64_t first_lane, int64_t lanes, float* out) const override;
  void fetch(int64_t first_lane, int64_t lanes) const override;

 private:
  void write_blocks(const Adapter::Site& site, int64_t row, const int32_t* of_tile, int64_t count, int64_t first_lane, int64_t lanes,
                    float* out) const;
  void write_whole(const Adapter::Site& site, int64_t row, const int32_t* of_tile, int64_t count, int64_t first_lane, int64_t lanes,
                   float* out) const;

  const KernelSet& set_;
  const AdaptedRows& rows_;
  int weight_;
  const PackedLinear& layer_;
  int64_t first_;
};

}  // namespace diptych

// The paged KV cache in the layout the attention kernel reads: blocks of P tokens, one region per (layer, block, kv head). Layers may
// differ in the number of their heads and in how wide these are.
//
//   K  [P/16][d/2][16][2]   a group of 16 tokens is contiguous; one load gives the same two dimensions of 16 tokens
//   V  [P/2][dv][2]         one load gives two tokens of the same 16 dimensions; dv is the width of a value rounded up to 16
//
// Latent attention keeps no V: K's vectors are both. The keys that an index finds blocks of tokens by are a layer of their own that has no
// V, either. Where an index chooses what is attended to, single tokens are read, and
//
//   K  [P][d]               a token's numbers are contiguous
//   I  [P/16][i/2][16][2]   in V's place, the keys that the index finds tokens by; none where a layer takes another's choice
//
// Where some tokens together are an entry (DeepSeek V4), rows of entries lie behind those of a block's tokens, one for every s of them, s being
// 16 or the tokens of an entry if these are fewer: it is that of the entry that ends with the last of them, or zeros.
//
//   K  [P + P/s][d]
//
// bf16: both in bf16. int8 and fp8 (e4m3.h): both in bytes with one fp32 scale per token for K and one for V behind them ([P], [P]).
// A token written to an even slot zeroes the V of its odd neighbour unless that is written in the same step, so that the
// kernel may multiply a masked neighbour by zero whatever an earlier owner of the block left there.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm/gemm.h"

namespace diptych {

enum class KvFormat : int32_t { bf16 = 0, int8 = 1, fp8 = 2 };

constexpr int64_t kGroupTokens = 16;
constexpr int64_t kMostLatentDim = 1024;  // of a head without values; 512 with them

// Lanes that so many dimensions take.
DIPTYCH_FORCED int64_t whole_vectors(int64_t dim) { return (dim + 15) / 16 * 16; }

struct KvShape {
  int64_t n_layers = 0, n_blocks = 0, block_tokens = 0, n_kv_heads = 0, head_dim = 0, v_head_dim = 0;
  KvFormat format = KvFormat::bf16;
  bool has_values = true;
  bool by_token = false;   // K lies token by token
  int64_t index_dim = 0;   // i
  int64_t shared_by = 0;   // s, of tokens that share an entry's row; 0: there are none

  DIPTYCH_FORCED int64_t value_dim() const { return whole_vectors(v_head_dim); }
  DIPTYCH_FORCED int64_t element_bytes() const { return format == KvFormat::bf16 ? 2 : 1; }
  DIPTYCH_FORCED int64_t rows() const { return block_tokens + (shared_by == 0 ? 0 : block_tokens / shared_by); }
  DIPTYCH_FORCED int64_t entry_row(int64_t offset) const { return block_tokens + offset / shared_by; }
  DIPTYCH_FORCED int64_t key_bytes() const { return rows() * head_dim * element_bytes(); }
  DIPTYCH_FORCED int64_t value_bytes() const { return block_tokens * (has_values ? value_dim() : index_dim) * element_bytes(); }
  DIPTYCH_FORCED int64_t scale_bytes() const { return format == KvFormat::bf16 ? 0 : (rows() + block_tokens) * 4; }
  DIPTYCH_FORCED int64_t head_bytes() const { return (key_bytes() + value_bytes() + scale_bytes() + 63) / 64 * 64; }
  DIPTYCH_FORCED int64_t block_bytes() const { return n_kv_heads * head_bytes(); }  // of one layer
  DIPTYCH_FORCED int64_t layer_bytes() const { return n_blocks * block_bytes(); }
  int64_t entry_share() const { return shared_by == 0 ? 0 : head_dim / shared_by; }  // of an entry, so many numbers for each token
  int64_t width() const { return head_dim + entry_share() + index_dim; }  // of a token's key, its part of an entry, and the index's key
  int64_t value_width() const { return v_head_dim + entry_share() + index_dim; }
};

// One kv head of one block of one layer; values: or the keys of an index.
struct KvHead {
  uint8_t* keys;
  uint8_t* values;
  float* key_scales;    // [P], and behind them of entries, not of bf16
  float* value_scales;  // [P], not of bf16
};

struct KvLayer {
  uint8_t* data = nullptr;
  KvShape shape;
  bool is_index = false;  // then keys are the index's

  DIPTYCH_FORCED KvHead head(int64_t block, int64_t kv_head) const {
    uint8_t* base = data + block * shape.block_bytes() + kv_head * shape.head_bytes();
    uint8_t* values = base + shape.key_bytes();
    float* scales = reinterpret_cast<float*>(values + shape.value_bytes());
    if (is_index) return {values, values, scales + shape.rows(), scales + shape.rows()};
    return {base, values, scales, scales + shape.rows()};
  }
  KvLayer index() const { return {data, shape, true}; }
};

struct KvHeads {  // of one layer
  int64_t n, dim, v_dim;  // v_dim 0: keys are values, or those of an index
  int64_t attended = 0;   // or so many dimensions lie token by token; behind them are a token's part of an entry, if any, and the key of an index
  int64_t shared_by = 0;

  KvShape of(const KvShape& common) const {
    KvShape shape = common;
    shape.n_kv_heads = n, shape.head_dim = dim, shape.has_values = v_dim != 0;
    if (attended != 0) shape.by_token = true, shape.head_dim = attended, shape.shared_by = shared_by, shape.index_dim = dim - attended - shape.entry_share();
    shape.v_head_dim = shape.has_values ? v_dim : shape.head_dim;
    return shape;
  }
};

class KvCache {
 public:
  explicit KvCache(const KvShape& shape);  // zeroed; throws std::bad_alloc, std::invalid_argument
  // The same, of layers that differ: `common` has the number of blocks, their tokens and the format.
  KvCache(const KvShape& common, const std::vector<KvHeads>& layers);

  // Room for the states of n_places sequences beside the blocks, so many floats in each layer that has one; before the first run.
  void add_states(const std::vector<int64_t>& floats_by_layer, int64_t n_places);
  int64_t n_places() const { return n_places_; }
  int64_t n_state_layers() const { return static_cast<int64_t>(state_floats_.size()); }
  int64_t state_floats(int64_t layer) const { return state_floats_[layer]; }
  int64_t state_bytes() const { return n_places_ * place_floats_ * 4; }
  int64_t place_floats() const { return place_floats_; }  // of one place, all layers behind one another
  float* state(int64_t layer, int64_t place) const { return reinterpret_cast<float*>(state_buffer_.data()) + place * place_floats_ + state_begins_[layer]; }

  int32_t number = 0;  // under which other ranks know theirs of the same pool

  // Of the first layer; blocks, format and layers are those of all. Where no layer keeps anything, blocks number tokens and have no bytes.
  const KvShape& shape() const { return shapes_.empty() ? common_ : shapes_[0]; }
  int64_t bytes() const { return begins_.back(); }
  int64_t block_bytes() const;  // over all layers
  const KvShape& shape_of(int64_t layer) const { return shapes_[layer]; }
  const std::vector<int64_t>& begins() const { return begins_; }  // where each layer's bytes begin, and where the last one's end
  KvLayer layer(int64_t index) const { return {buffer_.data() + begins_[index], shapes_[index]}; }
  void back(int64_t begin, int64_t end) const { buffer_.back(begin, end); }
  bool interleave(const std::vector<int>& nodes) const { return buffer_.interleave(nodes); }
  void copy_block(int64_t source, int64_t target);  // in every layer
  // The bytes of one block as they lie, layer after layer: block_bytes().
  void export_block(int64_t block, uint8_t* out) const;
  void import_block(int64_t block, const uint8_t* data);
  // The same, with the XXH3-64 of the bytes that were copied: each is read once, and no byte can change between the two.
  uint64_t export_checked(int64_t block, uint8_t* out) const;
  uint64_t import_checked(int64_t block, const uint8_t* data);

  // Unpacks tokens [0, n_tokens) that lie in block_ids, to k [K, n_tokens, width] and v [K, n_tokens, value_width] fp32.
  void read(int64_t layer, const int32_t* block_ids, int64_t n_tokens, float* k, float* v) const;
  // Packs the same into block_ids (rounded to the cache's format).
  void write(int64_t layer, const int32_t* block_ids, int64_t n_tokens, const float* k, const float* v);

 private:
  KvShape common_;                // of all layers
  std::vector<KvShape> shapes_;   // by layer
  std::vector<int64_t> begins_;   // [layers + 1]
  PageBuffer buffer_;
  std::vector<int64_t> state_floats_, state_begins_;  // by layer: how many, and where within a place
  int64_t n_places_ = 0, place_floats_ = 0;
  PageBuffer state_buffer_;
};

}  // namespace diptych

// Random models for kernels_fuzz: what one consists of, and the source of every random number of a round.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "program/program.h"

namespace diptych {

struct Model {
  int64_t hidden, ffn, n_heads, n_kv_heads, head_dim, v_head_dim, layers, vocab, block_tokens, n_experts, top_k;
  int64_t window, group;
  bool is_wide;
  Format weights;
  KvFormat kv;
  bool in_bytes;  // AttentionShape::in_bytes
  Activation activation;
  bool has_softcap, has_norms, has_full_norm;
  bool has_v, norms_turned;    // else keys are the values
  bool has_v_norm, shares_kv;  // all layers but the first attend to its keys and values
  int64_t kv_layers() const { return shares_kv ? 1 : layers; }
  int64_t n_adapters;
  int64_t rank, rotary;  // of latent attention, whose one cached vector is both; 0: none
  int64_t most, index_heads, index_dim, pool = 1;  // of an index that chooses what is attended to; most INT64_MAX: none
  int64_t block;         // positions that are chosen together, not of latents; 0: none
  bool by_means;         // by the means of their keys, for all heads the same; or by the largest of each, for each head of keys others
  bool is_chunked;       // AttentionShape::is_chunked
  bool both_ways;        // prompts come whole, and each token sees all of its own
  int64_t n_places;      // of distances, of each of which queries and keys say what scores gain there; 0: none. Then all sequences come whole
  bool shares_choice;    // the first layer's index chooses for all
  bool chooses(int64_t layer) const { return has_entries ? entries[layer].has_index : most != INT64_MAX && (layer == 0 || !shares_choice); }
  bool has_states;       // each layer moves one on, too
  StateShape states;
  bool has_entries;      // rows that all heads meet as they are: of a window's tokens, and of entries (DeepSeek V4)
  int64_t groups;        // of heads that are expanded together
  struct Entries { int64_t tokens, n_series; bool has_index; } entries[2];  // of each layer; of no tokens: there are none

  // How many tokens a prompt has that makes full use of a choice of positions; 0: there is none.
  int64_t chosen() const { return most == INT64_MAX || has_entries ? 0 : most; }

  // What the cache keeps: layer by layer, and behind them the keys that blocks are chosen by.
  std::vector<KvHeads> kept() const {
    std::vector<KvHeads> out;
    for (int64_t layer = 0; layer < kv_layers(); ++layer) {
      const int64_t of_index = chooses(layer) && block == 0 ? index_dim : 0;
      const int64_t shared_by = has_entries ? std::min(entries[layer].tokens, kGroupTokens) : 0, share = shared_by == 0 ? 0 : head_dim / shared_by;
      const bool is_by_token = has_entries || (most != INT64_MAX && block == 0);
      out.push_back({n_kv_heads, head_dim + share + of_index, rank == 0 && !has_entries ? v_head_dim : 0, is_by_token ? head_dim : 0, shared_by});
    }
    for (int64_t layer = 0; block != 0 && layer < layers; ++layer)
      if (chooses(layer)) out.push_back({1, index_dim, 0});
    return out;
  }

  // How many floats each state has: one of each layer that moves one on, then those of entries, each in front of its index's.
  std::vector<int64_t> state_floats() const {
    std::vector<int64_t> out(static_cast<size_t>(has_states ? layers : 0), states.floats());
    for (int64_t layer = 0; has_entries && layer < layers; ++layer) {
      if (entries[layer].tokens != 0) out.push_back(entries_floats(head_dim, entries[layer].n_series));
      if (entries[layer].has_index) out.push_back(entries_floats(index_dim, entries[layer].n_series));
    }
    return out;
  }
};

class World {
 public:
  explicit World(uint64_t seed) : random_(seed) {}

  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }

  Model model() {
    const int64_t heads[] = {1, 2, 3, 8}, dims[] = {2, 16, 24, 64, 80, 128, 256}, groups[] = {1, 3, 4, 7, 8, 70};
    Model m{};
    m.n_kv_heads = heads[pick(0, 3)];
    m.n_heads = m.n_kv_heads * groups[pick(0, m.n_kv_heads == 1 ? 5 : 4)];
    m.head_dim = dims[pick(0, m.n_heads > 24 ? 2 : 6)];
    m.hidden = pick(1, 150), m.ffn = pick(1, 200), m.layers = pick(1, 2), m.vocab = pick(2, 300);
    m.block_tokens = 16 * pick(1, 4);
    m.n_experts = pick(0, 3) == 0 ? pick(2, 6) : 0;
    m.top_k = m.n_experts ? pick(1, m.n_experts) : 0;
    m.window = pick(0, 1) ? pick(1, 300) : INT64_MAX;
    m.weights = static_cast<Format>(pick(0, 9)), m.group = is_grouped(m.weights) ? 16 << pick(0, 3) : 32 << pick(0, 2), m.is_wide = is_grouped(m.weights) && pick(0, 1) == 1, m.kv = static_cast<KvFormat>(pick(0, 2)), m.in_bytes = m.kv == KvFormat::int8 && pick(0, 1) == 1;
    m.activation = static_cast<Activation>(pick(0, 1));
    m.has_softcap = pick(0, 3) == 0, m.has_norms = pick(0, 1), m.has_full_norm = pick(0, 1);
    m.n_adapters = pick(0, 3);
    m.has_v = pick(0, 3) != 0, m.norms_turned = pick(0, 2) == 0 && !m.has_full_norm;
    m.has_v_norm = pick(0, 2) == 0, m.shares_kv = pick(0, 2) == 0;
    if (pick(0, 4) == 0) {
      m.rank = pick(0, 4) == 0 ? pick(1, 900) : pick(1, 120), m.rotary = 2 * pick(0, 40);
      m.rank += m.rank % 2;
      m.shares_kv = false;
      m.n_kv_heads = 1, m.n_heads = pick(0, 4) == 0 ? pick(60, 90) : pick(1, 20), m.head_dim = m.rank + m.rotary;
    }
    m.v_head_dim = m.rank == 0 && m.has_v && pick(0, 1) ? pick(1, m.n_heads > 24 ? 40 : 200) : m.head_dim;
    m.most = INT64_MAX;
    if (m.rank != 0 && pick(0, 1)) {
      m.most = pick(0, 2) == 0 ? pick(1, 300) : pick(1, 30), m.shares_choice = pick(0, 1), m.window = INT64_MAX;
      m.index_heads = pick(1, 20), m.index_dim = std::max<int64_t>(2, m.rotary) + 2 * pick(0, 30);
      m.pool = pick(0, 2) == 0 ? pick(2, 9) : 1;  // with gates behind its keys
      if (m.pool != 1) m.index_dim *= 2, m.most = (m.most / m.pool + 2) * m.pool - 1;
    }
    if (m.rank == 0 && pick(0, 2) == 0) {
      m.by_means = pick(0, 2) != 0, m.block = (m.by_means ? int64_t{2} : int64_t{16}) << pick(0, m.by_means ? 3 : 4);
      const int64_t most = 300 / m.block;  // of blocks: a tile's places and more, where small blocks fill all lists of them
      m.most = m.block * (pick(0, 1) ? pick((2 * most + 2) / 3, most) : pick(1, std::min<int64_t>(most, 12))) + (m.by_means ? m.block - 1 : 0);
      m.shares_choice = pick(0, 1), m.window = INT64_MAX, m.shares_kv = false;
      m.index_heads = m.by_means ? pick(1, 9) : m.n_kv_heads, m.index_dim = 2 * std::min<int64_t>(m.head_dim / 2, 20) + 2 * pick(0, 30);
    }
    m.has_states = pick(0, 2) == 0;
    m.states = states();
    if (pick(0, 4) == 0) make_entries(m);
    m.is_chunked = m.window != INT64_MAX && !m.has_entries && pick(0, 3) == 0;
    m.both_ways = m.most == INT64_MAX && !m.has_entries && !m.is_chunked && pick(0, 7) == 0;
    m.n_places = m.both_ways && m.rank == 0 && pick(0, 1) ? pick(1, 12) : 0;
    return m;
  }

  // Of a layer: a window alone, entries that are all met, or those that an index chooses; all indices choose equally many of as many tokens.
  void make_entries(Model& m) {
    const int64_t sizes[] = {2, 4, 8, 16, 48}, chosen = sizes[pick(0, 4)];
    int64_t shared = 2;
    m.has_entries = true, m.rank = 0, m.shares_kv = m.has_softcap = false, m.block = 0, m.pool = 1, m.most = INT64_MAX, m.window = pick(1, 40);
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      const int64_t kind = pick(0, 2);
      m.entries[layer] = {kind == 0 ? 0 : kind == 1 ? sizes[pick(0, 4)] : chosen, pick(1, 2), kind == 2};
      shared = std::max(shared, std::min(m.entries[layer].tokens, kGroupTokens));
      if (kind == 2 && m.most == INT64_MAX) m.most = pick(1, 12);
    }
    m.n_kv_heads = 1, m.head_dim = m.v_head_dim = 2 * shared * pick(1, (pick(0, 4) == 0 ? 560 : 80) / (2 * shared));
    m.groups = pick(1, 4), m.n_heads = m.groups * (pick(0, 4) == 0 ? pick(15, 22) : pick(1, 5));
    m.rotary = 2 * pick(0, std::min<int64_t>(m.head_dim / 2, 40));
    m.index_heads = pick(1, 20), m.index_dim = std::max<int64_t>(2, m.rotary) + 2 * pick(0, 30);
  }

  StateShape states() {
    StateShape s;
    s.rule = static_cast<StateRule>(pick(0, 6));
    s.n_key_heads = s.rule == StateRule::rg_lru ? 1 : pick(1, 3), s.n_value_heads = s.n_key_heads * pick(1, s.rule == StateRule::ssd || s.is_by_channel() ? 20 : 3);
    s.key_dim = s.has_matrix() ? pick(1, s.rule == StateRule::rg_lru ? 1 : 40) : 0, s.value_dim = pick(1, 70), s.n_taps = s.is_by_channel() ? 1 : pick(1, s.has_matrix() ? 4 : 10);
    s.scale = 0.3f, s.norm_eps = 1e-5f, s.most_step = 2.0f;
    s.fades_by_key = s.rule == StateRule::delta && pick(0, 1), s.is_steady = s.rule == StateRule::ssd && pick(0, 2) == 0, s.n_taps = s.is_steady ? 1 : s.n_taps;
    s.least_decay = s.fades_by_key && pick(0, 1) ? -5.0f : 0.0f;
    return s;
  }

  std::vector<float> floats(int64_t n, float low, float high) {
    std::vector<float> out(n);
    std::uniform_real_distribution<float> draw(low, high);
    for (float& x : out) x = draw(random_);
    return out;
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace diptych

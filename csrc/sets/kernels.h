// The program's own kernels (everything but the linear layers): tables of functions, parts of a kernel set (kernel_sets.h).
//
// Legend: S sequences, T packed tokens of the step, H query heads, K kv heads, G = H / K, d head dim, P tokens per block,
// M block table width. All kernels compute a row or a token from that row or token alone, in one order of summation.
#pragma once

#include <cstdint>

#include "gemm/gemm.h"
#include "memory/kv_cache.h"

namespace diptych {

// ---- norm -------------------------------------------------------------------------------------------------------------

// out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]; x, weight and out [n] fp32; out may be x.
using RmsNormRow = void (*)(const float* x, const float* weight, int64_t n, float eps, float* out);

// out[i] = (x[i] - mean(x)) / sqrt(variance(x) + eps) * weight[i] + bias[i]; bias null: none; out may be x.
using LayerNormRow = void (*)(const float* x, const float* weight, const float* bias, int64_t n, float eps, float* out);

// ---- rotary position and cache write ----------------------------------------------------------------------------------

// What queries are multiplied by: 1 + slope * log(1 + (position + shift) / tokens), the quotient a whole number.
struct QueryScale {
  float slope = 0.0f;                       // 0: they are not
  int64_t tokens = 1, shift = 0;

  float at(int64_t position) const {
    return slope == 0.0f ? 1.0f : 1.0f + slope * __builtin_log1pf(static_cast<float>((position + shift) / tokens));
  }
};

struct RotateShape {
  int64_t n_heads = 0, n_kv_heads = 0, head_dim = 0, v_head_dim = 0;
  // A row of qkv may hold more heads than are dealt with here (those of other ranks): so many, of which these are the first ones.
  int64_t row_heads = 0, row_kv_heads = 0, first_head = 0, first_kv_head = 0;
  int64_t rotary_dim = 0;                   // even; 0 where the layer has no rotary position
  const float* q_norm = nullptr;            // [d], or [H*d] of all heads of the row, twice that with biases; null: none
  const float* k_norm = nullptr;            // [d], or [K*d] likewise, null: none
  QueryScale query_scale;
  bool has_full_width_norm = false;         // the norm runs over all heads of the row (OLMo 2)
  bool has_v_norm = false;                  // each head of v is normed, without a weight
  bool writes_kv = true;                    // or a row holds q alone, and another layer writes what is attended to
  bool has_v = true;                        // or a row holds q and k, and the values are the keys before their norm and turn
  bool norms_turned = false;                // q and k are normed behind their turn
  bool has_head_norms = false;              // each head has a weight of its own, and its mean is taken away (Command-R+)
  bool has_norm_biases = false;             // behind each such weight lie the d numbers of a bias (Persimmon)
  float norm_eps = 0.0f;
  float v_scale = 1.0f;                     // what values are multiplied by
  const float* cos_table = nullptr;         // [positions, rotary_dim / 2]
  const float* sin_table = nullptr;
};

struct RotateCall {
  RotateShape shape;
  KvLayer kv;
  const float* qkv = nullptr;               // [T, (H + K) * d + K * dv]: q heads, k heads, v heads of the row, if it has them
  uint16_t* q_out = nullptr;                // [T, H, d] bf16, written
  const int32_t* positions = nullptr;       // [T]
  const int32_t* slots = nullptr;           // [T] block * P + offset
  int64_t n_tokens = 0;
};

// One token and one kv head: its G query heads, its key and its value. scratch: d + dv + 32 fp32.
using RotateToken = void (*)(const RotateCall& call, int64_t token, int64_t kv_head, float* scratch);

// ---- latent attention ------------------------------------------------------------------------------------------------

struct LatentCall {
  KvLayer kv;                               // one head without values, of rank + rotary dimensions
  int64_t rank = 0;
  const float* rows = nullptr;              // [T, rank + rotary]: the latent, the rotary part of the key
  const float* norm = nullptr;              // [rank]
  float norm_eps = 0.0f;
  const float* cos_table = nullptr;         // [positions, rotary / 2]
  const float* sin_table = nullptr;
  const int32_t* positions = nullptr;       // [T]
  const int32_t* slots = nullptr;           // [T]
};

// One token's row into the cache: latent normed, the rest turned. scratch: rank + rotary + 16 fp32.
using CacheLatent = void (*)(const LatentCall& call, int64_t token, float* scratch);
// out [n] bf16 = x, the first rotary_dim turned. scratch: n + 16 fp32.
using RotateQuery = void (*)(const float* x, int64_t n, int64_t rotary_dim, const float* cos_row, const float* sin_row, float* scratch, uint16_t* out);

struct IndexKeyCall {
  KvLayer kv;                               // the index's: KvLayer::index, or a layer of its own
  const float* rows = nullptr;              // [T, index_dim]
  const float* norm = nullptr;              // [index_dim], null: a key is stored as it is; and its bias, null: an RMSNorm's
  const float* bias = nullptr;
  float norm_eps = 0.0f;
  int64_t n_gates = 0;                      // so many numbers behind the key stay as they are: what weighs it in its pool
  int64_t rotary_dim = 0;                   // so many dimensions turn, the first ones
  const float* cos_table = nullptr;         // [positions, rotary_dim / 2]
  const float* sin_table = nullptr;
  const int32_t* positions = nullptr;       // [T]
  const int32_t* slots = nullptr;           // [T]
  int64_t pooled = 0;                       // the token's own key is the last of so many, whose mean takes its place; 0: rows are keys
};

// One token's key into the cache, or where keys are pooled of every so many-th the mean of so many as they lie there: normed, its mean taken away where there is a bias, and turned. scratch: twice (index_dim + 16) fp32.
using CacheIndex = void (*)(const IndexKeyCall& call, int64_t token, float* scratch);

// A pool of keys in a cache of an index, each with as many gates behind it: in the place of the last one lies afterwards what all of them are
// together, a sum by the softmax of gates and offsets [pool, d] over the pool, number by number, and zeros. slots: of the pool, in their order.
// scratch: 2 d (pool + 1) + 16 fp32.
constexpr int64_t kMostPool = 64;
using PoolIndex = void (*)(const KvLayer& index, const int32_t* slots, int64_t pool, const float* offsets, float* scratch);

// ---- entries: what some tokens are together (entries.inl) --------------------------------------------------------------

// Rows that all heads meet as they are: of tokens, or of entries, each of so many tokens of a sequence, which the last of them completes.
struct RowCall {
  KvLayer kv;                               // or its index, whose keys are of entries then
  const float* rows = nullptr;              // [T, d]
  const float* norm = nullptr;              // [d]
  float norm_eps = 0.0f;
  int64_t tokens = 0;                       // of an entry, which is turned as the first of them; 0: rows are of tokens
  int64_t half = 0;                         // so many pairs of neighbours at a row's end turn
  const float* cos_table = nullptr;         // [positions, half]
  const float* sin_table = nullptr;
  const int32_t* positions = nullptr;       // [T]
  const int32_t* slots = nullptr;           // [T]
};

// One token's row into the cache, normed and turned; of entries that which it completes, or zeros where none ends. scratch: d + 16 fp32.
using CacheRow = void (*)(const RowCall& call, int64_t token, float* scratch);
// x [d] normed, if there is a norm, its end turned: to bf16. scratch: d + 16 fp32.
using TurnQuery = void (*)(const float* x, int64_t d, const float* norm, float norm_eps, int64_t half, const float* cos_row, const float* sin_row, float* scratch, uint16_t* out);
// The end of x [d], turned the other way.
using TurnBack = void (*)(float* x, int64_t d, int64_t half, const float* cos_row, const float* sin_row);

// Entries are sums of what their tokens have, number by number weighed by a softmax of gates and offsets of the tokens' places. That moves on
// token by token: a state has of each series of d numbers the largest gate, the sum of weights and the sum of what they weigh. Of one series an
// entry is of its own tokens; of two the first is for the next entry, which goes on from there with the second.
struct EntriesCall {
  int64_t tokens = 0, n_series = 1, d = 0;
  const float* rows = nullptr;              // [T, 2 n d]: the series, and behind them their gates
  const float* offsets = nullptr;           // [tokens, n d]
  const int32_t* positions = nullptr;       // [T]
  float* out = nullptr;                     // [T, d], written where an entry ends

  DIPTYCH_FORCED int64_t width() const { return n_series * d; }
};

constexpr int64_t entries_floats(int64_t d, int64_t n_series) { return 3 * d * n_series; }  // of a state

struct StateSave;
struct EntriesTask {
  int64_t first_row, n_rows, lane;          // 16 numbers from there on
  const float* read;                        // null: of a sequence that begins
  float* write;                             // [3, n d]
  const StateSave *saves, *saves_end;
};
using MoveEntries = void (*)(const EntriesCall& call, const EntriesTask& task);

// ---- attention --------------------------------------------------------------------------------------------------------

constexpr int64_t kTileTokens = 256;  // keys per softmax tile, at absolute positions: [256 i, 256 i + 256)
constexpr int64_t kTaskRows = 64;     // (token, query head) rows of one task, at most (or G when that is larger)

struct AttentionShape {
  int64_t n_heads = 0, n_kv_heads = 0, head_dim = 0, v_head_dim = 0;
  float scale = 1.0f;
  int64_t window = INT64_MAX;  // a query sees the last `window` positions up to its own
  float softcap = 0.0f;        // scores become softcap * tanh(score / softcap)
  bool has_softcap = false;
  bool in_bytes = false;         // queries and weights that meet a cache of int8 have 8 bits (attention_whole.inl)
  const float* sinks = nullptr;  // [H] one more score of each head, of a key without value; null: none
  const float* slopes = nullptr;  // [H] what a score of each head loses for each position between query and key; null: nothing
  const float* distances = nullptr;  // [H, 2 reach + 32] what it gains by that distance, of -reach - 16 on (attention_bends.inl); null: nothing
  int64_t reach = 0;             // distances beyond it count as it does
  const float* places = nullptr;  // [2 reach + 1] for each distance from a key to a query, from -reach on, one of so many places: what a score
  int64_t n_places = 0;          // gains there the query and the key say, each for itself (AttentionCall::of_queries); 0: nothing
  bool is_chunked = false;       // a query sees the positions from the last multiple of `window` up to its own instead
  int64_t most = INT64_MAX;      // a query attends to so many positions at most, those of a choice; "positions" are then places in it
  int64_t block = 1;             // so many positions are chosen together, for each kv head others; of more than one the query's own is among them
  bool by_means = false;         // of blocks, by the means of their keys: whole ones, for all kv heads the same; behind them those are seen that
                                 // make no whole one yet
  int64_t pool = 1;              // so many positions are chosen together, for all heads; those behind the last whole pool are seen, too, and `most`
                                 // are seen where one is missing to a whole pool
  bool is_listed = false;        // a query sees rows in a list: the last `window` positions up to its own, and behind them entries of so many tokens
  int64_t entry_tokens = 0;      // each (0: none), all that are whole or `most` that are chosen; "positions" are then places in it

  // How many tokens and how many entries are in a list.
  DIPTYCH_FORCED int64_t near_of(int64_t position) const { return position + 1 < window ? position + 1 : window; }
  DIPTYCH_FORCED int64_t entries_of(int64_t position) const {
    const int64_t whole = entry_tokens == 0 ? 0 : (position + 1) / entry_tokens;
    return whole < most ? whole : most;
  }
  DIPTYCH_FORCED bool has_choice(int64_t position) const {
    return is_listed ? entry_tokens != 0 && (position + 1) / entry_tokens > most : position >= most;
  }

  // The first and the last position that a query sees. whole: 0, or how many tokens its sequence has where it sees both ways; then
  // a window reaches `window` positions to either side.
  DIPTYCH_FORCED int64_t first_seen(int64_t position, int64_t whole) const {
    if (is_listed) return 0;
    if (is_chunked) return position - position % window;
    const int64_t reach = whole > 0 ? window : window - 1;
    return position > reach ? position - reach : 0;
  }
  DIPTYCH_FORCED int64_t last_seen(int64_t position, int64_t whole) const {
    if (is_listed) return near_of(position) + entries_of(position) - 1;
    if (whole == 0) {
      if (position < most) return position;
      return pool != 1 ? most - pool + (position + 1) % pool : most - block + (position + (by_means ? 1 : 0)) % block;
    }
    return whole - 1 - position < window ? whole - 1 : position + window;
  }
};

// Query tokens [token_begin, token_end) of one sequence against tiles [tile_begin, tile_end) of one kv head.
struct AttentionTask {
  int32_t sequence, kv_head, token_begin, token_end, tile_begin, tile_end;
  bool is_split;           // then the tiles' partial results go to `partials` and combine_split joins them
  int64_t partial_begin;   // floats into `partials`: [tiles of the whole row range][rows][dv + 2]
  int32_t first_tile;      // the row range's first tile, where its partials begin
  int32_t whole = 0;       // tokens of a sequence whose queries see both ways, else 0
};

struct AttentionCall {
  AttentionShape shape;
  KvLayer kv;
  const uint16_t* q = nullptr;             // [T, H, d] bf16
  const int32_t* positions = nullptr;      // [T]
  const int32_t* block_table = nullptr;    // [S, M]
  int64_t table_width = 0;
  float* out_f32 = nullptr;                // [T, stride] fp32 or
  uint16_t* out_bf16 = nullptr;            // [T, stride] bf16, whichever is not null
  int64_t out_stride = 0;
  float* partials = nullptr;
  const float* of_queries = nullptr;       // [T, H, n_places] what a query adds to its scores where a key lies at a place
  const float* of_keys = nullptr;          // [T, H, n_places] and what a key adds to them; all that is seen is in the step
  const int32_t* choice = nullptr;         // [T, most] ascending positions of tokens that see more than so many; null: all are seen.
                                           // Of blocks: [T, K, most / block] ascending numbers of them; pooled: [T, most / block + 1],
                                           // the last that of what makes no whole one. Of a list: [T, most] ascending numbers of entries
};

using AttentionScratchBytes = int64_t (*)(const AttentionShape& shape);  // per thread, 64-byte aligned
// `following`, or null: the task that this thread likely runs next, whose keys are fetched meanwhile.
using AttentionRun = void (*)(const AttentionCall& call, const AttentionTask& task, const AttentionTask* following, uint8_t* scratch);
// Joins the partials of one row range (a split task with all its tiles), rows [row_begin, row_end) of it.
using AttentionCombine = void (*)(const AttentionCall& call, const AttentionTask& task, int64_t row_begin, int64_t row_end,
                                  uint8_t* scratch);

// ---- an index that chooses what is attended to (attention_index.inl) ---------------------------------------------------

// Of the index's heads: kv is the index's (KvLayer::index, or a layer of its own), q [T, H, d] its queries; it writes no output of attention.
struct IndexCall {
  AttentionCall heads;
  const float* weights = nullptr;          // [T, H]; null where blocks are chosen, and of pooled keys: 1
};

// Scores of keys [256 tile, ...) for some tokens of one sequence, ascending, as far as each of them sees: scores[i * stride + position] =
// sum over heads of weight * max(q k, 0). Behind a token's own position what is written is no score.
// Of blocks: scores[i * stride + head * (stride / H) + block] = the largest q k in it; of the token's own block what is written is no score.
using IndexTile = void (*)(const IndexCall& call, int64_t sequence, int64_t tile, const int32_t* tokens, int64_t n_tokens, float* scores,
                           int64_t stride, uint8_t* scratch);
// The places of the `most` highest of n > most scores, ascending, the lower of equals; scores become other numbers.
using ChooseRow = void (*)(float* scores, int64_t n, int64_t most, int32_t* chosen);

// ---- states (states.inl) -----------------------------------------------------------------------------------------------

// How states move on: by a gated delta rule (arXiv:2412.06464), by Mamba-2's rule (arXiv:2405.21060), or inputs alone that a short convolution sees.
// Taps: of a convolution sums alone, without gates; bent_taps: by silu. Selective: by Mamba-1's rule (arXiv:2312.00752), a decay for each channel
// and row. Rg_lru: by that of a real-gated linear recurrent unit (arXiv:2402.19427), a channel being a row.
enum class StateRule : int32_t { delta, ssd, convolution, taps, bent_taps, selective, rg_lru };

// A layer's heads. Value heads that share a key head are divided into parts, each a task by itself. A state of one sequence: each value head's
// [columns / 16][key_dim][16], columns padded to whole lanes, and behind all of them for each part the last n_taps - 1 inputs of its channels.
// Of a convolution and of taps key_dim is 0: channels alone, in heads of value_dim. Of the selective rule and of rg_lru there is one tap, and of the
// latter one key head, whose key_dim is 1.
struct StateShape {
  static constexpr int64_t kMostHeads = 8;  // of a part
  int64_t n_key_heads = 0, n_value_heads = 0, key_dim = 0, value_dim = 0, n_taps = 1;
  float scale = 1.0f;
  float norm_eps = 0.0f;
  StateRule rule = StateRule::delta;
  float least_step = 0.0f, most_step = 0.0f;  // ssd: what a token's step is held within
  float most_weight = 1.0f;  // delta: what beta is at most
  float rate_scale = 1.0f;   // of what is softened, before it is shifted
  bool fades_by_key = false;  // delta: each row of a head's state has a decay of its own
  float least_decay = 0.0f;   // by key: what bounds its logarithm, 0: nothing
  bool is_steady = false;     // ssd: each step is 1, and there are no taps: q, k and v are bent as they come

  DIPTYCH_FORCED bool is_selective() const { return rule == StateRule::selective; }
  DIPTYCH_FORCED bool is_by_channel() const { return is_selective() || rule == StateRule::rg_lru; }  // v alone comes, as taps have made it
  DIPTYCH_FORCED bool has_matrix() const { return rule == StateRule::delta || rule == StateRule::ssd || is_by_channel(); }
  DIPTYCH_FORCED int64_t channels() const { return (is_by_channel() ? 0 : 2 * n_key_heads * key_dim) + n_value_heads * value_dim; }
  DIPTYCH_FORCED int64_t inputs() const { return rule == StateRule::convolution ? 3 * channels() : channels(); }
  DIPTYCH_FORCED int64_t n_rates() const {  // of a head
    if (rule == StateRule::rg_lru) return 2 * value_dim;
    return !has_matrix() || is_steady ? 0 : rule == StateRule::delta && !fades_by_key ? 2 : 1;
  }
  DIPTYCH_FORCED int64_t n_decays() const { return fades_by_key ? key_dim : is_selective() ? value_dim : 0; }  // likewise, projected by themselves
  DIPTYCH_FORCED int64_t n_shifts() const { return n_decays() == 0 ? 1 : n_decays(); }  // likewise
  DIPTYCH_FORCED int64_t part_heads() const {
    const int64_t group = n_value_heads / n_key_heads;
    int64_t n = group < kMostHeads ? group : kMostHeads;
    while (group % n != 0) --n;
    return n;
  }
  DIPTYCH_FORCED int64_t n_parts() const { return n_value_heads / part_heads(); }
  DIPTYCH_FORCED int64_t part_width() const { return 2 * key_dim + part_heads() * value_dim; }
  DIPTYCH_FORCED int64_t head_floats() const { return (value_dim + 15) / 16 * 16 * key_dim; }
  DIPTYCH_FORCED int64_t heads_floats() const { return n_value_heads * head_floats(); }
  DIPTYCH_FORCED int64_t tail_floats() const { return (n_taps - 1) * part_width(); }  // of a part
  DIPTYCH_FORCED int64_t floats() const { return (heads_floats() + n_parts() * tail_floats() + 15) / 16 * 16; }
};

struct StateSave {  // behind so many rows of its sequence the state is left here, too
  int64_t rows;
  float* place;
};

struct StateTask {  // one part of one sequence
  int64_t part = 0, first_row = 0, n_rows = 0;
  const float* read = nullptr;  // a state, or null: zeros
  float* write = nullptr;       // may be `read`
  const StateSave *saves = nullptr, *saves_end = nullptr;  // ascending
};

struct StateCall {
  StateShape shape;
  // [T, inputs]: q, k and v; of a convolution what gates its inputs, what gates its outputs, its inputs; by channel: [T, stride], v of every head
  const float* qkv = nullptr;
  // [T, stride]: delta: beta of every head of the model, then their decays; ssd: their steps, null: 1; selective: of every key head k, then q; rg_lru: of every head
  // what its values are weighed by, then what they fade by, both before a sigmoid
  const float* rates = nullptr;
  // [T, stride]: where they fade by key, of every head's rows, in place of those; selective: the steps of every head's channels
  const float* decays = nullptr;
  int64_t qkv_stride = 0, rates_stride = 0, decays_stride = 0, first_head = 0, first_key_head = 0;
  const float* taps = nullptr;      // [n_taps, channels]; steady: null
  const float* tap_bias = nullptr;  // [channels], or null
  // [H], selective: as a state's heads lie, rg_lru: [H * value_dim]; [H, shifts]; null of a convolution, steady and rg_lru: the latter
  const float *decay = nullptr, *shift = nullptr;
  const float* skip = nullptr;   // ssd: [H], what of a value is added to what its head gives, steady and rg_lru: null; selective: [H * value_dim]
  const float* norm = nullptr;   // delta: [value_dim]
  float* out = nullptr;          // [T, stride], H * value_dim of each row
  int64_t out_stride = 0;
};

using MoveState = void (*)(const StateCall& call, const StateTask& task, float* scratch);
using StateScratchFloats = int64_t (*)(const StateShape& shape);

// ---- small ones -------------------------------------------------------------------------------------------------------

using AddRow = void (*)(const float* y, int64_t n, float scale, float* x);        // x += scale * y
using SoftcapRow = void (*)(float* x, int64_t n, float softcap);                    // x = softcap * tanh(x / softcap)
using EmbedRow = void (*)(const void* row, Source source, int64_t n, float scale, float* out);
// exp(x - max) / sum in place, [n]
using SoftmaxRow = void (*)(float* x, int64_t n);
// 1 / (1 + exp(-x)) in place, [n]
using SigmoidRow = void (*)(float* x, int64_t n);
// out [n] = min(g sigmoid(alpha g), bound) (u + shift), g = min(scale gate, limit), u = scale up within +-min(limit, bound); x = gate [n],
// up [n]; out may be x.
struct GateForm { float alpha = 1.0f, limit = 0.0f, bound = 0.0f, shift = 0.0f; };
using GateRow = void (*)(const float* x, int64_t n, float scale, const GateForm& form, float* out);
// rows[i] [n] += sum over j of coefficients[i * n_rows + j] * rows[j], of what all were before; at most kMostStreams.
constexpr int64_t kMostStreams = 8;
using MixRows = void (*)(float* const* rows, int64_t n_rows, int64_t n, const float* coefficients);
// The sum of x * y, [n], in an order that n alone decides.
using RowProduct = float (*)(const float* x, const float* y, int64_t n);
// out = y * sqrt(mean(x^2) / max(mean(y^2), least)), [n]; out may be y.
using MatchRow = void (*)(const float* y, const float* x, int64_t n, float least, float* out);
// out = x * weight, [n]
using WeighRow = void (*)(const float* x, const float* weight, int64_t n, float* out);
// out [n] = act(max(gate - (mean(gate) + cutoff * deviation(gate)), 0)) * up; x = gate [n], up [n].
using SparseGateRow = void (*)(const float* x, int64_t n, float cutoff, Activation activation, float* out);
// out = act(x), [n]; out may be x. squared_relu: max(x, 0)^2. clip: within +-numbers[0]. xielu (arXiv 2411.13010), of numbers a, b, s
// and e: s x + a x^2 above 0, s x + b (exp(min(x, e)) - 1 - x) below. softplus: log(1 + e^x).
enum class Curve : int32_t { silu, gelu_tanh, gelu, relu, squared_relu, clip, xielu, softplus };
constexpr int64_t kCurveNumbers = 4;
using CurveRow = void (*)(const float* x, int64_t n, Curve curve, const float* numbers, float* out);
// The largest of some numbers and the first place that holds it; NaN is no number.
struct Best {
  float value = 0.0f;
  int32_t index = -1;  // nothing was seen yet

  bool is_nan() const { return value != value; }
  bool is_before(const Best& other) const {
    if (index < 0 || other.index < 0) return index > other.index;
    if (value == other.value || (is_nan() && other.is_nan())) return index < other.index;
    return value > other.value || is_nan();
  }
};
// Goes on with x [n], whose places are first, first + 1, ... and lie behind all places seen before.
using FindBest = void (*)(const float* x, int64_t n, int64_t first, Best* best);

// One token drawn from softmax(x / temperature): the first whose running sum of weights exceeds quantile * total.
struct Drawn {
  int32_t index = 0;
  float best = 0.0f;    // the largest logit, NaN where x holds one; where it is not finite nothing was drawn
  double total = 0.0;   // sum of exp((x - best) / temperature)
};
using DrawRow = void (*)(const float* x, int64_t n, float temperature, double quantile, Drawn* drawn);

// ---- adapters (adapters.h) --------------------------------------------------------------------------------------------

constexpr int64_t kAdapterRows = 4;   // rows that one call takes at most
constexpr int64_t kAdapterRanks = 4;  // threads share an adapter's A by so many of its rows

// out[i][r] = sum over k of x[i][k] * a[r][k], all bf16: x [rows][stride], a [ranks, stride]; stride a multiple of 128, zero behind K.
using ShrinkRows = void (*)(const uint16_t* const* x, int64_t rows, const uint16_t* a, int64_t stride, int64_t ranks, float* const* out);
// out[i * stride + lane] = bias[lane] + sum over r of shrunk[i][r] * b[r][lane], 16 lanes; b [ranks][16] bf16.
using ExpandRows = void (*)(const float* const* shrunk, int64_t rows, const uint16_t* b, int64_t ranks, const float* bias, float* out,
                            int64_t stride);

// A block of 16 shrunk ranks of a row as int8, as Rows describes a row.
struct ShrunkBlock {
  int8_t q[16];
  float scale;
  int32_t sum;
};
// The same over int8, 16 lanes: out[i][lane] = bias[lane] + sum over the blocks, one after the other, of scale * scales[lane] * (whole sum).
// shrunk[i] has its blocks side by side; b [blocks][4 steps][16 words] of u8 = q + 128; bias null: none. Null where the set's tiles do it.
using ExpandBlocks = void (*)(const ShrunkBlock* const* shrunk, int64_t rows, const uint8_t* b, int64_t blocks, const float* scales,
                              const float* bias, float* const* out);

struct AttentionKernels {
  AttentionRun run;
  AttentionCombine combine;
  AttentionScratchBytes scratch_bytes;
  IndexTile index_tile;
  ChooseRow choose_row;
};

struct StepKernels {
  RmsNormRow rms_norm_row;
  LayerNormRow layer_norm_row;
  RotateToken rotate_token;
  CacheLatent cache_latent;
  RotateQuery rotate_query;
  CacheIndex cache_index;
  PoolIndex pool_index;
  CacheRow cache_row;
  TurnQuery turn_query;
  TurnBack turn_back;
  MoveEntries move_entries;
  AddRow add_row;
  SoftcapRow softcap_row;
  EmbedRow embed_row;
  SoftmaxRow softmax_row;
  SigmoidRow sigmoid_row;
  GateRow gate_row;
  FindBest find_best;
  DrawRow draw_row;
  ShrinkRows shrink_rows;
  ExpandRows expand_rows;
  ExpandBlocks expand_blocks;
  MixRows mix_rows;
  RowProduct row_product;
  MatchRow match_row;
  WeighRow weigh_row;
  SparseGateRow sparse_gate_row;
  CurveRow curve_row;
  MoveState move_state;
  StateScratchFloats state_scratch_floats;
};

}  // namespace diptych

// Paged attention, causal or both ways, with an online softmax, the same arithmetic for one query row (decode) and many (prefill).
//
// A kv head's tile of 256 keys, at absolute positions, is read once for all query heads of its group and all rows of the
// task. Each row takes from each tile a fresh partial (max m, sum l, weighted values o), and joins the partials in tile
// order. So it never matters which rows stand beside it, or whether tiles were split over threads. Keys a row may not see
// add exact zeros. (Milakov and Gimelshein 2018; Dao et al. 2022, with the partial kept apart from the running state.)
//
// A cache of int8 is met by whole numbers (attention_whole.inl).

namespace diptych {
namespace DIPTYCH_ISA {

#if defined(DIPTYCH_ATTENTION_TILES)
constexpr int kRows = 16;
#elif defined(DIPTYCH_AVX512)
constexpr int kRows = 8;  // by 3 vectors, fewer rows by 4: at most 28 accumulators of 32 registers
#elif defined(DIPTYCH_AVX2)
constexpr int kRows = 6;  // by 1 vector of two registers, fewer rows by more: at most 12 accumulators of 16 registers
#elif defined(DIPTYCH_NEON)
constexpr int kRows = 4;  // by 1 vector: 16 accumulators of 32 registers
#else
constexpr int kRows = 1;
#endif

// How the products read what they multiply keys and values with: bf16, or the same numbers in fp32 where no instruction takes bf16.
#if (defined(DIPTYCH_AVX512) && !defined(__AVX512BF16__) && !defined(DIPTYCH_ATTENTION_TILES)) || defined(DIPTYCH_AVX2)
using Input = float;
#if defined(DIPTYCH_AVX2)
DIPTYCH_INLINE void store_inputs(Input* out, F32 x) { store(out, x); }  // weights as they are: to round them takes as long as to find them
#else
DIPTYCH_INLINE void store_inputs(Input* out, F32 x) { store(out, bf16_numbers(x)); }
#endif
DIPTYCH_INLINE void take_inputs(const uint16_t* x, int64_t n, Input* out) {
  for (int64_t i = 0; i < n; i += 16) store_n(out + i, load_bf16_n(x + i, n - i < 16 ? n - i : 16), n - i < 16 ? n - i : 16);
}
#else
using Input = uint16_t;
DIPTYCH_INLINE void store_inputs(Input* out, F32 x) { store_bf16(out, x); }
DIPTYCH_INLINE void take_inputs(const uint16_t* x, int64_t n, Input* out) { std::memcpy(out, x, static_cast<size_t>(n) * 2); }
#endif

#if !defined(DIPTYCH_ATTENTION_TILES) && !defined(DIPTYCH_NEON)
#define DIPTYCH_WHOLE 1  // where bf16 has no instruction at its full rate whole numbers of 16 bits take half the time
#if defined(DIPTYCH_AVX512)
#define DIPTYCH_QUADS 1  // bytes are multiplied by bytes
#endif
#if defined(DIPTYCH_AVX512) || defined(DIPTYCH_AVX2)
#define DIPTYCH_BYTES 1  // bytes are widened in the registers that multiply
#if defined(__AVX512BF16__)
#define DIPTYCH_BESIDE 1  // what comes is asked for as AMD's processors with AVX-512 like it; Intel's without tiles take the set without BF16
#endif
#endif
#endif

constexpr int64_t kTileGroups = kTileTokens / kGroupTokens;
constexpr float kWeightLevels = 32767.0f;
constexpr float kLog2e = 1.44269504088896f;

// Scratch of one thread, carved from one 64-byte aligned buffer.
struct Scratch {
  Input* queries;          // [rows and kRows to spare, query_stride(d)], zero behind d
  int32_t* positions;      // [rows]
  float* state_max;        // [rows] in units of log2
  float* state_sum;        // [rows]
  float* state_values;     // [rows, dv]
  float* scores;           // [kRows, 256]
  Input* weights;          // [kRows, 256]
  uint16_t* wide_keys;     // [256 d] cache of bytes only
  uint16_t* wide_values;   // [256 dv]
  float* key_scales;       // [256]
  float* value_scales;     // [256]
  float* query_scales;     // [rows] where queries are whole numbers
  uint8_t* gathered;       // of a tile, where blocks of fewer tokens than a group has are chosen

  // In place of queries and weights where the cache is met by whole numbers, and by those that lie as bytes.
  uint16_t* whole_queries() const { return reinterpret_cast<uint16_t*>(queries); }
  uint16_t* whole_weights() const { return reinterpret_cast<uint16_t*>(weights); }
  uint8_t* quad_queries() const { return reinterpret_cast<uint8_t*>(queries); }
  uint8_t* quad_weights() const { return reinterpret_cast<uint8_t*>(weights); }
};

DIPTYCH_INLINE int64_t query_stride(int64_t d);

DIPTYCH_INLINE int64_t most_rows(const AttentionShape& shape) {
  int64_t group = shape.n_heads / shape.n_kv_heads;
  return group > kTaskRows ? group : kTaskRows;
}

template <class T>
DIPTYCH_INLINE T* carve(uint8_t*& at, int64_t n) {
  T* out = reinterpret_cast<T*>(at);
  at += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  return out;
}

DIPTYCH_INLINE int64_t gathered_bytes(const AttentionShape& shape) {
  return shape.by_means ? kTileTokens * ((shape.head_dim + whole_vectors(shape.v_head_dim)) * 2 + 8) + 64 : 0;
}

DIPTYCH_INLINE Scratch carve_scratch(const AttentionShape& shape, uint8_t* at) {
  const int64_t rows = most_rows(shape), d = shape.head_dim, dv = whole_vectors(shape.v_head_dim);
  Scratch s;
  s.queries = carve<Input>(at, (rows + kRows) * query_stride(d));
  s.positions = carve<int32_t>(at, rows);
  s.state_max = carve<float>(at, rows);
  s.state_sum = carve<float>(at, rows);
  s.state_values = carve<float>(at, rows * dv);
  s.scores = carve<float>(at, kRows * kTileTokens);
  s.weights = carve<Input>(at, kRows * kTileTokens);
  s.wide_keys = carve<uint16_t>(at, kTileTokens * d);
  s.wide_values = carve<uint16_t>(at, kTileTokens * dv);
  s.key_scales = carve<float>(at, kTileTokens);
  s.value_scales = carve<float>(at, kTileTokens);
  s.query_scales = carve<float>(at, rows);
  s.gathered = carve<uint8_t>(at, gathered_bytes(shape));
  return s;
}

// The part of a tile that some rows may see.
struct Span {
  int64_t first, end;  // groups of 16 keys
  int64_t pairs;       // token pairs in [0, end * 8) that hold at least one key seen
};

struct SequenceView {
  const AttentionCall* call;
  const int32_t* blocks;
  int64_t kv_head;
  int64_t last_key;  // no row of the task sees past it
  const int32_t* chosen = nullptr;  // numbers of blocks of AttentionShape::block positions, whose tokens are those that count; null: all are
};

// Walks the groups of 16 tokens of a sequence from `token` on, without a division per group.
struct GroupWalk {
  const SequenceView& view;
  int64_t block, offset;
  KvHead head;

  int64_t place = 0;  // in a choice

  DIPTYCH_FORCED GroupWalk(const SequenceView& v, int64_t token) : view(v), place(token) {
    find(v.chosen == nullptr ? token : place_of(v, token));
  }
  DIPTYCH_FORCED static int64_t place_of(const SequenceView& v, int64_t token) {
    const int64_t block = v.call->shape.block;
    return v.chosen[token / block] * block + token % block;
  }
  DIPTYCH_FORCED void find(int64_t token) {
    const int64_t block_tokens = view.call->kv.shape.block_tokens;
    block = token / block_tokens, offset = token - block * block_tokens;
    head = view.call->kv.head(view.blocks[block], view.kv_head);
  }
  DIPTYCH_FORCED void step() {
    if (view.chosen != nullptr) return find(place_of(view, place += 16));
    offset += 16;
    if (offset != view.call->kv.shape.block_tokens) return;
    ++block, offset = 0;
    head = view.call->kv.head(view.blocks[block], view.kv_head);
  }
};

class Ahead;

// Where the groups of one tile lie; `span` is what some row of the task may see.
struct Tile {
  const uint16_t* keys[kTileGroups];
  const uint16_t* values[kTileGroups];
  Ahead* ahead;
  int64_t start;  // position of the tile's first key
  Span span;
  const float* key_scales = nullptr;  // [256] of a cache of bytes
  const float* value_scales = nullptr;
  bool is_whole = false;         // keys and values are whole numbers
  bool is_bytes = false;         // they lie in the cache as they are: keys and values point to bytes
  bool is_quads = false;         // and queries and weights are bytes, too
  float most_value_scale = 0.0f;  // of all 256 keys, where the rows see them all
};

// From this many turns of a task's rows over a tile on it is better widened once: what it then takes is stored and read again, past
// the first cache. Of 7 rows, one turn, widening took a third of the time.
constexpr int64_t kManyTurns = 4;
// The same of fp8.
#if defined(__AVX512BF16__) || defined(DIPTYCH_AVX2)
constexpr int64_t kManyTurnsOfFp8 = kManyTurns;
#else
constexpr int64_t kManyTurnsOfFp8 = 2;  // each turn widens twice, from eight bits to sixteen and to fp32
#endif

DIPTYCH_INLINE int64_t turns_of(int64_t rows) { return (rows + kRows - 1) / kRows; }
// Rows of a turn: of nine by eight at most five, then four.
DIPTYCH_INLINE int64_t turn_of(int64_t rows, bool is_quads) {
  int64_t turns = turns_of(rows);
#if defined(DIPTYCH_BESIDE)
  // Many turns of six rows by four vectors: a row's pair has a register, and 16 groups and heads of 64 and 128 leave no vector over.
  if (turns >= kManyTurns && (is_quads || is_zen5())) turns = (rows + 5) / 6;
#else
  (void)is_quads;
#endif
  return (rows + turns - 1) / turns;
}

// Steps of the work on a tile: a vector that is multiplied is one, and weighing 16 keys takes a row as long as so many products.
constexpr int64_t kStepsToWeigh = 17;

DIPTYCH_INLINE int64_t steps_of(const Span& span, int64_t d, int64_t dv) {
  return (span.end - span.first) * (d / 2 + dv / 2 + kStepsToWeigh);
}

#if defined(DIPTYCH_BESIDE)
#include "attention/attention_beside.inl"
#else
#include "attention/attention_ahead.inl"
#endif

#include "attention/attention_whole.inl"

// What a row's product with V becomes: values [R, dv] = old * keep + product * unit * take; without `keep` product * unit is stored as it
// is, without `unit` the product stands for itself.
struct Joined {
  const float* unit;
  const float* keep;
  const float* take;
  float* out;
  int64_t stride;
};

#if defined(DIPTYCH_ATTENTION_TILES)
#include "attention/attention_tiles.inl"
#elif defined(DIPTYCH_AVX2)
#include "attention/attention_products_avx2.inl"
#else
#include "attention/attention_products.inl"
#endif

// ---- softmax of a few rows over one tile ----

#include "attention/attention_bends.inl"

// Hides the keys outside [lo, hi) of the tile from one row's scores and returns their maximum, lane by lane.
DIPTYCH_INLINE F32 hide_and_max(float* scores, const Span& seen, int64_t lo, int64_t hi) {
  const F32 none = set1(-__builtin_inff());
  int64_t first = seen.first, end = seen.end;
  for (; first < end && lo > first * 16; ++first) {
    const int64_t from = lo - first * 16, to = hi - first * 16;
    store(scores + first * 16, keep(load(scores + first * 16), none, from > 16 ? 16 : from, to > 16 ? 16 : to));
  }
  F32 most[2] = {none, none};
  for (int64_t g = seen.first; g < first; ++g) most[0] = max(most[0], load(scores + g * 16));
  for (; end > first && hi < end * 16; --end) {
    const int64_t to = hi - (end - 1) * 16;
    const F32 s = keep(load(scores + (end - 1) * 16), none, 0, to < 0 ? 0 : to);
    store(scores + (end - 1) * 16, s);
    most[0] = max(most[0], s);
  }
  for (; first + 2 <= end; first += 2)
    for (int i = 0; i < 2; ++i) most[i] = max(most[i], load(scores + (first + i) * 16));
  return first < end ? max(max(most[0], most[1]), load(scores + first * 16)) : max(most[0], most[1]);
}

// weights = exp2(score * unit - most) rounded to bf16; returns their sum, lane by lane. With nothing to ask for ahead the loop is its own
// function, whose constants stay in registers.
static __attribute__((noinline)) F32 weigh_scores_alone(const float* scores, Input* weights, const Span& seen, float unit, float most) {
  const F32 shift = set1(most == -__builtin_inff() ? 0.0f : -most), factor = set1(unit);
  F32 sum = zero();
  for (int64_t g = seen.first; g < seen.end; ++g) {
    const F32 p = weight_exp2_lanes(fma(load(scores + g * 16), factor, shift));
    sum = add(sum, p);
    store_inputs(weights + g * 16, p);
  }
  return sum;
}

DIPTYCH_INLINE F32 weigh_scores(const float* scores, Input* weights, const Span& seen, float unit, float most,
                                const float* value_scales, Ahead& ahead, int64_t steps) {
  if (value_scales == nullptr && ahead.cursor.is_idle()) return weigh_scores_alone(scores, weights, seen, unit, most);
  const F32 shift = set1(most == -__builtin_inff() ? 0.0f : -most), factor = set1(unit);
  F32 sum = zero();
  Ahead::Cursor cursor = ahead.cursor;
  for (int64_t g = seen.first; g < seen.end; ++g) {
    cursor.step(steps);
    F32 p = weight_exp2_lanes(fma(load(scores + g * 16), factor, shift));
    sum = add(sum, p);
    if (value_scales) p = mul(p, load(value_scales + g * 16));
    store_inputs(weights + g * 16, p);
  }
  ahead.cursor = cursor;
  return sum;
}

// ---- one task ----

#include "attention/attention_groups.inl"

// n heads' queries side by side, from the row-th on; arrange_queries puts them as the products read them.
DIPTYCH_INLINE void take_queries(const AttentionCall& call, const uint16_t* q, int64_t n, int64_t row, const Scratch& scratch) {
  const int64_t d = call.shape.head_dim, stride = query_stride(d);
  for (int64_t r = row; r < row + n; ++r, q += d) {
#if defined(DIPTYCH_QUADS)
    if (is_quads(call)) {
      scratch.query_scales[r] = quad_query(q, d, scratch.quad_queries() + r * quad_stride(d));
      continue;
    }
#endif
    if (is_whole(call)) {
      scratch.query_scales[r] = whole_query(q, d, call.shape.in_bytes, stride, scratch.whole_queries() + r * stride);
      continue;
    }
    Input* query = scratch.queries + r * stride;
    take_inputs(q, d, query);
    std::memset(query + d, 0, static_cast<size_t>(stride - d) * sizeof(Input));
  }
}

#include "attention/attention_latent.inl"
#include "attention/attention_index.inl"

// state = state joined with partial, for n <= 16 rows; gives the factors for the values. An empty partial (-inf, 0) changes
// exactly nothing: what it keeps is multiplied by 1, what it takes by 0.
DIPTYCH_INLINE void join(float* state_max, float* state_sum, const float* most, const float* sum, int64_t n, float* keeps,
                         float* takes) {
  const F32 before = load_n(state_max, n), fresh = load_n(most, n), joined = max(before, fresh);
  const F32 finite = max(joined, set1(-3e38f));  // both empty: -inf - -inf would be no number
  const F32 kept = exp2_lanes(sub(before, finite)), taken = exp2_lanes(sub(fresh, finite));
  store_n(state_max, joined, n);
  store_n(state_sum, fma(load_n(state_sum, n), kept, mul(load_n(sum, n), taken)), n);
  to_array(kept, keeps);
  to_array(taken, takes);
}

// A head's sink is a key of score `sinks[head]` and no value: it joins the finished state as one more term of the denominator.
DIPTYCH_INLINE float share_of(const AttentionCall& call, int64_t head, float most, float sum) {
  if (call.shape.sinks == nullptr) return sum == 0.0f ? 0.0f : 1.0f / sum;
  const F32 sink = set1(call.shape.sinks[head] * kLog2e), joined = max(set1(most), sink);
  const F32 kept = exp2_lanes(sub(set1(most), joined));
  alignas(64) float shares[16];
  to_array(div(kept, fma(set1(sum), kept, exp2_lanes(sub(sink, joined)))), shares);
  return shares[0];
}

DIPTYCH_INLINE void write_row(const AttentionCall& call, int64_t token, int64_t head, const float* values, float most, float sum) {
  const int64_t d = call.shape.v_head_dim;
  const F32 inverse = set1(share_of(call, head, most, sum));
  for (int64_t i = 0; i < d; i += 16) {
    const int64_t lanes = d - i < 16 ? d - i : 16;
    F32 y = fma(load(values + i), inverse, zero());
    if (call.out_bf16) {
      store_bf16_n(call.out_bf16 + token * call.out_stride + head * d + i, y, lanes);
    } else {
      store_n(call.out_f32 + token * call.out_stride + head * d + i, y, lanes);
    }
  }
}

DIPTYCH_INLINE void weigh_all_scores(const Scratch& scratch, int64_t n, const Tile& tile, const Span& seen, const float* units,
                                     const float* most, const float* most_scales, bool in_bytes, F32* sums) {
  const int64_t steps = kStepsToWeigh / n;
  for (int64_t r = 0; r < n; ++r) {
    const float* scores = scratch.scores + r * kTileTokens;
#if defined(DIPTYCH_QUADS)
    if (tile.is_quads) {
      sums[r] = weigh_scores_in_bytes(scores, scratch.quad_weights() + r * kTileTokens, seen, units[r], most[r], tile.value_scales, most_scales[r], *tile.ahead, steps);
      continue;
    }
#endif
    if (tile.is_whole) {
      const auto weigh = in_bytes ? weigh_scores_in_bytes<uint16_t> : tile.ahead->cursor.is_idle() ? weigh_scores_whole<false> : weigh_scores_whole<true>;
      sums[r] = weigh(scores, scratch.whole_weights() + r * kTileTokens, seen, units[r], most[r], tile.value_scales, most_scales[r], *tile.ahead, steps);
      continue;
    }
    sums[r] = weigh_scores(scores, scratch.weights + r * kTileTokens, seen, units[r], most[r], tile.value_scales, *tile.ahead, steps);
  }
}

struct TaskRows {
  int64_t token, group, head, n, whole;  // first token, heads per token, first head, rows, AttentionTask::whole
};

DIPTYCH_INLINE TaskRows rows_of(const AttentionCall& call, const AttentionTask& task) {
  const int64_t group = call.shape.n_heads / call.shape.n_kv_heads;
  return {task.token_begin, group, task.kv_head * group, (task.token_end - task.token_begin) * group, task.whole};
}

DIPTYCH_INLINE void run_tile(const AttentionCall& call, const TaskRows& rows, const Tile& tile, const Scratch& scratch,
                             float* partial) {
  const int64_t d = call.shape.head_dim, dv = call.kv.shape.value_dim();
  const int64_t most = turn_of(rows.n, is_quads(call));
  const bool is_bent = bends_scores(call.shape);
  for (int64_t r0 = 0; r0 < rows.n; r0 += most) {
    const int64_t n = rows.n - r0 < most ? rows.n - r0 : most;
    // Only the groups that these few rows see: what is left out would have added exact zeros.
    const int32_t* positions = scratch.positions + r0;
    const int64_t low = call.shape.first_seen(positions[0], rows.whole);
    const int64_t high = call.shape.last_seen(positions[n - 1], rows.whole) + 1 - tile.start;
    Span seen = tile.span;
    if (low > tile.start) seen.first = (low - tile.start) / 16;
    if (seen.first < tile.span.first) seen.first = tile.span.first;
    if (high < seen.pairs * 2) seen.pairs = (high + 1) / 2;
    if ((high + 15) / 16 < seen.end) seen.end = (high + 15) / 16;
    if (seen.end > seen.first) score(scratch, r0, n, d, tile, seen);
    // Pass by pass over all rows, so that the reductions of one row hide behind those of the others.
    F32 lanes[kRows];
    float most[16], sum[16], keeps[16], takes[16], units[kRows], value_units[kRows] = {};
    for (int64_t r = 0; r < n; ++r) {
      const int64_t lo = call.shape.first_seen(positions[r], rows.whole) - tile.start;
      const int64_t hi = call.shape.last_seen(positions[r], rows.whole) + 1 - tile.start;
      const float scale = tile.is_whole ? call.shape.scale * scratch.query_scales[r0 + r] : call.shape.scale;
      float* scores = scratch.scores + r * kTileTokens;
      units[r] = (is_bent ? 1.0f : scale) * kLog2e;
      const int64_t head = rows.head + (r0 + r) % rows.group, ahead = positions[r] - tile.start;
      if (call.shape.n_places != 0) relate_scores(call, scores, seen, rows.token + (r0 + r) / rows.group, head, ahead, hi, scale);
      else if (is_bent) bend_scores(call.shape, scores, seen, head, ahead, scale);
      lanes[r] = hide_and_max(scores, seen, lo, hi);
      // a bound by the keys that the row sees, whoever stands beside it
      if (tile.is_whole) value_units[r] = lo <= 0 && hi >= kTileTokens ? tile.most_value_scale : most_scale(tile.value_scales, lo, hi);
    }
    for (int64_t r = 0; r < n; ++r) most[r] = horizontal_max(lanes[r]) * units[r];
    weigh_all_scores(scratch, n, tile, seen, units, most, value_units, call.shape.in_bytes, lanes);
    for (int64_t r = 0; r < n; ++r) sum[r] = horizontal_sum(lanes[r]), value_units[r] *= 1.0f / weight_levels(call.shape);
    const float* unit = tile.is_whole ? value_units : nullptr;
    if (partial) {
      float* out = partial + r0 * (dv + 2);
      weigh(scratch, n, tile, seen, dv, {unit, nullptr, nullptr, out + 2, dv + 2});
      for (int64_t r = 0; r < n; ++r) out[r * (dv + 2)] = most[r], out[r * (dv + 2) + 1] = sum[r];
    } else {
      join(scratch.state_max + r0, scratch.state_sum + r0, most, sum, n, keeps, takes);
      weigh(scratch, n, tile, seen, dv, {unit, keeps, takes, scratch.state_values + r0 * dv, dv});
    }
    tile.ahead->end_turn();
  }
}

DIPTYCH_INLINE SequenceView view_of(const AttentionCall& call, const AttentionTask& task) {
  const AttentionShape& shape = call.shape;
  const int64_t position = call.positions[task.token_end - 1], blocks = shape.most / shape.block;
  const bool has_chosen = call.choice != nullptr && shape.block > 1 && position >= shape.most;  // then it is a task's only token
  const int32_t* chosen = has_chosen ? call.choice + (shape.by_means ? (task.token_end - 1) * (blocks + 1) : ((task.token_end - 1) * shape.n_kv_heads + task.kv_head) * blocks) : nullptr;
  return {&call, call.block_table + task.sequence * call.table_width, task.kv_head, shape.last_seen(position, task.whole), chosen};
}

// First position that some row of the task sees.
DIPTYCH_INLINE int64_t first_key(const AttentionCall& call, const AttentionTask& task) {
  return call.shape.first_seen(call.positions[task.token_begin], task.whole);
}

static void attention(const AttentionCall& call, const AttentionTask& task, const AttentionTask* following, uint8_t* memory) {
  const Scratch scratch = carve_scratch(call.shape, memory);
  const TaskRows rows = rows_of(call, task);
  const int64_t d = call.shape.head_dim, dv = call.kv.shape.value_dim();
  for (int64_t r = 0, token = rows.token; r < rows.n; r += rows.group, ++token) {  // a token's heads of the group lie side by side
    for (int64_t g = 0; g < rows.group; ++g) scratch.positions[r + g] = call.positions[token];
    take_queries(call, call.q + (token * call.shape.n_heads + rows.head) * d, rows.group, r, scratch);
  }
  arrange_queries(scratch, is_whole(call), rows.n, turn_of(rows.n, is_quads(call)), d);
  for (int64_t r = 0; r < rows.n; ++r) scratch.state_max[r] = -__builtin_inff(), scratch.state_sum[r] = 0.0f;
  std::memset(scratch.state_values, 0, static_cast<size_t>(rows.n * dv) * 4);
  const SequenceView view = view_of(call, task);
  const SequenceView following_view = following != nullptr ? view_of(call, *following) : view;
  const int64_t low = first_key(call, task);
  begin_products();
  for (int64_t t = task.tile_begin; t < task.tile_end; ++t) {
    Tile tile;
    tile.start = t * kTileTokens;
    tile.span.first = low > tile.start ? (low - tile.start) / 16 : 0;
    const int64_t left = view.last_key + 1 - tile.start;
    tile.span.end = left >= kTileTokens ? kTileGroups : (left + 15) / 16;
    tile.span.pairs = left >= kTileTokens ? kTileTokens / 2 : (left + 1) / 2;
    const SequenceView* after = t + 1 < task.tile_end ? &view : following != nullptr ? &following_view : nullptr;
    int64_t after_token = tile.start + kTileTokens;
    if (after == &following_view) {
      const int64_t start = following->tile_begin * kTileTokens, first = first_key(call, *following) / 16 * 16;
      after_token = first > start ? first : start;
    }
    Ahead ahead;
    tile.ahead = &ahead;
    if (call.shape.is_listed || (call.choice != nullptr && call.shape.block == 1)) {
      gather_tile(view, rows.token, scratch, tile);
    } else if (view.chosen != nullptr && call.shape.by_means) {
      gather_blocks(view, scratch, rows.n, tile);
    } else {
      find_tile(view, scratch, rows.n, tile);
      ask_ahead(view, after, after_token, rows.n, tile, ahead);
      if (!call.kv.shape.has_values) values_of_keys(view, scratch, tile);
    }
    float* partial = nullptr;
    if (task.is_split) partial = call.partials + task.partial_begin + (t - task.first_tile) * rows.n * (dv + 2);
    run_tile(call, rows, tile, scratch, partial);
  }
  end_products();
  if (task.is_split) return;
  for (int64_t r = 0, token = rows.token; r < rows.n; ++token)
    for (int64_t g = 0; g < rows.group; ++g, ++r)
      write_row(call, token, rows.head + g, scratch.state_values + r * dv, scratch.state_max[r],
                scratch.state_sum[r]);
}

static void attention_combine(const AttentionCall& call, const AttentionTask& task, int64_t row_begin, int64_t row_end,
                              uint8_t* memory) {
  const Scratch scratch = carve_scratch(call.shape, memory);
  const TaskRows rows = rows_of(call, task);
  const int64_t dv = call.kv.shape.value_dim();
  for (int64_t r0 = row_begin; r0 < row_end; r0 += 16) {
    const int64_t n = row_end - r0 < 16 ? row_end - r0 : 16;
    float state_max[16], state_sum[16] = {}, most[16], sum[16], keeps[16], takes[16];
    for (float& value : state_max) value = -__builtin_inff();
    std::memset(scratch.state_values, 0, static_cast<size_t>(n * dv) * 4);
    for (int64_t t = task.first_tile; t < task.tile_end; ++t) {
      const float* partials = call.partials + task.partial_begin + ((t - task.first_tile) * rows.n + r0) * (dv + 2);
      for (int64_t r = 0; r < n; ++r) most[r] = partials[r * (dv + 2)], sum[r] = partials[r * (dv + 2) + 1];
      join(state_max, state_sum, most, sum, n, keeps, takes);
      for (int64_t r = 0; r < n; ++r) {
        float* values = scratch.state_values + r * dv;
        for (int64_t i = 0; i < dv; i += 16) {
          F32 fresh = mul(load(partials + r * (dv + 2) + 2 + i), set1(takes[r]));
          store(values + i, fma(load(values + i), set1(keeps[r]), fresh));
        }
      }
    }
    for (int64_t r = 0; r < n; ++r)
      write_row(call, rows.token + (r0 + r) / rows.group, rows.head + (r0 + r) % rows.group, scratch.state_values + r * dv,
                state_max[r], state_sum[r]);
  }
}

static int64_t attention_scratch_bytes(const AttentionShape& shape) {
  const int64_t rows = most_rows(shape), d = shape.head_dim, dv = whole_vectors(shape.v_head_dim);
  const int64_t floats = 4 * rows + rows * dv + kRows * kTileTokens + 2 * kTileTokens;
  const int64_t inputs = (rows + kRows) * query_stride(d) + kRows * kTileTokens, halves = kTileTokens * (d + dv);
  return (floats * 4 + inputs * static_cast<int64_t>(sizeof(Input)) + halves * 2 + gathered_bytes(shape) + 13 * 64 + 4095) / 4096 * 4096;
}

extern const AttentionKernels kAttention = {attention, attention_combine, attention_scratch_bytes, index_tile, choose_row};

}  // namespace DIPTYCH_ISA
}  // namespace diptych

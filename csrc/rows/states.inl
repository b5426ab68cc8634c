// The state of one sequence moves on, token by token, so that no bit depends on how a prompt is cut.
//
// A task is one key head of one sequence with value heads that share it: their channels of q, k and v, and their part of the state.
// Tokens go by in tiles, so that what a tile needs stays in L1: first its q, k and v, then the tile for each 16 columns of a head's state.

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kStateTile = 16;  // tokens
constexpr float kLeastLength = 1e-6f;  // in the root of a query's and a key's length

// log(1 + e^x): max(x, 0) + 2 artanh(y / (2 + y)), y = e^-|x|; relative error below 1e-7.
DIPTYCH_INLINE F32 softplus_lanes(F32 x) {
  const F32 y = exp_lanes(min(x, sub(zero(), x))), s = div(y, add(set1(2.0f), y)), square = mul(s, s);
  F32 p = set1(2.0f / 13.0f);
  for (const float term : {2.0f / 11.0f, 2.0f / 9.0f, 2.0f / 7.0f, 2.0f / 5.0f, 2.0f / 3.0f, 2.0f}) p = fma(p, square, set1(term));
  return fma(p, s, max(x, zero()));
}

static int64_t state_scratch_floats(const StateShape& shape) {
  const int64_t heads = shape.part_heads(), width = shape.part_width();
  const int64_t by_key = shape.fades_by_key ? 3 * kStateTile * (shape.key_dim + 16) : 0;
  return (kStateTile + shape.n_taps) * (width + 48) + kStateTile * (2 * heads + 1) + 64 + by_key;
}

// Sums over the taps of `width` channels of tokens [begin, begin + n), the oldest input first. x: what channel `channel` of the task's first
// token begins with; tail: the inputs before that token.
template <bool IsActivated>
static void sum_taps(const StateCall& call, const float* x, int64_t x_stride, const float* tail, int64_t tail_stride, int64_t channel, int64_t width,
                     int64_t begin, int64_t n, float* out, int64_t out_stride) {
  const StateShape& shape = call.shape;
  const int64_t before = shape.n_taps - 1, channels = shape.channels();
  for (int64_t t = 0; t < n; ++t)
    for (int64_t i = 0; i < width; i += 16) {
      const int64_t lanes = width - i < 16 ? width - i : 16;
      if (shape.is_steady) {
        store_n(out + t * out_stride + i, silu_lanes(load_n(x + (begin + t) * x_stride + i, lanes)), lanes);
        continue;
      }
      F32 sum = call.tap_bias == nullptr ? zero() : load_n(call.tap_bias + channel + i, lanes);
      for (int64_t tap = 0; tap < shape.n_taps; ++tap) {
        const int64_t at = begin + t + tap - before;
        const float* given = at < 0 ? tail + (at + before) * tail_stride + i : x + at * x_stride + i;
        sum = fma(load_n(given, lanes), load_n(call.taps + tap * channels + channel + i, lanes), sum);
      }
      store_n(out + t * out_stride + i, IsActivated ? silu_lanes(sum) : sum, lanes);
    }
}

DIPTYCH_INLINE void to_length(float* x, int64_t n, float length) {
  const F32 factor = set1(length / __builtin_sqrtf(sum_of_squares(x, n) + kLeastLength));
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    store_n(x + i, mul(load_n(x + i, lanes), factor), lanes);
  }
}

DIPTYCH_INLINE float dot_row(const float* a, const float* b, int64_t n) {
  F32 sum = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    sum = fma(load_n(a + i, lanes), load_n(b + i, lanes), sum);
  }
  return horizontal_sum(sum);
}

// What weighs a head's news and what is left of its state, for n tokens: beta and decay, or the token's step and what is left behind it.
static void rates_of(const StateCall& call, const StateTask& task, int64_t head, int64_t begin, int64_t n, float* weight, float* left) {
  if (call.shape.is_steady) {
    for (int64_t t = 0; t < kStateTile; t += 16) store(weight + t, set1(1.0f)), store(left + t, exp_lanes(set1(-call.decay[head])));
    return;
  }
  const int64_t row = call.rates_stride, own = call.first_head + head;
  const bool is_delta = call.shape.rule == StateRule::delta, has_decays = !call.shape.fades_by_key;
  float given[2][kStateTile] = {};
  for (int64_t t = 0; t < n; ++t) {
    const float* rates = call.rates + (task.first_row + begin + t) * row;
    given[0][t] = rates[own], given[1][t] = is_delta && has_decays ? rates[row / 2 + own] : rates[own];
  }
  for (int64_t t = 0; t < kStateTile; t += 16) {
    F32 rate = softplus_lanes(fma(load(given[1] + t), set1(call.shape.rate_scale), set1(call.shift[head])));
    if (!is_delta) rate = min(max(rate, set1(call.shape.least_step)), set1(call.shape.most_step));
    store(weight + t, is_delta ? div(set1(call.shape.most_weight), add(set1(1.0f), exp_lanes(sub(zero(), load(given[0] + t))))) : rate);
    store(left + t, exp_lanes(mul(set1(-call.decay[head]), rate)));
  }
}

// Where a head's state fades by key: what is left of each row, and k and q times that, [n][key_dim] each.
struct Fading {
  float *left = nullptr, *k = nullptr, *q = nullptr;
};

static void fade_by_key(const StateCall& call, const StateTask& task, int64_t head, int64_t begin, int64_t n, const float* q, const float* k, int64_t stride,
                        const Fading& out) {
  const int64_t dk = call.shape.key_dim;
  const float* shift = call.shift + head * dk;
  const F32 decay = set1(-call.decay[head]), scale = set1(call.shape.rate_scale), least = set1(call.shape.least_decay);
  const bool is_bounded = call.shape.least_decay != 0.0f;
  for (int64_t t = 0; t < n; ++t) {
    const float* given = call.decays + (task.first_row + begin + t) * call.decays_stride + (call.first_head + head) * dk;
    for (int64_t i = 0; i < dk; i += 16) {
      const int64_t lanes = dk - i < 16 ? dk - i : 16;
      const F32 shifted = fma(load_n(given + i, lanes), scale, load_n(shift + i, lanes));
      const F32 left = exp_lanes(is_bounded ? div(least, add(set1(1.0f), exp_lanes(mul(decay, shifted)))) : mul(decay, softplus_lanes(shifted)));
      store_n(out.left + t * dk + i, left, lanes);
      store_n(out.k + t * dk + i, mul(left, load_n(k + t * stride + i, lanes)), lanes);
      store_n(out.q + t * dk + i, mul(left, load_n(q + t * stride + i, lanes)), lanes);
    }
  }
}

// 16 or 32 columns of a head's state and the n tokens that pass it.
struct Columns {
  const float *q, *k, *v;               // of the first token; v: those of these columns
  int64_t stride;                       // from a token's q, k and v to the next one's
  const float *weight, *left, *along;   // of each token: what weighs its news, what is left of the state behind it, q k
  float skip;                           // how much of a value is given as it is
  int64_t n, last_lanes;                // tokens; columns that the last 16 have
  float *state, *out;                   // [key_dim][16] for each 16 columns; a row for each token
  int64_t out_stride;
};

// By the delta rule: what each token leaves is S^T q of the state behind it, without the decay of its own it would wait for. A row that moved
// on meets the next token's k and q at once, so that a token reads and writes the state once; columns beside each other share what is spread
// of k and q, and hide each other's chains of additions. What a state has of k already is taken from v. By key k and q have the decay before
// they meet a row.
template <int64_t G, bool kByKey>
static void move_by_delta(const Columns& over, int64_t dk, const Fading& by_key) {
  const float *k = over.k, *met_k = kByKey ? by_key.k : k, *met_q = kByKey ? by_key.q : over.q, *rows_left = by_key.left;
  const int64_t met_stride = kByKey ? dk : over.stride;
  float* const state = over.state;
  F32 of_k[G], of_q[G], news[G];
  for (int64_t g = 0; g < G; ++g) of_k[g] = of_q[g] = zero();
  for (int64_t i = 0; i < dk; ++i) {
    const F32 of_key = set1(met_k[i]), of_query = set1(met_q[i]);
    for (int64_t g = 0; g < G; ++g) {
      const F32 s = load(state + (g * dk + i) * 16);
      of_k[g] = fma(s, of_key, of_k[g]);
      of_q[g] = fma(s, of_query, of_q[g]);
    }
  }
  for (int64_t t = 0; t < over.n; ++t, k += over.stride, met_k += met_stride, met_q += met_stride, rows_left += kByKey ? dk : 0) {
    const float left = kByKey ? 1.0f : over.left[t];
    // a number, of which a lane each is made anew: compilers copy lanes that they choose by way of memory, in other pieces than they read
    const auto fading_of = [&](int64_t i) { return kByKey ? rows_left[i] : left; };
    for (int64_t g = 0; g < G; ++g) {
      const int64_t lanes = g + 1 == G ? over.last_lanes : 16;
      const F32 value = load_n(over.v + t * over.stride + g * 16, lanes);
      if constexpr (!kByKey) of_k[g] = mul(set1(left), of_k[g]), of_q[g] = mul(set1(left), of_q[g]);
      news[g] = mul(set1(over.weight[t]), sub(value, of_k[g]));
      store_n(over.out + t * over.out_stride + g * 16, fma(news[g], set1(over.along[t]), of_q[g]), lanes);
      of_k[g] = of_q[g] = zero();
    }
    if (t + 1 == over.n)
      for (int64_t i = 0; i < dk; ++i)
        for (int64_t g = 0; g < G; ++g) store(state + (g * dk + i) * 16, fma(news[g], set1(k[i]), mul(set1(fading_of(i)), load(state + (g * dk + i) * 16))));
    else
      for (int64_t i = 0; i < dk; ++i) {
        const F32 key = set1(k[i]), of_key = set1(met_k[met_stride + i]), of_query = set1(met_q[met_stride + i]), row_fading = set1(fading_of(i));
        F32 s[G];  // all of them read before one is stored: their addresses may be equal in what a processor compares first
        for (int64_t g = 0; g < G; ++g) s[g] = fma(news[g], key, mul(row_fading, load(state + (g * dk + i) * 16)));
        for (int64_t g = 0; g < G; ++g) {
          store(state + (g * dk + i) * 16, s[g]);
          of_k[g] = fma(s[g], of_key, of_k[g]);
          of_q[g] = fma(s[g], of_query, of_q[g]);
        }
      }
  }
}

// By Mamba-2's rule, T tokens from `begin` on: their news wait for no state, so a row stays in registers while they pass. What each leaves is
// its decay of S^T q of the state before it, and its news.
template <int64_t G, int64_t T>
static void pass_tokens(const Columns& over, int64_t dk, int64_t begin) {
  const float *q = over.q + begin * over.stride, *k = over.k + begin * over.stride;
  float* const out = over.out + begin * over.out_stride;
  F32 value[T][G], news[T][G], of_q[T][G], fading[T];
  for (int64_t t = 0; t < T; ++t) {
    fading[t] = set1(over.left[begin + t]);
    for (int64_t g = 0; g < G; ++g) {
      value[t][g] = load_n(over.v + (begin + t) * over.stride + g * 16, g + 1 == G ? over.last_lanes : 16);
      news[t][g] = mul(set1(over.weight[begin + t]), value[t][g]);
      of_q[t][g] = zero();
    }
  }
  for (int64_t i = 0; i < dk; ++i) {
    F32 s[G];
    for (int64_t g = 0; g < G; ++g) s[g] = load(over.state + (g * dk + i) * 16);
    for (int64_t t = 0; t < T; ++t) {
      const F32 key = set1(k[t * over.stride + i]), query = set1(q[t * over.stride + i]);
      for (int64_t g = 0; g < G; ++g) {
        of_q[t][g] = fma(s[g], query, of_q[t][g]);
        s[g] = fma(news[t][g], key, mul(fading[t], s[g]));
      }
    }
    for (int64_t g = 0; g < G; ++g) store(over.state + (g * dk + i) * 16, s[g]);
  }
  for (int64_t t = 0; t < T; ++t)
    for (int64_t g = 0; g < G; ++g) {
      const F32 given = fma(news[t][g], set1(over.along[begin + t]), mul(fading[t], of_q[t][g]));
      store_n(out + t * over.out_stride + g * 16, fma(value[t][g], set1(over.skip), given), g + 1 == G ? over.last_lanes : 16);
    }
}

template <int64_t G>
static void move_by_decay(const Columns& over, int64_t dk, const Fading&) {
  int64_t t = 0;
  for (; t + 4 <= over.n; t += 4) pass_tokens<G, 4>(over, dk, t);
  for (; t < over.n; ++t) pass_tokens<G, 1>(over, dk, t);
}

// By Mamba-1's rule, T tokens that pass 16 channels: `columns` of them. A row of the state stays in registers meanwhile, and what is left of it
// waits for no state, so tokens hide each other's exponentials.
struct Channels {
  const float *x, *steps, *keys, *queries;  // of the first token
  int64_t x_stride, steps_stride, keys_stride, out_stride;
  const float *decay, *shift, *skip;        // [key_dim][16], of the channels
  float *state, *out;                       // [key_dim][16]; a row for each token
  int64_t lanes;
};

template <int64_t T>
static void pass_channels(const Channels& over, int64_t dk, int64_t begin) {
  const float *k = over.keys + begin * over.keys_stride, *q = over.queries + begin * over.keys_stride;
  F32 value[T], step[T], news[T], given[T];
  for (int64_t t = 0; t < T; ++t) {
    value[t] = load_n(over.x + (begin + t) * over.x_stride, over.lanes);
    step[t] = softplus_lanes(add(load_n(over.steps + (begin + t) * over.steps_stride, over.lanes), load_n(over.shift, over.lanes)));
    news[t] = mul(step[t], value[t]);
    step[t] = mul(step[t], set1(-kLog2e));  // so that what is left is a power of 2, which takes less than one of e
    given[t] = zero();
  }
  for (int64_t i = 0; i < dk; ++i) {
    const F32 decay = load(over.decay + i * 16);
    F32 s = load(over.state + i * 16);
    for (int64_t t = 0; t < T; ++t) {
      s = fma(exp2_lanes(mul(step[t], decay)), s, mul(news[t], set1(k[t * over.keys_stride + i])));
      given[t] = fma(s, set1(q[t * over.keys_stride + i]), given[t]);
    }
    store(over.state + i * 16, s);
  }
  const F32 skip = load_n(over.skip, over.lanes);
  for (int64_t t = 0; t < T; ++t) store_n(over.out + (begin + t) * over.out_stride, fma(value[t], skip, given[t]), over.lanes);
}

// Real-gated linear recurrent units, 16 channels: what is left of each, and how much of a value is let in, follow from the token alone, so only one
// multiplication and one addition wait for the state. What is let in is as much as has faded, in squares; all of it where nothing came before.
struct Units {
  const float *x, *gates;  // of the first token; gates: of values, and value_dim behind them those of the state
  int64_t x_stride, gates_stride, out_stride, value_dim;
  const float* decay;
  float *state, *out;
  int64_t n, lanes;
  bool begins;
};

DIPTYCH_INLINE F32 sigmoid_lanes(F32 x) { return div(set1(1.0f), add(set1(1.0f), exp_lanes(sub(zero(), x)))); }

static void pass_units(const Units& over) {
  const F32 decay = sub(zero(), load_n(over.decay, over.lanes)), one = set1(1.0f);
  F32 s = load(over.state);
  for (int64_t t = 0; t < over.n; ++t) {
    const float* gates = over.gates + t * over.gates_stride;
    const F32 left = exp_lanes(mul(decay, sigmoid_lanes(load_n(gates + over.value_dim, over.lanes))));
    const F32 open = over.begins && t == 0 ? one : root(max(fma(sub(zero(), left), left, one), zero()));
    const F32 news = mul(open, mul(sigmoid_lanes(load_n(gates, over.lanes)), load_n(over.x + t * over.x_stride, over.lanes)));
    s = fma(left, s, news);
    store_n(over.out + t * over.out_stride, s, over.lanes);
  }
  store(over.state, s);
}

// The task's heads of a state, from one place to another; from nowhere: zeros.
static void copy_heads(const StateShape& shape, int64_t part, const float* from, float* to) {
  const int64_t floats = shape.part_heads() * shape.head_floats();
  if (from == to) return;
  to += part * floats;
  if (from == nullptr)
    std::memset(to, 0, static_cast<size_t>(floats) * 4);
  else
    std::memcpy(to, from + part * floats, static_cast<size_t>(floats) * 4);
}

// The inputs that a task's taps saw last, from a state; from nowhere: zeros.
static void read_tail(const StateShape& shape, const StateTask& task, float* tail) {
  const size_t bytes = static_cast<size_t>(shape.tail_floats()) * 4;
  if (task.read == nullptr)
    std::memset(tail, 0, bytes);
  else
    std::memcpy(tail, task.read + shape.heads_floats() + task.part * shape.tail_floats(), bytes);
}

// Calls `move(begin, n)` for tiles of the task's tokens, cut where states are left, and `leave(end, place)` there and at the end.
template <typename Move, typename Leave>
DIPTYCH_INLINE void by_tiles(const StateTask& task, const Move& move, const Leave& leave) {
  const StateSave* save = task.saves;
  for (int64_t begin = 0; begin < task.n_rows;) {
    int64_t n = task.n_rows - begin < kStateTile ? task.n_rows - begin : kStateTile;
    if (save != task.saves_end && save->rows - begin < n) n = save->rows - begin;
    move(begin, n);
    begin += n;
    for (; save != task.saves_end && save->rows == begin; ++save) leave(begin, save->place);
  }
  leave(task.n_rows, task.write);
}

static void move_heads(const StateCall& call, const StateTask& task, float* scratch) {
  const StateShape& shape = call.shape;
  const int64_t dk = shape.key_dim, dv = shape.value_dim, heads = shape.part_heads(), own = heads * dv, channels = shape.channels();
  const int64_t before = shape.n_taps - 1, width = shape.part_width(), key_head = task.part * shape.n_key_heads / shape.n_parts();
  const bool is_delta = shape.rule == StateRule::delta;
  // where the task's channels begin in a row of qkv, and how wide they are
  const int64_t firsts[3] = {key_head * dk, (shape.n_key_heads + key_head) * dk, 2 * shape.n_key_heads * dk + task.part * own};
  const int64_t widths[3] = {dk, dk, own};
  auto* const one_moves = shape.fades_by_key ? move_by_delta<1, true> : is_delta ? move_by_delta<1, false> : move_by_decay<1>;
  auto* const two_move = shape.fades_by_key ? move_by_delta<2, true> : is_delta ? move_by_delta<2, false> : move_by_decay<2>;
  float *tail = scratch, *tile = tail + before * width, *weight = tile + kStateTile * width, *left = weight + kStateTile * heads,
        *along = left + kStateTile * heads;
  const Fading by_key{along + kStateTile, along + kStateTile * (1 + dk), along + kStateTile * (1 + 2 * dk)};
  const float* rows = call.qkv + task.first_row * channels;
  read_tail(shape, task, tail);
  copy_heads(shape, task.part, task.read, task.write);

  auto leave = [&](int64_t end, float* place) {
    copy_heads(shape, task.part, task.write, place);
    float* to = place + shape.heads_floats() + task.part * shape.tail_floats();
    for (int64_t row = 0; row < before; ++row, to += width) {
      const int64_t at = end + row - before;
      for (int64_t part = 0, column = 0; part < 3; column += widths[part], ++part)
        std::memcpy(to + column, at < 0 ? tail + (at + before) * width + column : rows + at * channels + firsts[part], static_cast<size_t>(widths[part]) * 4);
    }
  };
  auto move = [&](int64_t begin, int64_t n) {
    for (int64_t part = 0, at = 0; part < 3; at += widths[part], ++part)
      sum_taps<true>(call, rows + firsts[part], channels, tail + at, width, firsts[part], widths[part], begin, n, tile + at, width);
    for (int64_t t = 0; t < n; ++t) {
      if (is_delta) to_length(tile + t * width, dk, shape.scale), to_length(tile + t * width + dk, dk, 1.0f);
      along[t] = dot_row(tile + t * width, tile + t * width + dk, dk);
    }
    for (int64_t i = 0; i < heads; ++i) {
      const int64_t head = task.part * heads + i;
      const float skip = call.skip == nullptr ? 0.0f : call.skip[head];
      float *state = task.write + head * shape.head_floats(), *out = call.out + (task.first_row + begin) * call.out_stride + head * dv;
      rates_of(call, task, head, begin, n, weight, left);
      if (shape.fades_by_key) fade_by_key(call, task, head, begin, n, tile, tile + dk, width, by_key);
      for (int64_t column = 0; column < dv; column += 32, state += 2 * dk * 16) {
        const int64_t columns = dv - column, lanes = columns < 32 ? (columns - 1) % 16 + 1 : 16;
        const Columns over{.q = tile, .k = tile + dk, .v = tile + 2 * dk + i * dv + column, .stride = width, .weight = weight, .left = left,
                           .along = along, .skip = skip, .n = n, .last_lanes = lanes, .state = state, .out = out + column,
                           .out_stride = call.out_stride};
        (columns > 16 ? two_move : one_moves)(over, dk, by_key);
      }
      if (!is_delta) continue;
      for (int64_t t = 0; t < n; ++t) rms_norm_row(out + t * call.out_stride, call.norm, dv, shape.norm_eps, out + t * call.out_stride);
    }
  };
  by_tiles(task, move, leave);
}

// Channels that each have decays of their own. They come as taps have bent them, and so a state has no tail.
static void move_channels(const StateCall& call, const StateTask& task) {
  const StateShape& shape = call.shape;
  const int64_t dk = shape.key_dim, dv = shape.value_dim, heads = shape.part_heads(), key_head = call.first_key_head + task.part * shape.n_key_heads / shape.n_parts();
  copy_heads(shape, task.part, task.read, task.write);
  auto leave = [&](int64_t, float* place) { copy_heads(shape, task.part, task.write, place); };
  auto move = [&](int64_t begin, int64_t n) {
    const int64_t row = task.first_row + begin;
    for (int64_t head = task.part * heads; head < (task.part + 1) * heads; ++head)
      for (int64_t column = 0; column < dv; column += 16) {
        const int64_t at = head * shape.head_floats() + column * dk, own = head * dv + column, of_all = call.first_head * dv + own;
        const float* rates = call.rates + row * call.rates_stride + 2 * key_head * dk;
        const Channels over{.x = call.qkv + row * call.qkv_stride + of_all, .steps = call.decays + row * call.decays_stride + of_all, .keys = rates,
                            .queries = rates + dk, .x_stride = call.qkv_stride, .steps_stride = call.decays_stride, .keys_stride = call.rates_stride,
                            .out_stride = call.out_stride, .decay = call.decay + at, .shift = call.shift + own, .skip = call.skip + own,
                            .state = task.write + at, .out = call.out + row * call.out_stride + own, .lanes = dv - column < 16 ? dv - column : 16};
        int64_t t = 0;
        for (; t + 4 <= n; t += 4) pass_channels<4>(over, dk, t);
        for (; t < n; ++t) pass_channels<1>(over, dk, t);
      }
  };
  by_tiles(task, move, leave);
}

// Likewise, by recurrent units.
static void move_units(const StateCall& call, const StateTask& task) {
  const StateShape& shape = call.shape;
  const int64_t dv = shape.value_dim, heads = shape.part_heads();
  copy_heads(shape, task.part, task.read, task.write);
  auto leave = [&](int64_t, float* place) { copy_heads(shape, task.part, task.write, place); };
  auto move = [&](int64_t begin, int64_t n) {
    const int64_t row = task.first_row + begin;
    for (int64_t head = task.part * heads; head < (task.part + 1) * heads; ++head)
      for (int64_t column = 0; column < dv; column += 16) {
        const int64_t own = head * dv + column, of_all = (call.first_head + head) * dv;
        pass_units({.x = call.qkv + row * call.qkv_stride + of_all + column, .gates = call.rates + row * call.rates_stride + 2 * of_all + column,
                    .x_stride = call.qkv_stride, .gates_stride = call.rates_stride, .out_stride = call.out_stride, .value_dim = dv,
                    .decay = call.decay + own, .state = task.write + head * shape.head_floats() + column, .out = call.out + row * call.out_stride + own,
                    .n = n, .lanes = dv - column < 16 ? dv - column : 16, .begins = task.read == nullptr && begin == 0});
      }
  };
  by_tiles(task, move, leave);
}

// A short convolution of gated inputs, gated again: out = c * (sum over taps of tap * (b * x)). What a state keeps is b * x.
static void move_inputs(const StateCall& call, const StateTask& task, float* scratch) {
  const StateShape& shape = call.shape;
  const int64_t before = shape.n_taps - 1, width = shape.part_width(), channels = shape.channels(), first = task.part * width, stride = shape.inputs();
  float* inputs = scratch;  // those before a tile, then the tile's
  const float* rows = call.qkv + task.first_row * stride + first;
  read_tail(shape, task, inputs);
  auto leave = [&](int64_t, float* place) {
    if (before == 0) return;  // of one tap nothing is kept
    std::memcpy(place + shape.heads_floats() + task.part * shape.tail_floats(), inputs, static_cast<size_t>(shape.tail_floats()) * 4);
  };
  auto move = [&](int64_t begin, int64_t n) {
    for (int64_t t = 0; t < n; ++t)
      for (int64_t i = 0; i < width; i += 16) {
        const int64_t lanes = width - i < 16 ? width - i : 16;
        const float* row = rows + (begin + t) * stride + i;
        store_n(inputs + (before + t) * width + i, mul(load_n(row, lanes), load_n(row + 2 * channels, lanes)), lanes);
      }
    float* out = call.out + (task.first_row + begin) * call.out_stride + first;
    sum_taps<false>(call, inputs + before * width, width, inputs, width, first, width, 0, n, out, call.out_stride);
    for (int64_t t = 0; t < n; ++t)
      for (int64_t i = 0; i < width; i += 16) {
        const int64_t lanes = width - i < 16 ? width - i : 16;
        float* given = out + t * call.out_stride + i;
        store_n(given, mul(load_n(rows + (begin + t) * stride + channels + i, lanes), load_n(given, lanes)), lanes);
      }
    std::memmove(inputs, inputs + n * width, static_cast<size_t>(shape.tail_floats()) * 4);  // what the next tile sees
  };
  by_tiles(task, move, leave);
}

// Sums over the taps of a part's channels, and nothing else. What a state keeps is their inputs.
template <bool IsBent>
static void move_taps(const StateCall& call, const StateTask& task, float* scratch) {
  const StateShape& shape = call.shape;
  const int64_t before = shape.n_taps - 1, width = shape.part_width(), channels = shape.channels(), first = task.part * width;
  const float* rows = call.qkv + task.first_row * channels + first;
  read_tail(shape, task, scratch);
  auto leave = [&](int64_t end, float* place) {
    float* to = place + shape.heads_floats() + task.part * shape.tail_floats();
    for (int64_t row = 0; row < before; ++row, to += width) {
      const int64_t at = end + row - before;
      std::memcpy(to, at < 0 ? scratch + (at + before) * width : rows + at * channels, static_cast<size_t>(width) * 4);
    }
  };
  auto move = [&](int64_t begin, int64_t n) {
    float* out = call.out + (task.first_row + begin) * call.out_stride + first;
    sum_taps<IsBent>(call, rows, channels, scratch, width, first, width, begin, n, out, call.out_stride);
  };
  by_tiles(task, move, leave);
}

static void move_state(const StateCall& call, const StateTask& task, float* scratch) {
  switch (call.shape.rule) {
    case StateRule::convolution: return move_inputs(call, task, scratch);
    case StateRule::taps: return move_taps<false>(call, task, scratch);
    case StateRule::bent_taps: return move_taps<true>(call, task, scratch);
    case StateRule::selective: return move_channels(call, task);
    case StateRule::rg_lru: return move_units(call, task);
    default: return move_heads(call, task, scratch);
  }
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych

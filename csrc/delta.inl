// A gated delta rule (arXiv:2412.06464): the state of one sequence moves on, token by token, so that no bit depends on how a prompt is cut.
//
// A task is one key head of one sequence, with the value heads that share it: their channels of q, k and v, and their part of the state.
// Tokens go by in tiles, so that what a tile needs stays in L1: first its q, k and v, then the tile for each 16 columns of a head's state.

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kDeltaTile = 16;  // tokens
constexpr float kLeastLength = 1e-6f;  // in the root of a query's and a key's length

// log(1 + e^x): max(x, 0) + 2 artanh(y / (2 + y)), y = e^-|x|; relative error below 1e-7.
DIPTYCH_INLINE F32 softplus_lanes(F32 x) {
  const F32 y = exp_lanes(min(x, sub(zero(), x))), s = div(y, add(set1(2.0f), y)), square = mul(s, s);
  F32 p = set1(2.0f / 13.0f);
  for (const float term : {2.0f / 11.0f, 2.0f / 9.0f, 2.0f / 7.0f, 2.0f / 5.0f, 2.0f / 3.0f, 2.0f}) p = fma(p, square, set1(term));
  return fma(p, s, max(x, zero()));
}

static int64_t delta_scratch_floats(const DeltaShape& shape) {
  const int64_t group = shape.n_value_heads / shape.n_key_heads, width = 2 * shape.key_dim + group * shape.value_dim;
  return (kDeltaTile + shape.n_taps) * (width + 48) + kDeltaTile * (2 * group + 1) + 64;
}

// silu of `width` channels from `channel` on, of tokens [begin, begin + n), each a sum over the taps: the oldest input first.
static void sum_taps(const DeltaCall& call, const DeltaTask& task, const float* tail, int64_t tail_stride, int64_t channel, int64_t width,
                     int64_t begin, int64_t n, float* out, int64_t out_stride) {
  const DeltaShape& shape = call.shape;
  const int64_t before = shape.n_taps - 1, channels = shape.channels();
  for (int64_t t = 0; t < n; ++t)
    for (int64_t i = 0; i < width; i += 16) {
      const int64_t lanes = width - i < 16 ? width - i : 16;
      F32 sum = zero();
      for (int64_t tap = 0; tap < shape.n_taps; ++tap) {
        const int64_t at = begin + t + tap - before;
        const float* x = at < 0 ? tail + (at + before) * tail_stride + i : call.qkv + (task.first_row + at) * channels + channel + i;
        sum = fma(load_n(x, lanes), load_n(call.taps + tap * channels + channel + i, lanes), sum);
      }
      store_n(out + t * out_stride + i, silu_lanes(sum), lanes);
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

// beta and decay of a head for n tokens.
static void rates_of(const DeltaCall& call, const DeltaTask& task, int64_t head, int64_t begin, int64_t n, float* beta, float* decay) {
  const int64_t row = call.rates_stride, own = call.first_head + head;
  float given[2][kDeltaTile] = {};
  for (int64_t t = 0; t < n; ++t) {
    const float* rates = call.rates + (task.first_row + begin + t) * row;
    given[0][t] = rates[own], given[1][t] = rates[row / 2 + own];
  }
  for (int64_t t = 0; t < kDeltaTile; t += 16) {
    store(beta + t, div(set1(1.0f), add(set1(1.0f), exp_lanes(sub(zero(), load(given[0] + t))))));
    const F32 rate = softplus_lanes(add(load(given[1] + t), set1(call.shift[head])));
    store(decay + t, exp_lanes(mul(set1(-call.decay[head]), rate)));
  }
}

// G times 16 columns of a head's state, [key_dim][16] each, over n tokens: what each leaves is S^T q of the state behind it, without the decay
// of its own it would wait for. A row that moved on meets the next token's k and q at once, so that a token reads and writes the state once;
// columns beside each other share what is spread of k and q, and hide each other's chains of additions.
template <int64_t G>
static void move_columns(const DeltaShape& shape, const float* q, const float* k, int64_t stride, const float* v, int64_t v_stride,
                         const float* beta, const float* decay, const float* along, int64_t n, int64_t last_lanes, float* state, float* out,
                         int64_t out_stride) {
  const int64_t dk = shape.key_dim;
  F32 of_k[G], of_q[G], news[G];
  for (int64_t g = 0; g < G; ++g) of_k[g] = of_q[g] = zero();
  for (int64_t i = 0; i < dk; ++i) {
    const F32 of_key = set1(k[i]), of_query = set1(q[i]);
    for (int64_t g = 0; g < G; ++g) {
      const F32 s = load(state + (g * dk + i) * 16);
      of_k[g] = fma(s, of_key, of_k[g]);
      of_q[g] = fma(s, of_query, of_q[g]);
    }
  }
  for (int64_t t = 0; t < n; ++t, q += stride, k += stride) {
    const F32 fading = set1(decay[t]);
    for (int64_t g = 0; g < G; ++g) {
      const int64_t lanes = g + 1 == G ? last_lanes : 16;
      news[g] = mul(set1(beta[t]), sub(load_n(v + t * v_stride + g * 16, lanes), mul(fading, of_k[g])));
      store_n(out + t * out_stride + g * 16, fma(news[g], set1(along[t]), mul(fading, of_q[g])), lanes);
      of_k[g] = of_q[g] = zero();
    }
    if (t + 1 == n)
      for (int64_t i = 0; i < dk; ++i)
        for (int64_t g = 0; g < G; ++g) store(state + (g * dk + i) * 16, fma(news[g], set1(k[i]), mul(fading, load(state + (g * dk + i) * 16))));
    else
      for (int64_t i = 0; i < dk; ++i) {
        const F32 key = set1(k[i]), of_key = set1(k[stride + i]), of_query = set1(q[stride + i]);
        F32 s[G];  // all of them read before one is stored: their addresses may be equal in what a processor compares first
        for (int64_t g = 0; g < G; ++g) s[g] = fma(news[g], key, mul(fading, load(state + (g * dk + i) * 16)));
        for (int64_t g = 0; g < G; ++g) {
          store(state + (g * dk + i) * 16, s[g]);
          of_k[g] = fma(s[g], of_key, of_k[g]);
          of_q[g] = fma(s[g], of_query, of_q[g]);
        }
      }
  }
}

// The task's part of a state, from one place to another; from nowhere: zeros.
static void copy_heads(const DeltaShape& shape, int64_t key_head, const float* from, float* to) {
  const int64_t group = shape.n_value_heads / shape.n_key_heads, floats = group * shape.head_floats();
  if (from == to) return;
  to += key_head * floats;
  if (from == nullptr)
    std::memset(to, 0, static_cast<size_t>(floats) * 4);
  else
    std::memcpy(to, from + key_head * floats, static_cast<size_t>(floats) * 4);
}

static void move_state(const DeltaCall& call, const DeltaTask& task, float* scratch) {
  const DeltaShape& shape = call.shape;
  const int64_t dk = shape.key_dim, dv = shape.value_dim, group = shape.n_value_heads / shape.n_key_heads, own = group * dv;
  const int64_t before = shape.n_taps - 1, channels = shape.channels(), width = 2 * dk + own;
  // where the task's channels begin in a row of qkv, and how wide they are
  const int64_t firsts[3] = {task.key_head * dk, (shape.n_key_heads + task.key_head) * dk, 2 * shape.n_key_heads * dk + task.key_head * own};
  const int64_t widths[3] = {dk, dk, own};
  float *tail = scratch, *tile = tail + before * width, *beta = tile + kDeltaTile * width, *decay = beta + kDeltaTile * group,
        *along = decay + kDeltaTile * group;
  for (int64_t row = 0; row < before; ++row)
    for (int64_t part = 0, at = 0; part < 3; at += widths[part], ++part) {
      const size_t bytes = static_cast<size_t>(widths[part]) * 4;
      float* to = tail + row * width + at;
      task.read == nullptr ? static_cast<void>(std::memset(to, 0, bytes))
                           : static_cast<void>(std::memcpy(to, task.read + shape.heads_floats() + row * channels + firsts[part], bytes));
    }
  copy_heads(shape, task.key_head, task.read, task.write);

  // the last inputs before token `end` of the sequence, to a place
  auto leave_tail = [&](int64_t end, float* place) {
    for (int64_t row = 0; row < before; ++row) {
      const int64_t at = end + row - before;
      for (int64_t part = 0, column = 0; part < 3; column += widths[part], ++part) {
        const float* from = at < 0 ? tail + (at + before) * width + column : call.qkv + (task.first_row + at) * channels + firsts[part];
        std::memcpy(place + shape.heads_floats() + row * channels + firsts[part], from, static_cast<size_t>(widths[part]) * 4);
      }
    }
  };

  const DeltaSave* save = task.saves;
  for (int64_t begin = 0; begin < task.n_rows;) {
    int64_t n = task.n_rows - begin < kDeltaTile ? task.n_rows - begin : kDeltaTile;
    if (save != task.saves_end && save->rows - begin < n) n = save->rows - begin;
    for (int64_t part = 0, at = 0; part < 3; at += widths[part], ++part)
      sum_taps(call, task, tail + at, width, firsts[part], widths[part], begin, n, tile + at, width);
    for (int64_t t = 0; t < n; ++t) {
      to_length(tile + t * width, dk, shape.scale);
      to_length(tile + t * width + dk, dk, 1.0f);
      along[t] = dot_row(tile + t * width, tile + t * width + dk, dk);
    }
    for (int64_t i = 0; i < group; ++i) {
      const int64_t head = task.key_head * group + i;
      float *state = task.write + head * shape.head_floats(), *out = call.out + (task.first_row + begin) * call.out_stride + head * dv;
      rates_of(call, task, head, begin, n, beta, decay);
      for (int64_t column = 0; column < dv; column += 32, state += 2 * dk * 16) {
        const int64_t left = dv - column, lanes = left < 32 ? (left - 1) % 16 + 1 : 16;
        (left > 16 ? move_columns<2> : move_columns<1>)(shape, tile, tile + dk, width, tile + 2 * dk + i * dv + column, width, beta, decay, along, n,
                                                         lanes, state, out + column, call.out_stride);
      }
      for (int64_t t = 0; t < n; ++t) rms_norm_row(out + t * call.out_stride, call.norm, dv, shape.norm_eps, out + t * call.out_stride);
    }
    begin += n;
    for (; save != task.saves_end && save->rows == begin; ++save) {
      copy_heads(shape, task.key_head, task.write, save->place);
      leave_tail(begin, save->place);
    }
  }
  leave_tail(task.n_rows, task.write);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych

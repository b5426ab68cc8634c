// Rows of streams beside each other, gates of which only what stands out is left, and curves without a gate.

namespace diptych {
namespace DIPTYCH_ISA {

// Column by column: every row's new value is of all old ones, added in their order.
static void mix_rows(float* const* rows, int64_t n_rows, int64_t n, const float* coefficients) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    F32 old[kMostStreams];
    for (int64_t j = 0; j < n_rows; ++j) old[j] = load_n(rows[j] + i, lanes);
    for (int64_t row = 0; row < n_rows; ++row) {
      F32 sum = old[row];
      for (int64_t j = 0; j < n_rows; ++j) sum = fma(set1(coefficients[row * n_rows + j]), old[j], sum);
      store_n(rows[row] + i, sum, lanes);
    }
  }
}

// Four lane sums, added as a fixed tree, as of squares.
static float row_product(const float* x, const float* y, int64_t n) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int64_t j = 0; j < 4; ++j) sums[j] = fma(load(x + i + 16 * j), load(y + i + 16 * j), sums[j]);
#pragma GCC unroll 4
  for (int64_t j = 0; j < 4; ++j) {  // unrolled, so that the sums are registers
    const int64_t left = n - i - 16 * j, lanes = left < 16 ? left : 16;
    if (left <= 0) break;
    sums[j] = fma(load_n(x + i + 16 * j, lanes), load_n(y + i + 16 * j, lanes), sums[j]);
  }
  return horizontal_sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

static void match_row(const float* y, const float* x, int64_t n, float least, float* out) {
  const float wanted = sum_of_squares(x, n) / static_cast<float>(n), found = sum_of_squares(y, n) / static_cast<float>(n);
  const F32 factor = set1(__builtin_sqrtf(wanted) / __builtin_sqrtf(found > least ? found : least));
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    store_n(out + i, mul(load_n(y + i, lanes), factor), lanes);
  }
}

static void weigh_row(const float* x, const float* weight, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    store_n(out + i, mul(load_n(x + i, lanes), load_n(weight + i, lanes)), lanes);
  }
}

// The mean first, then the squares around it; lanes behind the end count for neither.
static void sparse_gate_row(const float* x, int64_t n, float cutoff, Activation activation, float* out) {
  F32 sum = zero(), squares = zero();
  for (int64_t i = 0; i < n; i += 16) sum = add(sum, load_n(x + i, n - i < 16 ? n - i : 16));
  const float mean = horizontal_sum(sum) / static_cast<float>(n);
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    const F32 away = keep(sub(load_n(x + i, lanes), set1(mean)), zero(), 0, lanes);
    squares = fma(away, away, squares);
  }
  const F32 least = set1(mean + cutoff * __builtin_sqrtf(horizontal_sum(squares) / static_cast<float>(n)));
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    const F32 gate = max(sub(load_n(x + i, lanes), least), zero()), up = load_n(x + n + i, lanes);
    store_n(out + i, mul(activation == Activation::gelu_tanh ? gelu_tanh_lanes(gate) : silu_lanes(gate), up), lanes);
  }
}

static F32 xielu_lanes(F32 x, const float* numbers) {
  const F32 above = max(x, zero()), below = min(x, zero());
  const F32 is_above = min(mul(set1(3e38f), mul(set1(3e38f), above)), set1(1.0f));  // 1 or 0
  const F32 bent = sub(sub(exp_lanes(min(below, set1(numbers[3]))), set1(1.0f)), below);
  const F32 side = fma(mul(above, above), set1(numbers[0]), mul(mul(bent, set1(numbers[1])), sub(set1(1.0f), is_above)));
  return fma(x, set1(numbers[2]), side);
}

static void curve_row(const float* x, int64_t n, Curve curve, const float* numbers, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    F32 value = load_n(x + i, lanes);
    if (curve == Curve::silu) value = silu_lanes(value);
    else if (curve == Curve::gelu_tanh) value = gelu_tanh_lanes(value);
    else if (curve == Curve::gelu) value = gelu_lanes(value);
    else if (curve == Curve::clip) value = min(max(value, set1(-numbers[0])), set1(numbers[0]));
    else if (curve == Curve::xielu) value = xielu_lanes(value, numbers);
    else if (curve == Curve::softplus) value = softplus_lanes(value);
    else value = max(value, zero());
    store_n(out + i, curve == Curve::squared_relu ? mul(value, value) : value, lanes);
  }
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych

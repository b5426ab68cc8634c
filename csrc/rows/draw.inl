// One token from a row of logits by inverse CDF. Written once over simd.h.

namespace diptych {
namespace DIPTYCH_ISA {

// Sums of a row by blocks, so that the drawn token is looked for in one block only.
constexpr int64_t kMostBlocks = 256;

// 2^((x - best) * factor) of the next `lanes` logits, 0 behind them.
DIPTYCH_INLINE F32 weights_of(const float* x, int64_t lanes, F32 best, F32 factor) {
  if (lanes >= 16) return exp2_lanes(mul(sub(load(x), best), factor));
  return keep(exp2_lanes(mul(sub(load_n(x, lanes), best), factor)), zero(), 0, lanes);
}

static void draw_row(const float* x, int64_t n, float temperature, double quantile, Drawn* drawn) {
  Best most;
  find_best(x, n, 0, &most);
  *drawn = {0, most.value, 0.0};
  if (!__builtin_isfinite(most.value)) return;
  const F32 best = set1(most.value), factor = set1(1.44269504088896f / temperature);
  const int64_t block = ((n + kMostBlocks - 1) / kMostBlocks + 31) / 32 * 32;
  double sums[kMostBlocks];
  int64_t blocks = 0;
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = begin + block < n ? begin + block : n;
    F32 parts[2] = {zero(), zero()};
    int64_t i = begin;
    for (; i + 32 <= end; i += 32)
      for (int64_t j = 0; j < 2; ++j) parts[j] = add(parts[j], weights_of(x + i + 16 * j, 16, best, factor));
    for (; i < end; i += 16) parts[0] = add(parts[0], weights_of(x + i, end - i, best, factor));
    sums[blocks] = horizontal_sum(add(parts[0], parts[1]));
    drawn->total += sums[blocks++];
  }

  const double target = quantile * drawn->total;
  double below = 0.0;
  int64_t chosen = most.index / block;
  for (int64_t b = 0; b < blocks; ++b) {
    if (sums[b] > 0.0) chosen = b;  // the last of these where rounding takes the target past the end
    if (below + sums[b] > target) break;
    below += sums[b];
  }
  drawn->index = most.index;
  const int64_t end = (chosen + 1) * block < n ? (chosen + 1) * block : n;
  for (int64_t i = chosen * block; i < end; i += 16) {
    float weights[16];
    to_array(weights_of(x + i, end - i, best, factor), weights);
    for (int64_t lane = 0; lane < 16 && i + lane < end; ++lane) {
      if (weights[lane] > 0.0f) drawn->index = static_cast<int32_t>(i + lane);
      below += weights[lane];
      if (below > target) return;
    }
  }
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych

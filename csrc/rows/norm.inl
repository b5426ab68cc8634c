// Row kernels without structure: norm, add, softcap, embedding row, softmax, largest value. Written once over simd.h.

namespace diptych {
namespace DIPTYCH_ISA {

// Four lane sums, added as a fixed tree: the order depends on n alone.
DIPTYCH_INLINE float sum_of_squares(const float* x, int64_t n) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int64_t j = 0; j < 4; ++j) {
      F32 v = load(x + i + 16 * j);
      sums[j] = fma(v, v, sums[j]);
    }
#pragma GCC unroll 4
  for (int64_t j = 0; j < 4; ++j) {  // unrolled, so that the sums are registers
    const int64_t left = n - i - 16 * j;
    if (left <= 0) break;
    F32 v = load_n(x + i + 16 * j, left < 16 ? left : 16);
    sums[j] = fma(v, v, sums[j]);
  }
  return horizontal_sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

DIPTYCH_INLINE void scale_by_weight(const float* x, const float* weight, int64_t n, float factor, float* out) {
  F32 f = set1(factor);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), f), load(weight + i)));
  if (i < n) store_n(out + i, mul(mul(load_n(x + i, n - i), f), load_n(weight + i, n - i)), n - i);
}

static void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, float* out) {
  float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps);
  scale_by_weight(x, weight, n, factor, out);
}

// The mean first, then the squares around it: one pass would lose what a large mean hides.
static void layer_norm_row(const float* x, const float* weight, const float* bias, int64_t n, float eps, float* out) {
  F32 sum = zero();
  for (int64_t i = 0; i < n; i += 16) sum = add(sum, load_n(x + i, n - i < 16 ? n - i : 16));
  const F32 mean = set1(horizontal_sum(sum) / static_cast<float>(n));
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    store_n(out + i, sub(load_n(x + i, lanes), mean), lanes);
  }
  rms_norm_row(out, weight, n, eps, out);
  if (bias == nullptr) return;
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    store_n(out + i, add(load_n(out + i, lanes), load_n(bias + i, lanes)), lanes);
  }
}

static void add_row(const float* y, int64_t n, float scale, float* x) {
  F32 s = set1(scale);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, fma(load(y + i), s, load(x + i)));
  if (i < n) store_n(x + i, fma(load_n(y + i, n - i), s, load_n(x + i, n - i)), n - i);
}

static void softcap_row(float* x, int64_t n, float softcap) {
  F32 cap = set1(softcap), inverse = set1(1.0f / softcap);
  for (int64_t i = 0; i < n; i += 16) {
    int64_t lanes = n - i < 16 ? n - i : 16;
    store_n(x + i, mul(cap, tanh_lanes(mul(load_n(x + i, lanes), inverse))), lanes);
  }
}

DIPTYCH_INLINE float f16_to_f32(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = h & 0x7fffu, bits;
  float out;
  if (rest >= 0x7c00u) {
    bits = sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
  } else if (rest >= 0x400u) {
    bits = sign | ((rest + 0x1c000u) << 13);
  } else {
    float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -small : small;
  }
  std::memcpy(&out, &bits, 4);
  return out;
}

static void embed_row(const void* row, Source source, int64_t n, float scale, float* out) {
  if (source == Source::bf16) {
    const uint16_t* p = static_cast<const uint16_t*>(row);
    for (int64_t i = 0; i < n; i += 16) {
      int64_t lanes = n - i < 16 ? n - i : 16;
      store_n(out + i, mul(load_bf16_n(p + i, lanes), set1(scale)), lanes);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    float v = source == Source::f16 ? f16_to_f32(static_cast<const uint16_t*>(row)[i]) : static_cast<const float*>(row)[i];
    out[i] = v * scale;
  }
}

static void softmax_row(float* x, int64_t n) {
  F32 most = set1(-__builtin_inff()), sum = zero();
  for (int64_t i = 0; i < n; i += 16) {
    int64_t lanes = n - i < 16 ? n - i : 16;
    most = max(most, keep(load_n(x + i, lanes), most, 0, lanes));
  }
  F32 shift = set1(horizontal_max(most));
  for (int64_t i = 0; i < n; i += 16) {
    int64_t lanes = n - i < 16 ? n - i : 16;
    F32 e = keep(exp_lanes(sub(load_n(x + i, lanes), shift)), zero(), 0, lanes);
    sum = add(sum, e);
    store_n(x + i, e, lanes);
  }
  F32 inverse = set1(1.0f / horizontal_sum(sum));
  for (int64_t i = 0; i < n; i += 16) {
    int64_t lanes = n - i < 16 ? n - i : 16;
    store_n(x + i, mul(load_n(x + i, lanes), inverse), lanes);
  }
}

static void sigmoid_row(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    store_n(x + i, div(set1(1.0f), add(set1(1.0f), exp_lanes(sub(zero(), load_n(x + i, lanes))))), lanes);
  }
}

static void gate_row(const float* x, int64_t n, float scale, const GateForm& form, float* out) {
  const F32 limit = set1(form.limit), bound = set1(form.bound), most = min(limit, bound), least = sub(zero(), most);
  const F32 steepness = set1(form.alpha), factor = set1(scale), shift = set1(form.shift);
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t lanes = n - i < 16 ? n - i : 16;
    const F32 gate = min(mul(load_n(x + i, lanes), factor), limit), up = max(min(mul(load_n(x + n + i, lanes), factor), most), least);
    const F32 slope = add(set1(1.0f), exp_lanes(sub(zero(), mul(steepness, gate))));
    store_n(out + i, mul(min(div(gate, slope), bound), add(up, shift)), lanes);
  }
}

// A block's largest value first; its place is looked for only where that beats all before. NaN beats every number.
static void find_best(const float* x, int64_t n, int64_t first, Best* best) {
  constexpr int64_t kBlock = 2048;
  const float lowest = -__builtin_inff();
  const F32 floor = set1(-1.0f);  // so that no sum is inf - inf
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    F32 most[4] = {set1(lowest), set1(lowest), set1(lowest), set1(lowest)};
    F32 numbers[4] = {zero(), zero(), zero(), zero()};  // NaN once the block held one
    int64_t i = begin;
    for (; i + 64 <= end; i += 64)
      for (int64_t j = 0; j < 4; ++j) {
        const F32 values = load(x + i + 16 * j);
        most[j] = max(values, most[j]);  // max(NaN, y) is y
        numbers[j] = add(numbers[j], max(floor, values));
      }
    Best block{horizontal_max(max(max(most[0], most[1]), max(most[2], most[3])))};
    float sum = horizontal_sum(add(add(numbers[0], numbers[1]), add(numbers[2], numbers[3])));
    for (; i < end; ++i) {
      if (x[i] > block.value) block.value = x[i];
      if (x[i] != x[i]) sum = x[i];
    }
    if (sum != sum) block.value = sum;
    block.index = static_cast<int32_t>(first + begin);
    if (!block.is_before(*best)) continue;
    for (i = begin; i < end && x[i] != block.value && x[i] == x[i];) ++i;
    block.index = static_cast<int32_t>(first + i);
    *best = block;
  }
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych

// Everything of a set but its tiles, in portable C++: the scalar set's own text, and the AVX2 set's, whose flags turn the loops
// into its registers. Included inside the anonymous namespace, after lanes.inl.

inline float from_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline uint16_t to_bf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((word >> 16) | 0x40);
  return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline float from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  uint32_t word;
  if (exponent == 31) {
    word = sign | 0x7f800000 | (static_cast<uint32_t>(mantissa) << 13);
  } else if (exponent != 0) {
    word = sign | (static_cast<uint32_t>(exponent + 112) << 23) | (static_cast<uint32_t>(mantissa) << 13);
  } else {
    const float value = std::ldexp(static_cast<float>(mantissa), -24);
    std::memcpy(&word, &value, 4);
    word |= sign;
  }
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// ---- finish ------------------------------------------------------------------------------------------------------

// 2^t to 3e-7 relative, t held to [-126, 126]; n joins the exponent bits.
inline Lanes exp2_lanes(Lanes t) {
  t = lower(higher(t, fill(-126.0f)), fill(126.0f));
  const Lanes room = fill(12582912.0f), n = (t + room) - room, f = t - n;
  Lanes p = fill(1.3264733e-3f);
  p = p * f + 9.6715130e-3f;
  p = p * f + 5.5507336e-2f;
  p = p * f + 2.4022242e-1f;
  p = p * f + 6.9314700e-1f;
  p = p * f + 1.0f;
  return (Lanes)((Whole)p + (__builtin_convertvector(n, Whole) << 23));
}

// act(gate): activations are x / (1 + 2^-t), t = log2(e) x (silu, of sigmoid 1 above) or 2 log2(e) u with tanh's argument u (gelu).
inline Lanes activate(Activation activation, Lanes x) {
  Lanes t = x * -1.44269504f;
  if (activation == Activation::gelu_tanh) t = x * -2.3022082f * (x * x * 0.044715f + 1.0f);
  if (activation == Activation::sigmoid) x = fill(1.0f);
  return x / (exp2_lanes(t) + 1.0f);
}

// By the rule of to_bf16: both words are made, then one is chosen.
inline void store_bf16(Lanes values, uint16_t* out) {
  const Bits word = (Bits)values, quiet = word >> 16 | 0x40, rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
  const Bits is_nan = (Bits)((word & 0x7fffffff) > 0x7f800000);
  const Halves halves = __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), Halves);
  std::memcpy(out, &halves, sizeof halves);
}

// `count` of a piece's lanes, from output `output` on.
template <Store kStore>
inline __attribute__((always_inline)) void put(const FinishArgs& args, int64_t row, int64_t output, Lanes lanes, int64_t count) {
  if (kStore == Store::gate_f32) lanes = activate(args.activation, lanes);
  if (kStore == Store::bf16 && count == kLaneCount) return store_bf16(lanes, static_cast<uint16_t*>(args.out[row]) + output);
  float y[kLaneCount];
  std::memcpy(y, &lanes, sizeof y);
  float* out = static_cast<float*>(args.out[row]) + output;
  uint16_t* bits = static_cast<uint16_t*>(args.out[row]) + output;
  const float weight = kStore == Store::add_f32 ? args.row_weights[row] : 1.0f;
  for (int64_t i = 0; i < count; ++i) {
    if (kStore == Store::bf16) bits[i] = to_bf16(y[i]);
    else if (kStore == Store::f32) out[i] = y[i];
    else if (kStore == Store::gate_f32) out[i] *= y[i];
    else out[i] = std::fma(weight, y[i], out[i]);
  }
}

// Scaled sums plus bias of one row, from lane `lane` of the tile on.
template <bool kWholeSums>
inline __attribute__((always_inline)) Lanes scaled(const FinishArgs& args, int64_t row, int64_t lane, const float* lane_scales, float row_scale) {
  const Bits* at = reinterpret_cast<const Bits*>(static_cast<const float*>(args.acc) + row * kPanelLanes + lane);
  Lanes y;
  if (kWholeSums) {
    y = __builtin_convertvector((Whole)*at - 128 * *args.row_sums[row], Lanes) * (row_scale * *reinterpret_cast<const Lanes*>(lane_scales + lane));
  } else {
    y = (Lanes)*at * row_scale;
    if (lane_scales != nullptr) y = y * *reinterpret_cast<const Lanes*>(lane_scales + lane);
  }
  return args.bias == nullptr ? y : y + *reinterpret_cast<const Lanes*>(args.bias + row * args.bias_stride + lane);
}

template <bool kWholeSums, Store kStore>
void finish_as(const FinishArgs& args) {
  const PackedLinear& w = *args.w;
  const bool gated = w.shape.gated, has_row_scales = kWholeSums || is_grouped(w.shape.format);
  const float* lane_scales = kWholeSums || has_lane_scales(w.shape.format) ? w.scales + args.first_lane : nullptr;
  for (int64_t row = 0; row < args.rows; ++row) {
    const float row_scale = has_row_scales ? *args.row_scales[row] : 1.0f;
    for (int64_t strip = 0; strip < args.lanes; strip += gated ? 2 * kStripLanes : kStripLanes)
      for (int64_t lane = strip; lane < strip + kStripLanes; lane += kLaneCount) {
        Lanes y = scaled<kWholeSums>(args, row, lane, lane_scales, row_scale);
        if (gated) y = activate(args.activation, y) * scaled<kWholeSums>(args, row, lane + kStripLanes, lane_scales, row_scale);
        const int64_t output = gated ? lane - strip / 2 : lane, left = args.outputs - output;
        left >= kLaneCount ? put<kStore>(args, row, output, y, kLaneCount) : put<kStore>(args, row, output, y, left);
      }
  }
}

template <bool kWholeSums>
inline void finish_sums(const FinishArgs& args) {
  switch (args.store) {
    case Store::bf16: return finish_as<kWholeSums, Store::bf16>(args);
    case Store::f32: return finish_as<kWholeSums, Store::f32>(args);
    case Store::gate_f32: return finish_as<kWholeSums, Store::gate_f32>(args);
    case Store::add_f32: return finish_as<kWholeSums, Store::add_f32>(args);
  }
}

inline void finish(const FinishArgs& args) { has_whole_sums(args.w->shape.format) ? finish_sums<true>(args) : finish_sums<false>(args); }

// ---- activations and packing -------------------------------------------------------------------------------------

inline void transpose_words(const uint32_t* words, int64_t stride, int64_t n_words, uint8_t* out) {
  uint32_t* to = reinterpret_cast<uint32_t*>(out);
  for (int64_t word = 0; word < n_words; ++word)
    for (int64_t lane = 0; lane < kStripLanes; ++lane) to[word * kStripLanes + lane] = words[lane * stride + word];
}

inline void load_inputs(const void* row, Source source, int64_t begin, int64_t count, float* out) {
  if (source == Source::f32) {
    std::memcpy(out, static_cast<const float*>(row) + begin, sizeof(float) * count);
    return;
  }
  const uint16_t* bits = static_cast<const uint16_t*>(row) + begin;
  if (source == Source::bf16) {
    for (int64_t i = 0; i < count; ++i) out[i] = from_bf16(bits[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = from_f16(bits[i]);
  }
}

inline void round_inputs(const float* x, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_bf16(x[i]);
}

// Magnitudes compare like the integers of their bits.
inline float abs_max(const float* x, int64_t count) {
  uint32_t highest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    highest = bits > highest ? bits : highest;
  }
  float value;
  std::memcpy(&value, &highest, 4);
  return value;
}

inline void quantize_int8(const float* x, int64_t count, float inverse_scale, int8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float level = (x[i] * inverse_scale + 12582912.0f) - 12582912.0f;  // to nearest, ties to even
    out[i] = static_cast<int8_t>(static_cast<int32_t>(level));
  }
}

inline int32_t sum_int8(const int8_t* x, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  return sum;
}

inline void sum_groups(const int8_t* x, int64_t group, int64_t groups, int32_t* sums) {
  for (int64_t g = 0; g < groups; ++g) sums[g] = sum_int8(x + g * group, group);
}

inline void quantize_row(const void* x, Source source, int64_t count, int8_t* out, float* scale, int32_t* sum) {
  constexpr int64_t kChunk = 128;
  float chunk[kChunk], highest = 0.0f;
  auto load = [&](int64_t i) {
    const int64_t present = count - i < kChunk ? count - i : kChunk;
    load_inputs(x, source, i, present, chunk);
    return present;
  };
  for (int64_t i = 0; i < count; i += kChunk) {
    const float most = abs_max(chunk, load(i));
    highest = most > highest ? most : highest;
  }
  const float inverse = steps_per_unit(highest, 127.0f);
  const int64_t padded = round_up(count, kMaxGroup);
  std::memset(out + count, 0, padded - count);
  for (int64_t i = 0; i < count; i += kChunk) quantize_int8(chunk, load(i), inverse, out + i);
  *scale = highest / 127.0f;
  *sum = sum_int8(out, padded);
}

// One multiplication serves the four nibbles of a word: 15 * unit + zero fits a byte.
inline void expand_int4(const uint8_t* strip, int64_t group, int64_t first, int64_t count, uint8_t* out) {
  for (int64_t g = first; g < first + count; ++g, out += group / 4 * kStepBytes)
    for (int64_t lane = 0; lane < kStripLanes; lane += kLaneCount) {
      const Bits grid = __builtin_convertvector(*reinterpret_cast<const Halves*>(strip + head_of_group(group, g) + 2 * lane), Bits);
      const Bits unit = grid & 255u, zero = (grid >> 8) * 0x01010101u;
      const uint8_t* words = strip + steps_of_group(group, g) + 4 * lane;
      uint8_t* to = out + 4 * lane;
      for (int64_t step = 0; step < group / 8; ++step, words += kStepBytes, to += 2 * kStepBytes) {
        const Bits both = *reinterpret_cast<const Bits*>(words);
        *reinterpret_cast<Bits*>(to) = (both & 0x0f0f0f0fu) * unit + zero;
        *reinterpret_cast<Bits*>(to + kStepBytes) = ((both >> 4) & 0x0f0f0f0fu) * unit + zero;
      }
    }
}

#include "quantize_int4.inl"

template <LoadInputs kLoad, AbsMax kMost, QuantizeInt8 kQuantize>
inline void quantize_groups(const void* x, Source source, int64_t count, int64_t group, int8_t* out, int8_t* low, float* scale, float* powers,
                     int32_t* sums) {
  float values[kMaxGroup], most = 0.0f;
  const float top = low == nullptr ? 127.0f : kMostWide;
  const int64_t groups = round_up(count, kMaxGroup) / group;
  auto load = [&](int64_t g) {
    const int64_t left = count - g * group, present = left < 0 ? 0 : left < group ? left : group;
    if (present > 0) kLoad(x, source, g * group, present, values);
    std::memset(values + present, 0, sizeof(float) * static_cast<size_t>(group - present));
  };
  for (int64_t g = 0; g < groups; ++g) {
    load(g);
    powers[g] = kMost(values, group);
    most = powers[g] > most ? powers[g] : most;
  }
  for (int64_t g = 0; g < groups; ++g, out += group) {
    load(g);
    powers[g] = power_of_group(most, powers[g]);
    const float inverse = steps_per_unit(most * powers[g], top);
    int32_t sum = 0;
    if (low == nullptr) {
      kQuantize(values, group, inverse, out);
      for (int64_t i = 0; i < group; ++i) sum += out[i];
    } else {
      for (int64_t i = 0; i < group; ++i) {
        const int32_t q = static_cast<int32_t>((values[i] * inverse + 12582912.0f) - 12582912.0f);  // to nearest, ties to even
        out[i] = static_cast<int8_t>((q + 64) >> kLowBits);
        *low++ = static_cast<int8_t>(q - out[i] * 128);
        sum += q;
      }
    }
    sums[g] = sum;
  }
  *scale = most / top;
}

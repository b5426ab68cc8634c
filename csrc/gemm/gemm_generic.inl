// Everything of a set but its tiles, in portable C++: the scalar set's own text, and the AVX2 set's, whose flags turn the loops
// into its registers. Included inside the anonymous namespace, after lanes.inl.

inline float from_bits(uint32_t word) {
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
inline float from_bf16(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

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

// ---- moves ---------------------------------------------------------------------------------------------------------

// Numbers that lie together, fp32 or bf16.
inline Lanes load_lanes(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

// bf16 and f16; whole numbers below 2^16 as halves; the lowest bytes of four pieces side by side. Compilers take lanes apart for them.
constexpr int64_t kBlockLanes = 4 * kLaneCount;
#if defined(__AVX2__)
inline Lanes load_lanes(const uint16_t* x) {
  return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16);
}
inline Lanes load_f16(const uint16_t* x) { return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
inline Halves narrow(Bits words) {
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)words), _mm256_extracti128_si256((__m256i)words, 1));
}
inline void store_bytes(const Bits (&words)[4], int8_t* out) {
  const __m256i low = _mm256_packus_epi32((__m256i)(words[0] & 255u), (__m256i)(words[1] & 255u));
  const __m256i high = _mm256_packus_epi32((__m256i)(words[2] & 255u), (__m256i)(words[3] & 255u));
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
}
#elif defined(__aarch64__)
inline Lanes load_lanes(const uint16_t* x) { return (Lanes)vshll_n_u16(vld1_u16(x), 16); }
inline Lanes load_f16(const uint16_t* x) { return (Lanes)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
inline Halves narrow(Bits words) { return (Halves)vmovn_u32((uint32x4_t)words); }
inline void store_bytes(const Bits (&words)[4], int8_t* out) {
  const uint16x8_t low = vcombine_u16(vmovn_u32((uint32x4_t)words[0]), vmovn_u32((uint32x4_t)words[1]));
  const uint16x8_t high = vcombine_u16(vmovn_u32((uint32x4_t)words[2]), vmovn_u32((uint32x4_t)words[3]));
  vst1q_s8(out, vreinterpretq_s8_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high))));
}
#else
#if defined(__SSE2__)
inline Lanes load_lanes(const uint16_t* x) {
  return (Lanes)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
}
inline void store_bytes(const Bits (&words)[4], int8_t* out) {
  const __m128i low = _mm_packs_epi32((__m128i)(words[0] & 255u), (__m128i)(words[1] & 255u));
  const __m128i high = _mm_packs_epi32((__m128i)(words[2] & 255u), (__m128i)(words[3] & 255u));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(low, high));
}
#else
inline Lanes load_lanes(const uint16_t* x) {
  Halves halves;
  std::memcpy(&halves, x, sizeof halves);
  return (Lanes)(__builtin_convertvector(halves, Bits) << 16);
}
inline void store_bytes(const Bits (&words)[4], int8_t* out) {
  for (int64_t i = 0; i < kBlockLanes; ++i) out[i] = static_cast<int8_t>(words[i / kLaneCount][i % kLaneCount] & 255u);
}
#endif
inline Lanes load_f16(const uint16_t* x) {
  Lanes lanes;
  for (int lane = 0; lane < kLaneCount; ++lane) lanes[lane] = from_f16(x[lane]);
  return lanes;
}
inline Halves narrow(Bits words) { return __builtin_convertvector(words, Halves); }
#endif

// ---- finish ------------------------------------------------------------------------------------------------------

// Some pieces side by side: one waits for itself at every operation, and a processor looks only so far ahead.
#define DIPTYCH_EACH _Pragma("GCC unroll 4") for (int i = 0; i < kCount; ++i)

// 2^t to 3e-7 relative, t held to [-126, 126]; the whole number joins the exponent bits.
template <int kCount>
inline void exp2_lanes(Lanes (&t)[kCount]) {
  const Lanes room = fill(12582912.0f);
  Lanes whole[kCount], p[kCount];
  DIPTYCH_EACH t[i] = lower(higher(t[i], fill(-126.0f)), fill(126.0f));
  DIPTYCH_EACH whole[i] = t[i] + room;  // its lowest bits are the nearest whole number's
  DIPTYCH_EACH t[i] = t[i] - (whole[i] - room);
  DIPTYCH_EACH p[i] = t[i] * 1.3264733e-3f + 9.6715130e-3f;
  DIPTYCH_EACH p[i] = p[i] * t[i] + 5.5507336e-2f;
  DIPTYCH_EACH p[i] = p[i] * t[i] + 2.4022242e-1f;
  DIPTYCH_EACH p[i] = p[i] * t[i] + 6.9314700e-1f;
  DIPTYCH_EACH p[i] = p[i] * t[i] + 1.0f;
  DIPTYCH_EACH t[i] = (Lanes)((Bits)p[i] + ((Bits)whole[i] << 23));
}

// act(gate): activations are x / (1 + 2^-t), t = log2(e) x (silu, of sigmoid 1 above) or 2 log2(e) u with tanh's argument u (gelu).
template <int kCount>
inline void activate(Activation activation, Lanes (&x)[kCount]) {
  Lanes t[kCount];
  if (activation == Activation::gelu_tanh) DIPTYCH_EACH t[i] = x[i] * -2.3022082f * (x[i] * x[i] * 0.044715f + 1.0f);
  else DIPTYCH_EACH t[i] = x[i] * -1.44269504f;
  exp2_lanes(t);
  DIPTYCH_EACH x[i] = (activation == Activation::sigmoid ? fill(1.0f) : x[i]) / (t[i] + 1.0f);
}

// By the rule of to_bf16: both words are made, then one is chosen.
inline void store_bf16(Lanes values, uint16_t* out) {
  const Bits word = (Bits)values, high = word >> 16, rounded = (word + 0x7fff + (high & 1)) >> 16;
  const Whole is_nan = (Whole)(word & 0x7fffffff) > 0x7f800000;
  const Halves halves = narrow(is_nan ? high | 0x40 : rounded);
  std::memcpy(out, &halves, sizeof halves);
}

// Pieces of a row to where its outputs go.
template <Store kStore, int kCount>
inline __attribute__((always_inline)) void put(Activation activation, float weight, Lanes (&y)[kCount], void* to) {
  if constexpr (kStore == Store::bf16) {
    DIPTYCH_EACH store_bf16(y[i], static_cast<uint16_t*>(to) + i * kLaneCount);
  } else {
    float* out = static_cast<float*>(to);
    if constexpr (kStore == Store::gate_f32) activate(activation, y);
    if constexpr (kStore == Store::gate_f32) DIPTYCH_EACH y[i] = y[i] * load_lanes(out + i * kLaneCount);
    if constexpr (kStore == Store::add_f32) DIPTYCH_EACH y[i] = fused(fill(weight), y[i], load_lanes(out + i * kLaneCount));
    std::memcpy(out, y, sizeof y);
  }
}

// The first `count` of the lanes.
template <Store kStore>
void put_some(Activation activation, float weight, Lanes (&y)[1], int64_t count, void* to) {
  uint8_t piece[sizeof y] = {};
  const size_t bytes = static_cast<size_t>(count) * (kStore == Store::bf16 ? 2 : 4);
  std::memcpy(piece, to, bytes);
  put<kStore>(activation, weight, y, piece);
  std::memcpy(to, piece, bytes);
}

// Sums of a row from an address on, scaled, plus bias.
template <bool kWholeSums>
inline __attribute__((always_inline)) Lanes scaled(const void* sums, int32_t lacking, float row_scale, const float* lane_scales, const float* bias) {
  Lanes y;
  if constexpr (kWholeSums) {
    y = __builtin_convertvector(*static_cast<const Whole*>(sums) - lacking, Lanes) * (row_scale * *reinterpret_cast<const Lanes*>(lane_scales));
  } else {
    y = *static_cast<const Lanes*>(sums) * row_scale;
    if (lane_scales != nullptr) y = y * *reinterpret_cast<const Lanes*>(lane_scales);
  }
  return bias == nullptr ? y : y + *reinterpret_cast<const Lanes*>(bias);
}

template <bool kWholeSums, bool kGated, Store kStore>
void finish_as(const FinishArgs& args) {
  constexpr int64_t kOutputBytes = kStore == Store::bf16 ? 2 : 4;
  const PackedLinear& w = *args.w;
  const bool has_row_scales = kWholeSums || is_grouped(w.shape.format);
  const float* lane_scales = kWholeSums || has_lane_scales(w.shape.format) ? w.scales + args.first_lane : nullptr;
  const Activation activation = args.activation;
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t from = args.x_rows != nullptr ? args.x_rows[row] : row;
    const float row_scale = has_row_scales ? args.row_scales[from] : 1.0f, weight = args.row_weights != nullptr ? args.row_weights[row] : 1.0f;
    const int32_t lacking = kWholeSums ? 128 * args.row_sums[from] : 0;
    const float* sums = static_cast<const float*>(args.acc) + row * kPanelLanes;
    const float* bias = args.bias == nullptr ? nullptr : args.bias + row * args.bias_stride;
    uint8_t* to = args.out + (args.out_rows != nullptr ? args.out_rows[row] : row) * args.out_stride;
    const auto make = [&](int64_t output, auto& y) __attribute__((always_inline)) {
      constexpr int kCount = static_cast<int>(sizeof y / sizeof(Lanes));
      const auto of = [](const float* lanes, int64_t lane) { return lanes == nullptr ? nullptr : lanes + lane; };
      const auto at = [&](int64_t lane) __attribute__((always_inline)) {
        return scaled<kWholeSums>(sums + lane, lacking, row_scale, of(lane_scales, lane), of(bias, lane));
      };
      const auto lane_of = [&](int64_t i) { return kGated ? i + i / kStripLanes * kStripLanes : i; };
      DIPTYCH_EACH y[i] = at(lane_of(output + i * kLaneCount));
      if constexpr (kGated) activate(activation, y);
      if constexpr (kGated) DIPTYCH_EACH y[i] = y[i] * at(lane_of(output + i * kLaneCount) + kStripLanes);
    };
    int64_t output = 0;
    for (Lanes y[4]; output + kBlockLanes <= args.outputs; output += kBlockLanes) {
      make(output, y);
      put<kStore>(activation, weight, y, to + output * kOutputBytes);
    }
    for (Lanes y[1]; output < args.outputs; output += kLaneCount) {
      make(output, y);
      const int64_t left = args.outputs - output;
      uint8_t* at = to + output * kOutputBytes;
      left >= kLaneCount ? put<kStore>(activation, weight, y, at) : put_some<kStore>(activation, weight, y, left, at);
    }
  }
}

template <bool kWholeSums, bool kGated>
inline void finish_sums(const FinishArgs& args) {
  switch (args.store) {
    case Store::bf16: return finish_as<kWholeSums, kGated, Store::bf16>(args);
    case Store::f32: return finish_as<kWholeSums, kGated, Store::f32>(args);
    case Store::gate_f32: return finish_as<kWholeSums, kGated, Store::gate_f32>(args);
    case Store::add_f32: return finish_as<kWholeSums, kGated, Store::add_f32>(args);
  }
}

inline void finish(const FinishArgs& args) {
  const bool gated = args.w->shape.gated;
  if (has_whole_sums(args.w->shape.format)) return gated ? finish_sums<true, true>(args) : finish_sums<true, false>(args);
  gated ? finish_sums<false, true>(args) : finish_sums<false, false>(args);
}
#undef DIPTYCH_EACH

// ---- activations and packing -------------------------------------------------------------------------------------

inline void transpose_words(const uint32_t* words, int64_t stride, int64_t n_words, uint8_t* out) {
  uint32_t* to = reinterpret_cast<uint32_t*>(out);
  for (int64_t word = 0; word < n_words; ++word)
    for (int64_t lane = 0; lane < kStripLanes; ++lane) to[word * kStripLanes + lane] = words[lane * stride + word];
}

// What of x [count] fills no whole piece, and zeros behind it.
template <int64_t kLanes, typename Value>
struct Rest {
  Value values[kLanes] = {};
  Rest(const Value* x, int64_t count) { std::memcpy(values, x + count / kLanes * kLanes, sizeof(Value) * static_cast<size_t>(count % kLanes)); }
};

template <typename Load>
inline void widen_inputs(const uint16_t* x, int64_t count, float* out, const Load& load) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kLaneCount <= count; i += kLaneCount) {
    const Lanes lanes = load(x + i);
    std::memcpy(out + i, &lanes, sizeof lanes);
  }
  if (i == count) return;
  const Lanes lanes = load(Rest<kLaneCount, uint16_t>(x, count).values);
  std::memcpy(out + i, &lanes, sizeof(float) * static_cast<size_t>(count - i));
}

inline void load_inputs(const void* row, Source source, int64_t begin, int64_t count, float* out) {
  if (source == Source::f32) {
    std::memcpy(out, static_cast<const float*>(row) + begin, sizeof(float) * count);
    return;
  }
  const uint16_t* bits = static_cast<const uint16_t*>(row) + begin;
  if (source == Source::bf16) return widen_inputs(bits, count, out, [](const uint16_t* at) { return load_lanes(at); });
  widen_inputs(bits, count, out, load_f16);
}

inline void round_inputs(const float* x, int64_t count, uint16_t* out) {
  int64_t i = 0;
  for (; i + kLaneCount <= count; i += kLaneCount) store_bf16(load_lanes(x + i), out + i);
  for (; i < count; ++i) out[i] = to_bf16(x[i]);
}

// Magnitudes compare as whole numbers: then infinity is above all others, and what is no number above that. As floats it would be lost, and a
// row that holds one would answer as if it were plain.
inline Whole magnitude(Lanes x) { return (Whole)((Bits)x & 0x7fffffffu); }
#if defined(__AVX2__)
inline Whole higher_whole(Whole a, Whole b) { return (Whole)_mm256_max_epi32((__m256i)a, (__m256i)b); }
#else
inline Whole higher_whole(Whole a, Whole b) { return a > b ? a : b; }
#endif

// Of magnitudes.
inline float highest_of(Whole x) {
#if defined(__AVX2__)
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  four = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(four, _mm_shuffle_epi32(four, 1))));
#else
  int32_t highest = 0;
  for (int lane = 0; lane < kLaneCount; ++lane) highest = x[lane] > highest ? x[lane] : highest;
  float value;
  std::memcpy(&value, &highest, sizeof(value));
  return value;
#endif
}

// NaN where one is.
template <typename Value>
inline float largest_of(const Value* x, int64_t count) {
  Whole even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * kLaneCount <= count; i += 2 * kLaneCount) {
    even = higher_whole(magnitude(load_lanes(x + i)), even);
    odd = higher_whole(magnitude(load_lanes(x + i + kLaneCount)), odd);
  }
  if (i + kLaneCount <= count) even = higher_whole(magnitude(load_lanes(x + i)), even);
  if (count % kLaneCount != 0) odd = higher_whole(magnitude(load_lanes(Rest<kLaneCount, Value>(x, count).values)), odd);
  return highest_of(higher_whole(even, odd));
}

inline float abs_max(const float* x, int64_t count) { return largest_of(x, count); }

// To nearest, ties to even: where the sum leaves no room for a fraction, its lowest byte is the whole number's.
inline Bits levels_of(Lanes x, float inverse) { return (Bits)(x * inverse + 12582912.0f); }

template <typename Value>
inline void quantize_block(const Value* x, float inverse, int8_t* out) {
  Bits levels[4];
  for (int piece = 0; piece < 4; ++piece) levels[piece] = levels_of(load_lanes(x + piece * kLaneCount), inverse);
  store_bytes(levels, out);
}

// What fills no block behind the others, and zeros to the block's end.
template <typename Value>
inline void quantize_values(const Value* x, int64_t count, float inverse, int8_t* out, int8_t* last) {
  for (int64_t i = 0; i + kBlockLanes <= count; i += kBlockLanes) quantize_block(x + i, inverse, out + i);
  if (count % kBlockLanes != 0) quantize_block(Rest<kBlockLanes, Value>(x, count).values, inverse, last);
}

inline void quantize_int8(const float* x, int64_t count, float inverse_scale, int8_t* out) {
  int8_t last[kBlockLanes];
  quantize_values(x, count, inverse_scale, out, last);
  const int64_t rest = count % kBlockLanes;
  std::memcpy(out + count - rest, last, static_cast<size_t>(rest));
}

inline int32_t sum_int8(const int8_t* x, int64_t count) {
  int32_t sum = 0;
  int64_t i = 0;
#if defined(__AVX2__)
  __m256i sums = _mm256_setzero_si256();
  const auto take = [&](__m256i bytes) {
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1)));
  };
  for (; i + 32 <= count; i += 32) take(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)));
  if (i + 16 <= count) take(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)))), i += 16;
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  sum = _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 1)));
#endif
  for (; i < count; ++i) sum += x[i];
  return sum;
}

inline void sum_groups(const int8_t* x, int64_t group, int64_t groups, int16_t* sums) {
  for (int64_t g = 0; g < groups; ++g) sums[g] = static_cast<int16_t>(sum_int8(x + g * group, group));
}

template <typename Value>
inline void quantize_row_of(const Value* x, int64_t count, int8_t* out, float* scale, int32_t* sum) {
  const float highest = largest_of(x, count);
  const int64_t padded = round_up(count, kMaxGroup), done = round_up(count, kBlockLanes);
  quantize_values(x, count, steps_per_unit(highest, 127.0f), out, out + count / kBlockLanes * kBlockLanes);
  if (done < padded) std::memset(out + done, 0, static_cast<size_t>(padded - done));
  *scale = highest / 127.0f;
  *sum = sum_int8(out, padded);
}

inline void quantize_row(const void* x, Source source, int64_t count, int8_t* out, float* scale, int32_t* sum) {
  if (source == Source::bf16) return quantize_row_of(static_cast<const uint16_t*>(x), count, out, scale, sum);
  quantize_row_of(static_cast<const float*>(x), count, out, scale, sum);
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

#include "gemm/quantize_int4.inl"

// Rows describes what is made; kMaxGroup inputs at a time.
template <bool kWide, typename Value>
inline void quantize_groups_of(const Value* x, int64_t count, int64_t group, int8_t* out, int8_t* low, float* scale, float* powers, int32_t* sums) {
  const Rest<kMaxGroup, Value> rest(x, count);
  const int64_t chunks = (count + kMaxGroup - 1) / kMaxGroup, groups = kMaxGroup / group;
  const auto chunk_of = [&](int64_t i) { return (i + 1) * kMaxGroup <= count ? x + i * kMaxGroup : rest.values; };
  float most = 0.0f;
  for (int64_t chunk = 0, all = 0; chunk < chunks; ++chunk)
    for (const Value *from = chunk_of(chunk), *end = from + kMaxGroup; from < end; from += group, ++all) {
      powers[all] = largest_of(from, group);
      most = higher_magnitude(powers[all], most);
    }
  const float top = kWide ? kMostWide : 127.0f;
  *scale = most / top;
  for (int64_t chunk = 0; chunk < chunks; ++chunk, out += kMaxGroup, powers += groups, sums += groups) {
    const Value* from = chunk_of(chunk);
    float inverses[kMaxGroup / kLaneCount];  // of each piece
    for (int64_t g = 0, piece = 0; g < groups; ++g) {
      powers[g] = power_of_group(most, powers[g]);
      const float inverse = steps_per_unit(most * powers[g], top);
      for (int64_t i = 0; i < group; i += kLaneCount) inverses[piece++] = inverse;
    }
    for (int64_t at = 0; at < kMaxGroup; at += kBlockLanes) {
      Bits levels[4], highs[4];
      for (int i = 0; i < 4; ++i) {
        levels[i] = levels_of(load_lanes(from + at + i * kLaneCount), inverses[at / kLaneCount + i]);
        highs[i] = (Bits)(((Whole)levels[i] + 64) >> kLowBits);
        if (kWide) levels[i] = levels[i] - (highs[i] << kLowBits);
      }
      store_bytes(kWide ? highs : levels, out + at);
      if (kWide) store_bytes(levels, low + at);
    }
    for (int64_t g = 0; g < groups; ++g) sums[g] = sum_int8(out + g * group, group);
    if (!kWide) continue;
    for (int64_t g = 0; g < groups; ++g) sums[g] = sums[g] * (1 << kLowBits) + sum_int8(low + g * group, group);
    low += kMaxGroup;
  }
}

inline void quantize_groups(const void* x, Source source, int64_t count, int64_t group, int8_t* out, int8_t* low, float* scale, float* powers,
                            int32_t* sums) {
  const auto run = [&](const auto* values) {
    low == nullptr ? quantize_groups_of<false>(values, count, group, out, low, scale, powers, sums)
                   : quantize_groups_of<true>(values, count, group, out, low, scale, powers, sums);
  };
  source == Source::bf16 ? run(static_cast<const uint16_t*>(x)) : run(static_cast<const float*>(x));
}

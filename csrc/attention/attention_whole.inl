// A cache of int8 met by whole numbers: a query behind one scale, a row's weights of a tile behind another, so that products are whole sums.
// Of 16 bits they are finer than bf16. Of 8, where the caller asks (AttentionShape::in_bytes), a query has 127 levels and weights 254, and
// what rounding takes from a weight the next but one of its lane gets: products of bytes are half as many.

#if defined(DIPTYCH_WHOLE)
constexpr bool kMeetsWhole = true;  // whatever is asked for
DIPTYCH_INLINE void store_whole(uint16_t* out, F32 x) { store_i16(out, x); }
#else
constexpr bool kMeetsWhole = false;  // sums of bf16 numbers that are whole, and below 2^24 as these are, are exact, too
DIPTYCH_INLINE void store_whole(uint16_t* out, F32 x) { store_bf16(out, x); }
#endif
#if defined(DIPTYCH_QUADS)
DIPTYCH_INLINE void store_whole(uint8_t* out, F32 x) { store_u8(out, x); }
#endif
constexpr float kByteLevels = 127.0f, kWeightByteLevels = 254.0f;  // 255 and what was carried would be 256

DIPTYCH_INLINE bool is_whole(const AttentionCall& call) {
  return call.kv.shape.format == KvFormat::int8 && (kMeetsWhole || call.shape.in_bytes);
}
// Whether queries and weights lie as bytes, too.
DIPTYCH_INLINE bool is_quads(const AttentionCall& call) {
#if defined(DIPTYCH_QUADS)
  return is_whole(call) && call.shape.in_bytes && call.kv.shape.has_values && call.shape.head_dim >= 8;  // or a row would be longer than one of pairs
#else
  (void)call;
  return false;
#endif
}
DIPTYCH_INLINE float weight_levels(const AttentionShape& shape) { return shape.in_bytes ? kWeightByteLevels : kWeightLevels; }

// A query of bytes: minus 128 times its sum, as keys are met as bytes without a sign, and the numbers in fours.
DIPTYCH_INLINE int64_t quad_stride(int64_t d) { return 4 + (d + 3) / 4 * 4; }

// A query of bf16 as whole numbers whose products with any bytes fit 32 bits; returns its scale: of zeros any but zero, by which what is hidden
// from it would be no number.
DIPTYCH_INLINE float whole_query(const uint16_t* x, int64_t d, bool in_bytes, int64_t stride, uint16_t* out) {
  const float levels = in_bytes ? kByteLevels : d <= 512 ? 32767.0f : 16383.0f;
  F32 most = zero();
  for (int64_t i = 0; i < d; i += 16) {
    const F32 y = load_bf16_n(x + i, d - i < 16 ? d - i : 16);
    most = max(most, max(y, sub(zero(), y)));
  }
  const float largest = horizontal_max(most);
  const F32 inverse = set1(largest > 1e-30f ? levels / largest : 0.0f);
  int64_t i = 0;
  for (; i + 16 <= d; i += 16) store_whole(out + i, round_even(mul(load_bf16_n(x + i, 16), inverse)));
  if (i < d) {
    uint16_t whole[16];
    store_whole(whole, round_even(mul(load_bf16_n(x + i, d - i), inverse)));
    std::memcpy(out + i, whole, static_cast<size_t>(d - i) * 2);
  }
  std::memset(out + d, 0, static_cast<size_t>(stride - d) * 2);
  return largest > 1e-30f ? largest / levels : 1.0f;
}

// The largest of the scales [lo, hi) of a tile; NaN where one is.
DIPTYCH_INLINE float most_scale(const float* scales, int64_t lo, int64_t hi) {
  F32 most = zero(), none = zero();
  for (int64_t at = 0; at < kTileTokens; at += 16)
    if (at < hi && at + 16 > lo) {
      const F32 own = keep(load(scales + at), zero(), lo > at ? lo - at : 0, hi - at < 16 ? hi - at : 16);
      most = max(most, own), none = fma(own, zero(), none);
    }
  return horizontal_max(most) + horizontal_sum(none);
}

// What a weight is multiplied by before it is rounded, where what stands before it is at most `most_scale`.
DIPTYCH_INLINE F32 levels_of(float levels, float most_scale) { return set1(most_scale > 1e-30f ? levels / most_scale : 0.0f); }

// weights = exp2(score * unit - most) * value scale, rounded to whole numbers of 16 bits; returns the sum of the exponentials, lane by lane.
template <bool kIsAsking>
static __attribute__((noinline)) F32 weigh_scores_whole(const float* scores, uint16_t* weights, const Span& seen, float unit, float most,
                                                        const float* value_scales, float most_scale, Ahead& ahead, int64_t steps) {
  const F32 shift = set1(most == -__builtin_inff() ? 0.0f : -most), factor = set1(unit);
  const F32 levels = levels_of(kWeightLevels, most_scale);
  F32 sum = zero();
  Ahead::Cursor cursor = ahead.cursor;
  for (int64_t g = seen.first; g < seen.end; ++g) {
    if (kIsAsking) cursor.step(steps);
    const F32 p = weight_exp2_lanes(fma(load(scores + g * 16), factor, shift));
    sum = add(sum, p);
    store_whole(weights + g * 16, mul(p, mul(load(value_scales + g * 16), levels)));
  }
  if (kIsAsking) ahead.cursor = cursor;
  return sum;
}

// The same to levels of eight bits. Two groups' roundings go on apart, or each would wait for the one before.
template <class Out>
static __attribute__((noinline)) F32 weigh_scores_in_bytes(const float* scores, Out* weights, const Span& seen, float unit, float most,
                                                           const float* value_scales, float most_scale, Ahead& ahead, int64_t steps) {
  const F32 shift = set1(most == -__builtin_inff() ? 0.0f : -most), factor = set1(unit);
  const F32 levels = levels_of(kWeightByteLevels, most_scale);
  F32 sum = zero(), carried = zero(), next = zero();
  Ahead::Cursor cursor = ahead.cursor;
  for (int64_t g = seen.first; g < seen.end; ++g) {
    cursor.step(steps);
    const F32 p = weight_exp2_lanes(fma(load(scores + g * 16), factor, shift));
    sum = add(sum, p);
    const F32 exact = fma(p, mul(load(value_scales + g * 16), levels), carried), whole = round_even(exact);
    carried = next, next = sub(exact, whole);
    store_whole(weights + g * 16, whole);
  }
  ahead.cursor = cursor;
  // Four tokens are multiplied together: behind the last pair that is seen are another owner's, whose scales are perhaps no numbers.
  if (sizeof(Out) == 1 && seen.pairs % 2 != 0) std::memset(weights + seen.pairs * 2, 0, 2);
  return sum;
}

#if defined(DIPTYCH_QUADS)
DIPTYCH_INLINE float quad_query(const uint16_t* x, int64_t d, uint8_t* out) {
  uint16_t whole[kMostLatentDim];
  const float scale = whole_query(x, d, true, d, whole);
  int32_t sum = 0;
  int64_t i = 0;
  for (; i < d; ++i) {
    const int16_t number = static_cast<int16_t>(whole[i]);
    sum += number, out[4 + i] = static_cast<uint8_t>(number);
  }
  for (; i % 4 != 0; ++i) out[4 + i] = 0;
  sum *= -128;
  std::memcpy(out, &sum, 4);
  return scale;
}
#endif

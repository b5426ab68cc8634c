// simd.h's sixteen lanes in four q registers.

struct F32 { float32x4_t v[4]; };
struct Pairs { uint32x4_t v[4]; };

#define DIPTYCH_EACH for (int i = 0; i < 4; ++i)
DIPTYCH_INLINE F32 load(const float* p) { F32 r; DIPTYCH_EACH r.v[i] = vld1q_f32(p + 4 * i); return r; }
DIPTYCH_INLINE F32 load_n(const float* p, int64_t n) {
  if (n >= 16) return load(p);
  float all[16] = {};
  std::memcpy(all, p, static_cast<size_t>(n) * 4);
  return load(all);
}
DIPTYCH_INLINE void store(float* p, F32 x) { DIPTYCH_EACH vst1q_f32(p + 4 * i, x.v[i]); }
DIPTYCH_INLINE void store_n(float* p, F32 x, int64_t n) {
  if (n >= 16) return store(p, x);
  float all[16];
  store(all, x);
  std::memcpy(p, all, static_cast<size_t>(n) * 4);
}
DIPTYCH_INLINE F32 set1(float x) { F32 r; DIPTYCH_EACH r.v[i] = vdupq_n_f32(x); return r; }
DIPTYCH_INLINE F32 add(F32 a, F32 b) { DIPTYCH_EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
DIPTYCH_INLINE F32 sub(F32 a, F32 b) { DIPTYCH_EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
DIPTYCH_INLINE F32 mul(F32 a, F32 b) { DIPTYCH_EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
DIPTYCH_INLINE F32 div(F32 a, F32 b) { DIPTYCH_EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
DIPTYCH_INLINE F32 root(F32 a) { DIPTYCH_EACH a.v[i] = vsqrtq_f32(a.v[i]); return a; }
DIPTYCH_INLINE F32 fma(F32 a, F32 b, F32 c) { DIPTYCH_EACH a.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return a; }
// b where either is NaN, as on x86: vmaxq_f32 would give NaN
DIPTYCH_INLINE F32 max(F32 a, F32 b) { DIPTYCH_EACH a.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); return a; }
DIPTYCH_INLINE F32 min(F32 a, F32 b) { DIPTYCH_EACH a.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); return a; }
DIPTYCH_INLINE F32 round_even(F32 a) { DIPTYCH_EACH a.v[i] = vrndnq_f32(a.v[i]); return a; }
DIPTYCH_INLINE F32 scale2(F32 x, F32 n) {
  DIPTYCH_EACH {
    const float32x4_t whole = vminq_f32(vmaxq_f32(n.v[i], vdupq_n_f32(-127.0f)), vdupq_n_f32(127.0f));
    const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127)), 23);
    x.v[i] = vmulq_f32(x.v[i], vreinterpretq_f32_s32(bits));
  }
  return x;
}
DIPTYCH_INLINE F32 keep(F32 x, F32 y, int64_t lo, int64_t hi) {
  static const int32_t kFour[4] = {0, 1, 2, 3};
  DIPTYCH_EACH {
    const int32x4_t index = vaddq_s32(vld1q_s32(kFour), vdupq_n_s32(4 * i));
    const uint32x4_t inside = vandq_u32(vcgeq_s32(index, vdupq_n_s32(static_cast<int32_t>(lo))), vcltq_s32(index, vdupq_n_s32(static_cast<int32_t>(hi))));
    x.v[i] = vbslq_f32(inside, x.v[i], y.v[i]);
  }
  return x;
}
DIPTYCH_INLINE void to_array(F32 x, float out[16]) { store(out, x); }
DIPTYCH_INLINE float horizontal_sum(F32 x) {
  const float32x4_t all = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(all), vget_high_f32(all));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
DIPTYCH_INLINE float horizontal_max(F32 x) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3])));
}
DIPTYCH_INLINE F32 load_bf16(const uint16_t* p) {
  F32 r;
  DIPTYCH_EACH r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
  return r;
}
DIPTYCH_INLINE F32 load_bf16_n(const uint16_t* p, int64_t n) {
  if (n >= 16) return load_bf16(p);
  uint16_t raw[16] = {0};
  std::memcpy(raw, p, static_cast<size_t>(n) * 2);
  return load_bf16(raw);
}
// 4 bf16 in the low halves of words, by the rule of f32_to_bf16
DIPTYCH_INLINE uint32x4_t round_bf16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), high = vshrq_n_u32(bits, 16);
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(vandq_u32(high, vdupq_n_u32(1)), vdupq_n_u32(0x7fff))), 16);
  const uint32x4_t is_number = vceqq_f32(x, x), exponent = vandq_u32(bits, vdupq_n_u32(0x7f800000u));
  const uint32x4_t out = vbslq_u32(is_number, rounded, vorrq_u32(high, vdupq_n_u32(0x40)));
  return vbslq_u32(vceqq_u32(exponent, vdupq_n_u32(0)), vandq_u32(high, vdupq_n_u32(0x8000)), out);
}
DIPTYCH_INLINE void store_bf16(uint16_t* p, F32 x) { DIPTYCH_EACH vst1_u16(p + 4 * i, vmovn_u32(round_bf16(x.v[i]))); }
DIPTYCH_INLINE void store_bf16_n(uint16_t* p, F32 x, int64_t n) {
  if (n >= 16) return store_bf16(p, x);
  uint16_t raw[16];
  store_bf16(raw, x);
  std::memcpy(p, raw, static_cast<size_t>(n) * 2);
}
DIPTYCH_INLINE F32 load_i8(const int8_t* p) {
  const int8x16_t raw = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(raw)), high = vmovl_high_s8(raw);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}
DIPTYCH_INLINE Pairs load_pairs(const uint16_t* p) {
  Pairs r;
  DIPTYCH_EACH r.v[i] = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
  return r;
}
DIPTYCH_INLINE Pairs broadcast_pair(const uint16_t* p) {
  uint32_t two;
  std::memcpy(&two, p, 4);
  const uint32x4_t all = vdupq_n_u32(two);
  return {{all, all, all, all}};
}
DIPTYCH_INLINE F32 dot2(F32 acc, Pairs a, Pairs b) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  DIPTYCH_EACH acc.v[i] = vbfdotq_f32(acc.v[i], vreinterpretq_bf16_u32(a.v[i]), vreinterpretq_bf16_u32(b.v[i]));
#else
  const uint32x4_t high = vdupq_n_u32(0xffff0000u);
  DIPTYCH_EACH {
    acc.v[i] = vfmaq_f32(acc.v[i], vreinterpretq_f32_u32(vandq_u32(a.v[i], high)), vreinterpretq_f32_u32(vandq_u32(b.v[i], high)));
    acc.v[i] = vfmaq_f32(acc.v[i], vreinterpretq_f32_u32(vshlq_n_u32(a.v[i], 16)), vreinterpretq_f32_u32(vshlq_n_u32(b.v[i], 16)));
  }
#endif
  return acc;
}
DIPTYCH_INLINE void store_parity(uint16_t* out, F32 x, int64_t parity) {
  uint16_t raw[16];
  store_bf16(raw, x);
  for (int64_t i = 0; i < 16; ++i) out[2 * i + parity] = raw[i];
}
DIPTYCH_INLINE void widen_i8(const int8_t* p, uint16_t* out) {
  store_bf16(out, load_i8(p));
  store_bf16(out + 16, load_i8(p + 16));
}
#undef DIPTYCH_EACH

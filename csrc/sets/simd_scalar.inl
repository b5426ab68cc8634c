// simd.h's sixteen lanes in a plain array, for any processor.

struct F32 { float v[16]; };
struct Pairs { uint16_t v[32]; };

#define DIPTYCH_EACH for (int i = 0; i < 16; ++i)
DIPTYCH_INLINE F32 load(const float* p) { F32 r; std::memcpy(r.v, p, 64); return r; }
DIPTYCH_INLINE F32 load_n(const float* p, int64_t n) { F32 r{}; std::memcpy(r.v, p, static_cast<size_t>(n) * 4); return r; }
DIPTYCH_INLINE void store(float* p, F32 x) { std::memcpy(p, x.v, 64); }
DIPTYCH_INLINE void store_n(float* p, F32 x, int64_t n) { std::memcpy(p, x.v, static_cast<size_t>(n) * 4); }
DIPTYCH_INLINE F32 set1(float x) { F32 r; DIPTYCH_EACH r.v[i] = x; return r; }
DIPTYCH_INLINE F32 add(F32 a, F32 b) { DIPTYCH_EACH a.v[i] += b.v[i]; return a; }
DIPTYCH_INLINE F32 sub(F32 a, F32 b) { DIPTYCH_EACH a.v[i] -= b.v[i]; return a; }
DIPTYCH_INLINE F32 mul(F32 a, F32 b) { DIPTYCH_EACH a.v[i] *= b.v[i]; return a; }
DIPTYCH_INLINE F32 div(F32 a, F32 b) { DIPTYCH_EACH a.v[i] /= b.v[i]; return a; }
DIPTYCH_INLINE F32 root(F32 a) { DIPTYCH_EACH a.v[i] = __builtin_sqrtf(a.v[i]); return a; }
DIPTYCH_INLINE F32 fma(F32 a, F32 b, F32 c) { DIPTYCH_EACH a.v[i] = a.v[i] * b.v[i] + c.v[i]; return a; }
DIPTYCH_INLINE F32 max(F32 a, F32 b) { DIPTYCH_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
DIPTYCH_INLINE F32 min(F32 a, F32 b) { DIPTYCH_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
DIPTYCH_INLINE F32 round_even(F32 a) {  // |a| < 2^22; adding 1.5 * 2^23 drops the fraction, ties to even
  DIPTYCH_EACH a.v[i] = (a.v[i] + 12582912.0f) - 12582912.0f;
  return a;
}
DIPTYCH_INLINE F32 scale2(F32 x, F32 n) {
  DIPTYCH_EACH {
    int32_t whole = static_cast<int32_t>(n.v[i] > -127.0f ? n.v[i] < 127.0f ? n.v[i] : 127.0f : -127.0f);
    uint32_t bits = static_cast<uint32_t>(whole + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    x.v[i] *= power;
  }
  return x;
}
DIPTYCH_INLINE F32 keep(F32 x, F32 y, int64_t lo, int64_t hi) { DIPTYCH_EACH x.v[i] = (i >= lo && i < hi) ? x.v[i] : y.v[i]; return x; }
DIPTYCH_INLINE void to_array(F32 x, float out[16]) { std::memcpy(out, x.v, 64); }
DIPTYCH_INLINE float horizontal_sum(F32 x) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
  return x.v[0];
}
DIPTYCH_INLINE float horizontal_max(F32 x) {
  for (int i = 1; i < 16; ++i) x.v[0] = x.v[0] > x.v[i] ? x.v[0] : x.v[i];
  return x.v[0];
}
DIPTYCH_INLINE F32 load_bf16_n(const uint16_t* p, int64_t n) { F32 r{}; for (int64_t i = 0; i < n; ++i) r.v[i] = bf16_to_f32(p[i]); return r; }
DIPTYCH_INLINE F32 load_bf16(const uint16_t* p) { return load_bf16_n(p, 16); }
DIPTYCH_INLINE void store_bf16_n(uint16_t* p, F32 x, int64_t n) { for (int64_t i = 0; i < n; ++i) p[i] = f32_to_bf16(x.v[i]); }
DIPTYCH_INLINE void store_bf16(uint16_t* p, F32 x) { store_bf16_n(p, x, 16); }
DIPTYCH_INLINE F32 load_i8(const int8_t* p) { F32 r; DIPTYCH_EACH r.v[i] = static_cast<float>(p[i]); return r; }
DIPTYCH_INLINE Pairs load_pairs(const uint16_t* p) { Pairs r; std::memcpy(r.v, p, 64); return r; }
DIPTYCH_INLINE Pairs broadcast_pair(const uint16_t* p) { Pairs r; DIPTYCH_EACH { r.v[2 * i] = p[0]; r.v[2 * i + 1] = p[1]; } return r; }
DIPTYCH_INLINE F32 dot2(F32 acc, Pairs a, Pairs b) {
  DIPTYCH_EACH {
    acc.v[i] += bf16_to_f32(a.v[2 * i + 1]) * bf16_to_f32(b.v[2 * i + 1]);
    acc.v[i] += bf16_to_f32(a.v[2 * i]) * bf16_to_f32(b.v[2 * i]);
  }
  return acc;
}
DIPTYCH_INLINE void store_parity(uint16_t* out, F32 x, int64_t parity) { DIPTYCH_EACH out[2 * i + parity] = f32_to_bf16(x.v[i]); }
DIPTYCH_INLINE void widen_i8(const int8_t* p, uint16_t* out) { for (int i = 0; i < 32; ++i) out[i] = f32_to_bf16(static_cast<float>(p[i])); }
struct I32 { int32_t v[16]; };
DIPTYCH_INLINE void clear(I32& sum) { sum = I32{}; }
DIPTYCH_INLINE I32 dot2(I32 acc, Pairs a, Pairs b) {
  DIPTYCH_EACH for (int half = 0; half < 2; ++half) acc.v[i] += static_cast<int16_t>(a.v[2 * i + half]) * static_cast<int16_t>(b.v[2 * i + half]);
  return acc;
}
DIPTYCH_INLINE F32 numbers(I32 sum) { F32 r; DIPTYCH_EACH r.v[i] = static_cast<float>(sum.v[i]); return r; }
DIPTYCH_INLINE void store_i16(uint16_t* p, F32 x) {
  x = round_even(min(max(x, set1(-32768.0f)), set1(32767.0f)));
  DIPTYCH_EACH p[i] = static_cast<uint16_t>(static_cast<int16_t>(x.v[i]));
}
DIPTYCH_INLINE void widen_i8_whole(const int8_t* p, uint16_t* out) { for (int i = 0; i < 32; ++i) out[i] = static_cast<uint16_t>(static_cast<int16_t>(p[i])); }
#undef DIPTYCH_EACH

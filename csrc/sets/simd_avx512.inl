// simd.h's sixteen lanes in one zmm register; with or without the instructions for bf16.

struct F32 { __m512 v; };
struct Pairs { __m512i v; };  // 16 lanes of two bf16 each

DIPTYCH_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

DIPTYCH_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
DIPTYCH_INLINE F32 load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
DIPTYCH_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
DIPTYCH_INLINE void store_n(float* p, F32 x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
DIPTYCH_INLINE F32 set1(float x) { return {_mm512_set1_ps(x)}; }
DIPTYCH_INLINE F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
DIPTYCH_INLINE F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
DIPTYCH_INLINE F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
DIPTYCH_INLINE F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
DIPTYCH_INLINE F32 root(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
DIPTYCH_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
DIPTYCH_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
DIPTYCH_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
DIPTYCH_INLINE F32 round_even(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x * 2^n for whole n; n <= -160 gives zero
DIPTYCH_INLINE F32 scale2(F32 x, F32 n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// lanes [lo, hi) of x, other lanes of y; 0 <= lo, hi <= 16
DIPTYCH_INLINE F32 keep(F32 x, F32 y, int64_t lo, int64_t hi) {
  __mmask16 mask = hi > lo ? static_cast<__mmask16>(((1u << hi) - 1u) & ~((1u << lo) - 1u)) : __mmask16{0};
  return {_mm512_mask_blend_ps(mask, y.v, x.v)};
}
DIPTYCH_INLINE void to_array(F32 x, float out[16]) { _mm512_storeu_ps(out, x.v); }
DIPTYCH_INLINE float horizontal_sum(F32 x) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
DIPTYCH_INLINE float horizontal_max(F32 x) {
  __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
DIPTYCH_INLINE F32 load_bf16(const uint16_t* p) {
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
DIPTYCH_INLINE F32 load_bf16_n(const uint16_t* p, int64_t n) {
  __m256i raw = _mm256_maskz_loadu_epi16(first_lanes(n), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
DIPTYCH_INLINE __m256i pack_bf16(F32 x) { return round_bf16(x.v); }
DIPTYCH_INLINE void store_bf16(uint16_t* p, F32 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_bf16(x)); }
DIPTYCH_INLINE void store_bf16_n(uint16_t* p, F32 x, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), pack_bf16(x)); }
DIPTYCH_INLINE F32 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// The nearest whole numbers, even where two are, of |x| <= 127.
DIPTYCH_INLINE void store_i8(int8_t* p, F32 x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v))); }
// Whole numbers of 0 to 255.
DIPTYCH_INLINE void store_u8(uint8_t* p, F32 x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(x.v))); }
DIPTYCH_INLINE Pairs load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
DIPTYCH_INLINE Pairs load_pairs(const int8_t* p) {  // 32 bytes as whole numbers of 16 bits
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
DIPTYCH_INLINE Pairs broadcast_pair(const uint16_t* p) {
  int32_t two;
  std::memcpy(&two, p, 4);
  return {_mm512_set1_epi32(two)};
}
#if defined(__AVX512BF16__)
DIPTYCH_INLINE F32 dot2(F32 acc, Pairs a, Pairs b) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}
#else
// x as bf16 holds it.
DIPTYCH_INLINE F32 bf16_numbers(F32 x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(pack_bf16(x)), 16))};
}
// The even (0) or the odd (1) values of the pairs.
DIPTYCH_INLINE F32 widen_half(Pairs x, int half) {
  return {_mm512_castsi512_ps(half == 0 ? _mm512_slli_epi32(x.v, 16) : _mm512_and_si512(x.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
#endif
// out[lane][parity] = bf16(x[lane]); the other parity is left alone
DIPTYCH_INLINE void store_parity(uint16_t* out, F32 x, int64_t parity) {
  __m512i wide = _mm512_cvtepu16_epi32(pack_bf16(x));
  if (parity) wide = _mm512_slli_epi32(wide, 16);
  _mm512_mask_storeu_epi16(out, parity ? 0xAAAAAAAAu : 0x55555555u, wide);
}
// 32 int8 -> 32 bf16, exact: nothing is to be rounded
DIPTYCH_INLINE void widen_i8(const int8_t* p, uint16_t* out) {
  for (int i = 0; i < 32; i += 16) {
    const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(load_i8(p + i).v), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtepi32_epi16(high));
  }
}

struct I32 { __m512i v; };  // whole sums of pairs of 16 bits
DIPTYCH_INLINE void clear(I32& sum) { sum.v = _mm512_setzero_si512(); }
DIPTYCH_INLINE I32 dot2(I32 acc, Pairs a, Pairs b) {
  add_dot_int16(acc.v, a.v, b.v);
  return acc;
}
DIPTYCH_INLINE F32 numbers(I32 sum) { return {_mm512_cvtepi32_ps(sum.v)}; }
// The nearest whole numbers, even where two are, within 16 bits.
DIPTYCH_INLINE void store_i16(uint16_t* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}
DIPTYCH_INLINE void widen_i8_whole(const int8_t* p, uint16_t* out) {
  _mm512_storeu_si512(out, _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}

// 32 E4M3 -> 32 bf16, exact. A number is its magnitude shifted to bf16's place and 120 more in the exponent; what is none (NaN) or has no
// exponent comes out of a table, by the low five bits of its code, which no two of these share.
DIPTYCH_INLINE Pairs load_pairs(const E4m3* p) {
  const __m512i rare = _mm512_inserti32x4(_mm512_castsi128_si512(_mm_setr_epi16(0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60)),
                                          _mm_set1_epi16(0x7fc0), 3);
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i magnitudes = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
  const __mmask32 is_rare = _mm256_cmple_epi8_mask(_mm256_add_epi8(magnitudes, _mm256_set1_epi8(1)), _mm256_set1_epi8(8));  // NaN: -128
  const __m512i wide = _mm512_cvtepu8_epi16(magnitudes);
  __m512i number = _mm512_add_epi16(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x3c00));
  number = _mm512_mask_permutexvar_epi16(number, is_rare, wide, rare);
  return {_mm512_mask_add_epi16(number, _mm256_movepi8_mask(codes), number, _mm512_set1_epi16(static_cast<int16_t>(0x8000)))};
}
DIPTYCH_INLINE void widen_e4m3(const E4m3* p, uint16_t* out) { _mm512_storeu_si512(out, load_pairs(p).v); }

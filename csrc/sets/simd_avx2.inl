// simd.h's sixteen lanes in two ymm registers.

struct F32 { __m256 a, b; };
struct Pairs { __m256i a, b; };

DIPTYCH_INLINE __m256i lane_mask(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
DIPTYCH_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
DIPTYCH_INLINE F32 load_n(const float* p, int64_t n) {
  if (n >= 16) return load(p);
  __m256 a = _mm256_maskload_ps(p, lane_mask(n));
  __m256 b = n > 8 ? _mm256_maskload_ps(p + 8, lane_mask(n - 8)) : _mm256_setzero_ps();
  return {a, b};
}
DIPTYCH_INLINE void store(float* p, F32 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
// Stores by a mask take AMD's processors some 20 cycles each: for ends of rows alone.
DIPTYCH_INLINE void store_n(float* p, F32 x, int64_t n) {
  if (n >= 16) return store(p, x);
  if (n < 8) return _mm256_maskstore_ps(p, lane_mask(n), x.a);
  _mm256_storeu_ps(p, x.a);
  if (n > 8) _mm256_maskstore_ps(p + 8, lane_mask(n - 8), x.b);
}
DIPTYCH_INLINE F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
DIPTYCH_INLINE F32 add(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
DIPTYCH_INLINE F32 sub(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
DIPTYCH_INLINE F32 mul(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
DIPTYCH_INLINE F32 div(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
DIPTYCH_INLINE F32 root(F32 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
DIPTYCH_INLINE F32 fma(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
DIPTYCH_INLINE F32 max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
DIPTYCH_INLINE F32 min(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
DIPTYCH_INLINE F32 round_even(F32 x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
DIPTYCH_INLINE __m256 power2(__m256 n) {
  n = _mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-127.0f)), _mm256_set1_ps(127.0f));
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_castsi256_ps(bits);
}
DIPTYCH_INLINE F32 scale2(F32 x, F32 n) { return {_mm256_mul_ps(x.a, power2(n.a)), _mm256_mul_ps(x.b, power2(n.b))}; }
DIPTYCH_INLINE F32 keep(F32 x, F32 y, int64_t lo, int64_t hi) {
  __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), eight = _mm256_set1_epi32(8);
  __m256i low = _mm256_set1_epi32(static_cast<int>(lo) - 1), high = _mm256_set1_epi32(static_cast<int>(hi));
  __m256i first = _mm256_and_si256(_mm256_cmpgt_epi32(index, low), _mm256_cmpgt_epi32(high, index));
  index = _mm256_add_epi32(index, eight);
  __m256i second = _mm256_and_si256(_mm256_cmpgt_epi32(index, low), _mm256_cmpgt_epi32(high, index));
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(first)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(second))};
}
DIPTYCH_INLINE void to_array(F32 x, float out[16]) { store(out, x); }
DIPTYCH_INLINE float horizontal_sum(F32 x) {
  __m256 a = _mm256_add_ps(x.a, x.b);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
DIPTYCH_INLINE float horizontal_max(F32 x) {
  __m256 a = _mm256_max_ps(x.a, x.b);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
DIPTYCH_INLINE __m256 widen_bf16(__m128i raw) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
DIPTYCH_INLINE F32 load_bf16(const uint16_t* p) {
  return {widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
DIPTYCH_INLINE F32 load_bf16_n(const uint16_t* p, int64_t n) {
  if (n >= 16) return load_bf16(p);
  uint16_t raw[16] = {0};
  std::memcpy(raw, p, static_cast<size_t>(n) * 2);
  return load_bf16(raw);
}
DIPTYCH_INLINE __m256i pack_bf16(F32 x) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b)), 0xD8);
}
DIPTYCH_INLINE void store_bf16(uint16_t* p, F32 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_bf16(x)); }
DIPTYCH_INLINE void store_bf16_n(uint16_t* p, F32 x, int64_t n) {
  if (n >= 16) return store_bf16(p, x);
  uint16_t raw[16];
  store_bf16(raw, x);
  std::memcpy(p, raw, static_cast<size_t>(n) * 2);
}
DIPTYCH_INLINE F32 load_i8(const int8_t* p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8)))};
}
DIPTYCH_INLINE void store_i8(int8_t* p, F32 x) {
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
DIPTYCH_INLINE Pairs load_pairs(const uint16_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
DIPTYCH_INLINE Pairs broadcast_pair(const uint16_t* p) {
  int32_t two;
  std::memcpy(&two, p, 4);
  return {_mm256_set1_epi32(two), _mm256_set1_epi32(two)};
}
DIPTYCH_INLINE __m256 dot2_half(__m256 acc, __m256i x, __m256i y) {
  __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, high)), _mm256_castsi256_ps(_mm256_and_si256(y, high)), acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)), acc);
}
DIPTYCH_INLINE F32 dot2(F32 acc, Pairs x, Pairs y) { return {dot2_half(acc.a, x.a, y.a), dot2_half(acc.b, x.b, y.b)}; }
DIPTYCH_INLINE void store_parity(uint16_t* out, F32 x, int64_t parity) {
  uint16_t raw[16];
  store_bf16(raw, x);
  for (int64_t i = 0; i < 16; ++i) out[2 * i + parity] = raw[i];
}
DIPTYCH_INLINE void widen_i8(const int8_t* p, uint16_t* out) {
  store_bf16(out, load_i8(p));
  store_bf16(out + 16, load_i8(p + 16));
}
struct I32 { __m256i a, b; };
DIPTYCH_INLINE void clear(I32& sum) { sum.a = sum.b = _mm256_setzero_si256(); }
DIPTYCH_INLINE I32 dot2(I32 acc, Pairs x, Pairs y) {
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y.b))};
}
DIPTYCH_INLINE F32 numbers(I32 sum) { return {_mm256_cvtepi32_ps(sum.a), _mm256_cvtepi32_ps(sum.b)}; }
DIPTYCH_INLINE void store_i16(uint16_t* p, F32 x) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}
DIPTYCH_INLINE void widen_i8_whole(const int8_t* p, uint16_t* out) {
  for (int i = 0; i < 32; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
}

// 32 E4M3 -> 32 bf16, exact but for kE4m3Unit
DIPTYCH_INLINE void widen_e4m3(const E4m3* p, uint16_t* out) {
  for (int i = 0; i < 32; i += 16) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i));
    const __m256i even = _mm256_castps_si256(widen_e4m3_words(_mm_slli_epi16(codes, 8))), odd = _mm256_castps_si256(widen_e4m3_words(codes));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_or_si256(_mm256_srli_epi32(even, 16), odd));
  }
}

// Sixteen fp32 lanes on every instruction set: one zmm, two ymm, four q registers, or a plain array.
//
// Included only by the kernels_<set>.cpp and attention_<set>.cpp translation units, each compiled with its own flags and DIPTYCH_ISA set to the set's
// name. Everything is in that set's own namespace and force-inlined, so that the linker can never pick a wide version for a narrow machine.
// Horizontal sums are one fixed tree.
#pragma once

#include <cstdint>
#include <cstring>

#include "e4m3.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(DIPTYCH_AVX512)
#include "avx512_math.h"
#elif defined(DIPTYCH_AVX2)
#include "avx2_math.h"
#endif
#if defined(DIPTYCH_NEON)
#include <arm_neon.h>
#endif

#define DIPTYCH_INLINE static inline __attribute__((always_inline))

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kLanes = 16;

struct E4m3 { uint8_t code; };  // as a cache holds them

// ---- scalar bf16 (round to nearest even; NaN stays NaN) ----

DIPTYCH_INLINE float bf16_to_f32(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

DIPTYCH_INLINE uint16_t f32_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  if ((bits & 0x7f800000u) == 0) return static_cast<uint16_t>((bits >> 16) & 0x8000u);  // as vcvtneps2bf16 does
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(DIPTYCH_AVX512)

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

#elif defined(DIPTYCH_AVX2)

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

#elif defined(DIPTYCH_NEON)

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

#else  // scalar

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
    int32_t whole = static_cast<int32_t>(n.v[i] < -127.0f ? -127.0f : n.v[i] > 127.0f ? 127.0f : n.v[i]);
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

#endif

#if !defined(DIPTYCH_AVX512) && !defined(DIPTYCH_AVX2)
DIPTYCH_INLINE void store_i8(int8_t* p, F32 x) {
  float whole[16];
  to_array(round_even(x), whole);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(whole[i]);
}
DIPTYCH_INLINE void widen_e4m3(const E4m3* p, uint16_t* out) {
  for (int i = 0; i < 32; ++i) out[i] = e4m3_to_bf16(p[i].code);
}
#endif
#if defined(DIPTYCH_AVX2)
constexpr float kE4m3Unit = 256.0f;  // by which widened E4M3 are to be multiplied
#else
constexpr float kE4m3Unit = 1.0f;
#endif

DIPTYCH_INLINE F32 zero() { return set1(0.0f); }

// 2^r, |r| <= 1/2: relative error below 2e-7, exactly 1 at 0
DIPTYCH_INLINE F32 exp2_fraction(F32 r) {
  F32 p = fma(r, set1(0.001326472731307149f), set1(0.009671512991189957f));
  p = fma(r, p, set1(0.05550733581185341f));
  p = fma(r, p, set1(0.24022242426872253f));
  p = fma(r, p, set1(0.6931470036506653f));
  return fma(r, p, set1(1.0f));
}

// 2^x, relative error below 2e-7, exactly 1 at 0, exactly 0 at and below -160; x <= 127.
DIPTYCH_INLINE F32 exp2_lanes(F32 x) {
  x = max(x, set1(-160.0f));
  const F32 n = round_even(x);
  return scale2(exp2_fraction(sub(x, n)), n);
}

// 2^x for weights of a softmax, x <= 0: relative error below 9e-5, drowned by their rounding to bf16 (2e-3), by AVX2, which does not round them, 1.1e-4; exactly 1 at 0,
// exactly 0 at -inf. Where it is the inner loop (AVX-512) the fraction above floor(x) meets the minimax cubic of 2^f on [0, 1]
// through (0, 1), and the scaling takes floor(x) by itself.
DIPTYCH_INLINE F32 weight_exp2_lanes(F32 x) {
#if defined(DIPTYCH_AVX512)
  const __m512 f = _mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 at -inf
  __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(0.07706713676452637f), _mm512_set1_ps(0.22764486074447632f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(0.6951168179512024f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(1.0f));
  return {_mm512_scalef_ps(p, x.v)};
#elif defined(DIPTYCH_AVX2)
  return {weight_exp2(x.a), weight_exp2(x.b)};
#else
  return exp2_lanes(x);
#endif
}

// e^x with the argument reduced in two parts, so that large |x| keeps its relative accuracy.
DIPTYCH_INLINE F32 exp_lanes(F32 x) {
  x = min(max(x, set1(-110.0f)), set1(88.0f));
  const F32 n = round_even(mul(x, set1(1.44269504089f))), r = fma(n, set1(-0.693359375f), x);
  return scale2(exp2_fraction(mul(fma(n, set1(2.12194440e-4f), r), set1(1.44269504089f))), n);
}

// absolute error below 3e-7
DIPTYCH_INLINE F32 tanh_lanes(F32 x) {
  x = min(max(x, set1(-20.0f)), set1(20.0f));
  F32 e = exp_lanes(add(x, x));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

DIPTYCH_INLINE F32 silu_lanes(F32 x) { return div(x, add(set1(1.0f), exp_lanes(sub(zero(), x)))); }
DIPTYCH_INLINE F32 gelu_tanh_lanes(F32 x) {
  F32 cube = mul(mul(x, x), x);
  F32 inner = mul(set1(0.7978845608028654f), fma(set1(0.044715f), cube, x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh_lanes(inner)));
}

// x (1 + erf(x / sqrt 2)) / 2; absolute error below 3e-7: erfc by Abramowitz and Stegun's 7.1.26.
DIPTYCH_INLINE F32 gelu_lanes(F32 x) {
  const F32 size = max(x, sub(zero(), x));
  const F32 t = div(set1(1.0f), fma(set1(0.3275911f * 0.70710678f), size, set1(1.0f)));
  F32 p = fma(t, set1(1.061405429f), set1(-1.453152027f));
  p = fma(t, p, set1(1.421413741f));
  p = fma(t, p, set1(-0.284496736f));
  p = mul(t, fma(t, p, set1(0.254829592f)));
  const F32 tail = mul(p, exp_lanes(mul(set1(-0.5f), mul(x, x))));
  return sub(max(x, zero()), mul(mul(set1(0.5f), size), tail));
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych

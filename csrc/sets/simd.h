// Sixteen fp32 lanes on every instruction set: one zmm, two ymm, four q registers, or a plain array (simd_<set>.inl), and what is written over these.
//
// Included only by the kernels_<set>.cpp and attention_<set>.cpp translation units, each compiled with its own flags and DIPTYCH_ISA set to the set's
// name. Everything is in that set's own namespace and force-inlined, so that the linker can never pick a wide version for a narrow machine.
// Horizontal sums are one fixed tree.
#pragma once

#include <cstdint>
#include <cstring>

#include "sets/e4m3.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(DIPTYCH_AVX512)
#include "sets/avx512_math.h"
#elif defined(DIPTYCH_AVX2)
#include "sets/avx2_math.h"
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
#include "sets/simd_avx512.inl"
#elif defined(DIPTYCH_AVX2)
#include "sets/simd_avx2.inl"
#elif defined(DIPTYCH_NEON)
#include "sets/simd_neon.inl"
#else
#include "sets/simd_scalar.inl"
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

// 2^x, relative error below 2e-7, exactly 1 at 0, exactly 0 at and below -160; x <= 127; NaN stays NaN.
DIPTYCH_INLINE F32 exp2_lanes(F32 x) {
  x = max(set1(-160.0f), x);
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

// e^x with the argument reduced in two parts, so that large |x| keeps its relative accuracy. NaN stays NaN: max and min give their second.
DIPTYCH_INLINE F32 exp_lanes(F32 x) {
  x = min(set1(88.0f), max(set1(-110.0f), x));
  const F32 n = round_even(mul(x, set1(1.44269504089f))), r = fma(n, set1(-0.693359375f), x);
  return scale2(exp2_fraction(mul(fma(n, set1(2.12194440e-4f), r), set1(1.44269504089f))), n);
}

// absolute error below 3e-7; NaN stays NaN, or capped logits that are none would be plausible
DIPTYCH_INLINE F32 tanh_lanes(F32 x) {
  x = min(set1(20.0f), max(set1(-20.0f), x));
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

// Small vector helpers of the AVX-512 files. Everything is static inline: these functions exist only inside translation
// units compiled for AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "sets/e4m3.h"

namespace diptych {
namespace {

inline __m512 widen_bf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// To bf16, nearest even, as vcvtneps2bf16 does it: NaN stays NaN, denormals become zero.
inline __m256i round_bf16(__m512 x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  const __m512i lifted = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff)));
  __m512i rounded = _mm512_srli_epi32(lifted, 16);
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), high, _mm512_set1_epi32(0x40));
  const __mmask16 is_tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  return _mm512_cvtepi32_epi16(_mm512_mask_and_epi32(rounded, is_tiny, high, _mm512_set1_epi32(0x8000)));
#endif
}

// The dot instructions, tied to their accumulator: GCC 12 copies the accumulators of its own intrinsics around a full register
// file (half of the int8 rate lost).
#if defined(__AVX512BF16__)
inline void add_dot_bf16(__m512& sum, __m512i pairs, __m512i w) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(pairs), "v"(w));
}
#endif
inline void add_dot_int16(__m512i& sum, __m512i pairs, __m512i w) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(pairs), "v"(w));
}
inline void add_dot_int16_of(__m512i& sum, const uint16_t* pair, __m512i w) {  // the same pair for all
  typedef int32_t __attribute__((may_alias, aligned(2))) Pair;
  __asm__("vpdpwssd %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(*reinterpret_cast<const Pair*>(pair)), "v"(w));
}
inline void add_dot_int8(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}
inline void add_dot_int8_of(__m512i& sum, __m512i unsigned_bytes, const uint8_t* word) {  // the same word for all
  typedef int32_t __attribute__((may_alias)) Word;
  __asm__("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(*reinterpret_cast<const Word*>(word)), "v"(unsigned_bytes));
}

#if defined(__AVX512BF16__)
inline void add_dot_bf16_of(__m512& sum, const uint16_t* pair, __m512i w) {  // the same pair for all
  typedef int32_t __attribute__((may_alias, aligned(2))) Pair;
  __asm__("vdpbf16ps %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(*reinterpret_cast<const Pair*>(pair)), "v"(w));
}

// Both bytes of a bf16 by the low seven bits of its E4M3 code: the sets with BF16 have VBMI too (kernel_sets.cpp).
struct alignas(64) E4m3Tables {
  uint64_t order[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // of eight codes each, so that bytes interleaved within 128 bits stand in order
  uint8_t low[128] = {}, high[128] = {};
  uint32_t sign = 0x80808080u;
  constexpr E4m3Tables() {
    for (int code = 0; code < 128; ++code) {
      const uint16_t number = e4m3_to_bf16(static_cast<uint8_t>(code));
      low[code] = static_cast<uint8_t>(number & 0xff), high[code] = static_cast<uint8_t>(number >> 8);
    }
  }
};
inline constexpr E4m3Tables kE4m3Tables;

// 64 codes -> 64 bf16, exact. As assembly, which reads tables where they lie: in registers they would take those of the sums. Zen 4
// hides all of it behind 14 dots: lookups and interleaving go to ports that these leave free.
inline void widen_64_e4m3(const void* codes, __m512i& first, __m512i& second) {
  __m512i high;
  typedef __m512i_u __attribute__((may_alias)) Codes;
  const auto at = [](const uint8_t* table) -> const __m512i& { return *reinterpret_cast<const __m512i*>(table); };
  __asm__(
      "vmovdqa64 %[order], %[first]\n\t"
      "vpermq %[codes], %[first], %[first]\n\t"
      "vmovdqa64 %[low], %[second]\n\t"
      "vpermt2b %[low_behind], %[first], %[second]\n\t"
      "vmovdqa64 %[high_table], %[high]\n\t"
      "vpermt2b %[high_behind], %[first], %[high]\n\t"
      "vpternlogd $0xf8, %[sign]%{1to16%}, %[first], %[high]\n\t"  // high | (codes & sign)
      "vpunpcklbw %[high], %[second], %[first]\n\t"
      "vpunpckhbw %[high], %[second], %[second]"
      : [first] "=&v"(first), [second] "=&v"(second), [high] "=&v"(high)
      : [codes] "m"(*static_cast<const Codes*>(codes)), [order] "m"(kE4m3Tables.order), [sign] "m"(kE4m3Tables.sign),
        [low] "m"(at(kE4m3Tables.low)), [low_behind] "m"(at(kE4m3Tables.low + 64)),
        [high_table] "m"(at(kE4m3Tables.high)), [high_behind] "m"(at(kE4m3Tables.high + 64)));
}
#endif

// 2^t to 2e-7 relative, t held to [-126, 126]. The polynomial is the degree 5 fit of 2^f on [-0.5, 0.5]; adding 1.5 * 2^23 finds the
// whole part, whose low bits then join the exponent.
inline __m512 exp2_ps(__m512 t) {
  t = _mm512_min_ps(_mm512_max_ps(t, _mm512_set1_ps(-126.0f)), _mm512_set1_ps(126.0f));
  const __m512 room = _mm512_set1_ps(12582912.0f), whole = _mm512_add_ps(t, room);
  const __m512 f = _mm512_sub_ps(t, _mm512_sub_ps(whole, room));
  __m512 p = _mm512_set1_ps(1.3264733e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6715130e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5507336e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022242e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314700e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(whole), 23)));
}

// Rows and columns of a 16 x 16 block of words change places.
inline void transpose_16x16(__m512i block[16]) {
  __m512i pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(block[i], block[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(block[i], block[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  // quads[4 r + c] holds, in its 128-bit part p, column 4 p + c of rows 4 r .. 4 r + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(quads[c], quads[4 + c], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(quads[c], quads[4 + c], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(quads[8 + c], quads[12 + c], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(quads[8 + c], quads[12 + c], 0xee);
    block[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    block[4 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    block[8 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    block[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
}

}  // namespace
}  // namespace diptych

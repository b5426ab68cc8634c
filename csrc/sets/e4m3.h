// FP8 E4M3 (Micikevicius et al. 2022): sign, four bits of exponent with bias 7, three of mantissa; up to 448, no infinities, 0x7f is NaN.
//
// A row of numbers has one scale, which puts its largest on the largest code: a channel far above the rest, as trained models have,
// is then held without error, which a power of two rounds as it rounds the others.
#pragma once

#include <cstdint>
#include <cstring>

#define DIPTYCH_E4M3 static inline __attribute__((always_inline))

namespace diptych {

// What a row with that largest magnitude is divided by, so that the largest becomes 448; 0 where all are zero, NaN where one is.
DIPTYCH_E4M3 float e4m3_scale(float most) {
  if (most <= 0.0f) return 0.0f;
  const float scale = most / 448.0f;
  return scale < 0x1p-126f ? 0x1p-126f : scale > 0x1p126f ? 0x1p126f : scale;  // neither subnormal nor infinite
}

// To the nearest, ties to even; beyond 448 is 448, NaN is NaN.
DIPTYCH_E4M3 uint8_t to_e4m3(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  float positive;
  std::memcpy(&positive, &magnitude, 4);
  const float small = (positive * 512.0f + 12582912.0f) - 12582912.0f;  // steps of 2^-9 below 2^-6
  const uint32_t large = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  uint32_t code = positive < 0.015625f ? static_cast<uint32_t>(static_cast<int32_t>(small)) : large > 0x7eu ? 0x7eu : large;
  if (magnitude > 0x7f800000u) code = 0x7fu;
  return static_cast<uint8_t>(sign | code);
}

DIPTYCH_E4M3 constexpr uint16_t e4m3_to_bf16(uint8_t code) {
  constexpr uint16_t kSmall[8] = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // m 2^-9
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t number = magnitude < 8 ? kSmall[magnitude] : magnitude == 0x7f ? 0x7fc0u : (magnitude << 4) + 0x3c00u;
  return static_cast<uint16_t>(number | (code & 0x80u) << 8);
}

// bf16(scale * code) of all codes, scale from 2^-100 to 2^100, in 16 numbers: its mantissa is its code's alone. The first eight are of
// mantissas where the exponent's field is 0, to be added to; the last eight are codes without one.
struct ScaledE4m3 {
  uint16_t numbers[16];
  explicit ScaledE4m3(float scale) {
    for (int i = 0; i < 16; ++i) {
      const float product = scale * (i < 8 ? static_cast<float>(8 + i) * 0x1p-10f : static_cast<float>(i - 8) * 0x1p-9f);
      uint32_t bits;
      std::memcpy(&bits, &product, 4);
      numbers[i] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
  }
  uint16_t of(uint8_t code) const {
    const uint32_t exponent = code >> 3 & 15u, number = numbers[exponent == 0 ? 8 + (code & 7) : code & 7] + (exponent << 7);
    return static_cast<uint16_t>(number | (code & 0x80u) << 8);
  }
};

}  // namespace diptych
#undef DIPTYCH_E4M3

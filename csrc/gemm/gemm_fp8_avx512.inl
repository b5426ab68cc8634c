// fp8 on AVX-512 with VBMI: tiles of few rows make bf16 of codes in registers, by tables of 128 bytes of a scale. Included by
// gemm_avx512.inl.

struct Fp8Index {
  alignas(64) uint16_t at[128], exponents[128];  // in ScaledE4m3::numbers, and what is added
  float units[16];                               // what its numbers are of a scale
  alignas(64) uint8_t even[64], odd[64];
  constexpr Fp8Index() : at{}, exponents{}, units{}, even{}, odd{} {
    for (int code = 0; code < 128; ++code) {
      at[code] = static_cast<uint16_t>(code < 8 ? 8 + code : code & 7);
      exponents[code] = static_cast<uint16_t>(code >> 3 << 7);
    }
    for (int i = 0; i < 8; ++i) units[i] = static_cast<float>(8 + i) * 0x1p-10f, units[8 + i] = static_cast<float>(i) * 0x1p-9f;
    for (int i = 0; i < 64; ++i) even[i] = static_cast<uint8_t>(2 * i), odd[i] = static_cast<uint8_t>(2 * i + 1);
  }
};
inline constexpr Fp8Index kFp8Index;

// Both bytes of bf16(scale * code) by the code's low seven bits.
struct Fp8Tables {
  __m512i low[2], high[2];
  Fp8Tables() = default;
  inline explicit Fp8Tables(float scale) {
    const __m512 products = _mm512_mul_ps(_mm512_loadu_ps(kFp8Index.units), _mm512_set1_ps(scale));
    const __m512i numbers = _mm512_castsi256_si512(round_bf16(products));
    const auto words = [&](int at) {
      const __m512i found = _mm512_permutexvar_epi16(_mm512_load_si512(kFp8Index.at + 32 * at), numbers);
      return _mm512_add_epi16(found, _mm512_load_si512(kFp8Index.exponents + 32 * at));
    };
    for (int half = 0; half < 2; ++half) {
      const __m512i former = words(2 * half), latter = words(2 * half + 1);
      low[half] = _mm512_permutex2var_epi8(former, _mm512_load_si512(kFp8Index.even), latter);
      high[half] = _mm512_permutex2var_epi8(former, _mm512_load_si512(kFp8Index.odd), latter);
    }
  }
  // One step of codes -> two of bf16.
  inline void expand(__m512i codes, __m512i& first, __m512i& second) const {
    const __m512i lows = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    const __m512i highs = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    const __m512i bytes = _mm512_ternarylogic_epi32(highs, codes, _mm512_set1_epi8(-128), 0xf8);  // highs | (codes & sign)
    first = _mm512_unpacklo_epi8(lows, bytes), second = _mm512_unpackhi_epi8(lows, bytes);
  }
};

void expand_fp8(const uint8_t* strip, int64_t groups, int64_t first, int64_t count, uint8_t* out) {
  const uint8_t* w = strip + bytes_of_fp8_scales(groups) + bytes_of_steps(Format::fp8, first * kFp8Inputs);
  for (int64_t group = first; group < first + count; ++group) {
    const Fp8Tables tables(fp8_scale(strip, group));
#pragma GCC unroll 4
    for (int64_t i = 0; i < kFp8Inputs; i += 4, w += kStepBytes, out += 2 * kStepBytes) {
      __m512i former, latter;
      tables.expand(_mm512_load_si512(w), former, latter);
      _mm512_store_si512(out, former), _mm512_store_si512(out + kStepBytes, latter);
    }
  }
}

// A row has one chain of sums in each strip, whose order is that of bf16: few rows take several strips.
template <int kRows, int kStrips, bool kInterleaved, Reach kReach>
void tile_fp8(const TileArgs& args) {
  __m512 sums[kRows][kStrips] = {};
  const Words<kRows, kInterleaved> x(args);
  const int64_t strip_bytes = args.strip_bytes, steps = args.units * kFp8Inputs / 4, heads = bytes_of_fp8_scales(args.units);
  const uint8_t* w = args.strip + heads;
  Ahead<kStrips, kReach, false> ahead(args, steps / kUnroll, heads + steps * kStepBytes);
  for (int64_t group = 0, at = 0; group < args.units; ++group) {
    Fp8Tables tables[kStrips];
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) tables[v] = Fp8Tables(fp8_scale(args.strip + v * strip_bytes, group));
    for (int64_t i = 0; i < kFp8Inputs / 4; i += kUnroll) {
      ahead.turn();
#pragma GCC unroll 4
      for (int step = 0; step < kUnroll; ++step, w += kStepBytes, at += 2) {
        __m512i lanes[2][kStrips];
#pragma GCC unroll 4
        for (int v = 0; v < kStrips; ++v) tables[v].expand(_mm512_load_si512(w + v * strip_bytes), lanes[0][v], lanes[1][v]);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half)
#pragma GCC unroll 24
          for (int row = 0; row < kRows; ++row) {
            const __m512i word = x.get(row, at + half);
#pragma GCC unroll 4
            for (int v = 0; v < kStrips; ++v) add_dot_bf16(sums[row][v], lanes[half][v], word);
          }
      }
    }
  }
  __m512* acc = static_cast<__m512*>(args.acc);
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) acc[row * kVectors + v] = sums[row][v];
}

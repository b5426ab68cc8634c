// A strip of fp8 as the bf16 that it stands for (ExpandFp8), where no instruction looks 128 bytes up at a time: 16 numbers by the code's
// mantissa, and its exponent added. Included inside the anonymous namespace of a set's file.

#if defined(__AVX2__) || defined(DIPTYCH_FP8_NEON)
struct Bytes16 { alignas(16) uint8_t low[16], high[16]; };
inline Bytes16 bytes_of(const ScaledE4m3& scaled) {
  Bytes16 bytes;
  for (int i = 0; i < 16; ++i) bytes.low[i] = static_cast<uint8_t>(scaled.numbers[i] & 0xff), bytes.high[i] = static_cast<uint8_t>(scaled.numbers[i] >> 8);
  return bytes;
}
#endif

// One step of codes -> two of bf16.
#if defined(__AVX2__)
struct Expander {
  __m256i low, high;
  explicit Expander(float scale) {
    const Bytes16 bytes = bytes_of(ScaledE4m3(scale));
    low = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes.low)));
    high = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes.high)));
  }
  inline void step(const uint8_t* w, uint8_t* out) const {
    for (int half = 0; half < 2; ++half) {
      const __m256i codes = _mm256_load_si256(reinterpret_cast<const __m256i*>(w) + half), zero = _mm256_setzero_si256();
      const __m256i exponent = _mm256_and_si256(codes, _mm256_set1_epi8(0x78)), sign = _mm256_and_si256(codes, _mm256_set1_epi8(-128));
      const __m256i small = _mm256_and_si256(_mm256_cmpeq_epi8(exponent, zero), _mm256_set1_epi8(8));
      const __m256i at = _mm256_or_si256(_mm256_and_si256(codes, _mm256_set1_epi8(7)), small);
      const __m256i lows = _mm256_shuffle_epi8(low, at), highs = _mm256_or_si256(_mm256_shuffle_epi8(high, at), sign);
      const __m256i first = _mm256_slli_epi16(_mm256_unpacklo_epi8(exponent, zero), 4), second = _mm256_slli_epi16(_mm256_unpackhi_epi8(exponent, zero), 4);
      _mm256_store_si256(reinterpret_cast<__m256i*>(out) + half, _mm256_add_epi16(_mm256_unpacklo_epi8(lows, highs), first));
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + kStepBytes) + half, _mm256_add_epi16(_mm256_unpackhi_epi8(lows, highs), second));
    }
  }
};
#elif defined(DIPTYCH_FP8_NEON)
struct Expander {
  uint8x16_t low, high;
  explicit Expander(float scale) {
    const Bytes16 bytes = bytes_of(ScaledE4m3(scale));
    low = vld1q_u8(bytes.low), high = vld1q_u8(bytes.high);
  }
  inline void step(const uint8_t* w, uint8_t* out) const {
    for (int quarter = 0; quarter < 4; ++quarter) {
      const uint8x16_t codes = vld1q_u8(w + 16 * quarter), exponent = vandq_u8(codes, vdupq_n_u8(0x78)), zero = vdupq_n_u8(0);
      const uint8x16_t at = vorrq_u8(vandq_u8(codes, vdupq_n_u8(7)), vandq_u8(vceqq_u8(exponent, zero), vdupq_n_u8(8)));
      const uint8x16_t lows = vqtbl1q_u8(low, at), highs = vorrq_u8(vqtbl1q_u8(high, at), vandq_u8(codes, vdupq_n_u8(0x80)));
      const uint16x8_t first = vshlq_n_u16(vreinterpretq_u16_u8(vzip1q_u8(exponent, zero)), 4);
      const uint16x8_t second = vshlq_n_u16(vreinterpretq_u16_u8(vzip2q_u8(exponent, zero)), 4);
      vst1q_u16(reinterpret_cast<uint16_t*>(out) + 8 * quarter, vaddq_u16(vreinterpretq_u16_u8(vzip1q_u8(lows, highs)), first));
      vst1q_u16(reinterpret_cast<uint16_t*>(out + kStepBytes) + 8 * quarter, vaddq_u16(vreinterpretq_u16_u8(vzip2q_u8(lows, highs)), second));
    }
  }
};
#else
struct Expander {
  ScaledE4m3 scaled;
  explicit Expander(float scale) : scaled(scale) {}
  inline void step(const uint8_t* w, uint8_t* out) const {
    for (int64_t i = 0; i < kStepBytes; ++i) {  // of 16 codes the first eight belong to the first step
      const uint16_t number = scaled.of(w[i]);
      std::memcpy(out + i % 16 / 8 * kStepBytes + (i / 16 * 8 + i % 8) * 2, &number, 2);
    }
  }
};
#endif

void expand_fp8(const uint8_t* strip, int64_t groups, int64_t first, int64_t count, uint8_t* out) {
  const uint8_t* w = strip + bytes_of_fp8_scales(groups) + bytes_of_steps(Format::fp8, first * kFp8Inputs);
  for (int64_t group = first; group < first + count; ++group) {
    const Expander expander(fp8_scale(strip, group));
    for (int64_t i = 0; i < kFp8Inputs; i += 4, w += kStepBytes, out += 2 * kStepBytes) expander.step(w, out);
  }
}

// Latent attention (MLA): a cached token is one vector, key and value of all heads. Its values are the keys of a tile put into the order
// that the second product reads, in scratch: for each task that meets the tile, whose rows are all heads of some tokens.

// One group of keys, of which `known` tokens are this sequence's. Words of two dimensions of one token become words of two tokens of one
// dimension; tokens behind the last are another owner's, perhaps no numbers, and become zeros.
#if defined(DIPTYCH_AVX512)
DIPTYCH_INLINE void turn_group(const uint16_t* keys, int64_t known, int64_t d, int64_t dv, uint16_t* values) {
  const __mmask16 own = first_lanes(known < 0 ? 0 : known > 16 ? 16 : known);
  const __m512i tokens_inside = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (int64_t i = 0; i < d / 2; i += 8) {  // eight words of 16 tokens are a square of eight pairs of tokens; zeros fill up dv
    __m512i words[8], pairs[8], quads[8];
    for (int j = 0; j < 8; ++j) {
      const __mmask16 lanes = i + j < d / 2 ? own : __mmask16{0};
      words[j] = _mm512_shuffle_epi8(_mm512_maskz_loadu_epi32(lanes, keys + (i + j) * 2 * kGroupTokens), tokens_inside);
    }
    for (int j = 0; j < 8; j += 2) {
      pairs[j] = _mm512_unpacklo_epi64(words[j], words[j + 1]);
      pairs[j + 1] = _mm512_unpackhi_epi64(words[j], words[j + 1]);
    }
    for (int j = 0; j < 8; j += 4)
      for (int odd = 0; odd < 2; ++odd) {
        quads[j + odd] = _mm512_shuffle_i64x2(pairs[j + odd], pairs[j + 2 + odd], 0x88);      // pairs of tokens 0 and 4, or 1 and 5
        quads[j + 2 + odd] = _mm512_shuffle_i64x2(pairs[j + odd], pairs[j + 2 + odd], 0xdd);  // 2 and 6, or 3 and 7
      }
    for (int p = 0; p < 4; ++p) {
      uint16_t* at = values + p * 2 * dv + 4 * i;
      _mm512_storeu_si512(at, _mm512_shuffle_i64x2(quads[p], quads[4 + p], 0x88));
      _mm512_storeu_si512(at + 4 * 2 * dv, _mm512_shuffle_i64x2(quads[p], quads[4 + p], 0xdd));
    }
  }
}
#elif defined(DIPTYCH_AVX2)
DIPTYCH_INLINE void turn_group(const uint16_t* keys, int64_t known, int64_t d, int64_t dv, uint16_t* values) {
  const __m256i tokens_inside = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  const auto store_at = [&](int64_t p, int64_t i, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + p * 2 * dv + 4 * i), x); };
  for (int64_t i = 0; i < dv / 2; i += 4)  // four words of 8 tokens are a square of four pairs of tokens; zeros fill up dv
    for (int64_t half = 0; half < 2; ++half) {
      const __m256i own = lane_mask(known - half * 8);
      __m256i words[4];
#pragma GCC unroll 4
      for (int64_t j = 0; j < 4; ++j) {
        words[j] = _mm256_setzero_si256();
        if (i + j < d / 2) words[j] = _mm256_maskload_epi32(reinterpret_cast<const int*>(keys + (i + j) * 2 * kGroupTokens + half * 16), own);
        words[j] = _mm256_shuffle_epi8(words[j], tokens_inside);
      }
      const __m256i even[2] = {_mm256_unpacklo_epi64(words[0], words[1]), _mm256_unpacklo_epi64(words[2], words[3])};  // pairs of tokens 0 and 2
      const __m256i odd[2] = {_mm256_unpackhi_epi64(words[0], words[1]), _mm256_unpackhi_epi64(words[2], words[3])};   // 1 and 3
      store_at(half * 4, i, _mm256_permute2x128_si256(even[0], even[1], 0x20));
      store_at(half * 4 + 1, i, _mm256_permute2x128_si256(odd[0], odd[1], 0x20));
      store_at(half * 4 + 2, i, _mm256_permute2x128_si256(even[0], even[1], 0x31));
      store_at(half * 4 + 3, i, _mm256_permute2x128_si256(odd[0], odd[1], 0x31));
    }
}
#else
DIPTYCH_INLINE void turn_group(const uint16_t* keys, int64_t known, int64_t d, int64_t dv, uint16_t* values) {
  for (int64_t i = 0; i < d / 2; ++i) {
    uint32_t words[kGroupTokens];
    std::memcpy(words, keys + i * 2 * kGroupTokens, sizeof words);
    for (int64_t t = known < 0 ? 0 : known; t < kGroupTokens; ++t) words[t] = 0;
    for (int64_t p = 0; p < kGroupTokens / 2; ++p) {
      const uint32_t even = words[2 * p], odd = words[2 * p + 1];
      const uint32_t pair[2] = {(even & 0xffffu) | odd << 16, even >> 16 | (odd & 0xffff0000u)};
      std::memcpy(values + p * 2 * dv + 4 * i, pair, sizeof pair);
    }
  }
  for (int64_t p = 0; p < kGroupTokens / 2; ++p) std::memset(values + p * 2 * dv + 2 * d, 0, static_cast<size_t>(dv - d) * 4);
}
#endif

// The scales of tokens behind the last are zeros as well, where there are any (int8, fp8): a weight of zero meets them.
DIPTYCH_INLINE void values_of_keys(const SequenceView& view, const Scratch& scratch, Tile& tile) {
  const int64_t d = view.call->kv.shape.head_dim, dv = view.call->kv.shape.value_dim();
  for (int64_t g = tile.span.first; g < tile.span.end; ++g) {
    uint16_t* values = scratch.wide_values + g * kGroupTokens * dv;
    const int64_t known = view.last_key + 1 - tile.start - g * kGroupTokens;
    for (int64_t t = known < 0 ? 0 : known; t < kGroupTokens; ++t) scratch.value_scales[g * kGroupTokens + t] = 0.0f;
    turn_group(tile.keys[g], known, d, dv, values);
    tile.values[g] = values;
  }
}

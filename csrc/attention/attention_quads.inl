// The two products of attention over bytes: four of a query, or of a row's weights, meet four of each of 16 keys, or dimensions, by one dot
// product. The cache has them in pairs, which are put in fours in the registers that multiply.

struct Quads { using Sum = I32; using In = uint8_t; using Stored = int8_t; };

DIPTYCH_INLINE __m256i load_32(const int8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
// Words of two halves, by turns: two pairs of 16 lanes side by side become fours.
DIPTYCH_INLINE __m512i in_turns(__m512i halves) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}

// acc += R rows of queries, as quad_query leaves them, times Z groups of keys.
template <int R, int Z>
DIPTYCH_INLINE void score_quads(const uint8_t* q, int64_t d, const uint16_t* const* keys, Ahead::Cursor& cursor, I32 (&acc)[R][Z]) {
  const int64_t stride = quad_stride(d);
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  for (int r = 0; r < R; ++r) {
    int32_t start;
    std::memcpy(&start, q + r * stride, 4);
    for (int z = 0; z < Z; ++z) acc[r][z].v = _mm512_set1_epi32(start);
  }
  for (int64_t i = 0; i < d; i += 4) {
    cursor.template step_keys<Z, 64>(i / 4);
    cursor.step(Z);  // the work is counted in pairs
    __m512i fours[Z];
    for (int z = 0; z < Z; ++z) {
      const int8_t* at = reinterpret_cast<const int8_t*>(keys[z]) + i * 16;
      const __m512i pairs = d - i >= 4 ? _mm512_loadu_si512(at) : _mm512_zextsi256_si512(load_32(at));
      fours[z] = _mm512_xor_si512(in_turns(pairs), sign);
    }
    for (int r = 0; r < R; ++r)
      for (int z = 0; z < Z; ++z) add_dot_int8_of(acc[r][z].v, fours[z], q + r * stride + 4 + i);
  }
}

// acc += R rows of a group's weights times Z vectors of 16 dimensions. Of two vectors the halves of 128 bits come by turns: order_quads puts
// them in order.
template <int R, int Z>
DIPTYCH_INLINE void weigh_quads(const uint8_t* weights, const int8_t* v, int64_t pairs, int64_t dv, Ahead::Cursor& cursor, I32 (&acc)[R][Z]) {
#pragma GCC unroll 1
  for (int64_t p = 0; p < pairs; p += 2, v += 4 * dv) {
    cursor.template step_values<Z, 32>();
    cursor.template step_values<Z, 32>();
    const int8_t* latter = v + 2 * dv;
    __m512i y[Z];
    for (int z = 0; z + 2 <= Z; z += 2) {
      const __m512i a = _mm512_loadu_si512(v + z * 32), b = _mm512_loadu_si512(latter + z * 32);
      y[z] = _mm512_unpacklo_epi16(a, b), y[z + 1] = _mm512_unpackhi_epi16(a, b);
    }
    if (Z % 2 != 0) y[Z - 1] = in_turns(_mm512_inserti64x4(_mm512_castsi256_si512(load_32(v + (Z - 1) * 32)), load_32(latter + (Z - 1) * 32), 1));
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, weights + r * kTileTokens + 2 * p, 4);
      const __m512i x = _mm512_set1_epi32(four);
      for (int z = 0; z < Z; ++z) add_dot_int8(acc[r][z].v, x, y[z]);
    }
  }
}

template <int R, int Z>
DIPTYCH_INLINE void order_quads(I32 (&acc)[R][Z]) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int z = 0; z + 2 <= Z; z += 2) {
      const __m512i lower = acc[r][z].v, upper = acc[r][z + 1].v;
      acc[r][z].v = _mm512_permutex2var_epi32(lower, first, upper);
      acc[r][z + 1].v = _mm512_permutex2var_epi32(lower, second, upper);
    }
}

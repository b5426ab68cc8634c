// AVX-512 (VNNI) tiles of int4. Included inside the anonymous namespace of gemm_avx512.inl.

// int4, the whole K. Sums of whole numbers may be cut at will, so few rows take the nibbles as they are and weigh each group's sum:
// sum (unit q + zero) x = unit sum q x + zero sum x. That is a few operations a row and group. On AMD all that is no multiplication may take
// a port of the multiplications, too, so each operation counts: high nibbles are multiplied where they stand, and their sum is shifted.
template <int kRows, int kStrips, Reach kReach>
void tile_int4_few(const TileArgs& args) {
  constexpr int kChains = kRows * kStrips <= 6 || kStrips == 1 ? 2 : 1;  // of a group: of low and high nibbles, or one, where registers are short
  __m512i sums[kRows][kStrips];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) sums[row][v] = _mm512_setzero_si512();
  const Words<kRows, false> x(args);
  const int64_t words = args.group / 4, step_bytes = args.group / 8 * kStepBytes, strip_bytes = args.strip_bytes;
  const uint8_t* w = args.strip;
  Ahead<kStrips, kReach> ahead(args, args.units * (words / 8), args.units * step_bytes);
  __m512i units[kStrips];  // of two groups, in 16 bits each
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i of_both = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16)), 16));
  int64_t at = 0;
  for (int64_t group = 0; group < args.units; ++group) {
    // Heads of two groups are loaded in the order of addresses: reached for behind its groups, that line made the prefetchers lose the stream
    // (a twentieth of a lone row's time, where the threads share no cache and memory gives each of them all it can take).
    if (group % 2 == 0) {
#pragma GCC unroll 4
      for (int v = 0; v < kStrips; ++v) {
        __m512i heads = _mm512_load_si512(w + v * strip_bytes);
        ahead.in_order(heads);
        units[v] = _mm512_permutexvar_epi16(of_both, heads);
        const __m512i zeros = _mm512_srli_epi16(units[v], 8);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) sums[row][v] = _mm512_dpwssd_epi32(sums[row][v], zeros, _mm512_set1_epi32(sums_of_pair(args, row, group)));
      }
      ahead.pass(w);
      w += 2 * kHeadBytes;
      ahead.line();
    }
    __m512i group_sums[kRows][kStrips][kChains];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int v = 0; v < kStrips; ++v)
#pragma GCC unroll 2
        for (int chain = 0; chain < kChains; ++chain) group_sums[row][v][chain] = _mm512_setzero_si512();
    for (const int64_t end = at + words; at < end;) {
      ahead.turn();
#pragma GCC unroll 4
      for (int step = 0; step < kUnroll; ++step, at += 2, w += kStepBytes) {
        ahead.pass(w);
#pragma GCC unroll 4
        for (int v = 0; v < kStrips; ++v) {
          __m512i nibbles = _mm512_load_si512(w + v * strip_bytes);
          __asm__("" : "+v"(nibbles));  // once: GCC would load them for both halves
          ahead.in_order(nibbles);
          const __m512i low = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
          const __m512i high = kChains == 2 ? _mm512_andnot_si512(_mm512_set1_epi8(15), nibbles)
                                            : _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), _mm512_set1_epi8(15));
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) add_dot_int8_of(group_sums[row][v][0], low, x.at(row, at));
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) add_dot_int8_of(group_sums[row][v][kChains - 1], high, x.at(row, at + 1));
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) {
      const __m512i unit = _mm512_and_si512(group % 2 == 0 ? units[v] : _mm512_srli_epi32(units[v], 16), _mm512_set1_epi32(0xff));
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        __m512i of_group = group_sums[row][v][0];
        if constexpr (kChains == 2) of_group = _mm512_add_epi32(of_group, _mm512_srai_epi32(group_sums[row][v][1], 4));
        sums[row][v] = _mm512_add_epi32(sums[row][v], _mm512_mullo_epi32(unit, of_group));
      }
    }
  }
  __m512i* acc = static_cast<__m512i*>(args.acc);
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) acc[row * kVectors + v] = sums[row][v];
}

// More rows: each step becomes two vectors of int8 in registers, for all of them.
template <int kRows, int kStrips, bool kInterleaved, Reach kReach>
void tile_int4(const TileArgs& args) {
  if constexpr (!kInterleaved) return tile_int4_few<kRows, kStrips, kReach>(args);
  static_assert(kStrips == 1 || !kInterleaved);
  constexpr int kChains = kRows <= 8 ? 2 : 1;
  __m512i sums[kChains][kRows];
#pragma GCC unroll 2
  for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 24
    for (int row = 0; row < kRows; ++row) sums[c][row] = _mm512_setzero_si512();
  const Words<kRows, kInterleaved> x(args);
  const int64_t words = args.group / 4, step_bytes = args.group / 8 * kStepBytes;
  const uint8_t *w = args.strip, *heads = w;
  Ahead<1, kReach> ahead(args, args.units * (words / 8), args.units * step_bytes);
  int64_t at = 0;
  for (int64_t group = 0; group < args.units; ++group) {
    if (group % 2 == 0) {
      heads = w;
      ahead.pass(w);
      w += 2 * kHeadBytes;
      ahead.line();
    }
    const Grid grid(heads + group % 2 * kHeadBytes);
    for (const int64_t end = at + words; at < end;) {
      ahead.turn();
#pragma GCC unroll 4
      for (int step = 0; step < kUnroll; ++step, at += 2, w += kStepBytes) {
        ahead.pass(w);
        const __m512i nibbles = _mm512_load_si512(w), low = grid.low(nibbles), high = grid.high(nibbles);
#pragma GCC unroll 24
        for (int row = 0; row < kRows; ++row) add_dot_int8(sums[0][row], low, x.get(row, at));
#pragma GCC unroll 24
        for (int row = 0; row < kRows; ++row) add_dot_int8(sums[kChains - 1][row], high, x.get(row, at + 1));
      }
    }
  }
  __m512i* acc = static_cast<__m512i*>(args.acc);
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row)
    acc[row * kVectors] = kChains == 1 ? sums[0][row] : _mm512_add_epi32(sums[0][row], sums[kChains - 1][row]);
}

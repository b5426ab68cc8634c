// The two products of attention on registers: tiles of R rows by Z vectors, the same walk for each kind of keys and values.

DIPTYCH_INLINE int64_t query_stride(int64_t d) { return d; }
DIPTYCH_INLINE void arrange_queries(const Scratch&, bool, int64_t, int64_t, int64_t) {}
DIPTYCH_INLINE void begin_products() {}
DIPTYCH_INLINE void end_products() {}

// What is added up, what queries and weights are, and how keys and values are read.
struct Numbers { using Sum = F32; using In = Input; using Stored = uint16_t; };
#if defined(DIPTYCH_WHOLE)
// A cache of int8: whole sums, so that no bit depends on their order, nor on whether a tile was widened before or is where it is multiplied.
struct Whole { using Sum = I32; using In = uint16_t; using Stored = uint16_t; };
#endif
#if defined(DIPTYCH_BYTES)
struct Bytes { using Sum = I32; using In = uint16_t; using Stored = int8_t; };
struct Eights { using Sum = F32; using In = Input; using Stored = E4m3; };  // fp8: the numbers that it would be widened to
#endif
#if defined(DIPTYCH_QUADS)
#include "attention/attention_quads.inl"
template <class Kind>
constexpr bool kIsQuads = std::is_same_v<Kind, Quads>;
#else
template <class Kind>
constexpr bool kIsQuads = false;
#endif
template <class Kind>
using InputOf = typename Kind::In;
template <class Kind>
constexpr int kBytesOf = 32 * sizeof(typename Kind::Stored);  // of one vector
template <class Kind>
DIPTYCH_INLINE const typename Kind::Stored* stored(const uint16_t* x) { return reinterpret_cast<const typename Kind::Stored*>(x); }

DIPTYCH_INLINE void clear(F32& sum) { sum = zero(); }
DIPTYCH_INLINE F32 numbers(F32 sum) { return sum; }

// One pair of inputs: acc[r][z] += x[r] * y[z], x(r) and y(z) where they lie.
template <class Sum, int R, int Z, class X, class Y>
DIPTYCH_INLINE void add_pair(Sum (&acc)[R][Z], X x, Y y) {
  Pairs pairs[Z];
  for (int z = 0; z < Z; ++z) pairs[z] = load_pairs(y(z));
  for (int r = 0; r < R; ++r) {
    const Pairs b = broadcast_pair(x(r));
    for (int z = 0; z < Z; ++z) acc[r][z] = dot2(acc[r][z], b, pairs[z]);
  }
}

#if defined(DIPTYCH_AVX512) && !defined(__AVX512BF16__)
// Without a dot instruction the even inputs come first, then the odd: y is read twice, since both its halves beside the sums would not
// fit the registers.
template <int R, int Z, class X, class Y>
DIPTYCH_INLINE void add_pair(F32 (&acc)[R][Z], X x, Y y) {
  constexpr bool is_costly = std::is_same_v<decltype(y(0)), const E4m3*>;  // to widen twice
  Pairs pairs[Z];
  if constexpr (is_costly)
    for (int z = 0; z < Z; ++z) pairs[z] = load_pairs(y(z));
  for (int half = 0; half < 2; ++half) {
    F32 wide[Z];
    for (int z = 0; z < Z; ++z) wide[z] = widen_half(is_costly ? pairs[z] : load_pairs(y(z)), half);
    for (int r = 0; r < R; ++r) {
      const F32 b = set1(x(r)[half]);
      for (int z = 0; z < Z; ++z) acc[r][z] = fma(b, wide[z], acc[r][z]);
    }
  }
}
#endif

#if defined(DIPTYCH_AVX512) && defined(__AVX512BF16__)
// A dot takes its row's pair from memory, as those of bf16 do, where four vectors of seven rows fill the registers. Elsewhere a pair is
// read once: two loads a cycle are as many as there are dots.
template <int R, int Z, class X, class Y>
DIPTYCH_INLINE void add_pair(I32 (&acc)[R][Z], X x, Y y) {
  Pairs pairs[Z];
  for (int z = 0; z < Z; ++z) pairs[z] = load_pairs(y(z));
  for (int r = 0; r < R; ++r) {
    if constexpr (R * Z + Z < 32) {
      const Pairs b = broadcast_pair(x(r));
      for (int z = 0; z < Z; ++z) acc[r][z] = dot2(acc[r][z], b, pairs[z]);
    } else {
      for (int z = 0; z < Z; ++z) add_dot_int16_of(acc[r][z].v, x(r), pairs[z].v);
    }
  }
}

// 64 codes of fp8 are widened at once: acc[r][first] += x(r) * the former half, acc[r][second] += x(r)[step] * the latter.
template <class Kind>
constexpr bool kWidensTwo = std::is_same_v<Kind, Eights>;
template <int R, int Z, class X>
DIPTYCH_INLINE void add_two(F32 (&acc)[R][Z], int first, int second, X x, int step, const E4m3* codes) {
  Pairs former, latter;
  widen_64_e4m3(codes, former.v, latter.v);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) add_dot_bf16_of(acc[r][first].v, x(r), former.v);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) add_dot_bf16_of(acc[r][second].v, x(r) + step, latter.v);
}
#else
template <class Kind>
constexpr bool kWidensTwo = false;
#endif

template <class Kind, int R, int Z>
DIPTYCH_INLINE void score_columns(const InputOf<Kind>* q, int64_t d, const Tile& tile, int64_t group, float* out) {
  const uint16_t* const* keys = tile.keys + group;
  const float* scales = tile.key_scales ? tile.key_scales + group * 16 : nullptr;
  Ahead::Cursor cursor = tile.ahead->cursor;
  cursor.to_keys(group);
  typename Kind::Sum acc[R][Z];
  if constexpr (kIsQuads<Kind>) {
    score_quads(q, d, keys, cursor, acc);
  } else {
    for (int r = 0; r < R; ++r)
      for (int z = 0; z < Z; ++z) clear(acc[r][z]);
    int64_t i = 0;
    if constexpr (kWidensTwo<Kind>)
      for (; i + 2 <= d / 2; i += 2) {
        for (int half = 0; half < 2; ++half) cursor.template step_keys<Z, kBytesOf<Kind>>(i + half);
#pragma GCC unroll 4
        for (int z = 0; z < Z; ++z) add_two(acc, z, z, [&](int r) { return q + r * d + 2 * i; }, 2, stored<Kind>(keys[z]) + i * 32);
      }
    for (; i < d / 2; ++i) {
      cursor.template step_keys<Z, kBytesOf<Kind>>(i);
      add_pair(acc, [&](int r) { return q + r * d + 2 * i; }, [&](int z) { return stored<Kind>(keys[z]) + i * 32; });
    }
  }
  tile.ahead->cursor = cursor;
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) {
      const F32 sum = numbers(acc[r][z]);
      store(out + r * kTileTokens + z * 16, scales ? mul(sum, load(scales + z * 16)) : sum);
    }
}

template <class Kind, int R>
constexpr int columns_of() {
#if defined(DIPTYCH_AVX512) && defined(__AVX512BF16__)
  if (R > 7) return kWidensTwo<Kind> ? 2 : 3;
  if (kIsQuads<Kind>) return R > 6 ? 3 : 4;  // a row's four, or what puts keys in fours, stand beside the sums
  return 4;  // a dot takes its row's pair from memory
#elif defined(DIPTYCH_AVX512)
  if (std::is_same_v<Kind, Eights>) return R <= 5 ? 4 : 3;  // what widens stands beside the sums
  return R <= 6 ? 4 : 3;  // widened vectors, or a row's pair, stand beside the sums
#elif defined(DIPTYCH_AVX2)
  return 2;
#else
  return 1;
#endif
}

// Of n vectors, how many the next call takes: never one alone where two calls of two or three would do.
template <class Kind, int R>
DIPTYCH_INLINE int64_t vectors_at_once(int64_t n) {
  constexpr int most = columns_of<Kind, R>();
  if (n <= most) return n;
  return most > 2 && n == most + 1 ? n - 2 : most;
}

template <class Kind, int R>
static void score_rows(const InputOf<Kind>* q, int64_t d, const Tile& tile, const Span& seen, float* scores) {
  for (int64_t g = seen.first; g < seen.end;) {
    const int64_t z = vectors_at_once<Kind, R>(seen.end - g);
    switch (z) {
#if defined(DIPTYCH_AVX512)
      case 4:
        if constexpr (columns_of<Kind, R>() >= 4) score_columns<Kind, R, 4>(q, d, tile, g, scores + g * 16);
        break;
      case 3: score_columns<Kind, R, 3>(q, d, tile, g, scores + g * 16); break;
#endif
#if defined(DIPTYCH_AVX512) || defined(DIPTYCH_AVX2)
      case 2: score_columns<Kind, R, 2>(q, d, tile, g, scores + g * 16); break;
#endif
      default: score_columns<Kind, R, 1>(q, d, tile, g, scores + g * 16);
    }
    g += z;
  }
}

template <class Kind, int R, int Z>
DIPTYCH_INLINE void weigh_columns(const InputOf<Kind>* weights, const Tile& tile, const Span& seen, int64_t column, int64_t dv,
                                  const Joined& to) {
  typename Kind::Sum acc[R][Z];
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) clear(acc[r][z]);
  Ahead::Cursor cursor = tile.ahead->cursor;
  for (int64_t g = seen.first; g < seen.end; ++g) {
    const auto* v = stored<Kind>(tile.values[g]) + column * 2;
    const int64_t left = seen.pairs - g * 8, pairs = left < 8 ? left : 8, element = kBytesOf<Kind> / 32;
    cursor.to_values(g, column * 2 * element, 2 * dv * element);
    if constexpr (kIsQuads<Kind>) {
      weigh_quads(weights + g * 16, v, pairs, dv, cursor, acc);
    } else {
      for (int64_t p = 0; p < pairs; ++p, v += 2 * dv) {
        cursor.template step_values<Z, kBytesOf<Kind>>();
        const auto x = [&](int r) { return weights + r * kTileTokens + g * 16 + 2 * p; };
        if constexpr (kWidensTwo<Kind> && Z % 2 == 0) {
#pragma GCC unroll 2
          for (int z = 0; z < Z; z += 2) add_two(acc, z, z + 1, x, 0, v + z * 32);
        } else {
          add_pair(acc, x, [&](int z) { return v + z * 32; });
        }
      }
    }
  }
  tile.ahead->cursor = cursor;
  if constexpr (kIsQuads<Kind>) order_quads(acc);
  // Unrolled, or the sums would lie in memory in the loop above, too.
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int z = 0; z < Z; ++z) {
      float* at = to.out + r * to.stride + column + z * 16;
      const F32 product = std::is_same_v<typename Kind::Sum, F32> && kMeetsWhole ? numbers(acc[r][z]) : to.unit ? mul(numbers(acc[r][z]), set1(to.unit[r])) : numbers(acc[r][z]);
      store(at, to.keep ? fma(load(at), set1(to.keep[r]), mul(product, set1(to.take[r]))) : product);
    }
  }
}

template <class Kind, int R>
static void weigh_rows(const InputOf<Kind>* weights, const Tile& tile, const Span& seen, int64_t dv, const Joined& to) {
  for (int64_t column = 0; column < dv;) {
    const int64_t z = vectors_at_once<Kind, R>((dv - column) / 16);
    switch (z) {
#if defined(DIPTYCH_AVX512)
      case 4:
        if constexpr (columns_of<Kind, R>() >= 4) weigh_columns<Kind, R, 4>(weights, tile, seen, column, dv, to);
        break;
      case 3: weigh_columns<Kind, R, 3>(weights, tile, seen, column, dv, to); break;
#endif
#if defined(DIPTYCH_AVX512) || defined(DIPTYCH_AVX2)
      case 2: weigh_columns<Kind, R, 2>(weights, tile, seen, column, dv, to); break;
#endif
      default: weigh_columns<Kind, R, 1>(weights, tile, seen, column, dv, to);
    }
    column += 16 * z;
  }
}

// By the number of rows, 1 to kRows.
template <class Kind, int... kN>
DIPTYCH_INLINE void score_by(std::integer_sequence<int, kN...>, int64_t n, const InputOf<Kind>* q, int64_t d, const Tile& tile,
                             const Span& seen, float* scores) {
  using Rows = void (*)(const InputOf<Kind>*, int64_t, const Tile&, const Span&, float*);
  static constexpr Rows kByRows[] = {score_rows<Kind, kN + 1>...};
  kByRows[n - 1](q, d, tile, seen, scores);
}
template <class Kind, int... kN>
DIPTYCH_INLINE void weigh_by(std::integer_sequence<int, kN...>, int64_t n, const InputOf<Kind>* weights, const Tile& tile, const Span& seen,
                             int64_t dv, const Joined& to) {
  using Rows = void (*)(const InputOf<Kind>*, const Tile&, const Span&, int64_t, const Joined&);
  static constexpr Rows kByRows[] = {weigh_rows<Kind, kN + 1>...};
  kByRows[n - 1](weights, tile, seen, dv, to);
}

DIPTYCH_INLINE void score(const Scratch& scratch, int64_t row, int64_t n, int64_t d, const Tile& tile, const Span& seen) {
  constexpr std::make_integer_sequence<int, kRows> any{};
#if defined(DIPTYCH_QUADS)
  if (tile.is_quads) return score_by<Quads>(any, n, scratch.quad_queries() + row * quad_stride(d), d, tile, seen, scratch.scores);
#endif
#if defined(DIPTYCH_BYTES)
  if (tile.is_bytes && !tile.is_whole) return score_by<Eights>(any, n, scratch.queries + row * d, d, tile, seen, scratch.scores);
  if (tile.is_bytes) return score_by<Bytes>(any, n, scratch.whole_queries() + row * d, d, tile, seen, scratch.scores);
#endif
#if defined(DIPTYCH_WHOLE)
  if (tile.is_whole) return score_by<Whole>(any, n, scratch.whole_queries() + row * d, d, tile, seen, scratch.scores);
#endif
  score_by<Numbers>(any, n, scratch.queries + row * d, d, tile, seen, scratch.scores);
}
DIPTYCH_INLINE void weigh(const Scratch& scratch, int64_t n, const Tile& tile, const Span& seen, int64_t dv, const Joined& to) {
  constexpr std::make_integer_sequence<int, kRows> any{};
#if defined(DIPTYCH_QUADS)
  if (tile.is_quads) return weigh_by<Quads>(any, n, scratch.quad_weights(), tile, seen, dv, to);
#endif
#if defined(DIPTYCH_BYTES)
  if (tile.is_bytes && !tile.is_whole) return weigh_by<Eights>(any, n, scratch.weights, tile, seen, dv, to);
  if (tile.is_bytes) return weigh_by<Bytes>(any, n, scratch.whole_weights(), tile, seen, dv, to);
#endif
#if defined(DIPTYCH_WHOLE)
  if (tile.is_whole) return weigh_by<Whole>(any, n, scratch.whole_weights(), tile, seen, dv, to);
#endif
  weigh_by<Numbers>(any, n, scratch.weights, tile, seen, dv, to);
}

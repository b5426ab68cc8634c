// The two products of attention by AVX2, in place of attention_products.inl: R rows by V vectors of eight sums, so that the sums and what
// stands beside them fit 16 registers. Of a turn's queries the numbers of one dimension lie side by side, for all its rows by one pointer.

DIPTYCH_INLINE int64_t query_stride(int64_t d) { return d; }
DIPTYCH_INLINE void begin_products() {}
DIPTYCH_INLINE void end_products() {}

// Eight rows of eight words, row by row and then column by column.
DIPTYCH_INLINE void turn_square(__m256 (&x)[8]) {
  __m256 y[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int high = 0; high < 2; ++high) {
      x[i + 2 * high] = _mm256_shuffle_ps(y[i + high], y[i + 2 + high], 0x44);
      x[i + 2 * high + 1] = _mm256_shuffle_ps(y[i + high], y[i + 2 + high], 0xee);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) y[i] = _mm256_permute2f128_ps(x[i], x[4 + i], 0x20), y[4 + i] = _mm256_permute2f128_ps(x[i], x[4 + i], 0x31);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}

// A turn's rows, one behind the other before, come side by side number by number, whole numbers pair by pair.
DIPTYCH_INLINE void arrange_queries(const Scratch& scratch, bool is_whole, int64_t rows, int64_t turn, int64_t d) {
  const int64_t words = is_whole ? d / 2 : d;  // of a row
  float* spare = scratch.queries + rows * d;   // kRows to spare
  for (int64_t first = 0; first < rows; first += turn) {
    const int64_t n = rows - first < turn ? rows - first : turn;
    float* out = scratch.queries + first * words;
    std::memcpy(spare, out, static_cast<size_t>(n * words) * 4);
    for (int64_t i = 0; i < words; i += 8) {
      __m256 square[8];
#pragma GCC unroll 8
      for (int64_t r = 0; r < 8; ++r) square[r] = _mm256_loadu_ps(spare + (r < n ? r : 0) * words + i);
      turn_square(square);
      const int64_t columns = words - i < 8 ? words - i : 8;
      for (int64_t c = 0; c < columns; ++c) {  // what is stored behind a column the next ones replace
        if ((words - i - c) * n >= 8) _mm256_storeu_ps(out + (i + c) * n, square[c]);
        else _mm256_maskstore_ps(out + (i + c) * n, lane_mask(n), square[c]);
      }
    }
  }
}

// What is added up, what queries and weights are, and how keys and values are read.
struct Numbers { using Sum = __m256; using In = float; using Stored = uint16_t; };
// A cache of int8: whole sums, so that no bit depends on their order, nor on whether a tile was widened before or is where it is multiplied.
struct Whole { using Sum = __m256i; using In = uint16_t; using Stored = uint16_t; };
struct Bytes { using Sum = __m256i; using In = uint16_t; using Stored = int8_t; };
struct Eights { using Sum = __m256; using In = float; using Stored = E4m3; };  // fp8: the numbers that it would be widened to
template <class Kind>
constexpr bool kIsWhole = std::is_same_v<typename Kind::Sum, __m256i>;

DIPTYCH_INLINE void clear(__m256& sum) { sum = _mm256_setzero_ps(); }
DIPTYCH_INLINE void clear(__m256i& sum) { sum = _mm256_setzero_si256(); }
DIPTYCH_INLINE __m256 numbers(__m256 sum) { return sum; }
DIPTYCH_INLINE __m256 numbers(__m256i sum) { return _mm256_cvtepi32_ps(sum); }

// Eight pairs: the even (0) or the odd (1) numbers, or both of them as whole numbers of 16 bits.
DIPTYCH_INLINE __m256 widen_half(const uint16_t* y, int half) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(y));
  return _mm256_castsi256_ps(half == 0 ? _mm256_slli_epi32(pairs, 16) : _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
DIPTYCH_INLINE __m256 widen_half(const E4m3* y, int half) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(y));
  return widen_e4m3_words(half == 0 ? _mm_slli_epi16(codes, 8) : codes);
}
DIPTYCH_INLINE __m256i whole_pairs(const uint16_t* y) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(y)); }
DIPTYCH_INLINE __m256i whole_pairs(const int8_t* y) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(y))); }

// sum += x * y, written so that the sum keeps its register: GCC 12 lets the sum take x's or y's, and then moves and spills others.
DIPTYCH_INLINE __m256 add_product(__m256 sum, __m256 x, __m256 y) {
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
  return sum;
}
// Read again for each two vectors: kept beside the sums they would not fit the registers.
DIPTYCH_INLINE __m256 broadcast_again(const float* x) {
  __m256 all;
  __asm__ volatile("vbroadcastss %1, %0" : "=x"(all) : "m"(*x));
  return all;
}
DIPTYCH_INLINE __m256i broadcast_again(const uint16_t* x) {
  typedef int32_t __attribute__((may_alias, aligned(2))) Pair;
  __m256i all;
  __asm__ volatile("vpbroadcastd %1, %0" : "=x"(all) : "m"(*reinterpret_cast<const Pair*>(x)));
  return all;
}
DIPTYCH_INLINE __m256i add_product(__m256i sum, __m256i x, __m256i y) {
  __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(x, y)));
  return sum;
}

// One pair of inputs: acc[r][v] += x(r, half) * y(v), two vectors widened at a time.
template <int R, int V, class X, class Y>
DIPTYCH_INLINE void add_pair(__m256 (&acc)[R][V], X x, Y y) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half)
#pragma GCC unroll 4
    for (int v = 0; v < V; v += 2) {
      const __m256 wide[2] = {widen_half(y(v), half), widen_half(y(v + 1), half)};
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256 few = broadcast_again(x(r, half));
        acc[r][v] = add_product(acc[r][v], few, wide[0]);
        acc[r][v + 1] = add_product(acc[r][v + 1], few, wide[1]);
      }
    }
}
template <int R, int V, class X, class Y>
DIPTYCH_INLINE void add_pair(__m256i (&acc)[R][V], X x, Y y) {
#pragma GCC unroll 4
  for (int v = 0; v < V; v += 2) {
    const __m256i wide[2] = {whole_pairs(y(v)), whole_pairs(y(v + 1))};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256i few = broadcast_again(x(r, 0));
      acc[r][v] = add_product(acc[r][v], few, wide[0]);
      acc[r][v + 1] = add_product(acc[r][v + 1], few, wide[1]);
    }
  }
}

#define DIPTYCH_WITHIN __attribute__((always_inline))  // a function of its own would have the sums in memory

// kAsks: beside the products what comes next is asked for. Where nothing is, sums and addresses have all registers.
template <class Kind, int R, int V, bool kAsks>
DIPTYCH_INLINE void score_columns(const typename Kind::In* q, int64_t d, const Tile& tile, int64_t group, float* out) {
  using Stored = typename Kind::Stored;
  const Stored* keys[V / 2];
#pragma GCC unroll 4
  for (int z = 0; z < V / 2; ++z) keys[z] = reinterpret_cast<const Stored*>(tile.keys[group + z]);
  Ahead::Cursor cursor;
  if constexpr (kAsks) cursor = tile.ahead->cursor;
  typename Kind::Sum acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) clear(acc[r][v]);
  for (int64_t i = 0; i < d / 2; ++i) {
    if constexpr (kAsks) cursor.step(V / 2);
    const auto x = [&](int r, int half) DIPTYCH_WITHIN { return kIsWhole<Kind> ? q + (i * R + r) * 2 : q + (2 * i + half) * R + r; };
    add_pair(acc, x, [&](int v) DIPTYCH_WITHIN { return keys[v / 2] + i * 32 + v % 2 * 16; });
  }
  if constexpr (kAsks) tile.ahead->cursor = cursor;
  const float* scales = tile.key_scales ? tile.key_scales + group * 16 : nullptr;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const __m256 sum = numbers(acc[r][v]);
      _mm256_storeu_ps(out + r * kTileTokens + v * 8, scales ? _mm256_mul_ps(sum, _mm256_loadu_ps(scales + v * 8)) : sum);
    }
}

// Vectors of R rows: twelve sums where FMA is the bound, which waits for eight at least.
template <int R>
constexpr int kVectors = R <= 3 ? 4 : 2;

template <class Kind, int R, bool kAsks>
DIPTYCH_INLINE void score_groups(const typename Kind::In* q, int64_t d, const Tile& tile, const Span& seen, float* scores) {
  int64_t g = seen.first;
  for (; g + kVectors<R> / 2 <= seen.end; g += kVectors<R> / 2) score_columns<Kind, R, kVectors<R>, kAsks>(q, d, tile, g, scores + g * 16);
  if (g < seen.end) score_columns<Kind, R, 2, kAsks>(q, d, tile, g, scores + g * 16);
}
template <class Kind, int R>
static void score_rows(const typename Kind::In* q, int64_t d, const Tile& tile, const Span& seen, float* scores) {
  if (tile.ahead->cursor.is_idle()) score_groups<Kind, R, false>(q, d, tile, seen, scores);
  else score_groups<Kind, R, true>(q, d, tile, seen, scores);
}

template <class Kind, int R, int V, bool kAsks>
DIPTYCH_INLINE void weigh_columns(const typename Kind::In* weights, const Tile& tile, const Span& seen, int64_t column, int64_t dv,
                                  const Joined& to) {
  using Stored = typename Kind::Stored;
  typename Kind::Sum acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) clear(acc[r][v]);
  Ahead::Cursor cursor;
  if constexpr (kAsks) cursor = tile.ahead->cursor;
  for (int64_t g = seen.first; g < seen.end; ++g) {
    const Stored* at = reinterpret_cast<const Stored*>(tile.values[g]) + column * 2;
    const typename Kind::In* x = weights + g * 16;
    const int64_t left = seen.pairs - g * 8, pairs = left < 8 ? left : 8;
    for (int64_t p = 0; p < pairs; ++p, at += 2 * dv, x += 2) {
      if constexpr (kAsks) cursor.step(V / 2);
      const auto weight = [&](int r, int half) DIPTYCH_WITHIN { return x + r * kTileTokens + half; };
      add_pair(acc, weight, [&](int v) DIPTYCH_WITHIN { return at + v * 16; });
    }
  }
  if constexpr (kAsks) tile.ahead->cursor = cursor;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float* out = to.out + r * to.stride + column;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      __m256 product = numbers(acc[r][v]);
      if constexpr (kIsWhole<Kind>) product = _mm256_mul_ps(product, _mm256_broadcast_ss(to.unit + r));
      if (to.keep != nullptr) {
        product = _mm256_mul_ps(product, _mm256_broadcast_ss(to.take + r));
        product = _mm256_fmadd_ps(_mm256_loadu_ps(out + v * 8), _mm256_broadcast_ss(to.keep + r), product);
      }
      _mm256_storeu_ps(out + v * 8, product);
    }
  }
}

template <class Kind, int R, bool kAsks>
DIPTYCH_INLINE void weigh_values(const typename Kind::In* weights, const Tile& tile, const Span& seen, int64_t dv, const Joined& to) {
  int64_t column = 0;
  for (; column + kVectors<R> * 8 <= dv; column += kVectors<R> * 8)
    weigh_columns<Kind, R, kVectors<R>, kAsks>(weights, tile, seen, column, dv, to);
  if (column < dv) weigh_columns<Kind, R, 2, kAsks>(weights, tile, seen, column, dv, to);
}
template <class Kind, int R>
static void weigh_rows(const typename Kind::In* weights, const Tile& tile, const Span& seen, int64_t dv, const Joined& to) {
  if (tile.ahead->cursor.is_idle()) weigh_values<Kind, R, false>(weights, tile, seen, dv, to);
  else weigh_values<Kind, R, true>(weights, tile, seen, dv, to);
}

// By the number of rows, 1 to kRows.
template <class Kind, int... kN>
DIPTYCH_INLINE void score_by(std::integer_sequence<int, kN...>, int64_t n, const void* q, int64_t d, const Tile& tile, const Span& seen, float* scores) {
  using Rows = void (*)(const typename Kind::In*, int64_t, const Tile&, const Span&, float*);
  static constexpr Rows kByRows[] = {score_rows<Kind, kN + 1>...};
  kByRows[n - 1](static_cast<const typename Kind::In*>(q), d, tile, seen, scores);
}
template <class Kind, int... kN>
DIPTYCH_INLINE void weigh_by(std::integer_sequence<int, kN...>, int64_t n, const void* weights, const Tile& tile, const Span& seen, int64_t dv,
                             const Joined& to) {
  using Rows = void (*)(const typename Kind::In*, const Tile&, const Span&, int64_t, const Joined&);
  static constexpr Rows kByRows[] = {weigh_rows<Kind, kN + 1>...};
  kByRows[n - 1](static_cast<const typename Kind::In*>(weights), tile, seen, dv, to);
}

// The row-th is the first of a turn of n rows.
DIPTYCH_INLINE void score(const Scratch& scratch, int64_t row, int64_t n, int64_t d, const Tile& tile, const Span& seen) {
  constexpr std::make_integer_sequence<int, kRows> any{};
  const float* q = scratch.queries + row * d;
  const uint16_t* whole = scratch.whole_queries() + row * d;
  if (tile.is_bytes && !tile.is_whole) return score_by<Eights>(any, n, q, d, tile, seen, scratch.scores);
  if (tile.is_bytes) return score_by<Bytes>(any, n, whole, d, tile, seen, scratch.scores);
  if (tile.is_whole) return score_by<Whole>(any, n, whole, d, tile, seen, scratch.scores);
  score_by<Numbers>(any, n, q, d, tile, seen, scratch.scores);
}
DIPTYCH_INLINE void weigh(const Scratch& scratch, int64_t n, const Tile& tile, const Span& seen, int64_t dv, const Joined& to) {
  constexpr std::make_integer_sequence<int, kRows> any{};
  if (tile.is_bytes && !tile.is_whole) return weigh_by<Eights>(any, n, scratch.weights, tile, seen, dv, to);
  if (tile.is_bytes) return weigh_by<Bytes>(any, n, scratch.weights, tile, seen, dv, to);
  if (tile.is_whole) return weigh_by<Whole>(any, n, scratch.weights, tile, seen, dv, to);
  weigh_by<Numbers>(any, n, scratch.weights, tile, seen, dv, to);
}

#undef DIPTYCH_WITHIN

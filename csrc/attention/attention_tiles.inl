// The two products of attention on matrix tiles (amx_tiles.h), 16 rows at a time: the cache's layout is that of the tiles. A group of
// 16 keys is one tile for each 32 dimensions, and the values of two groups, 16 pairs of tokens from an even group on, are one: what a row
// does not see of them is zero, so which groups it sees changes no bit. Rows that a task does not have are computed and left.

constexpr int64_t kTileDims = 32;
DIPTYCH_INLINE int64_t query_stride(int64_t d) { return (d + kTileDims - 1) / kTileDims * kTileDims; }

// 0 to 3: sums. 4: queries, 5: keys. 6: weights of two groups, 7: their values.
DIPTYCH_INLINE void arrange_queries(const Scratch&, bool, int64_t, int64_t, int64_t) {}
DIPTYCH_INLINE void begin_products() {
  TileConfig config;
  for (int tile = 0; tile < kTileRegisters; ++tile) config.rows[tile] = kTileRows, config.row_bytes[tile] = kTileRowBytes;
  tile_configure(config);
}
DIPTYCH_INLINE void end_products() { tile_release(); }

template <class Function, int... kI>
DIPTYCH_INLINE void each(std::integer_sequence<int, kI...>, Function&& function) {
  (function(std::integral_constant<int, kI>{}), ...);
}
template <int kCount, class Function>
DIPTYCH_INLINE void each(Function&& function) {
  each(std::make_integer_sequence<int, kCount>{}, function);
}

template <int Z>
static void score_columns(const uint16_t* q, int64_t d, const uint16_t* const* keys, Ahead& ahead, float* out) {
  const int64_t stride = query_stride(d) * 2, whole = d / kTileDims, rest = d % kTileDims / 2;  // of rows of pairs
  const bool is_asking = !ahead.cursor.is_idle();
  each<Z>([](auto z) { tile_zero<z>(); });
  for (int64_t step = 0; step < whole; ++step) {
    tile_load<4>(q + step * kTileDims, stride);
    each<Z>([&](auto z) {
      tile_load_passing<5>(keys[z] + step * kTileBytes / 2, kTileRowBytes);
      dot_bf16<z, 4, 5>();
      if (is_asking) ahead.cursor.step(kTileRows);
    });
  }
  if (rest != 0) {
    tile_load<4>(q + whole * kTileDims, stride);
    each<Z>([&](auto z) {
      alignas(64) uint8_t padded[kTileBytes] = {};
      std::memcpy(padded, keys[z] + whole * kTileBytes / 2, static_cast<size_t>(rest * kTileRowBytes));
      tile_load<5>(padded, kTileRowBytes);
      dot_bf16<z, 4, 5>();
    });
  }
  each<Z>([&](auto z) { tile_store<z>(out + z * 16, kTileTokens * 4); });
}

// The rows' scores of the groups seen; rows beyond the n asked for are written too.
DIPTYCH_INLINE void score(const Scratch& scratch, int64_t row, int64_t n, int64_t d, const Tile& tile, const Span& seen) {
  const uint16_t* q = scratch.queries + row * query_stride(d);
  float* scores = scratch.scores;
  for (int64_t g = seen.first; g < seen.end; g += 4) {
    switch (seen.end - g) {
      case 1: score_columns<1>(q, d, tile.keys + g, *tile.ahead, scores + g * 16); break;
      case 2: score_columns<2>(q, d, tile.keys + g, *tile.ahead, scores + g * 16); break;
      case 3: score_columns<3>(q, d, tile.keys + g, *tile.ahead, scores + g * 16); break;
      default: score_columns<4>(q, d, tile.keys + g, *tile.ahead, scores + g * 16);
    }
  }
  for (int64_t r = 0; tile.key_scales != nullptr && r < n; ++r)
    for (int64_t g = seen.first; g < seen.end; ++g)
      store(scores + r * kTileTokens + g * 16, mul(load(scores + r * kTileTokens + g * 16), load(tile.key_scales + g * 16)));
}

constexpr int64_t kGroupPairs = kGroupTokens / 2;

// Two groups from g on as far as they are seen, the rest zero: tokens behind the last are another owner's, and their values and scales are
// perhaps no numbers.
struct SeenWeights {
  alignas(64) uint16_t of[kRows * 2 * kGroupTokens] = {};
  SeenWeights(const uint16_t* weights, const Span& seen, int64_t g) {
    const int64_t first = g < seen.first ? seen.first : g, end = g + 2 < seen.end ? g + 2 : seen.end;
    const int64_t from = first * kGroupPairs, to = end * kGroupPairs < seen.pairs ? end * kGroupPairs : seen.pairs;
    for (int64_t r = 0; r < kRows; ++r)
      std::memcpy(of + (r * kGroupPairs * 2 + from - g * kGroupPairs) * 2, weights + r * kTileTokens + from * 2, static_cast<size_t>(to - from) * 4);
  }
};
struct SeenValues {
  alignas(64) uint8_t of[kTileBytes] = {};
  SeenValues(const Tile& tile, const Span& seen, int64_t g, int64_t column, int64_t dv) {
    for (int64_t half = 0; half < 2; ++half) {
      if (g + half < seen.first || g + half >= seen.end) continue;
      const uint16_t* v = tile.values[g + half] + column * 2;
      for (int64_t p = 0; p < kGroupPairs && (g + half) * kGroupPairs + p < seen.pairs; ++p)
        std::memcpy(of + (half * kGroupPairs + p) * kTileRowBytes, v + p * dv * 2, kTileRowBytes);
    }
  }
};

// fresh [16, 64]: weights V of Z vectors of dimensions.
template <int Z>
static void weigh_columns(const uint16_t* weights, const Tile& tile, const Span& seen, int64_t column, int64_t dv, float* fresh) {
  const bool is_asking = !tile.ahead->cursor.is_idle();
  each<Z>([](auto z) { tile_zero<z>(); });
  for (int64_t g = seen.first & ~int64_t{1}; g < seen.end; g += 2) {
    const bool is_whole = g >= seen.first && (g + 2) * kGroupPairs <= seen.pairs && tile.values[g + 1] == tile.values[g] + kGroupTokens * dv;
    if (is_whole) {
      tile_load<6>(weights + g * kGroupTokens, kTileTokens * 2);
    } else {
      const SeenWeights part(weights, seen, g);
      tile_load<6>(part.of, kTileRowBytes);
    }
    each<Z>([&](auto z) {
      if (is_whole) {
        tile_load_passing<7>(tile.values[g] + column * 2 + z * 32, dv * 4);
      } else {
        const SeenValues part(tile, seen, g, column + z * 16, dv);
        tile_load<7>(part.of, kTileRowBytes);
      }
      dot_bf16<z, 6, 7>();
      if (is_asking) tile.ahead->cursor.step(kGroupTokens);
    });
  }
  each<Z>([&](auto z) { tile_store<z>(fresh + z * 16, 64 * 4); });
}

DIPTYCH_INLINE void weigh(const Scratch& scratch, int64_t n, const Tile& tile, const Span& seen, int64_t dv, const Joined& to) {
  const uint16_t* weights = scratch.weights;
  alignas(64) float fresh[kRows * 64];
  for (int64_t column = 0; column < dv; column += 64) {
    const int64_t vectors = dv - column < 64 ? (dv - column) / 16 : 4;
    switch (vectors) {
      case 1: weigh_columns<1>(weights, tile, seen, column, dv, fresh); break;
      case 2: weigh_columns<2>(weights, tile, seen, column, dv, fresh); break;
      case 3: weigh_columns<3>(weights, tile, seen, column, dv, fresh); break;
      default: weigh_columns<4>(weights, tile, seen, column, dv, fresh);
    }
    for (int64_t r = 0; r < n; ++r)
      for (int64_t z = 0; z < vectors; ++z) {
        float* at = to.out + r * to.stride + column + z * 16;
        const F32 product = to.unit ? mul(load(fresh + r * 64 + z * 16), set1(to.unit[r])) : load(fresh + r * 64 + z * 16);
        store(at, to.keep ? fma(load(at), set1(to.keep[r]), mul(product, set1(to.take[r]))) : product);
      }
  }
}

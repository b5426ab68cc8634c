// Where the groups of a tile lie: in the cache as they are, or widened in scratch.

DIPTYCH_INLINE void find_groups(const SequenceView& view, Tile& tile) {
  const KvShape& kv = view.call->kv.shape;
  GroupWalk walk(view, tile.start + tile.span.first * 16);
  for (int64_t g = tile.span.first;;) {
    tile.keys[g] = reinterpret_cast<const uint16_t*>(walk.head.keys) + walk.offset * view.call->shape.head_dim;
    tile.values[g] = reinterpret_cast<const uint16_t*>(walk.head.values) + walk.offset * kv.value_dim();
    if (++g == tile.span.end) break;
    walk.step();
  }
}

#if defined(DIPTYCH_BYTES)
// Whether so many rows meet the bytes as they lie.
DIPTYCH_INLINE bool meets_bytes(const AttentionCall& call, int64_t rows) {
  const KvFormat format = call.kv.shape.format;
  if (is_quads(call)) return true;
#if defined(DIPTYCH_BESIDE)
  if (format == KvFormat::int8 && is_zen4()) return true;
#endif
  return turns_of(rows) < (format == KvFormat::fp8 ? kManyTurnsOfFp8 : kManyTurns);
}
#endif

DIPTYCH_INLINE void widen_bytes(KvFormat format, const int8_t* x, int64_t n, uint16_t* out) {
  int64_t i = 0;
  if (format == KvFormat::fp8) {
#if defined(DIPTYCH_BESIDE)
    for (; i + 64 <= n; i += 64) {
      Pairs former, latter;
      widen_64_e4m3(x + i, former.v, latter.v);
      _mm512_storeu_si512(out + i, former.v), _mm512_storeu_si512(out + i + 32, latter.v);
    }
#endif
    for (; i < n; i += 32) widen_e4m3(reinterpret_cast<const E4m3*>(x + i), out + i);
  } else {
    for (; i < n; i += 32)
#if defined(DIPTYCH_WHOLE)
      widen_i8_whole(x + i, out + i);
#else
      widen_i8(x + i, out + i);
#endif
  }
}

// The scales of a group of 16 tokens.
DIPTYCH_INLINE void take_scales(KvFormat format, const float* scales, float* out) {
  store(out, format == KvFormat::fp8 ? mul(load(scales), set1(kE4m3Unit)) : load(scales));
}

// A cache of bytes: the tile's keys and values as bf16 or whole numbers, exact; their scales go to scores and weights.
DIPTYCH_INLINE void widen_tile(const SequenceView& view, const Scratch& scratch, int64_t rows, Tile& tile) {
  const KvShape& kv = view.call->kv.shape;
  const int64_t d = view.call->shape.head_dim, dv = kv.value_dim();
#if defined(DIPTYCH_BYTES)
  tile.is_bytes = kv.has_values && meets_bytes(*view.call, rows);
#else
  (void)rows;
#endif
  GroupWalk walk(view, tile.start + tile.span.first * 16);
  for (int64_t g = tile.span.first; g < tile.span.end; ++g) {
    const int64_t offset = walk.offset;
    const KvHead head = walk.head;
    const int8_t* keys = reinterpret_cast<const int8_t*>(head.keys) + offset * d;
    const int8_t* values = reinterpret_cast<const int8_t*>(head.values) + offset * dv;
    uint16_t* wide_keys = scratch.wide_keys + g * 16 * d;
    uint16_t* wide_values = scratch.wide_values + g * 16 * dv;
    if (!tile.is_bytes) widen_bytes(kv.format, keys, 16 * d, wide_keys);
    if (!tile.is_bytes && kv.has_values) widen_bytes(kv.format, values, 16 * dv, wide_values);
    take_scales(kv.format, head.key_scales + offset, scratch.key_scales + g * 16);
    take_scales(kv.format, (kv.has_values ? head.value_scales : head.key_scales) + offset, scratch.value_scales + g * 16);
    tile.keys[g] = tile.is_bytes ? reinterpret_cast<const uint16_t*>(keys) : wide_keys;
    tile.values[g] = tile.is_bytes ? reinterpret_cast<const uint16_t*>(values) : wide_values;
    if (g + 1 < tile.span.end) walk.step();
  }
  tile.key_scales = scratch.key_scales, tile.value_scales = scratch.value_scales;
  tile.is_whole = is_whole(*view.call), tile.is_quads = is_quads(*view.call);
  if (tile.is_whole && tile.span.first == 0 && tile.span.pairs == kTileTokens / 2) tile.most_value_scale = most_scale(tile.value_scales, 0, kTileTokens);
}

DIPTYCH_INLINE void find_tile(const SequenceView& view, const Scratch& scratch, int64_t rows, Tile& tile) {
  if (view.call->kv.shape.format == KvFormat::bf16) return find_groups(view, tile);
  widen_tile(view, scratch, rows, tile);
}

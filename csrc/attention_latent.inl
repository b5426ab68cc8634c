// Latent attention (MLA): a cached token is one vector, key and value of all heads. Its values are the keys of a tile put into the order
// that the second product reads, in scratch: for each task that meets the tile, whose rows are all heads of some tokens.

// Words of two dimensions of one token become words of two tokens of one dimension. Tokens behind the last are another owner's:
// perhaps no numbers, so they become zeros, and so do their scales where there are any (int8, fp8), which a weight of zero meets.
DIPTYCH_INLINE void values_of_keys(const SequenceView& view, const Scratch& scratch, Tile& tile) {
  const int64_t d = view.call->kv.shape.head_dim, dv = view.call->kv.shape.value_dim();
  for (int64_t g = tile.span.first; g < tile.span.end; ++g) {
    const uint16_t* keys = tile.keys[g];
    uint16_t* values = scratch.wide_values + g * kGroupTokens * dv;
    const int64_t known = view.last_key + 1 - tile.start - g * kGroupTokens;
    for (int64_t t = known < 0 ? 0 : known; t < kGroupTokens; ++t) scratch.value_scales[g * kGroupTokens + t] = 0.0f;
    for (int64_t i = 0; i < d / 2; ++i) {
      uint32_t words[kGroupTokens];
      std::memcpy(words, keys + i * 2 * kGroupTokens, sizeof words);
      for (int64_t t = known; t < kGroupTokens; ++t) words[t] = 0;
      for (int64_t p = 0; p < kGroupTokens / 2; ++p) {
        const uint32_t even = words[2 * p], odd = words[2 * p + 1];
        const uint32_t pair[2] = {(even & 0xffffu) | odd << 16, even >> 16 | (odd & 0xffff0000u)};
        std::memcpy(values + p * 2 * dv + 4 * i, pair, sizeof pair);
      }
    }
    for (int64_t p = 0; p < kGroupTokens / 2; ++p)
      std::memset(values + p * 2 * dv + 2 * d, 0, static_cast<size_t>(dv - d) * 4);
    tile.values[g] = values;
  }
}

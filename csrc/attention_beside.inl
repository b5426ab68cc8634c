// What the memory brings while a tile is worked on, of a core that keeps many lines of its own on their way and whose prefetchers bring
// little: beside each vector that the first turn of rows multiplies, the line at the same place of what is read next. While keys are
// scored that is the tile's own values, while values are weighed the keys of the tile that comes after. Nothing is counted, so that the
// request costs what it is; several groups of keys are several places at once.
class Ahead {
 public:
  struct Cursor {
    const Ahead* ahead;
    const char* const* places;
    const char* at;
    int64_t stride;

    DIPTYCH_FORCED void to_keys(int64_t group) { places = ahead->is_asking && ahead->narrower == 0 ? ahead->beside_keys + group : nullptr; }
    DIPTYCH_FORCED void to_values(int64_t group, int64_t offset, int64_t bytes) {
      at = ahead->is_asking ? ahead->beside_values[group] + (offset >> ahead->narrower) : nullptr, stride = bytes >> ahead->narrower;
    }
    // Beside Z vectors of kBytes, the i-th of each group: a line holds one or two of them.
    template <int Z, int kBytes>
    DIPTYCH_FORCED void step_keys(int64_t i) {
      if (places == nullptr) return;
      if constexpr (kBytes == 64 || Z % 2 != 0)
        for (int z = 0; z < Z; ++z) __builtin_prefetch(places[z] + i * kBytes, 0, 2);
      else
        for (int z = 0; z < Z / 2; ++z) __builtin_prefetch(places[(i & 1) * (Z / 2) + z] + (i & ~int64_t{1}) * kBytes, 0, 2);
    }
    // Beside Z vectors of kBytes that lie side by side.
    template <int Z, int kBytes>
    DIPTYCH_FORCED void step_values() {
      if (at == nullptr) return;
      for (int z = 0; z < Z; z += 64 / kBytes) __builtin_prefetch(at + z * kBytes, 0, 2);
      at += stride;
    }
    DIPTYCH_FORCED void step(int64_t) {}
    DIPTYCH_FORCED bool is_idle() const { return true; }  // of `step`
  };
  DIPTYCH_FORCED void end_turn() { is_asking = false; }

  Cursor cursor = {this, nullptr, nullptr, 0};

  const char* beside_keys[kTileGroups];
  const char* beside_values[kTileGroups];
  bool is_asking = false;
  int narrower = 0;  // 1: a cache of bytes is asked for beside vectors of 16 bits, which are twice as many, and beside values alone
};

// Of a task of so many rows, behind whose tile the keys from `after_token` come.
DIPTYCH_INLINE void ask_ahead(const SequenceView& view, const SequenceView* after, int64_t after_token, int64_t rows, const Tile& tile, Ahead& ahead) {
  const KvShape& kv = view.call->kv.shape;
  const bool is_widened = kv.format != KvFormat::bf16 && !tile.is_bytes;  // then what is multiplied lies in scratch
  if ((is_widened && kv.has_values) || turns_of(rows) >= kManyTurns) return;
  ahead.is_asking = true, ahead.narrower = is_widened ? 1 : 0;
  const int64_t key = kv.head_dim * kv.element_bytes();
  for (int64_t g = tile.span.first; g < tile.span.end; ++g) {
    ahead.beside_keys[g] = reinterpret_cast<const char*>(kv.has_values ? tile.values[g] : tile.keys[g]);
    ahead.beside_values[g] = reinterpret_cast<const char*>(tile.keys[g]);  // here already, where nobody knows what comes
  }
  if (after == nullptr) return;
  GroupWalk walk(*after, after_token);
  for (int64_t g = tile.span.first; g < tile.span.end; ++g) {
    ahead.beside_values[g] = reinterpret_cast<const char*>(walk.head.keys) + walk.offset * key;
    if (!kv.has_values) ahead.beside_keys[g] = ahead.beside_values[g];
    if (kv.format != KvFormat::bf16) {
      __builtin_prefetch(walk.head.key_scales + walk.offset, 0, 2);
      __builtin_prefetch(walk.head.value_scales + walk.offset, 0, 2);
    }
    after_token += 16;
    if (after_token > after->last_key) break;
    walk.step();
  }
}

// What the memory brings while a tile is worked on, of a core that keeps many lines of its own on their way and whose prefetchers bring
// little: beside each vector that the first turn of rows multiplies, the line at the same place of what is read some groups later: keys, then
// values, then the keys of the tile that comes after. Up to Zen 4 that is half a tile later: while keys are scored the values, while values
// are weighed the next keys. Zen 5 asks kBytesAhead ahead, for few rows of bf16 past L2, and prompts ask, too, behind more than L2 holds (LAB.md:
// up to a fifth). Nothing is counted, so that the request costs what it is; several groups of keys are several places at once.
constexpr int64_t kBytesAhead = 8192;
constexpr int64_t kLeastAhead = 4;  // groups: so many are multiplied together
constexpr int64_t kL2Bytes = 1 << 20;  // of a core of Zen 5
class Ahead {
 public:
  struct Cursor {
    const Ahead* ahead;
    const char* const* places;
    const char* at;
    int64_t stride;
    bool is_past;  // L2 is left out

    DIPTYCH_FORCED void to_keys(int64_t group) { places = ahead->is_asking && ahead->narrower == 0 ? ahead->beside_keys + group : nullptr; }
    DIPTYCH_FORCED void to_values(int64_t group, int64_t offset, int64_t bytes) {
      at = ahead->is_asking ? ahead->beside_values[group] + (offset >> ahead->narrower) : nullptr, stride = bytes >> ahead->narrower;
    }
    DIPTYCH_FORCED void ask(const char* line) const {
      if (is_past) __builtin_prefetch(line, 0, 0);
      else __builtin_prefetch(line, 0, 2);
    }
    // Beside Z vectors of kBytes, the i-th of each group: a line holds one or two of them.
    template <int Z, int kBytes>
    DIPTYCH_FORCED void step_keys(int64_t i) {
      if (places == nullptr) return;
      if constexpr (kBytes == 64 || Z % 2 != 0)
        for (int z = 0; z < Z; ++z) ask(places[z] + i * kBytes);
      else
        for (int z = 0; z < Z / 2; ++z) ask(places[(i & 1) * (Z / 2) + z] + (i & ~int64_t{1}) * kBytes);
    }
    // Beside Z vectors of kBytes that lie side by side.
    template <int Z, int kBytes>
    DIPTYCH_FORCED void step_values() {
      if (at == nullptr) return;
      for (int z = 0; z < Z; z += 64 / kBytes) ask(at + z * kBytes);
      at += stride;
    }
    DIPTYCH_FORCED void step(int64_t) {}
    DIPTYCH_FORCED bool is_idle() const { return true; }  // of `step`
  };
  DIPTYCH_FORCED void end_turn() { is_asking = false; }

  Cursor cursor = {this, nullptr, nullptr, 0, false};

  const char* beside_keys[kTileGroups];
  const char* beside_values[kTileGroups];
  bool is_asking = false;
  int narrower = 0;  // 1: a cache of bytes is asked for beside vectors of 16 bits, which are twice as many, and beside values alone
};

// Of a task of so many rows, behind whose tile the keys from `after_token` come.
DIPTYCH_INLINE void ask_ahead(const SequenceView& view, const SequenceView* after, int64_t after_token, int64_t rows, const Tile& tile, Ahead& ahead) {
  const KvShape& kv = view.call->kv.shape;
  const bool is_widened = kv.format != KvFormat::bf16 && !tile.is_bytes;  // then what is multiplied lies in scratch
  const bool is_many = turns_of(rows) >= kManyTurns, is_near = kv.has_values && is_zen5();
  const bool is_in_l2 = view.last_key * (kv.head_dim + kv.value_dim()) * kv.element_bytes() < kL2Bytes;
  if ((is_widened && kv.has_values) || (is_many && (!is_near || is_in_l2))) return;
  ahead.is_asking = true, ahead.narrower = is_widened ? 1 : 0;
  ahead.cursor.is_past = is_near && !is_many && kv.format == KvFormat::bf16;
  const int64_t key = kv.head_dim * kv.element_bytes(), first = tile.span.first, end = tile.span.end;
  const char* next[kTileGroups];  // its own keys, here already, where nobody knows what comes
  for (int64_t g = first; g < end; ++g) next[g] = reinterpret_cast<const char*>(tile.keys[g]);
  if (after != nullptr) {
    GroupWalk walk(*after, after_token);
    for (int64_t g = first; g < end; ++g) {
      next[g] = reinterpret_cast<const char*>(walk.head.keys) + walk.offset * key;
      if (kv.format != KvFormat::bf16) {
        __builtin_prefetch(walk.head.key_scales + walk.offset, 0, 2);
        __builtin_prefetch(walk.head.value_scales + walk.offset, 0, 2);
      }
      after_token += 16;
      if (after_token > after->last_key) break;
      walk.step();
    }
  }
  int64_t groups = end - first;  // so many later
  if (is_near) groups = std::min(groups, std::max(kLeastAhead, kBytesAhead / (key * 16)));
  for (int64_t g = first; g < end; ++g) {
    const int64_t later = g + groups, over = later - (end - first);
    ahead.beside_keys[g] = later < end ? reinterpret_cast<const char*>(tile.keys[later]) : kv.has_values ? reinterpret_cast<const char*>(tile.values[over]) : next[over];
    ahead.beside_values[g] = later < end ? reinterpret_cast<const char*>(tile.values[later]) : next[over];
  }
}

// What the memory brings while a tile is worked on: the lines of the tile that comes after it, evenly over the work and from several
// places in turn. A core waits for few lines of its own at a time; the processor's own prefetcher of L2 runs ahead of each page that is
// read upwards, the further the slower that page is read.
class Ahead {
 public:
  // For all that one place more holds: places may be as small as a token, and what there is no room for is not asked for.
  DIPTYCH_FORCED bool has_room() const { return n_ + kOfPlace <= kPieces; }
  // [begin, begin + bytes), joined to what was added before where they touch.
  DIPTYCH_FORCED void add(const void* begin, int64_t bytes) {
    const char* first = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(begin) / kLine * kLine);
    const char* end = reinterpret_cast<const char*>((reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes) + kLine - 1) / kLine * kLine);
    const bool touches = n_ != 0 && first >= pieces_[n_ - 1].at && first <= pieces_[n_ - 1].end;
    if (!touches) pieces_[n_++] = {first, first};
    Piece& last = pieces_[n_ - 1];
    if (end <= last.end) return;
    lines_ += (end - last.end) / kLine;
    last.end = end;
  }
  // All of it within so many steps.
  void start(int64_t steps) {
    if (n_ == 0) return;
    cursor = {this, {}, 0, 0, (lines_ * kShares + steps - 1) / steps, 0};
    if (n_ <= kAtOnce / 2) cut_pieces(kAtOnce / n_);
    cursor.take(next_stretch());
  }

  struct Stretch {
    int64_t places, bytes;  // so many bytes at each of so many places, ahead->at_once_
  };
  // Where it stands, copied into a loop's own registers and back.
  struct Cursor {
    Ahead* ahead;
    Stretch stretch;
    int64_t place, offset;  // the next line of the stretch
    int64_t pace, due;      // shares of a line: for a step, and of the steps made

    DIPTYCH_FORCED void take(Stretch next) {
      stretch = next, offset = 0;
      if (next.bytes == 0) pace = due = 0;  // all is asked for
    }

    DIPTYCH_FORCED bool is_idle() const { return pace == 0; }
    DIPTYCH_FORCED void to_keys(int64_t) {}
    DIPTYCH_FORCED void to_values(int64_t, int64_t, int64_t) {}
    template <int Z, int kBytes>
    DIPTYCH_FORCED void step_keys(int64_t) { step(Z); }
    template <int Z, int kBytes>
    DIPTYCH_FORCED void step_values() { step(Z); }
    DIPTYCH_FORCED void step(int64_t steps) {
      for (due += pace * steps; due >= kShares; due -= kShares) {
        __builtin_prefetch(ahead->at_once_[place] + offset, 0, 2);
        if (++place != stretch.places) continue;
        place = 0;
        if ((offset += kLine) == stretch.bytes) take(ahead->next_stretch());
      }
    }
  };
  DIPTYCH_FORCED void end_turn() {}
  Cursor cursor = {};  // asks for nothing

 private:
  struct Piece {
    const char* at;
    const char* end;
  };
  static constexpr int64_t kLine = 64, kShares = 256, kAtOnce = 8;
  static constexpr int64_t kOfPlace = 4, kPieces = kOfPlace * (kTileGroups + 1);  // keys, values and both scales

  void cut_pieces(int64_t parts) {
    for (int64_t i = n_ - 1; i >= 0; --i) {
      const Piece whole = pieces_[i];
      const int64_t lines = (whole.end - whole.at) / kLine;
      for (int64_t part = 0; part < parts; ++part)
        pieces_[i * parts + part] = {whole.at + lines * part / parts * kLine, whole.at + lines * (part + 1) / parts * kLine};
    }
    n_ *= parts;
  }

  // The next places, as far as the shortest of the pieces goes; none where all are taken.
  __attribute__((noinline)) Stretch next_stretch() {
    Stretch stretch = {};
    for (; first_ < n_ && pieces_[first_].at == pieces_[first_].end; ++first_) {
    }
    const int64_t end = n_ - first_ < kAtOnce ? n_ : first_ + kAtOnce;
    for (int64_t i = first_; i < end; ++i) {
      const int64_t left = pieces_[i].end - pieces_[i].at;
      if (left != 0 && (stretch.bytes == 0 || left < stretch.bytes)) stretch.bytes = left;
    }
    for (int64_t i = first_; i < end; ++i) {
      if (pieces_[i].at == pieces_[i].end) continue;
      at_once_[stretch.places++] = pieces_[i].at;
      pieces_[i].at += stretch.bytes;
    }
    return stretch;
  }

  Piece pieces_[kPieces];
  int64_t first_ = 0, n_ = 0, lines_ = 0;
  const char* at_once_[kAtOnce];
};

// The keys and values from `token` to its tile's end.
DIPTYCH_INLINE void find_next(const SequenceView& view, int64_t token, Ahead& ahead) {
  const KvShape& kv = view.call->kv.shape;
  const int64_t key = kv.head_dim * kv.element_bytes(), value = kv.value_dim() * kv.element_bytes();
  const int64_t tile_end = (token / kTileTokens + 1) * kTileTokens;
  const int64_t end = view.last_key < tile_end ? view.last_key / 16 * 16 + 16 : tile_end;
  while (token < end && ahead.has_room()) {
    const int64_t position = view.chosen == nullptr ? token : GroupWalk::place_of(view, token);
    const int64_t block = position / kv.block_tokens, offset = position - block * kv.block_tokens;
    int64_t n = end - token < kv.block_tokens - offset ? end - token : kv.block_tokens - offset;
    if (view.chosen != nullptr && n > view.call->shape.block - token % view.call->shape.block) n = view.call->shape.block - token % view.call->shape.block;
    const KvHead head = view.call->kv.head(view.blocks[block], view.kv_head);
    ahead.add(head.keys + offset * key, n * key);
    if (kv.has_values) ahead.add(head.values + offset * value, n * value);
    if (kv.format != KvFormat::bf16) {
      ahead.add(head.key_scales + offset, n * 4);
      if (kv.has_values) ahead.add(head.value_scales + offset, n * 4);
    }
    token += n;
  }
}

// Of a task of so many rows, behind whose tile the keys from `after_token` come.
DIPTYCH_INLINE void ask_ahead(const SequenceView& view, const SequenceView* after, int64_t after_token, int64_t rows, const Tile& tile, Ahead& ahead) {
  const KvShape& kv = view.call->kv.shape;
  // Many turns take so long that the processor's own prefetchers do: asking made prompts of 512 tokens a tenth slower.
  if (after == nullptr || turns_of(rows) >= kManyTurns) return;
  find_next(*after, after_token, ahead);
  ahead.start(steps_of(tile.span, kv.head_dim, kv.value_dim()) * turns_of(rows));
}

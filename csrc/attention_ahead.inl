// What the memory brings while a tile is worked on: the lines of the tile that comes after it, in the order of their addresses and evenly
// over all of the work. In the products alone they would come in bursts, and the memory would rest while weights are made.
class Ahead {
 public:
  // [begin, begin + bytes), joined to what was added before where they touch.
  DIPTYCH_FORCED void add(const void* begin, int64_t bytes) {
    const char* first = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(begin) / 64 * 64);
    const char* end = reinterpret_cast<const char*>((reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes) + 63) / 64 * 64);
    const bool touches = n_ != 0 && first >= pieces_[n_ - 1].at && first <= pieces_[n_ - 1].end;
    if (!touches) pieces_[n_++] = {first, first};
    Piece& last = pieces_[n_ - 1];
    if (end <= last.end) return;
    lines_ += (end - last.end) / 64;
    last.end = end;
  }
  // All of it within so many steps.
  void start(int64_t steps) {
    if (n_ != 0) cursor = {pieces_, pieces_ + n_, pieces_->at, pieces_->end, (lines_ * kLine + steps - 1) / steps, 0};
  }

  struct Piece {
    const char* at;
    const char* end;
  };
  static constexpr int64_t kLine = 256;  // of the shares of a line that a step asks for
  // Where it stands, copied into a loop's own registers and back.
  struct Cursor {
    const Piece* piece;
    const Piece* pieces_end;
    const char* at;
    const char* end;
    int64_t pace, due;  // shares of a line: for a step, and of the steps made

    DIPTYCH_FORCED void step(int64_t steps) {
      for (due += pace * steps; due >= kLine; due -= kLine) {
        __builtin_prefetch(at, 0, 2);
        at += 64;
        if (at != end) continue;
        if (++piece == pieces_end) {
          pace = due = 0;
          return;
        }
        at = piece->at, end = piece->end;
      }
    }
  };
  Cursor cursor = {};  // asks for nothing

 private:
  Piece pieces_[4 * (kTileGroups + 1)];  // keys, values and both scales of each block that a tile touches
  int64_t n_ = 0, lines_ = 0;
};

// The int4 quantiser, one text for every instruction set: included inside the anonymous namespace of each set's file and compiled
// with its flags, after lanes.inl. Only single multiplications, additions and comparisons, never contracted, so all sets give the same bytes.

// To the nearest whole number, ties to even: 1.5 * 2^23 leaves no room for a fraction.
inline Lanes nearest(Lanes value) {
  const Lanes room = fill(12582912.0f);
  return (value + room) - room;
}

inline Lanes hold(Lanes value, float least, float most) { return lower(higher(value, fill(least)), fill(most)); }

// The 16 levels zero + unit * q, whole numbers within [-128, 127].
struct Levels {
  Lanes zero, unit, inverse, error;  // error: sum of squares over the group

  inline Lanes q_of(Lanes from_zero) const { return hold(nearest(from_zero * inverse), 0.0f, 15.0f); }
};

inline const Lanes& lanes_of(const float* x, int64_t i) { return *reinterpret_cast<const Lanes*>(x + i * kStripLanes); }

inline Levels make_levels(const float* x, int64_t group, Lanes centre, Lanes unit) {
  Levels levels{hold(nearest(centre - unit * 7.5f), -128.0f, 112.0f), unit, fill(1.0f) / unit, fill(0.0f)};
  levels.zero = lower(levels.zero, fill(127.0f) - unit * 15.0f);
  for (int64_t i = 0; i < group; ++i) {
    const Lanes from_zero = lanes_of(x, i) - levels.zero;
    const Lanes miss = from_zero - levels.q_of(from_zero) * unit;
    levels.error = levels.error + miss * miss;
  }
  return levels;
}

inline void keep_better(Levels& best, const Levels& other) {
  const Whole better = other.error < best.error;
  best.zero = better ? other.zero : best.zero;
  best.unit = better ? other.unit : best.unit;
  best.inverse = better ? other.inverse : best.inverse;
  best.error = better ? other.error : best.error;
}

inline Lanes& lanes_of(float* x, int64_t i) { return *reinterpret_cast<Lanes*>(x + i * kStripLanes); }

// x takes of what is left, and keeps what it was.
inline void take_left(float* x, int64_t group, const GroupFeedback& feedback, const float* left, Lanes* own) {
  for (int64_t i = 0; i < group; ++i) {
    Lanes sum = own[i] = lanes_of(x, i);
    for (int64_t d = 0; d < feedback.n; ++d) sum = sum + lanes_of(left, d) * feedback.take[i * feedback.n + d];
    lanes_of(x, i) = sum;
  }
}
inline void leave(const Lanes* missed, int64_t group, const GroupFeedback& feedback, float* left) {
  for (int64_t d = 0; d < feedback.n; ++d) {
    Lanes sum = lanes_of(left, d);
    for (int64_t i = 0; i < group; ++i) sum = sum + missed[i] * feedback.give[i * feedback.n + d];
    lanes_of(left, d) = sum;
  }
}

// One group of a piece's lanes.
inline void quantize_piece(float* x, const float* inverse, int64_t group, uint8_t* head, uint32_t* words, const GroupFeedback& feedback, float* left) {
  const Lanes factor = *reinterpret_cast<const Lanes*>(inverse);
  Lanes own[kMaxGroup];
  for (int64_t i = 0; i < group; ++i) lanes_of(x, i) = lanes_of(x, i) * factor;
  if (feedback.n != 0) take_left(x, group, feedback, left, own);
  Lanes low = lanes_of(x, 0), high = low;
  for (int64_t i = 0; i < group; ++i) low = lower(low, lanes_of(x, i)), high = higher(high, lanes_of(x, i));
  const Lanes centre = (low + high) * 0.5f;
  const Lanes below = nearest((high - low) * (1.0f / 15.0f) - 0.5f);
  Levels best = make_levels(x, group, centre, hold(below, 1.0f, 17.0f));
  keep_better(best, make_levels(x, group, centre, hold(below + 1.0f, 1.0f, 17.0f)));
  const Lanes better_unit = best.unit;
  for (const float shift : {-1.0f, 1.0f}) keep_better(best, make_levels(x, group, centre + shift, better_unit));

  const Whole unit = __builtin_convertvector(best.unit, Whole), zero = __builtin_convertvector(best.zero, Whole) + 128;
  for (int lane = 0; lane < kLaneCount; ++lane) {
    head[2 * lane] = static_cast<uint8_t>(unit[lane]);
    head[2 * lane + 1] = static_cast<uint8_t>(zero[lane]);
  }
  for (int64_t step = 0; step < group / 8; ++step) {
    Whole word = Whole{};
    for (int i = 0; i < 8; ++i)
      word |= __builtin_convertvector(best.q_of(lanes_of(x, step * 8 + i) - best.zero), Whole) << (i % 4 * 8 + i / 4 * 4);
    *reinterpret_cast<Whole*>(words + step * kStripLanes) = word;
  }
  if (feedback.n == 0) return;
  for (int64_t i = 0; i < group; ++i) own[i] = own[i] - (best.zero + best.q_of(lanes_of(x, i) - best.zero) * best.unit);
  leave(own, group, feedback, left);
}

// One group of 16 lanes: x [group][16] -> head and words [group / 8][16]; x becomes x * inverse, in units of the lanes' int8 scales.
// Of the units just below and above the range's fifteenth part the better is taken, then shifted a little up and down. On groups of
// 64 Gaussian weights that leaves 0.3 % more squared error than all six of these; seven units by 25 shifts would leave 7 % less, and
// units and zeros that are not whole 11 % less.
inline void quantize_group(float* x, const float* inverse, int64_t group, uint8_t* head, uint32_t* words, const GroupFeedback& feedback) {
  for (int64_t lane = 0; lane < kStripLanes; lane += kLaneCount)
    quantize_piece(x + lane, inverse + lane, group, head + 2 * lane, words + lane, feedback, feedback.left + lane);
}

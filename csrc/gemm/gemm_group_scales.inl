// What stands in the heads of groups, as numbers. Included by the tiles of AVX2 and NEON, after how they are widened.

constexpr int64_t kMostHeadGroups = kNestedInputs / 16;

// Of the groups of a head the lanes of a strip, by pieces. offsets: zeros, as they are stored, of the first group.
struct Head {
  Lanes scales[kMostHeadGroups][kStripPieces], minima[kMostHeadGroups][kStripPieces];
  const uint8_t* offsets;
  Whole zeros(int64_t group, int piece) const { return widen_u8(offsets + group * kStripLanes + piece * kLaneCount); }
};

// Once for all groups of a head: what numbers are stored as is asked for once, not for each. Of kCount pieces from `begin` on.
template <int kCount>
__attribute__((noinline)) void read_head(const LinearShape& shape, const uint8_t* at, int begin, Head& out) {
  const Grid& grid = shape.grid;
  const int64_t groups = groups_of_head(shape);
  const GroupPlace place = place_of_head(shape, 0);
  const auto read = [&](Lanes (&to)[kMostHeadGroups][kStripPieces], const uint8_t* from, int64_t bytes, const auto& widened) __attribute__((always_inline)) {
    from += begin * kLaneCount * bytes;
    for (int64_t group = 0; group < groups; ++group, from += kStripLanes * bytes)
#pragma GCC unroll 4
      for (int piece = 0; piece < kCount; ++piece) to[group][begin + piece] = widened(from + piece * kLaneCount * bytes, piece);
  };
  const auto as_floats = [](const uint8_t* from, int) __attribute__((always_inline)) { return *reinterpret_cast<const Lanes*>(from); };
  const auto as_halves = [](const uint8_t* from, int) __attribute__((always_inline)) { return widen_halves(from); };
  const auto as_bf16 = [](const uint8_t* from, int) __attribute__((always_inline)) { return widen_bf16(from); };
  const auto read_16 = [&](Lanes (&to)[kMostHeadGroups][kStripPieces], const uint8_t* from) __attribute__((always_inline)) {
    grid.scale == Source::f16 ? read(to, from, 2, as_halves) : read(to, from, 2, as_bf16);
  };
  const uint8_t *scales = at + place.scales, *offsets = at + place.offsets;
  out.offsets = offsets;
  if (grid.nested) {
    Lanes factors[2][kCount] = {};
    const auto read_factors = [&](int which, const uint8_t* from, int64_t bytes, const auto& widened) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int piece = 0; piece < kCount; ++piece) factors[which][piece] = widened(from + (begin + piece) * kLaneCount * bytes, piece);
    };
    if (grid.scale == Source::f32) read_factors(0, at, 4, as_floats);
    else read_factors(0, at, 2, as_halves), read_factors(1, at + 2 * kStripLanes, 2, as_halves);
    const auto times = [&](int which) __attribute__((always_inline)) {
      return [&factors, which](const uint8_t* from, int piece) __attribute__((always_inline)) { return factors[which][piece] * widen_s8(from); };
    };
    if (grid.e4m3) read(out.scales, scales, 1, [&](const uint8_t* from, int piece) __attribute__((always_inline)) { return factors[0][piece] * widen_e4m3(from); });
    else read(out.scales, scales, 1, times(0));
    if (grid.offset == Offset::minima) read(out.minima, offsets, 1, times(1));
    return;
  }
  if (grid.e8m0) read(out.scales, scales, 1, [](const uint8_t* from, int) __attribute__((always_inline)) { return (Lanes)(widen_u8(from) << 23); });
  else if (grid.scale == Source::f32) read(out.scales, scales, 4, as_floats);
  else read_16(out.scales, scales);
  if (grid.offset != Offset::minima) return;
  grid.halves ? read_16(out.minima, offsets) : read(out.minima, offsets, 4, as_floats);
}

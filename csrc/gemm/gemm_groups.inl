// Weights in groups (group2 to group8), in portable C++ for every set: included inside the anonymous namespace of its file after
// lanes.inl and its int8 tiles. Whole sums of a group come from the set's own int8 tile, over strips expanded to its form.

// Of 16 lanes. `minimum` is left alone where there is none.
template <LoadInputs kLoad>
void load_grid(const LinearShape& shape, const uint8_t* strip, const GroupPlace& place, float* scale, float* minimum) {
  const bool has_minima = shape.grid.offset == Offset::minima;
  if (shape.grid.e8m0) {
    for (int64_t lane = 0; lane < kStripLanes; ++lane) scale[lane] = power_of_field(strip[place.scales + lane]);
    return;
  }
  if (!shape.grid.nested) {
    kLoad(strip + place.scales, shape.grid.scale, 0, kStripLanes, scale);
    if (has_minima) kLoad(strip + place.offsets, shape.grid.halves ? shape.grid.scale : Source::f32, 0, kStripLanes, minimum);
    return;
  }
  float factors[2 * kStripLanes];
  kLoad(strip + place.factors, shape.grid.scale, 0, has_minima ? 2 * kStripLanes : kStripLanes, factors);
  for (int64_t lane = 0; lane < kStripLanes; ++lane) {
    scale[lane] = factors[lane] * nested_value(shape, strip[place.scales + lane]);
    if (has_minima) minimum[lane] = factors[kStripLanes + lane] * nested_value(shape, strip[place.offsets + lane]);
  }
}

// A step of a unit of 16 inputs as codes, one to a byte.
inline void take_codes(const LinearShape& shape, const uint8_t* unit, const uint8_t* tops, int64_t step, uint8_t* out) {
  const auto take = [&](const uint8_t* from, int64_t shift, uint8_t mask) {
    for (int64_t byte = 0; byte < kStepBytes; ++byte) out[byte] = static_cast<uint8_t>(from[byte] >> shift & mask);
  };
  switch (shape.format) {
    case Format::group8: take(unit + step * kStepBytes, 0, 255); break;
    case Format::group2: case Format::group3: take(unit, 2 * step, 3); break;
    default: take(unit + step / 2 * kStepBytes, step % 2 * 4, 15);
  }
  if (shape.format == Format::group6)
    for (int64_t byte = 0; byte < kStepBytes; ++byte) out[byte] |= static_cast<uint8_t>((unit[2 * kStepBytes + byte] >> 2 * step & 3) << 4);
  if (has_tops(shape.format))
    for (int64_t byte = 0; byte < kStepBytes; ++byte) out[byte] |= static_cast<uint8_t>((tops[step * 8 + byte / 8] >> byte % 8 & 1) << (bits_of(shape.format) - 1));
}

template <LoadInputs kLoad>
void expand_groups(const LinearShape& shape, const uint8_t* strip, int64_t first, int64_t count, uint8_t* steps, float* scales, float* minima) {
  const int8_t* table = is_table(shape) ? table_of(shape) : nullptr;
  for (int64_t g = first; g < first + count; ++g, scales += kStripLanes) {
    const GroupPlace place = place_of_group(shape, g);
    load_grid<kLoad>(shape, strip, place, scales, minima);
    if (shape.grid.offset == Offset::minima) minima += kStripLanes;
    uint8_t bases[kStepBytes];  // u8 of level 0, by lane
    for (int64_t byte = 0; byte < kStepBytes; ++byte)
      bases[byte] = static_cast<uint8_t>(128 - middle_of(shape) - (shape.grid.offset == Offset::zeros ? strip[place.offsets + byte / 4] : 0));
    const uint8_t *unit = strip + place.steps, *tops = strip + place.tops;
    for (int64_t i = 0; i < shape.group; i += 16, unit += bytes_of_steps(shape.format, 16), tops += 4 * 8)
      for (int64_t step = 0; step < 4; ++step, steps += kStepBytes) {
        take_codes(shape, unit, tops, step, steps);
        if (table != nullptr)
          for (int64_t byte = 0; byte < kStepBytes; ++byte) steps[byte] = static_cast<uint8_t>(table[steps[byte]]);
        for (int64_t byte = 0; byte < kStepBytes; ++byte) steps[byte] = static_cast<uint8_t>(steps[byte] + bases[byte]);
      }
  }
}

inline void ready_rows(const LinearShape&, bool, const float* const* x_powers, const int32_t* const* x_sums, int64_t rows, int64_t groups, RowOfGroup* out) {
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t row = 0; row < rows; ++row) {
      const float power = x_powers[row][group];
      const int32_t sum = x_sums[row][group];
      *out++ = {-128 * sum, power, 0.0f, power * static_cast<float>(sum)};
    }
}

// The tile over expanded strips: kRows rows, one strip, sums by the set's int8 tile of that height, of both halves where rows are wide.
template <int kRows, TileKernel kTile, bool kWide>
void tile_groups(const GroupArgs& args) {
  alignas(64) int32_t sums[kRows * kPanelLanes], low_sums[kRows * kPanelLanes];
  TileArgs tile{};
  tile.units = args.shape->group / 4;
  tile.strip_bytes = kExpandedBytes;
  if (!args.resume)
    for (int row = 0; row < kRows; ++row) std::memset(args.acc + row * kPanelLanes, 0, sizeof(float) * kStripLanes);
  for (int64_t g = 0; g < args.groups; ++g) {
    tile.strip = args.steps + g * tile.units * kStepBytes;
    for (int row = 0; row < kRows; ++row) tile.x[row] = args.x[row] + (args.first + g) * args.shape->group;
    tile.acc = sums;
    kTile(tile);
    if constexpr (kWide) {
      for (int row = 0; row < kRows; ++row) tile.x[row] += args.low;
      tile.acc = low_sums;
      kTile(tile);
    }
    for (int row = 0; row < kRows; ++row) {
      const RowOfGroup& of = args.rows[g * kRows + row];
      for (int64_t lane = 0, at = row * kPanelLanes; lane < kStripLanes; lane += kLaneCount, at += kLaneCount) {
        Lanes& acc = *reinterpret_cast<Lanes*>(args.acc + at);
        Whole sum = *reinterpret_cast<const Whole*>(sums + at);
        if constexpr (kWide) sum = (sum << kLowBits) + *reinterpret_cast<const Whole*>(low_sums + at);
        acc = fused(__builtin_convertvector(sum + of.start, Lanes) * of.power, *reinterpret_cast<const Lanes*>(args.scales + g * kStripLanes + lane), acc);
        if (args.minima != nullptr) acc = fused(fill(of.sum), *reinterpret_cast<const Lanes*>(args.minima + g * kStripLanes + lane), acc);
      }
    }
  }
}

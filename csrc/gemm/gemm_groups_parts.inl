// Tiles of weights in groups that meet strips as they are packed, any number of rows, a piece of a strip's lanes at a time: the text that
// AVX-VNNI and NEON share. Before it stand a set's own (gemm_groups_avx2.inl, gemm_groups_neon.inl): operand_of and add_16, what signed levels
// are met with more (kSignedBase), and how numbers are widened.

#include "gemm/gemm_group_scales.inl"

// For tiles over expanded strips too, where a set has any.
inline void ready_rows_of_parts(const LinearShape& shape, bool is_direct, const float* const* x_powers, const int32_t* const* x_sums, int64_t rows, int64_t groups,
                                RowOfGroup* out) {
  const int32_t base = !is_direct ? 128 : is_signed(form_of(shape)) ? kSignedBase : middle_of(shape);
  const bool keeps_sum = is_direct && shape.grid.offset == Offset::zeros;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t row = 0; row < rows; ++row, ++out) {
      const float power = x_powers[row][group];
      const int32_t sum = x_sums[row][group];
      *out = {-base * sum, power, 0.0f, power * static_cast<float>(sum)};
      if (keeps_sum) std::memcpy(&out->sum, &sum, sizeof(sum));
    }
}

constexpr int64_t kGroupAheadBytes = 4096;

// One group of a part of a strip against some rows: their whole sums. Wide rows pass twice: the sums of their high halves are shifted, and go on
// with the low ones.
template <CodeForm kForm, bool kWide, int kRows>
DIPTYCH_FORCED void sum_group(const RowOfGroup* of, const uint8_t* w, const uint8_t* tops, const uint8_t* const (&x)[kRows], int64_t from, int64_t group, int64_t low,
                              int part, const Operand& table, Whole (&whole)[kRows]) {
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) whole[row] = Whole{} + (kWide ? 0 : of[row].start);
#pragma GCC unroll 2
  for (int pass = 0; pass < (kWide ? 2 : 1); ++pass) {
    const uint8_t *unit = w, *top = tops;
    for (int64_t at = from; at < from + group; at += 16, unit += steps_of_16(kForm) * kStepBytes, top += 4 * 8) {
      Operand operands[4];
#pragma GCC unroll 8
      for (int word = 0; word < 4; ++word) operands[word] = operand_of<kForm>(unit, top, word, part, table);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) whole[row] = add_16(whole[row], operands, x[row] + at + (pass == 0 ? 0 : low));
    }
    if (kWide && pass == 0)
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) whole[row] = (whole[row] << kLowBits) + of[row].start;
  }
}

// Rows [first, first + kRows) of a tile of `rows` against kCount parts of a strip from `begin` on: as many sums as the
// registers hold beside what makes them.
template <CodeForm kForm, bool kWide, Offset kOffset, int kRows, int kCount>
void run_rows(const GroupArgs& args, int rows, int first, int begin) {
  const LinearShape& shape = *args.shape;
  const int64_t head_groups = groups_of_head(shape), inputs = shape.group, low = args.low, groups = args.groups;
  const int64_t group_bytes = bytes_of_group_steps(shape), tops_bytes = bytes_of_tops(shape);
  // Of several rows asked for each group: a text of its own would be half as much again to compile.
  const bool has_minima = kOffset == Offset::minima && (kRows == 1 || shape.grid.offset == Offset::minima);
  const GroupPlace place = place_of_head(shape, 0);
  const Operand table = load_table(shape);
  const RowOfGroup* of = args.rows + first;
  Head head;
  const uint8_t *x[kRows], *w = args.strip, *tops = nullptr;
  Lanes sums[kCount][kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    x[row] = args.x[first + row];
#pragma GCC unroll 8
    for (int at = 0; at < kCount; ++at) sums[at][row] = Lanes{};
  }
  for (int64_t group = 0, within = 0; group < groups; ++group, of += rows, w += group_bytes, tops += tops_bytes) {
    if (within == head_groups) within = 0;
    if (within == 0) read_head<kCount>(shape, w, begin, head), tops = w + place.tops, w += place.steps;
    if (begin == 0)
      for (int64_t line = 0; line < group_bytes; line += kStepBytes) __builtin_prefetch(w + line + kGroupAheadBytes, 0, 3);
#pragma GCC unroll 8
    for (int at = 0; at < kCount; ++at) {
      const int part = begin + at;
      Whole whole[kRows];
      sum_group<kForm, kWide, kRows>(of, w, tops, x, group * inputs, inputs, low, part, table, whole);
      const Lanes scale = head.scales[within][part];
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        if constexpr (kOffset == Offset::zeros) {
          int32_t sum;
          std::memcpy(&sum, &of[row].sum, sizeof(sum));
          whole[row] -= head.zeros(within, part) * sum;
        }
        sums[at][row] = fused(__builtin_convertvector(whole[row], Lanes) * of[row].power, scale, sums[at][row]);
      }
      if (has_minima) {
        const Lanes minimum = head.minima[within][part];
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) sums[at][row] = fused(Lanes{} + of[row].sum, minimum, sums[at][row]);
      }
    }
    ++within;
  }
#pragma GCC unroll 8
  for (int at = 0; at < kCount; ++at)
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) *reinterpret_cast<Lanes*>(args.acc + (first + row) * kPanelLanes + (begin + at) * kLaneCount) = sums[at][row];
}

template <CodeForm kForm, bool kWide, Offset kOffset, int kRows>
void run_tile(const GroupArgs& args) {
  if constexpr (kRows < kLeastRowsOfOne) {
    run_rows<kForm, kWide, kOffset, kRows, kStripPieces>(args, kRows, 0, 0);
  } else {
    constexpr int kFew = kRows <= kMostRowsOfOne ? kRows : (kRows + 1) / 2, kRest = kRows - kFew;
    for (int part = 0; part < kStripPieces; ++part) run_rows<kForm, kWide, kOffset, kFew, 1>(args, kRows, 0, part);
    if constexpr (kRest > 0)
      for (int part = 0; part < kStripPieces; ++part) run_rows<kForm, kWide, kOffset, kRest, 1>(args, kRows, kFew, part);
  }
}

template <CodeForm kForm, bool kWide, int kRows>
void tile_direct(const GroupArgs& args) {
  const Offset offset = args.shape->grid.offset;
  if constexpr (kForm == CodeForm::fours)
    if (offset == Offset::zeros) return run_tile<kForm, kWide, Offset::zeros, kRows>(args);
  if constexpr (kRows == 1)
    if (offset == Offset::none) return run_tile<kForm, kWide, Offset::none, kRows>(args);
  run_tile<kForm, kWide, Offset::minima, kRows>(args);
}

#define DIPTYCH_DIRECT(form) \
  {tile_direct<form, kWide, 1>, tile_direct<form, kWide, 2>, tile_direct<form, kWide, 3>, tile_direct<form, kWide, 4>, \
   tile_direct<form, kWide, 5>, tile_direct<form, kWide, 6>, tile_direct<form, kWide, 7>, tile_direct<form, kWide, 8>}
template <bool kWide>
constexpr DirectTiles kDirectTiles = {{DIPTYCH_DIRECT(CodeForm::twos), DIPTYCH_DIRECT(CodeForm::threes), DIPTYCH_DIRECT(CodeForm::threes_table),
                                       DIPTYCH_DIRECT(CodeForm::fours), DIPTYCH_DIRECT(CodeForm::fours_table), DIPTYCH_DIRECT(CodeForm::fives),
                                       DIPTYCH_DIRECT(CodeForm::sixes), DIPTYCH_DIRECT(CodeForm::bytes)}};
#undef DIPTYCH_DIRECT

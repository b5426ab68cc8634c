// AVX2's tiles of weights in groups: up to four rows by a strip, so that both registers of a strip share each broadcast of x, and rows what
// is made of codes. Included by gemm_groups_avx2.inl after operand_of.
//
// Codes of up to 6 bits, and levels of a table that reach little further, meet x as unsigned bytes: vpmaddubsw adds the products of two inputs
// in 16 bits, where so many of those join that their sum fits, before one vpmaddwd widens them. Other levels and rows of 15 bits are
// multiplied as 16 bits; the row comes so widened (widen_row), within each four inputs the even ones before the odd ones, as a
// mask and a shift make them of the levels.

#include "gemm/gemm_group_scales.inl"

// Inputs whose products join in 16 bits: those of a group, or so many; words: none do.
enum class Joined { group, of_32, of_16, of_8, words };

constexpr int64_t kMostJoined = 32767;

constexpr int32_t reach_of(const int8_t (&levels)[16]) {
  int32_t reach = 0;
  for (const int8_t level : levels) reach = level > reach ? level : -level > reach ? -level : reach;
  return reach;
}
constexpr int32_t kReaches[8] = {reach_of(kTables[0]), reach_of(kTables[1]), reach_of(kTables[2]), reach_of(kTables[3]),
                                 reach_of(kTables[4]), reach_of(kTables[5]), reach_of(kTables[6]), reach_of(kTables[7])};
inline int32_t table_reach(const LinearShape& shape) { return kReaches[static_cast<int>(shape.grid.levels) - 2]; }

inline Joined joined_of(const LinearShape& shape) {
  const int64_t highest = is_table(shape) ? 2 * table_reach(shape) : (1 << bits_of(shape.format)) - 1;  // of the unsigned bytes
  const auto fit = [&](int64_t inputs) { return inputs / 2 * highest * 127 <= kMostJoined; };
  if (shape.wide || !fit(8)) return Joined::words;
  return fit(shape.group) ? Joined::group : fit(32) ? Joined::of_32 : fit(16) ? Joined::of_16 : Joined::of_8;
}

// What a tile's operands have more than their levels.
inline int32_t base_of(const LinearShape& shape, bool is_direct) {
  const bool is_words = joined_of(shape) == Joined::words;
  if (is_words && !is_direct) return 0;
  if (is_table(shape)) return is_words ? 128 : table_reach(shape);
  return shape.format == Format::group8 ? 128 : middle_of(shape);
}

// A sum begins as the bits of the float 3 * 2^22 * power, too, whose last place is worth the row's power: the float that it ends as, less
// that start, is sum * power, in one operation. Wide rows have no room for a start.
constexpr float kFloatStart = 12582912.0f;

inline int32_t bits_of(float value) { return _mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(value))); }

inline void ready_rows_of_pairs(const LinearShape& shape, bool is_direct, const float* const* x_powers, const int32_t* const* x_sums, int64_t rows, int64_t groups,
                                RowOfGroup* out) {
  const int32_t base = base_of(shape, is_direct);
  const bool keeps_sum = shape.grid.offset == Offset::zeros;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t row = 0; row < rows; ++row, ++out) {
      const float power = x_powers[row][group];
      const int32_t sum = x_sums[row][group];
      const float offset = shape.wide ? 0.0f : kFloatStart * power;
      *out = {bits_of(offset) - base * sum, power, offset, power * static_cast<float>(sum)};
      if (keeps_sum) std::memcpy(&out->sum, &sum, sizeof(sum));
    }
}

inline __m256i even_bytes(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi16(255)); }
inline __m256i odd_bytes(__m256i bytes) { return _mm256_srli_epi16(bytes, 8); }

template <bool kWide>
void widen_row(const uint8_t* x, int64_t low, int64_t inputs, uint8_t* out) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const auto load = [&](const uint8_t* at) __attribute__((always_inline)) {
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)), order));
  };
  for (int64_t i = 0; i < inputs; i += 16) {
    __m256i words = load(x + i);
    if constexpr (kWide) words = _mm256_add_epi16(_mm256_slli_epi16(words, kLowBits), load(x + i + low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * i), words);
  }
}

inline void copy_row(const uint8_t* x, int64_t, int64_t inputs, uint8_t* out) { std::memcpy(out, x, static_cast<size_t>(inputs)); }

// Rows at multiples of 64 bytes meet in one bank of AMD's L1, where a tile reads the same word of each.
constexpr int64_t kRowGap = 72;

inline RowForm row_form_of_pairs(const LinearShape& shape, bool) {
  if (joined_of(shape) != Joined::words) return {copy_row, 1, kRowGap};
  return {shape.wide ? widen_row<true> : widen_row<false>, 2, kRowGap};
}

inline Operand load_table(const LinearShape& shape) {
  if (!is_table(shape)) return _mm256_setzero_si256();
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table_of(shape))));
  return _mm256_add_epi8(levels, _mm256_set1_epi8(static_cast<char>(base_of(shape, true))));
}

// Where operands come from, 16 inputs after 16: codes as they are packed, or what expand_pairs has made of them.
template <CodeForm kForm>
struct Packed {
  const uint8_t *unit, *tops;
  const Operand table;
  DIPTYCH_FORCED __m256i bytes(int step, int part) const { return operand_of<kForm>(unit, tops, step, part, table); }
  DIPTYCH_FORCED void words(int step, int part, __m256i (&out)[2]) const {
    const __m256i all = bytes(step, part);
    out[0] = even_bytes(all), out[1] = odd_bytes(all);
  }
  DIPTYCH_FORCED void advance() { unit += steps_of_16(kForm) * kStepBytes, tops += 4 * 8; }
};
// Lines are asked for, so far ahead, while as many are taken; 0 bytes ahead: those that are, which is nothing.
template <CodeForm kForm>
struct Streamed : Packed<kForm> {
  int64_t ahead;
  DIPTYCH_FORCED void advance() {
#pragma GCC unroll 4
    for (int line = 0; line < steps_of_16(kForm); ++line) __builtin_prefetch(this->unit + ahead + line * kStepBytes, 0, 3);
    Packed<kForm>::advance();
  }
};
struct ExpandedBytes {
  const uint8_t* at;
  DIPTYCH_FORCED __m256i bytes(int step, int part) const { return load_words(at + step * kStepBytes, part); }
  DIPTYCH_FORCED void advance() { at += 4 * kStepBytes; }
};
struct ExpandedWords {
  const uint8_t* at;
  DIPTYCH_FORCED void words(int step, int part, __m256i (&out)[2]) const {
    out[0] = load_words(at + step * 2 * kStepBytes, part), out[1] = load_words(at + (step * 2 + 1) * kStepBytes, part);
  }
  DIPTYCH_FORCED void advance() { at += 8 * kStepBytes; }
};

// A sum stays one chain: GCC would cut it into many, whose parts no registers hold.
DIPTYCH_FORCED __m256i chained(__m256i sum) {
  __asm__("" : "+x"(sum));
  return sum;
}

// kCount steps of 4 inputs from `from` on, of some rows: their sums of pairs, or joined to such. kAlone: no whole sums stand in registers beside
// them, so that two products have some before both are added.
template <int kCount, bool kFirst, bool kAlone = false, int kRows, class From>
DIPTYCH_FORCED void add_pairs(const From& weights, int from, const uint8_t* const (&x)[kRows], int64_t at, __m256i (&sums)[kRows][kHalves]) {
#pragma GCC unroll 4
  for (int step = from; step < from + kCount; ++step) {
    const __m256i low = weights.bytes(step, 0), high = weights.bytes(step, 1);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const __m256i own = broadcast_word(x[row] + at + step * 4);
      if (kAlone && !(kFirst && step == from)) {
        add_codes(sums[row], low, high, own);
        continue;
      }
      const __m256i of_low = _mm256_maddubs_epi16(low, own), of_high = _mm256_maddubs_epi16(high, own);
      const bool is_first = kFirst && step == from;
      sums[row][0] = is_first ? of_low : chained(_mm256_add_epi16(sums[row][0], of_low));
      sums[row][1] = is_first ? of_high : chained(_mm256_add_epi16(sums[row][1], of_high));
    }
  }
}

// Sums of pairs, widened, join whole ones: where they are the first, those that the group begins with.
template <bool kFirst, int kRows>
DIPTYCH_FORCED void add_widened(const __m256i (&sums)[kRows][kHalves], const RowOfGroup* of, __m256i (&whole)[kRows][kHalves]) {
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      const __m256i former = kFirst ? _mm256_set1_epi32(of[row].start) : whole[row][half];
      whole[row][half] = chained(_mm256_add_epi32(former, _mm256_madd_epi16(sums[row][half], _mm256_set1_epi16(1))));
    }
}

// One group of a strip against some rows: their whole sums.
template <Joined kJoined, int kRows, class From>
DIPTYCH_FORCED void sum_group(From& weights, const uint8_t* const (&x)[kRows], int64_t from, int64_t group, const RowOfGroup* of, __m256i (&whole)[kRows][kHalves]) {
  const int64_t end = from + group;
  __m256i sums[kRows][kHalves];
  if constexpr (kJoined == Joined::group) {
    add_pairs<4, true, true>(weights, 0, x, from, sums), weights.advance();
    for (int64_t at = from + 16; at < end; at += 16, weights.advance()) add_pairs<4, false, true>(weights, 0, x, at, sums);
    add_widened<true>(sums, of, whole);
    return;
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) whole[row][0] = whole[row][1] = _mm256_set1_epi32(of[row].start);
  if constexpr (kJoined == Joined::of_32)
    for (int64_t at = from; at < end; at += 32) {
      add_pairs<4, true>(weights, 0, x, at, sums), weights.advance();
      add_pairs<4, false>(weights, 0, x, at + 16, sums), weights.advance();
      add_widened<false>(sums, of, whole);
    }
  if constexpr (kJoined == Joined::of_16)
    for (int64_t at = from; at < end; at += 16, weights.advance()) add_pairs<4, true>(weights, 0, x, at, sums), add_widened<false>(sums, of, whole);
  if constexpr (kJoined == Joined::of_8)
    for (int64_t at = from; at < end; at += 16, weights.advance()) {
      add_pairs<2, true>(weights, 0, x, at, sums), add_widened<false>(sums, of, whole);
      add_pairs<2, true>(weights, 2, x, at, sums), add_widened<false>(sums, of, whole);
    }
  if constexpr (kJoined == Joined::words)
    for (int64_t at = from; at < end; at += 16, weights.advance())
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step) {
        __m256i words[kHalves][2];
        weights.words(step, 0, words[0]), weights.words(step, 1, words[1]);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) {
            const __m256i own = broadcast_word(x[row] + 2 * at + step * 8 + i * 4);
            whole[row][0] = chained(_mm256_add_epi32(whole[row][0], _mm256_madd_epi16(words[0][i], own)));
            whole[row][1] = chained(_mm256_add_epi32(whole[row][1], _mm256_madd_epi16(words[1][i], own)));
          }
      }
}

// The whole sums of a group join those of the groups before, which lie in L1: the registers hold no more. scale_of, and minimum_of or
// zero_of where there are any: the lanes' of a half.
template <bool kWide, bool kHasZeros, int kRows, class ScaleOf, class OffsetOf>
DIPTYCH_FORCED void end_group(const RowOfGroup* of, __m256i (&whole)[kRows][kHalves], bool has_minima, const ScaleOf& scale_of, const OffsetOf& offset_of,
                              float* acc) {
  const __m256 scales[kHalves] = {(__m256)scale_of(0), (__m256)scale_of(1)};
  __m256i offsets[kHalves] = {};
  if (kHasZeros || has_minima) offsets[0] = offset_of(0), offsets[1] = offset_of(1);
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
    const __m256 own = _mm256_set1_ps(kWide ? of[row].power : of[row].offset), of_x = _mm256_set1_ps(of[row].sum);  // once: stores follow
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      __m256i sum = whole[row][half];
      if constexpr (kHasZeros) sum = _mm256_sub_epi32(sum, _mm256_mullo_epi32(offsets[half], _mm256_castps_si256(of_x)));
      float* at = acc + row * kPanelLanes + half * 8;
      __m256 value = kWide ? _mm256_mul_ps(_mm256_cvtepi32_ps(sum), own) : _mm256_sub_ps(_mm256_castsi256_ps(sum), own);
      value = _mm256_fmadd_ps(value, scales[half], _mm256_load_ps(at));
      if (has_minima) value = _mm256_fmadd_ps(of_x, _mm256_castsi256_ps(offsets[half]), value);
      _mm256_store_ps(at, value);
    }
  }
}

inline void clear_sums(float* acc, int rows) {
  for (int row = 0; row < rows; ++row) std::memset(acc + row * kPanelLanes, 0, sizeof(float) * kStripLanes);
}

// ---- codes as they are packed ----

// Rows [first, first + kRows) of a tile of `rows`, group after group of all strips.
template <CodeForm kForm, bool kWide, Joined kJoined, Offset kOffset, int kRows>
void run_packed(const GroupArgs& args, int rows, int first) {
  const LinearShape& shape = *args.shape;
  const int64_t head_groups = groups_of_head(shape), inputs = shape.group, groups = args.groups, strips = args.strips, strip_bytes = args.strip_bytes;
  const int64_t group_bytes = bytes_of_group_steps(shape), tops_bytes = bytes_of_tops(shape);
  constexpr bool kHasZeros = kOffset == Offset::zeros;
  // Of several rows asked for each group: a text of its own would be half as much again to compile. One row has it, as asking took 6 % there.
  const bool has_minima = kOffset == Offset::minima && (kRows == 1 || shape.grid.offset == Offset::minima);
  const GroupPlace place = place_of_head(shape, 0);
  const Operand table = load_table(shape);
  const RowOfGroup* of = args.rows + first;
  float* const acc = args.acc + first * kPanelLanes;
  Head heads[kPanelStrips];
  const StripsAhead ahead(args.strip, strips, strip_bytes, args.next_strip, first == 0);
  const uint8_t *x[kRows], *steps = args.strip, *tops = nullptr;
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) x[row] = args.x[first + row];
  for (int64_t strip = 0; strip < strips; ++strip) clear_sums(acc + strip * kStripLanes, kRows);
  for (int64_t group = 0, within = 0; group < groups; ++group, ++within, of += rows, steps += group_bytes, tops += tops_bytes) {
    if (within == head_groups) within = 0;
    if (within == 0) {
      for (int64_t strip = 0; strip < strips; ++strip) {
        for (int64_t line = 0; line < place.steps; line += kStepBytes) ahead.ask(steps + line, strip);
        read_head<kHalves>(shape, steps + strip * strip_bytes, 0, heads[strip]);
      }
      tops = steps + place.tops, steps += place.steps;
    }
    const int64_t distance = ahead.distance(steps);
    for (int64_t strip = 0; strip < strips; ++strip) {
      const Head& head = heads[strip];
      Streamed<kForm> weights{{steps + strip * strip_bytes, tops + strip * strip_bytes, table}, distance};
      __m256i whole[kRows][kHalves];
      sum_group<kJoined>(weights, x, group * inputs, inputs, of, whole);
      const auto scale_of = [&](int half) __attribute__((always_inline)) { return head.scales[within][half]; };
      const auto offset_of = [&](int half) __attribute__((always_inline)) {
        return kHasZeros ? (__m256i)head.zeros(within, half) : (__m256i)head.minima[within][half];
      };
      end_group<kWide, kHasZeros>(of, whole, has_minima, scale_of, offset_of, acc + strip * kStripLanes);
    }
  }
}

// As many rows at a time as the registers hold sums of; the latter ones meet the strips in L2.
template <CodeForm kForm, bool kWide, Joined kJoined, Offset kOffset, int kRows>
void run_tile(const GroupArgs& args) {
  constexpr int kFew = kRows <= 4 ? kRows : (kRows + 1) / 2, kRest = kRows - kFew;
  run_packed<kForm, kWide, kJoined, kOffset, kFew>(args, kRows, 0);
  if constexpr (kRest > 0) run_packed<kForm, kWide, kJoined, kOffset, kRest>(args, kRows, kFew);
}

template <CodeForm kForm, bool kWide, Joined kJoined, int kRows>
void choose_offset(const GroupArgs& args) {
  const Offset offset = args.shape->grid.offset;
  if constexpr (kForm == CodeForm::fours)
    if (offset == Offset::zeros) return run_tile<kForm, kWide, kJoined, Offset::zeros, kRows>(args);
  if constexpr (kRows == 1)
    if (offset == Offset::none) return run_tile<kForm, kWide, kJoined, Offset::none, kRows>(args);
  run_tile<kForm, kWide, kJoined, Offset::minima, kRows>(args);
}

// How many codes of a form join where a group is too large for all of them to.
constexpr Joined joined_of_form(CodeForm form) {
  return form == CodeForm::sixes ? Joined::of_8 : form == CodeForm::fives || is_table(form) ? Joined::of_16 : Joined::of_32;
}

template <CodeForm kForm, bool kWide, int kRows>
void tile_direct(const GroupArgs& args) {
  if constexpr (kWide || kForm == CodeForm::bytes) return choose_offset<kForm, kWide, Joined::words, kRows>(args);
  else {
    const Joined joined = joined_of(*args.shape);
    if constexpr (is_table(kForm))
      if (joined == Joined::words) return choose_offset<kForm, kWide, Joined::words, kRows>(args);
    joined == Joined::group ? choose_offset<kForm, kWide, Joined::group, kRows>(args) : choose_offset<kForm, kWide, joined_of_form(kForm), kRows>(args);
  }
}

#define DIPTYCH_DIRECT(form) \
  {tile_direct<form, kWide, 1>, tile_direct<form, kWide, 2>, tile_direct<form, kWide, 3>, tile_direct<form, kWide, 4>, \
   tile_direct<form, kWide, 5>, tile_direct<form, kWide, 6>, tile_direct<form, kWide, 7>, tile_direct<form, kWide, 8>}
template <bool kWide>
constexpr DirectTiles kDirectTiles = {{DIPTYCH_DIRECT(CodeForm::twos), DIPTYCH_DIRECT(CodeForm::threes), DIPTYCH_DIRECT(CodeForm::threes_table),
                                       DIPTYCH_DIRECT(CodeForm::fours), DIPTYCH_DIRECT(CodeForm::fours_table), DIPTYCH_DIRECT(CodeForm::fives),
                                       DIPTYCH_DIRECT(CodeForm::sixes), DIPTYCH_DIRECT(CodeForm::bytes)}};
#undef DIPTYCH_DIRECT

// ---- expanded strips ----

// Of one form: operands as bytes, or levels as words.
template <CodeForm kForm>
void expand_codes(const LinearShape& shape, const uint8_t* strip, int64_t first, int64_t count, bool to_words, uint8_t* steps) {
  const Operand table = load_table(shape);
  const __m256i base = _mm256_set1_epi16(static_cast<int16_t>(base_of(shape, true)));
  for (int64_t group = first; group < first + count; ++group) {
    const GroupPlace place = place_of_group(shape, group);
    Packed<kForm> codes{strip + place.steps, strip + place.tops, table};
    for (int64_t at = 0; at < shape.group; at += 16, codes.advance())
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step)
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) {
          const __m256i bytes = codes.bytes(step, half);
          __m256i* out = reinterpret_cast<__m256i*>(steps) + half;
          if (!to_words) {
            _mm256_store_si256(out + 2 * step, bytes);
          } else {
            _mm256_store_si256(out + 4 * step, _mm256_sub_epi16(even_bytes(bytes), base));
            _mm256_store_si256(out + 4 * step + 2, _mm256_sub_epi16(odd_bytes(bytes), base));
          }
          if (step == 3 && half == kHalves - 1) steps += (to_words ? 8 : 4) * kStepBytes;
        }
  }
}

// minima: or whole numbers, zeros.
inline void expand_pairs(const LinearShape& shape, const uint8_t* strip, int64_t first, int64_t count, uint8_t* steps, float* scales, float* minima) {
  Head head;
  for (int64_t group = first; group < first + count; ++group) {
    const int64_t within = group % groups_of_head(shape);
    if (within == 0 || group == first) read_head<kHalves>(shape, strip + place_of_group(shape, group).factors, 0, head);
    for (int half = 0; half < kHalves; ++half, scales += 8, minima += 8) {
      *reinterpret_cast<Lanes*>(scales) = head.scales[within][half];
      if (shape.grid.offset == Offset::minima) *reinterpret_cast<Lanes*>(minima) = head.minima[within][half];
      if (shape.grid.offset == Offset::zeros) *reinterpret_cast<Whole*>(minima) = head.zeros(within, half);
    }
  }
  const bool to_words = joined_of(shape) == Joined::words;
  switch (form_of(shape)) {
    case CodeForm::twos: return expand_codes<CodeForm::twos>(shape, strip, first, count, to_words, steps);
    case CodeForm::threes: return expand_codes<CodeForm::threes>(shape, strip, first, count, to_words, steps);
    case CodeForm::threes_table: return expand_codes<CodeForm::threes_table>(shape, strip, first, count, to_words, steps);
    case CodeForm::fours: return expand_codes<CodeForm::fours>(shape, strip, first, count, to_words, steps);
    case CodeForm::fours_table: return expand_codes<CodeForm::fours_table>(shape, strip, first, count, to_words, steps);
    case CodeForm::fives: return expand_codes<CodeForm::fives>(shape, strip, first, count, to_words, steps);
    case CodeForm::sixes: return expand_codes<CodeForm::sixes>(shape, strip, first, count, to_words, steps);
    case CodeForm::bytes: return expand_codes<CodeForm::bytes>(shape, strip, first, count, to_words, steps);
  }
}

constexpr int kExpandedRows = 4;

// Bytes of the rows of the next tile, into L1, where those of this one are in use.
DIPTYCH_FORCED void bring_rows(const uint8_t* const* rows, int64_t from, int64_t bytes) {
  for (int64_t at = from; at < from + bytes; at += 64)
#pragma GCC unroll 4
    for (int row = 0; row < kExpandedRows; ++row) __builtin_prefetch(rows[row] + at, 0, 3);
}

// kInputs: of a group, where that is known, or 0: of groups of 32 the loops within one were a sixth of what there is to do.
template <bool kWide, Joined kJoined, Offset kOffset, int kInputs, class From>
void run_expanded(const GroupArgs& args) {
  constexpr bool kHasZeros = kOffset == Offset::zeros, kHasMinima = kOffset == Offset::minima;
  constexpr int64_t kInputBytes = kJoined == Joined::words ? 2 : 1;
  const int64_t inputs = kInputs != 0 ? kInputs : args.shape->group, brought = kInputs == 32 ? 64 : inputs;  // inputs of a line at least
  const RowOfGroup* of = args.rows;
  const RowOfGroup* const end = of + args.groups * kExpandedRows;
  const float* scales = args.scales;
  const uint8_t* offsets = kHasZeros ? reinterpret_cast<const uint8_t*>(args.zeros) : reinterpret_cast<const uint8_t*>(args.minima);
  const uint8_t* const* const next = args.next_x;
  float* const acc = args.acc;
  From weights{args.steps};
  const uint8_t* x[kExpandedRows];
#pragma GCC unroll 4
  for (int row = 0; row < kExpandedRows; ++row) x[row] = args.x[row];
  if (!args.resume) clear_sums(acc, kExpandedRows);
  for (int64_t from = args.first * inputs; of != end;) {
    if (kInputs != 32 || from % 64 == 0) bring_rows(next, from * kInputBytes, brought * kInputBytes);
    __m256i whole[kExpandedRows][kHalves];
    sum_group<kJoined>(weights, x, from, inputs, of, whole);
    const auto scale_of = [&](int half) __attribute__((always_inline)) { return _mm256_load_ps(scales + half * 8); };
    const auto offset_of = [&](int half) __attribute__((always_inline)) { return load_words(offsets, half); };
    end_group<kWide, kHasZeros>(of, whole, kHasMinima, scale_of, offset_of, acc);
    of += kExpandedRows, scales += kStripLanes, offsets += kHasZeros || kHasMinima ? kStepBytes : 0, from += inputs;
    if (of == end) return;  // asked here, too: without it GCC 12 makes a loop that takes 5 % longer
  }
}

template <bool kWide, Joined kJoined, int kInputs, class From>
void choose_expanded(const GroupArgs& args) {
  if constexpr (kJoined == Joined::group && kInputs == 0)
    if (args.shape->group == 32) return choose_expanded<kWide, kJoined, 32, From>(args);
  switch (args.shape->grid.offset) {
    case Offset::none: return run_expanded<kWide, kJoined, Offset::none, kInputs, From>(args);
    case Offset::zeros: return run_expanded<kWide, kJoined, Offset::zeros, kInputs, From>(args);
    case Offset::minima: return run_expanded<kWide, kJoined, Offset::minima, kInputs, From>(args);
  }
}

inline void tile_expanded(const GroupArgs& args) {
  switch (joined_of(*args.shape)) {
    case Joined::group: return choose_expanded<false, Joined::group, 0, ExpandedBytes>(args);
    case Joined::of_32: return choose_expanded<false, Joined::of_32, 0, ExpandedBytes>(args);
    case Joined::of_16: return choose_expanded<false, Joined::of_16, 0, ExpandedBytes>(args);
    case Joined::of_8: return choose_expanded<false, Joined::of_8, 0, ExpandedBytes>(args);
    case Joined::words: return choose_expanded<false, Joined::words, 0, ExpandedWords>(args);
  }
}

inline void tile_expanded_wide(const GroupArgs& args) { choose_expanded<true, Joined::words, 0, ExpandedWords>(args); }

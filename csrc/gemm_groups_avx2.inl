// AVX2 tiles of weights in groups: any number of rows meets strips as they are packed, half of a strip's lanes at a time. Included inside
// the anonymous namespace of gemm_avx2.cpp, after gemm_generic.inl.

constexpr int kHalfLanes = 8;

inline __m256 widen_halves(const uint8_t* at) { return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(at))); }
inline __m256 widen_bf16(const uint8_t* at) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(at))), 16));
}

// Of a group, eight lanes of its head.
struct Scales {
  explicit Scales(const LinearShape& shape)
      : source_(shape.grid.scale), nested_(shape.grid.nested), e4m3_(shape.grid.e4m3), scale_bytes_(bytes_of_scale(shape)),
        offset_bytes_(bytes_of_offset(shape)), scales_(place_of_head(shape, 0).scales), offsets_(place_of_head(shape, 0).offsets) {}
  void enter(const uint8_t* head) {
    head_ = head;
    if (!nested_) return;
    for (int half = 0; half < kHalves; ++half) {
      if (source_ == Source::f32) factors_[0][half] = _mm256_load_ps(reinterpret_cast<const float*>(head) + half * kHalfLanes);
      else factors_[0][half] = widen_halves(head + half * 16), factors_[1][half] = widen_halves(head + 2 * kStripLanes + half * 16);
    }
  }
  __m256 scale(int64_t within, int half) const {
    const uint8_t* at = head_ + scales_ + (within * kStripLanes + half * kHalfLanes) * scale_bytes_;
    if (nested_) return times(factors_[0][half], at);
    if (source_ == Source::f32) return _mm256_load_ps(reinterpret_cast<const float*>(at));
    return source_ == Source::f16 ? widen_halves(at) : widen_bf16(at);
  }
  const uint8_t* offset(int64_t within, int half) const { return head_ + offsets_ + (within * kStripLanes + half * kHalfLanes) * offset_bytes_; }
  __m256 minimum(int64_t within, int half) const {
    const uint8_t* at = offset(within, half);
    return nested_ ? times(factors_[1][half], at) : _mm256_load_ps(reinterpret_cast<const float*>(at));
  }

 private:
  __m256 times(const __m256& factor, const uint8_t* at) const {
    const __m128i stored = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    if (!e4m3_) return _mm256_mul_ps(factor, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(stored)));
    const __m256 small = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(stored), 7));  // its fields are f16's, whose exponents begin 8 lower
    return _mm256_mul_ps(factor, _mm256_mul_ps(small, _mm256_set1_ps(256.0f)));
  }
  const Source source_;
  const bool nested_, e4m3_;
  const int64_t scale_bytes_, offset_bytes_, scales_, offsets_;
  const uint8_t* head_ = nullptr;
  __m256 factors_[2][kHalves];
};

constexpr bool is_table(CodeForm form) { return form == CodeForm::threes_table || form == CodeForm::fours_table; }
constexpr bool has_tops(CodeForm form) { return form == CodeForm::threes || form == CodeForm::threes_table || form == CodeForm::fives; }
// Levels of their own sign; the others are codes from 0 to 63.
constexpr bool is_signed(CodeForm form) { return is_table(form) || form == CodeForm::bytes; }
constexpr int steps_of_16(CodeForm form) {
  switch (form) {
    case CodeForm::bytes: return 4;
    case CodeForm::sixes: return 3;
    case CodeForm::fours: case CodeForm::fours_table: case CodeForm::fives: return 2;
    default: return 1;
  }
}

// Step `word` of the four of 16 inputs, of half the lanes: codes, or levels where they are signed.
template <CodeForm kForm>
DIPTYCH_FORCED __m256i operand_of(const uint8_t* unit, const uint8_t* tops, int word, int half, const __m256i& table) {
  const auto step = [&](int i) __attribute__((always_inline)) { return load_words(unit + i * kStepBytes, half); };
  if constexpr (kForm == CodeForm::bytes) return _mm256_xor_si256(step(word), _mm256_set1_epi8(-128));
  constexpr bool kIsPairs = kForm == CodeForm::twos || kForm == CodeForm::threes || kForm == CodeForm::threes_table;
  const __m256i packed = step(kIsPairs ? 0 : word / 2);
  const int shift = kIsPairs ? 2 * word : word % 2 * 4;
  const __m256i shifted = shift == 0 ? packed : _mm256_srli_epi16(packed, shift);
  __m256i codes = _mm256_and_si256(shifted, _mm256_set1_epi8(kIsPairs ? 3 : 15));
  if constexpr (kForm == CodeForm::sixes) {
    const __m256i pairs = step(2), high = word == 3 ? _mm256_srli_epi16(pairs, 2) : _mm256_slli_epi16(pairs, 4 - 2 * word);
    codes = _mm256_or_si256(codes, _mm256_and_si256(high, _mm256_set1_epi8(48)));
  }
  if constexpr (has_tops(kForm)) {  // bit 8 i + j of these 32 is byte 8 i + j's
    int32_t bits;
    std::memcpy(&bits, tops + word * 8 + half * 4, 4);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own);
    codes = _mm256_or_si256(codes, _mm256_and_si256(is_set, _mm256_set1_epi8(kIsPairs ? 4 : 16)));
  }
  return is_table(kForm) ? _mm256_shuffle_epi8(table, codes) : codes;
}

// The dot products of 16 inputs of a row, joined to whole sums. Pairs of products fit 16 bits: 2 * 63 * 127, or 2 * 128 * 127 where the sign
// of a level has gone over to x; so do two sums of pairs of codes below 64, and four of codes below 32.
template <CodeForm kForm>
DIPTYCH_FORCED __m256i add_16(__m256i sum, const __m256i (&operands)[4], const __m256i (&magnitudes)[4], const uint8_t* x) {
  const auto pairs = [&](int word) __attribute__((always_inline)) {
    const __m256i own = broadcast_word(x + word * 4);
    if constexpr (is_signed(kForm)) return _mm256_maddubs_epi16(magnitudes[word], _mm256_sign_epi8(own, operands[word]));
    return _mm256_maddubs_epi16(operands[word], own);
  };
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (is_signed(kForm)) {
    const __m256i former = _mm256_add_epi32(_mm256_madd_epi16(pairs(0), ones), _mm256_madd_epi16(pairs(1), ones));
    return _mm256_add_epi32(sum, _mm256_add_epi32(former, _mm256_add_epi32(_mm256_madd_epi16(pairs(2), ones), _mm256_madd_epi16(pairs(3), ones))));
  }
  const __m256i former = _mm256_add_epi16(pairs(0), pairs(1)), latter = _mm256_add_epi16(pairs(2), pairs(3));
  if constexpr (kForm == CodeForm::sixes)
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(former, ones), _mm256_madd_epi16(latter, ones)));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_add_epi16(former, latter), ones));
}

inline void ready_rows(const LinearShape& shape, bool, const float* const* x_powers, const int32_t* const* x_sums, int64_t rows, int64_t groups, RowOfGroup* out) {
  const int32_t base = is_signed(form_of(shape)) ? 0 : middle_of(shape);
  const bool keeps_sum = shape.grid.offset == Offset::zeros;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t row = 0; row < rows; ++row, ++out) {
      const float power = x_powers[row][group];
      const int32_t sum = x_sums[row][group];
      *out = {-base * sum, power, 0.0f, power * static_cast<float>(sum)};
      if (keeps_sum) std::memcpy(&out->sum, &sum, sizeof(sum));
    }
}

constexpr int64_t kGroupAheadBytes = 4096;

// One group of half a strip against some rows: their whole sums. Wide rows pass twice: the sums of their high halves are shifted, and go on
// with the low ones.
template <CodeForm kForm, bool kWide, int kRows>
DIPTYCH_FORCED void sum_group(const RowOfGroup* of, const uint8_t* w, const uint8_t* tops, const uint8_t* const (&x)[kRows], int64_t from, int64_t group, int64_t low,
                              int half, const __m256i& table, __m256i (&whole)[kRows]) {
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) whole[row] = kWide ? _mm256_setzero_si256() : _mm256_set1_epi32(of[row].start);
#pragma GCC unroll 2
  for (int pass = 0; pass < (kWide ? 2 : 1); ++pass) {
    const uint8_t *unit = w, *top = tops;
    for (int64_t at = from; at < from + group; at += 16, unit += steps_of_16(kForm) * kStepBytes, top += 4 * 8) {
      __m256i operands[4], magnitudes[4];
#pragma GCC unroll 4
      for (int word = 0; word < 4; ++word) {
        operands[word] = operand_of<kForm>(unit, top, word, half, table);
        magnitudes[word] = is_signed(kForm) ? _mm256_abs_epi8(operands[word]) : operands[word];
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) whole[row] = add_16<kForm>(whole[row], operands, magnitudes, x[row] + at + (pass == 0 ? 0 : low));
    }
    if (kWide && pass == 0)
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) whole[row] = _mm256_add_epi32(_mm256_slli_epi32(whole[row], kLowBits), _mm256_set1_epi32(of[row].start));
  }
}

// Rows [first, first + kRows) of a tile of `rows` against one strip, or against kCount halves of it from `begin` on: as many sums as the
// registers hold beside what makes them.
template <CodeForm kForm, bool kWide, Offset kOffset, int kRows, int kCount>
void run_rows(const GroupArgs& args, int rows, int first, int begin) {
  const LinearShape& shape = *args.shape;
  const int64_t head_groups = groups_of_head(shape), inputs = shape.group, low = args.low, groups = args.groups;
  const int64_t group_bytes = bytes_of_group_steps(shape), tops_bytes = bytes_of_tops(shape);
  const GroupPlace head = place_of_head(shape, 0);
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table_of(shape))));
  const RowOfGroup* of = args.rows + first;
  Scales scales(shape);
  const uint8_t *x[kRows], *w = args.strip, *tops = nullptr;
  __m256 sums[kCount][kRows];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
    x[row] = args.x[first + row];
#pragma GCC unroll 2
    for (int half = 0; half < kCount; ++half) sums[half][row] = _mm256_setzero_ps();
  }
  for (int64_t group = 0, within = 0; group < groups; ++group, of += rows, w += group_bytes, tops += tops_bytes) {
    if (within == head_groups) within = 0;
    if (within == 0) scales.enter(w), tops = w + head.tops, w += head.steps;
    if (begin == 0)
      for (int64_t line = 0; line < group_bytes; line += kStepBytes) __builtin_prefetch(w + line + kGroupAheadBytes, 0, 3);
#pragma GCC unroll 2
    for (int at = 0; at < kCount; ++at) {
      const int half = begin + at;
      __m256i whole[kRows];
      sum_group<kForm, kWide, kRows>(of, w, tops, x, group * inputs, inputs, low, half, table, whole);
      const __m256 scale = scales.scale(within, half);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        if constexpr (kOffset == Offset::zeros) {
          const __m256i zero = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales.offset(within, half))));
          int32_t sum;
          std::memcpy(&sum, &of[row].sum, sizeof(sum));
          whole[row] = _mm256_sub_epi32(whole[row], _mm256_mullo_epi32(zero, _mm256_set1_epi32(sum)));
        }
        const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(whole[row]), _mm256_set1_ps(of[row].power));
        sums[at][row] = _mm256_fmadd_ps(value, scale, sums[at][row]);
      }
      if constexpr (kOffset == Offset::minima) {
        const __m256 minimum = scales.minimum(within, half);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) sums[at][row] = _mm256_fmadd_ps(_mm256_set1_ps(of[row].sum), minimum, sums[at][row]);
      }
    }
    ++within;
  }
#pragma GCC unroll 2
  for (int at = 0; at < kCount; ++at)
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) _mm256_store_ps(args.acc + (first + row) * kPanelLanes + (begin + at) * kHalfLanes, sums[at][row]);
}

template <CodeForm kForm, bool kWide, Offset kOffset, int kRows>
void run_tile(const GroupArgs& args) {
  if constexpr (kRows <= 2) {
    run_rows<kForm, kWide, kOffset, kRows, kHalves>(args, kRows, 0, 0);
  } else {
    constexpr int kFew = kRows <= 4 ? kRows : (kRows + 1) / 2, kRest = kRows - kFew;
    for (int half = 0; half < kHalves; ++half) run_rows<kForm, kWide, kOffset, kFew, 1>(args, kRows, 0, half);
    if constexpr (kRest > 0)
      for (int half = 0; half < kHalves; ++half) run_rows<kForm, kWide, kOffset, kRest, 1>(args, kRows, kFew, half);
  }
}

template <CodeForm kForm, bool kWide, int kRows>
void tile_direct(const GroupArgs& args) {
  const Offset offset = args.shape->grid.offset;
  if (kForm == CodeForm::fours && offset == Offset::zeros) return run_tile<kForm, kWide, kForm == CodeForm::fours ? Offset::zeros : Offset::none, kRows>(args);
  offset == Offset::minima ? run_tile<kForm, kWide, Offset::minima, kRows>(args) : run_tile<kForm, kWide, Offset::none, kRows>(args);
}

#define DIPTYCH_DIRECT(form) \
  {tile_direct<form, kWide, 1>, tile_direct<form, kWide, 2>, tile_direct<form, kWide, 3>, tile_direct<form, kWide, 4>, \
   tile_direct<form, kWide, 5>, tile_direct<form, kWide, 6>, tile_direct<form, kWide, 7>, tile_direct<form, kWide, 8>}
template <bool kWide>
constexpr DirectTiles kDirectTiles = {{DIPTYCH_DIRECT(CodeForm::twos), DIPTYCH_DIRECT(CodeForm::threes), DIPTYCH_DIRECT(CodeForm::threes_table),
                                       DIPTYCH_DIRECT(CodeForm::fours), DIPTYCH_DIRECT(CodeForm::fours_table), DIPTYCH_DIRECT(CodeForm::fives),
                                       DIPTYCH_DIRECT(CodeForm::sixes), DIPTYCH_DIRECT(CodeForm::bytes)}};
#undef DIPTYCH_DIRECT

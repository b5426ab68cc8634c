// AVX-512 (VNNI) tiles of weights in groups. Included inside the anonymous namespace of gemm_avx512.inl.

// Strips and panels follow one another, so reading ahead never asks where it is. Twice: at one row L2 alone reads 91 % of the bandwidth, L1
// alone, 2 to 8 KiB ahead, 83 % (Xeon, two cores).
constexpr int64_t kFarBytes = 8192, kNearBytes = 2048;
DIPTYCH_FORCED void read_ahead(const uint8_t* at, Asking asking) {
  if (asking == Asking::once) return _mm_prefetch(reinterpret_cast<const char*>(at + ahead_bytes(Reach::far)), _MM_HINT_T1);
  if (asking == Asking::here) return _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_NTA);
  if (asking == Asking::past) return _mm_prefetch(reinterpret_cast<const char*>(at + kPastBytes), _MM_HINT_NTA);
  _mm_prefetch(reinterpret_cast<const char*>(at + kFarBytes), _MM_HINT_T1);
  _mm_prefetch(reinterpret_cast<const char*>(at + kNearBytes), _MM_HINT_T0);
}

inline __m512 load_halves(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(at))); }

// Of a group of 16 lanes, from its head.
struct Scales {
  explicit Scales(const LinearShape& shape)
      : source_(shape.grid.scale), nested_(shape.grid.nested), e4m3_(shape.grid.e4m3), e8m0_(shape.grid.e8m0), halves_(shape.grid.halves),
        scale_bytes_(kStripLanes * bytes_of_scale(shape)), offset_bytes_(kStripLanes * bytes_of_offset(shape)), scales_(place_of_head(shape, 0).scales), offsets_(place_of_head(shape, 0).offsets) {}
  void enter(const uint8_t* head) {
    head_ = head;
    if (!nested_) return;
    if (source_ == Source::f32) factors_[0] = _mm512_load_ps(head);
    else factors_[0] = load_halves(head), factors_[1] = load_halves(head + 2 * kStripLanes);
  }
  __m512 scale(int64_t within) const {
    const uint8_t* at = head_ + scales_ + within * scale_bytes_;
    if (nested_) return times(factors_[0], at);
    if (e8m0_) return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(at))), 23));
    return source_ == Source::f32 ? _mm512_load_ps(at) : widen(at);
  }
  const uint8_t* offset(int64_t within) const { return head_ + offsets_ + within * offset_bytes_; }
  __m512 minimum(int64_t within) const {
    if (nested_) return times(factors_[1], offset(within));
    return halves_ ? widen(offset(within)) : _mm512_load_ps(offset(within));
  }

 private:
  __m512 widen(const uint8_t* at) const {
    return source_ == Source::f16 ? load_halves(at) : widen_bf16(_mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
  }
  __m512 times(const __m512& factor, const uint8_t* at) const {
    const __m128i stored = _mm_load_si128(reinterpret_cast<const __m128i*>(at));
    if (!e4m3_) return _mm512_mul_ps(factor, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(stored)));
    const __m512 small = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(stored), 7));  // its fields are f16's, whose exponents begin 8 lower
    return _mm512_mul_ps(factor, _mm512_mul_ps(small, _mm512_set1_ps(256.0f)));
  }
  const Source source_;
  const bool nested_, e4m3_, e8m0_, halves_;
  const int64_t scale_bytes_, offset_bytes_, scales_, offsets_;
  const uint8_t* head_ = nullptr;
  __m512 factors_[2];
};

#include "gemm/gemm_group_forms.inl"

// Step `word` of the four of 16 inputs, as codes or by the table as levels + 128.
template <CodeForm kForm>
DIPTYCH_FORCED __m512i operand_of(const uint8_t* unit, const uint8_t* tops, int word, const __m512i& table) {
  const auto step = [&](int i) __attribute__((always_inline)) { return _mm512_load_si512(unit + i * kStepBytes); };
  if constexpr (kForm == CodeForm::bytes) return step(word);
  constexpr bool kIsPairs = kForm == CodeForm::twos || kForm == CodeForm::threes || kForm == CodeForm::threes_table;
  const __m512i packed = step(kIsPairs ? 0 : word / 2);
  const int shift = kIsPairs ? 2 * word : word % 2 * 4;
  const __m512i shifted = shift == 0 ? packed : _mm512_srli_epi16(packed, static_cast<unsigned>(shift));
  if constexpr (kForm == CodeForm::sixes) {
    const __m512i pairs = step(2), high = word == 3 ? _mm512_srli_epi16(pairs, 2) : _mm512_slli_epi16(pairs, static_cast<unsigned>(4 - 2 * word));
    const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), shifted, high, 0xca);  // bits of the mask from nibbles
    return _mm512_and_si512(both, _mm512_set1_epi8(63));
  }
  __m512i codes = _mm512_and_si512(shifted, _mm512_set1_epi8(kIsPairs ? 3 : 15));
  if constexpr (has_tops(kForm))
    codes = _mm512_mask_add_epi8(codes, _load_mask64(reinterpret_cast<__mmask64*>(const_cast<uint8_t*>(tops + word * 8))), codes, _mm512_set1_epi8(kIsPairs ? 4 : 16));
  return is_table(kForm) ? _mm512_shuffle_epi8(table, codes) : codes;
}

// The 16 levels + 128 in every part of a register.
inline __m512i load_table(const LinearShape& shape) {
  const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table_of(shape)));
  return _mm512_broadcast_i32x4(_mm_xor_si128(levels, _mm_set1_epi8(static_cast<char>(0x80))));
}

// A sum begins as the bits of the float 3 * 2^22 * power, too, whose last place is worth the row's power: the float that it ends as, less
// that start, is sum * power, in one operation. Wide rows have no room for a start.
constexpr float kFloatStart = 12582912.0f;

inline int32_t bits_of(float value) { return _mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(value))); }

inline void ready_rows(const LinearShape& shape, bool is_direct, const float* const* x_powers, const int32_t* const* x_sums, int64_t rows, int64_t groups,
                       RowOfGroup* out) {
  const int32_t base = !is_direct ? shape.wide ? 1 : 128 : is_table(shape) ? 128 : middle_of(shape);  // 1: shifted behind the high halves
  const bool keeps_sum = is_direct && shape.grid.offset == Offset::zeros;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t row = 0; row < rows; ++row, ++out) {
      const float power = x_powers[row][group];
      const int32_t sum = x_sums[row][group];
      out->offset = kFloatStart * power;
      out->start = (shape.wide ? 0 : bits_of(out->offset)) - base * sum;
      out->power = power;
      if (keeps_sum) std::memcpy(&out->sum, &sum, sizeof(sum));
      else out->sum = power * static_cast<float>(sum);
    }
}

// Few rows meet strips as they are packed. sum (code - zero) q = sum code q - zero sum q, whole numbers. A row has two chains of sums:
// of wide rows those of its low and its high halves.
template <CodeForm kForm, bool kWide, int kRows>
class Direct {
 public:
  static constexpr int64_t kUnitBytes = steps_of_16(kForm) * kStepBytes, kUnitTops = has_tops(kForm) ? 4 * 8 : 0;  // of 16 inputs

  explicit DIPTYCH_FORCED Direct(const GroupArgs& args)
      : words_(args.shape->group / 4), low_words_(args.low / 4), has_zeros_(kForm == CodeForm::fours && args.shape->grid.offset == Offset::zeros),
        has_minima_(args.shape->grid.offset == Offset::minima), table_(is_table(kForm) ? load_table(*args.shape) : _mm512_setzero_si512()) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) x_[row] = args.x[row];
  }

  int64_t units() const { return words_ / 4; }

  // One group of a strip, whose codes begin at w and the inputs at word `at`. ask: of each line that is taken.
  template <class Ask>
  DIPTYCH_FORCED void add(const uint8_t* w, const uint8_t* tops, int64_t at, const Scales& scales, int64_t within, const RowOfGroup* of, const Ask& ask,
                          __m512 (&sums)[kRows]) const {
    __m512i low_sums[kRows], high_sums[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) low_sums[row] = _mm512_set1_epi32(of[row].start), high_sums[row] = _mm512_setzero_si512();
    for (const int64_t end = at + words_; at < end; at += 4, w += kUnitBytes, tops += kUnitTops) {
      __m512i sixes[4];  // three steps make four operands, which GCC would load again for each
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step) {
        if (step < steps_of_16(kForm)) ask(w + step * kStepBytes);
        if (kForm == CodeForm::sixes) sixes[step] = operand_of<kForm>(w, tops, step, table_);
      }
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step) {
        const __m512i operand = kForm == CodeForm::sixes ? sixes[step] : operand_of<kForm>(w, tops, step, table_);
        const auto word = [&](int row, int64_t i) __attribute__((always_inline)) { return _mm512_set1_epi32(*reinterpret_cast<const int*>(x_[row] + i * 4)); };
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          if constexpr (kWide) {
            add_dot_int8(low_sums[row], operand, word(row, at + step + low_words_)), add_dot_int8(high_sums[row], operand, word(row, at + step));
          } else {
            add_dot_int8(step % 2 == 0 ? low_sums[row] : high_sums[row], operand, word(row, at + step));
          }
        }
      }
    }
    const __m512 scale = scales.scale(within);
    const __m512i zero = has_zeros_ ? _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(scales.offset(within)))) : _mm512_setzero_si512();
    const __m512 minimum = has_minima_ ? scales.minimum(within) : _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      if constexpr (kWide) high_sums[row] = _mm512_slli_epi32(high_sums[row], kLowBits);
      __m512i whole = _mm512_add_epi32(low_sums[row], high_sums[row]);
      if (has_zeros_) whole = _mm512_sub_epi32(whole, _mm512_mullo_epi32(zero, _mm512_set1_epi32(bits_of(of[row].sum))));
      const __m512 value = kWide ? _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(of[row].power))
                                 : _mm512_sub_ps(_mm512_castsi512_ps(whole), _mm512_set1_ps(of[row].offset));
      sums[row] = _mm512_fmadd_ps(value, scale, sums[row]);
      if (has_minima_) sums[row] = _mm512_fmadd_ps(_mm512_set1_ps(of[row].sum), minimum, sums[row]);
    }
  }

 private:
  const int64_t words_, low_words_;
  const bool has_zeros_, has_minima_;
  const __m512i table_;
  const uint8_t* x_[kRows];
};

template <CodeForm kForm, bool kWide, int kRows>
void tile_lone(const GroupArgs& args) {
  const Direct<kForm, kWide, kRows> direct(args);
  const int64_t head_groups = groups_of_head(*args.shape);
  const GroupPlace head = place_of_head(*args.shape, 0);
  const auto ask = [asking = args.asking](const uint8_t* at) __attribute__((always_inline)) { read_ahead(at, asking); };
  const RowOfGroup* of = args.rows;
  Scales scales(*args.shape);
  const uint8_t *w = args.strip, *tops = nullptr;
  __m512 sums[kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) sums[row] = _mm512_setzero_ps();
  for (int64_t group = 0; group < args.groups; ++group, of += kRows) {
    const int64_t within = group & (head_groups - 1);
    if (within == 0) {
      scales.enter(w), tops = w + head.tops;
      for (const uint8_t* end = w + head.steps; w < end; w += kCacheLine) ask(w);
    }
    direct.add(w, tops, group * direct.units() * 4, scales, within, of, ask, sums);
    w += direct.units() * direct.kUnitBytes, tops += direct.units() * direct.kUnitTops;
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) _mm512_store_ps(args.acc + row * kPanelLanes, sums[row]);
}

// Strips side by side, as several streams come faster than one: group after group of all. Lines are asked for a little ahead, from where the
// strips end on those of the strips that follow.
template <CodeForm kForm, bool kWide, int kRows>
void tile_beside(const GroupArgs& args) {
  const Direct<kForm, kWide, kRows> direct(args);
  const int64_t head_groups = groups_of_head(*args.shape), strips = args.strips, strip_bytes = args.strip_bytes;
  const GroupPlace head = place_of_head(*args.shape, 0);
  const uint8_t *w = args.strip, *tops = nullptr, *entered = nullptr, *const last = w + strip_bytes - ahead_bytes(Reach::each);
  const int64_t to_next = args.next_strip - last;
  const RowOfGroup* of = args.rows;
  Scales scales(*args.shape);
  for (int row = 0; row < kRows; ++row)
    for (int64_t strip = 0; strip < strips; ++strip) _mm512_store_ps(args.acc + row * kPanelLanes + strip * kStripLanes, _mm512_setzero_ps());
  for (int64_t group = 0; group < args.groups; ++group, of += kRows) {
    const int64_t within = group & (head_groups - 1), distance = w < last ? ahead_bytes(Reach::each) : to_next;
    const auto ask = [distance](const uint8_t* at) __attribute__((always_inline)) { _mm_prefetch(reinterpret_cast<const char*>(at + distance), _MM_HINT_T0); };
    if (within == 0) {
      entered = w, tops = w + head.tops;
      for (const uint8_t* end = w + head.steps; w < end; w += kCacheLine)
        for (int64_t strip = 0; strip < strips; ++strip) ask(w + strip * strip_bytes);
    }
    for (int64_t strip = 0; strip < strips; ++strip) {
      const int64_t from = strip * strip_bytes;
      float* acc = args.acc + strip * kStripLanes;
      __m512 sums[kRows];
      scales.enter(entered + from);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) sums[row] = _mm512_load_ps(acc + row * kPanelLanes);
      direct.add(w + from, tops + from, group * direct.units() * 4, scales, within, of, ask, sums);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) _mm512_store_ps(acc + row * kPanelLanes, sums[row]);
    }
    w += direct.units() * direct.kUnitBytes, tops += direct.units() * direct.kUnitTops;
  }
}

constexpr int64_t kRowsBeside = 32;  // the most for which strips side by side are faster, though later rows meet them in cache (Xeon, two cores)

template <CodeForm kForm, bool kWide, int kRows>
void tile_direct(const GroupArgs& args) {
  args.strips > 1 ? tile_beside<kForm, kWide, kRows>(args) : tile_lone<kForm, kWide, kRows>(args);
}

#define DIPTYCH_DIRECT(form) \
  {tile_direct<form, kWide, 1>, tile_direct<form, kWide, 2>, tile_direct<form, kWide, 3>, tile_direct<form, kWide, 4>, \
   tile_direct<form, kWide, 5>, tile_direct<form, kWide, 6>, tile_direct<form, kWide, 7>, tile_direct<form, kWide, 8>}
template <bool kWide>
constexpr DirectTiles kDirectTiles = {{DIPTYCH_DIRECT(CodeForm::twos), DIPTYCH_DIRECT(CodeForm::threes), DIPTYCH_DIRECT(CodeForm::threes_table),
                                       DIPTYCH_DIRECT(CodeForm::fours), DIPTYCH_DIRECT(CodeForm::fours_table), DIPTYCH_DIRECT(CodeForm::fives),
                                       DIPTYCH_DIRECT(CodeForm::sixes), DIPTYCH_DIRECT(CodeForm::bytes)}};

// Expanded strips. A group's whole sums are registers and begin with what the levels' offset of 128 adds too much; sums over the groups
// are registers too, so that both leave 12 chains of dot products. What a group needs of a row is made for all groups before: broadcasts
// from memory take no port of those that multiply. Wide rows pass twice: the sums of their high halves are shifted, and go on with the low
// ones. They are converted; then the power is multiplied into the sum, or added to the exponent of the scale where additions have ports of
// their own.
enum class Ports { shared, apart };  // of additions and conversions with dot products and multiplications: Intel, AMD

// One group of rows that begin at byte `from` of each x.
template <int kRows, int kStrips>
DIPTYCH_FORCED void add_group(__m512i (&whole)[kRows][kStrips], const uint8_t* w, const uint8_t* const (&x)[kRows], int64_t from, int64_t bytes) {
  for (const int64_t end = from + bytes; from < end; from += 16, w += 4 * kStepBytes) {
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) {
      __m512i lanes[kStrips];
#pragma GCC unroll 4
      for (int v = 0; v < kStrips; ++v) lanes[v] = _mm512_load_si512(w + v * kExpandedBytes + step * kStepBytes);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const __m512i word = _mm512_set1_epi32(*reinterpret_cast<const int*>(x[row] + from + step * 4));
#pragma GCC unroll 4
        for (int v = 0; v < kStrips; ++v) add_dot_int8(whole[row][v], lanes[v], word);
      }
    }
  }
}

// The sums of one group of a row join those of the groups before.
template <int kStrips, bool kWide, bool kMinima, Ports kPorts>
DIPTYCH_FORCED void end_group(__m512 (&sums)[kStrips], const __m512i (&whole)[kStrips], const RowOfGroup& row, const float* scales, const float* minima) {
  const __m512 power = _mm512_set1_ps(row.power), offset = _mm512_set1_ps(row.offset);
  const __m512i step = _mm512_set1_epi32(bits_of(row.power) - bits_of(1.0f));  // of a scale's exponent, in its place
#pragma GCC unroll 4
  for (int v = 0; v < kStrips; ++v) {
    const __m512 scale = _mm512_load_ps(scales + v * kExpandedScales);
    if constexpr (!kWide) {
      sums[v] = _mm512_fmadd_ps(_mm512_sub_ps(_mm512_castsi512_ps(whole[v]), offset), scale, sums[v]);
    } else if constexpr (kPorts == Ports::apart) {
      const __m512 both = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(scale), step));
      sums[v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[v]), both, sums[v]);
    } else {
      sums[v] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(whole[v]), power), scale, sums[v]);
    }
    if constexpr (kMinima) sums[v] = _mm512_fmadd_ps(_mm512_set1_ps(row.sum), _mm512_load_ps(minima + v * kExpandedScales), sums[v]);
  }
}

template <int kRows, int kStrips, bool kWide, bool kMinima, Ports kPorts>
inline void run_expanded(const GroupArgs& args) {
  const int64_t groups = args.groups, inputs = args.shape->group, low = args.low;
  const uint8_t* x[kRows];
  __m512 sums[kRows][kStrips];
  float* const acc = args.acc;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    x[row] = args.x[row] + args.first * inputs;
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) sums[row][v] = args.resume ? _mm512_load_ps(acc + row * kPanelLanes + v * kStripLanes) : _mm512_setzero_ps();
  }
  const uint8_t* w = args.steps;
  const RowOfGroup* rows = args.rows;
  const float *scales = args.scales, *minima = args.minima;
  for (int64_t group = 0; group < groups; ++group, w += inputs / 4 * kStepBytes, rows += kRows, scales += kStripLanes, minima += kMinima ? kStripLanes : 0) {
    __m512i whole[kRows][kStrips];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int v = 0; v < kStrips; ++v) whole[row][v] = _mm512_set1_epi32(rows[row].start);
    add_group(whole, w, x, group * inputs, inputs);
    if constexpr (kWide) {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < kStrips; ++v) whole[row][v] = _mm512_slli_epi32(whole[row][v], kLowBits);
      add_group(whole, w, x, group * inputs + low, inputs);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) end_group<kStrips, kWide, kMinima, kPorts>(sums[row], whole[row], rows[row], scales, minima);
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) _mm512_store_ps(acc + row * kPanelLanes + v * kStripLanes, sums[row][v]);
}

template <int kRows, int kStrips, bool kWide, Ports kPorts>
void tile_expanded(const GroupArgs& args) {
  args.minima == nullptr ? run_expanded<kRows, kStrips, kWide, false, kPorts>(args) : run_expanded<kRows, kStrips, kWide, true, kPorts>(args);
}

// Of one group. base: what a code has more than it is expanded to, of each lane in all its bytes; of a table, what its level + 128 has.
template <CodeForm kForm>
uint8_t* expand_codes(const LinearShape& shape, const uint8_t* unit, const uint8_t* tops, const __m512i& table, const __m512i& base, uint8_t* out) {
  for (int64_t i = 0; i < shape.group; i += 16, unit += steps_of_16(kForm) * kStepBytes, tops += 4 * 8)
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step, out += kStepBytes) _mm512_store_si512(out, _mm512_sub_epi8(operand_of<kForm>(unit, tops, step, table), base));
  return out;
}
constexpr uint8_t* (*kExpandCodes[kCodeForms])(const LinearShape&, const uint8_t*, const uint8_t*, const __m512i&, const __m512i&, uint8_t*) = {
    expand_codes<CodeForm::twos>, expand_codes<CodeForm::threes>, expand_codes<CodeForm::threes_table>, expand_codes<CodeForm::fours>,
    expand_codes<CodeForm::fours_table>, expand_codes<CodeForm::fives>, expand_codes<CodeForm::sixes>, expand_codes<CodeForm::bytes>};

// more: what expanded levels have more than themselves, 128 or 0.
template <int kMore>
void expand_with(const LinearShape& shape, const uint8_t* strip, int64_t first, int64_t count, uint8_t* steps, float* scales, float* minima) {
  const __m512i table = load_table(shape), base = _mm512_set1_epi8(static_cast<char>(is_table(shape) ? 128 - kMore : middle_of(shape) - kMore));
  const auto expand = kExpandCodes[static_cast<int>(form_of(shape))];
  Scales scales_of(shape);
  for (int64_t g = first; g < first + count; ++g) {
    const GroupPlace place = place_of_group(shape, g);
    scales_of.enter(strip + place.factors);
    const int64_t within = g & (groups_of_head(shape) - 1);
    const __m512 scale = scales_of.scale(within);
    const __mmask16 is_zero = _mm512_cmp_ps_mask(scale, _mm512_setzero_ps(), _CMP_EQ_OQ);
    _mm512_store_ps(scales + (g - first) * kStripLanes, _mm512_mask_mov_ps(scale, is_zero, _mm512_set1_ps(1.0f)));
    if (shape.grid.offset == Offset::minima) _mm512_store_ps(minima + (g - first) * kStripLanes, scales_of.minimum(within));
    __m512i own = base;
    if (shape.grid.offset == Offset::zeros) {
      const __m512i zeros = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(strip + place.offsets)));
      own = _mm512_add_epi8(base, _mm512_mullo_epi32(zeros, _mm512_set1_epi32(0x01010101)));
    }
    uint8_t* const begin = steps;
    steps = expand(shape, strip + place.steps, strip + place.tops, table, own, steps);
    if (is_zero != 0)  // zero has no exponent that a power could join: levels of zero, with another scale
      for (uint8_t* step = begin; step < steps; step += kStepBytes) _mm512_mask_storeu_epi32(step, is_zero, _mm512_set1_epi8(static_cast<char>(kMore)));
  }
}

void expand_groups(const LinearShape& shape, const uint8_t* strip, int64_t first, int64_t count, uint8_t* steps, float* scales, float* minima) {
  expand_with<128>(shape, strip, first, count, steps, scales, minima);
}

// Of each of 16 vectors what joins all its lanes, in the lane of its number.
template <class Join>
DIPTYCH_FORCED __m512i join_each(const __m512i (&v)[16], Join&& join) {
  __m512i pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) pairs[i] = join(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) fours[i] = join(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]), _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  const auto halves = [&](__m512i a, __m512i b) __attribute__((always_inline)) {
    return join(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  return halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]));
}

// power_of_group and steps_per_unit of 16 groups.
inline __m512 powers_of_groups(float row, __m512 groups) {
  const __m512i halvings = _mm512_srai_epi32(_mm512_sub_epi32(_mm512_set1_epi32(bits_of(row)), _mm512_castps_si512(groups)), 23);
  const __m512i held = _mm512_min_epi32(_mm512_max_epi32(halvings, _mm512_setzero_si512()), _mm512_set1_epi32(kMostHalvings));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(127), held), 23));
}
inline __m512 steps_of_groups(__m512 highest, float top) {
  const __mmask16 has_steps = _mm512_cmp_ps_mask(highest, _mm512_set1_ps(0x1p-100f), _CMP_GT_OQ);
  return _mm512_maskz_div_ps(has_steps, _mm512_set1_ps(top), highest);
}

// Sixteen groups of 16 * kVectors of a row from group `first` on, of which `groups` are its own.
template <int kVectors, bool kWide, typename Value>
struct GroupsOfRow {
  const Value* x;  // of the first; all of them can be read
  int64_t first, groups;

  DIPTYCH_FORCED __m512 load(int64_t vector) const { return load_some(x + 16 * vector, 0xffff); }
  DIPTYCH_FORCED __mmask16 own() const { return head(groups); }

  __m512i largest() const {
    __m512i of_groups[16];
    const auto larger = [](__m512i a, __m512i b) __attribute__((always_inline)) { return _mm512_max_epi32(a, b); };
#pragma GCC unroll 16
    for (int64_t g = 0; g < 16; ++g) {
      of_groups[g] = magnitude_bits(load(g * kVectors));
#pragma GCC unroll 8
      for (int v = 1; v < kVectors; ++v) of_groups[g] = larger(of_groups[g], magnitude_bits(load(g * kVectors + v)));
    }
    return join_each(of_groups, larger);
  }

  void quantize(float most, float top, int8_t* out, int8_t* low, float* powers, int32_t* sums) const {
    const __m512 power = powers_of_groups(most, _mm512_maskz_loadu_ps(own(), powers + first));
    _mm512_mask_storeu_ps(powers + first, own(), power);
    alignas(64) float steps[16];
    _mm512_store_ps(steps, steps_of_groups(_mm512_mul_ps(_mm512_set1_ps(most), power), top));
    __m512i of_vectors[16 * kVectors], of_groups[16];
    for (int64_t v = groups * kVectors; v < 16 * kVectors; ++v) of_vectors[v] = _mm512_setzero_si512();
    for (int64_t v = 0; v < groups * kVectors; v += 4) {  // whole ones: rows are filled up to kMaxGroup
      const int64_t at = 16 * (first * kVectors + v);
      __m512i level[4], rest[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        level[i] = _mm512_cvtps_epi32(_mm512_mul_ps(load(v + i), _mm512_set1_ps(steps[(v + i) / kVectors])));
        of_vectors[v + i] = level[i];
        if constexpr (kWide) {
          const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(level[i], _mm512_set1_epi32(64)), kLowBits);
          rest[i] = _mm512_sub_epi32(level[i], _mm512_slli_epi32(high, kLowBits)), level[i] = high;
        }
      }
      _mm512_store_si512(out + at, pack_levels(level));
      if constexpr (kWide) _mm512_store_si512(low + at, pack_levels(rest));
    }
    const auto sum = [](__m512i a, __m512i b) __attribute__((always_inline)) { return _mm512_add_epi32(a, b); };
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
      of_groups[g] = of_vectors[g * kVectors];
#pragma GCC unroll 8
      for (int v = 1; v < kVectors; ++v) of_groups[g] = sum(of_groups[g], of_vectors[g * kVectors + v]);
    }
    _mm512_mask_storeu_epi32(sums + first, own(), join_each(of_groups, sum));
  }
};

template <int kVectors, bool kWide, typename Value>
void quantize_groups_of(const Value* x, int64_t count, int8_t* out, int8_t* low, float* scale, float* powers, int32_t* sums) {
  constexpr int64_t kInputs = 16 * 16 * kVectors;  // of 16 groups
  const int64_t groups = round_up(count, kMaxGroup) / (16 * kVectors);
  const float top = kWide ? kMostWide : 127.0f;
  Value last[kInputs];
  const int64_t rest = count % kInputs;
  if (rest != 0) std::memcpy(last, x + count - rest, rest * sizeof(Value)), std::memset(last + rest, 0, (kInputs - rest) * sizeof(Value));
  const auto some = [&](int64_t first) {
    const int64_t at = first / 16 * kInputs;
    return GroupsOfRow<kVectors, kWide, Value>{at + kInputs <= count ? x + at : last, first, std::min<int64_t>(16, groups - first)};
  };
  __m512i most_of_lanes = _mm512_setzero_si512();
  for (int64_t first = 0; first < groups; first += 16) {
    const __m512i largest = some(first).largest();
    most_of_lanes = _mm512_max_epi32(most_of_lanes, largest);
    _mm512_mask_storeu_epi32(powers + first, some(first).own(), largest);
  }
  const float most = highest_of(most_of_lanes);
  *scale = most / top;
  for (int64_t first = 0; first < groups; first += 16) some(first).quantize(most, top, out, low, powers, sums);
}

template <bool kWide, typename Value>
void quantize_groups_as(const Value* x, int64_t count, int64_t group, int8_t* out, int8_t* low, float* scale, float* powers, int32_t* sums) {
  switch (group) {
    case 16: return quantize_groups_of<1, kWide>(x, count, out, low, scale, powers, sums);
    case 32: return quantize_groups_of<2, kWide>(x, count, out, low, scale, powers, sums);
    case 64: return quantize_groups_of<4, kWide>(x, count, out, low, scale, powers, sums);
    default: return quantize_groups_of<8, kWide>(x, count, out, low, scale, powers, sums);
  }
}

void quantize_groups(const void* x, Source source, int64_t count, int64_t group, int8_t* out, int8_t* low, float* scale, float* powers, int32_t* sums) {
  const auto run = [&](const auto* values) {
    low == nullptr ? quantize_groups_as<false>(values, count, group, out, low, scale, powers, sums)
                   : quantize_groups_as<true>(values, count, group, out, low, scale, powers, sums);
  };
  source == Source::bf16 ? run(static_cast<const uint16_t*>(x)) : run(static_cast<const float*>(x));
}

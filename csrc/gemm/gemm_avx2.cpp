// AVX2 kernels (with FMA and F16C): tiles of a row x 64 lanes to 6 rows x 16; the rest is the generic text under this file's flags.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "sets/kernel_sets.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace diptych {
namespace {

#include "sets/lanes.inl"

#include "gemm/gemm_generic.inl"

// Strips that pass once, from memory. Side by side each is a stream to the processor's prefetchers, which bring several faster than one; in
// pages of its own, so that they begin anew with each strip: lines are asked for a little ahead, from where the strips end on those of the
// strips that follow. Asked for further ahead they would come before the prefetchers have begun; past L2 they come no faster.
class StripsAhead {
 public:
  StripsAhead(const uint8_t* strip, int64_t strips, int64_t strip_bytes, const uint8_t* next, bool is_stream)
      : is_stream_(is_stream), is_lone_(strips == 1), strip_bytes_(strip_bytes), last_(strip + strip_bytes - kAheadBytes),
        to_next_(next - strip - strip_bytes) {}
  // From what is taken to what is asked for meanwhile; 0: nothing is. taken: of the first strip.
  DIPTYCH_FORCED int64_t distance(const uint8_t* taken) const {
    if (!is_stream_) return 0;
    return is_lone_ ? kLoneAheadBytes : taken < last_ ? kAheadBytes : kAheadBytes + to_next_;
  }
  // One line of a strip; many at once would wait for one another.
  DIPTYCH_FORCED void ask(const uint8_t* taken, int64_t strip) const { ask_at(taken + distance(taken), strip); }
  DIPTYCH_FORCED void ask_at(const uint8_t* line, int64_t strip) const {
    if (is_stream_) __builtin_prefetch(line + strip * strip_bytes_, 0, 3);
  }

 private:
  static constexpr int64_t kAheadBytes = 1024, kLoneAheadBytes = 2048;
  const bool is_stream_, is_lone_;
  const int64_t strip_bytes_;
  const uint8_t* const last_;
  const int64_t to_next_;
};

#include "gemm/gemm_avx2.inl"

// The most rows of a tile: twelve sums, two registers of W, one of x and a constant are the sixteen there are.
constexpr int kManyRows = 6;

// Where every register is taken: constants stay in memory, and products go into a sum by one register between them.
alignas(32) constexpr uint32_t kOddBits[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
alignas(32) constexpr uint32_t kEvenBytes[8] = {0xff00ffu, 0xff00ffu, 0xff00ffu, 0xff00ffu, 0xff00ffu, 0xff00ffu, 0xff00ffu, 0xff00ffu};
alignas(32) constexpr int8_t kLowered[32] = {1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11, -1, 13, -1, 15, -1, 1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11, -1, 13, -1, 15, -1};
DIPTYCH_FORCED __m256i masked(__m256i words, const uint32_t (&mask)[8]) {
  __m256i out;
  __asm__("vpand %2, %1, %0" : "=x"(out) : "x"(words), "m"(mask));
  return out;
}
DIPTYCH_FORCED __m256i moved(__m256i words, const int8_t (&places)[32]) {
  __m256i out;
  __asm__("vpshufb %2, %1, %0" : "=x"(out) : "x"(words), "m"(places));
  return out;
}
// What is loaded behind it is loaded anew: no register keeps what was there before.
DIPTYCH_FORCED void forget(const uint8_t*& pointer) { __asm__ volatile("" : "+r"(pointer)); }

// Products of words of W by what a word of x was made to beforehand: two, of its even (0) and of its odd (1) inputs.
struct FloatProduct {  // bf16 as fp32
  using Sum = __m256;
  static DIPTYCH_FORCED Sum load(const void* at) { return _mm256_load_ps(static_cast<const float*>(at)); }
  static DIPTYCH_FORCED void store(void* at, Sum sum) { _mm256_store_ps(static_cast<float*>(at), sum); }
  static DIPTYCH_FORCED Sum lanes(__m256i words, int parity) {
    return _mm256_castsi256_ps(parity == 0 ? _mm256_slli_epi32(words, 16) : masked(words, kOddBits));
  }
  static DIPTYCH_FORCED Sum value(const uint8_t* x) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(x)); }
  static DIPTYCH_FORCED void add(Sum& sum, Sum w, Sum x) { sum = _mm256_fmadd_ps(w, x, sum); }
  static DIPTYCH_FORCED void add(Sum (&sums)[kHalves], Sum former, Sum latter, Sum x) { add(sums[0], former, x), add(sums[1], latter, x); }
};
struct WholeProduct {  // bytes as 16 bits, two at once; u8 = level + 128 as it is
  using Sum = __m256i;
  static DIPTYCH_FORCED Sum load(const void* at) { return _mm256_load_si256(static_cast<const __m256i*>(at)); }
  static DIPTYCH_FORCED void store(void* at, Sum sum) { _mm256_store_si256(static_cast<__m256i*>(at), sum); }
  static DIPTYCH_FORCED Sum lanes(__m256i words, int parity) { return parity == 0 ? masked(words, kEvenBytes) : moved(words, kLowered); }
  static DIPTYCH_FORCED Sum value(const uint8_t* x) { return broadcast_word(x); }
  static DIPTYCH_FORCED void add(Sum& sum, Sum w, Sum x) {
    __m256i products;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(w), "x"(x));
  }
  // As add_codes does; the latter products take the register of x, as there is no other.
  static DIPTYCH_FORCED void add(Sum (&sums)[kHalves], Sum former, Sum latter, Sum x) {
    __m256i products;
    __asm__("vpmaddwd %3, %4, %2\n\tvpmaddwd %3, %5, %3\n\tvpaddd %2, %0, %0\n\tvpaddd %3, %1, %1"
            : "+x"(sums[0]), "+x"(sums[1]), "=&x"(products), "+x"(x) : "x"(former), "x"(latter));
  }
};

// x as `widen_rows` and `widen_bytes` make it. Registers hold what is fewer, of x or of W.
template <class Product, int kRows, int kStrips>
void tile_widened(const TileArgs& args) {
  using Sum = typename Product::Sum;
  constexpr int kSums = kStrips * kHalves;
  Sum sums[kRows][kSums];
  const auto acc = [&](int row, int i) __attribute__((always_inline)) { return static_cast<uint8_t*>(args.acc) + (row * kPanelLanes + i * 8) * 4; };
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) sums[row][i] = args.resume ? Product::load(acc(row, i)) : Sum{};
  const StripsAhead ahead(args.strip, kStrips, args.strip_bytes, args.next_strip, args.is_stream);
  const uint8_t *w = args.strip, *x = args.words;
  for (int64_t step = 0; step < args.units; ++step, w += kStepBytes, x += 2 * kRows * 4) {
#pragma GCC unroll 4
    for (int strip = 0; strip < kStrips; ++strip) ahead.ask(w, strip);
    if constexpr (kStrips == 1) {
#pragma GCC unroll 2
      for (int parity = 0; parity < 2; ++parity) {
        forget(w);
        const Sum former = Product::lanes(load_words(w, 0), parity), latter = Product::lanes(load_words(w, 1), parity);
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) Product::add(sums[row], former, latter, Product::value(x + (parity * kRows + row) * 4));
      }
    } else {
      Sum values[2][kRows];
#pragma GCC unroll 4
      for (int i = 0; i < 2 * kRows; ++i) values[i / kRows][i % kRows] = Product::value(x + i * 4);
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) {
        const __m256i words = load_words(w + i / kHalves * args.strip_bytes, i % kHalves);
#pragma GCC unroll 2
        for (int parity = 0; parity < 2; ++parity) {
          const Sum own = Product::lanes(words, parity);
#pragma GCC unroll 2
          for (int row = 0; row < kRows; ++row) Product::add(sums[row][i], own, values[parity][row]);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) Product::store(acc(row, i), sums[row][i]);
}

// Of whole words of x.
inline int32_t sum_bytes(const uint8_t* x, int64_t words) {
  __m256i sum = _mm256_setzero_si256();
  for (int64_t word = 0; word < words; word += 8) {
    const __m256i wanted = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(words - word)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i values = _mm256_maskload_epi32(reinterpret_cast<const int*>(x + word * 4), wanted);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), values);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
  int32_t total = 0;
  for (const int32_t lane : lanes) total += lane;
  return total;
}

// int8 by rows of x as they lie, for callers whose rows are few and short. u8 = level + 128 x s8: two products fit 16 bits, 2 * 127 * 127, where
// the signs of levels have gone over to x; 128 times the sum of x is added at the end.
template <int kRows>
void tile_int8(const TileArgs& args) {
  __m256i sums[kRows][kHalves];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < kHalves; ++half) sums[row][half] = _mm256_setzero_si256();
  const __m256i offset = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
  const StripsAhead ahead(args.strip, 1, args.strip_bytes, args.next_strip, args.is_stream);
  const uint8_t* w = args.strip;
  for (int64_t step = 0; step < args.units; ++step, w += kStepBytes) {
    ahead.ask(w, 0);
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      const __m256i level = _mm256_xor_si256(load_words(w, half), offset), magnitude = _mm256_abs_epi8(level);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(broadcast_word(args.x[row] + step * 4), level));
        sums[row][half] = _mm256_add_epi32(sums[row][half], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    const __m256i lacking = _mm256_set1_epi32(128 * sum_bytes(args.x[row], args.units));
    __m256i* to = reinterpret_cast<__m256i*>(static_cast<int32_t*>(args.acc) + row * kPanelLanes);
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      const __m256i sum = _mm256_add_epi32(sums[row][half], lacking);
      _mm256_store_si256(to + half, args.resume ? _mm256_add_epi32(sum, _mm256_load_si256(to + half)) : sum);
    }
  }
}

// 32 inputs of some rows: their sums of code times x, 16 * 15 * 127 at most, in the 16 bits of two columns. Registers hold what is fewer, the
// words of x or the codes of a step.
template <int kRows, int kStrips>
DIPTYCH_FORCED void sum_codes(const uint8_t* w, int64_t strip_bytes, const uint8_t* const (&x)[kRows], const StripsAhead& ahead,
                              __m256i (&sums)[kRows][kStrips * kHalves]) {
  const __m256i nibble = _mm256_set1_epi8(15);
  const int64_t distance = ahead.distance(w);
  const auto load = [&](int i) __attribute__((always_inline)) {
    __m256i words = load_words(w + i / kHalves * strip_bytes, i % kHalves);
    __asm__("" : "+x"(words));  // once
    return words;
  };
  const auto codes = [&](__m256i words, int high) __attribute__((always_inline)) {
    return _mm256_and_si256(high == 0 ? words : _mm256_srli_epi16(words, 4), nibble);
  };
  const auto add = [&](int row, int i, bool is_first, __m256i own, __m256i word) __attribute__((always_inline)) {
    if (is_first) sums[row][i] = _mm256_maddubs_epi16(own, word);
    else add_codes(sums[row][i], own, word);
  };
#pragma GCC unroll 4
  for (int at = 0; at < 32; at += 8, w += kStepBytes) {
#pragma GCC unroll 4
    for (int strip = 0; strip < kStrips; ++strip) ahead.ask_at(w + distance, strip);
    if constexpr (kStrips == 1) {
      const __m256i words[kHalves] = {load(0), load(1)};
#pragma GCC unroll 2
      for (int high = 0; high < 2; ++high) {
        const __m256i former = codes(words[0], high), latter = codes(words[1], high);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const __m256i word = broadcast_word(x[row] + at + 4 * high);
          add(row, 0, at + high == 0, former, word), add(row, 1, at + high == 0, latter, word);
        }
      }
    } else {
      __m256i words_of_x[kRows][2];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) words_of_x[row][0] = broadcast_word(x[row] + at), words_of_x[row][1] = broadcast_word(x[row] + at + 4);
#pragma GCC unroll 8
      for (int i = 0; i < kStrips * kHalves; ++i) {
        const __m256i words = load(i);
#pragma GCC unroll 2
        for (int high = 0; high < 2; ++high) {
          const __m256i own = codes(words, high);
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) add(row, i, at + high == 0, own, words_of_x[row][high]);
        }
      }
    }
  }
}

// Heads of a pair of groups, {u8 unit, u8 zero} of 8 lanes in both halves of a register, of which each takes its own four: units of a group as
// pairs of 16 bits, and a pair of the zeros of both.
alignas(32) constexpr int8_t kUnits[32] = {0, -1, 0, -1, 2, -1, 2, -1, 4, -1, 4, -1, 6, -1, 6, -1, 8, -1, 8, -1, 10, -1, 10, -1, 12, -1, 12, -1, 14, -1, 14, -1};
alignas(32) constexpr int8_t kFormerZeros[32] = {1, -1, -1, -1, 3,  -1, -1, -1, 5,  -1, -1, -1, 7,  -1, -1, -1,
                                                 9, -1, -1, -1, 11, -1, -1, -1, 13, -1, -1, -1, 15, -1, -1, -1};
alignas(32) constexpr int8_t kLatterZeros[32] = {-1, -1, 1, -1, -1, -1, 3,  -1, -1, -1, 5,  -1, -1, -1, 7,  -1,
                                                 -1, -1, 9, -1, -1, -1, 11, -1, -1, -1, 13, -1, -1, -1, 15, -1};
DIPTYCH_FORCED __m256i grid_of(const uint8_t* head, int group, int half) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(head + group * kHeadBytes) + half));
}
DIPTYCH_FORCED __m256i units_of(const uint8_t* head, int group, int half) { return moved(grid_of(head, group, half), kUnits); }
DIPTYCH_FORCED __m256i zeros_of(const uint8_t* head, int half) {
  return _mm256_or_si256(moved(grid_of(head, 0, half), kFormerZeros), moved(grid_of(head, 1, half), kLatterZeros));
}

// A pair of groups of some strips from `head` on: what is widened is multiplied by the unit in the same step; the zeros of both by their sums of
// x, 128 * 127 at most, in another. The head of a group that is not there is 0. Sums stay in registers where those suffice.
template <int kRows, int kStrips>
DIPTYCH_FORCED void add_pair_of_groups(const TileArgs& args, int64_t pair, const uint8_t* head, const StripsAhead& ahead, const uint8_t* const (&first_x)[kRows],
                                       int32_t* acc) {
  constexpr int kSums = kStrips * kHalves;
  constexpr bool kIsHeld = kRows * kSums <= 4;
  const int64_t strip_bytes = args.strip_bytes, group_inputs = args.group;
  __m256i whole[kRows][kSums];
  const auto at = [&](int row, int i) __attribute__((always_inline)) { return reinterpret_cast<__m256i*>(acc + row * kPanelLanes) + i; };
#pragma GCC unroll 4
  for (int strip = 0; strip < kStrips; ++strip) ahead.ask_at(head + ahead.distance(head), strip);
#pragma GCC unroll 4
  for (int i = 0; i < kSums; ++i) {
    const __m256i zeros = zeros_of(head + i / kHalves * strip_bytes, i % kHalves);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const __m256i of_zeros = _mm256_madd_epi16(zeros, _mm256_set1_epi32(sums_of_pair(args, row, pair)));
      whole[row][i] = pair == 0 ? of_zeros : _mm256_add_epi32(_mm256_load_si256(at(row, i)), of_zeros);
      if (!kIsHeld) _mm256_store_si256(at(row, i), whole[row][i]);
    }
  }
  const uint8_t *x[kRows], *w = head + 2 * kHeadBytes;
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) x[row] = first_x[row];
  for (int64_t group = 0; group < std::min<int64_t>(2, args.units - pair); ++group)
    for (int64_t from = 0; from < group_inputs; from += 32, w += 4 * kStepBytes) {
      __m256i sums[kRows][kSums];
      sum_codes<kRows, kStrips>(w, strip_bytes, x, ahead, sums);
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) {
        const __m256i units = units_of(head + i / kHalves * strip_bytes, static_cast<int>(group), i % kHalves);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const __m256i added = _mm256_madd_epi16(sums[row][i], units);
          if (kIsHeld) whole[row][i] = _mm256_add_epi32(whole[row][i], added);
          else _mm256_store_si256(at(row, i), _mm256_add_epi32(_mm256_load_si256(at(row, i)), added));
        }
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) x[row] += 32;
    }
  if (!kIsHeld) return;
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) _mm256_store_si256(at(row, i), whole[row][i]);
}

template <int kRows, int kStrips>
void tile_int4(const TileArgs& args) {
  constexpr int kAtOnce = kRows == 1 ? std::min(kStrips, 2) : 1;
  const int64_t pair_inputs = 2 * args.group, pair_bytes = head_of_group(args.group, 2);
  const uint8_t *x[kRows], *head = args.strip;
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) x[row] = args.x[row];
  for (int64_t pair = 0; pair < args.units; pair += 2, head += pair_bytes) {
    for (int strip = 0; strip < kStrips; strip += kAtOnce) {
      const int64_t at = strip * args.strip_bytes;
      const StripsAhead ahead(args.strip + at, kStrips, args.strip_bytes, args.next_strip + at, args.is_stream);
      add_pair_of_groups<kRows, kAtOnce>(args, pair, head + at, ahead, x, static_cast<int32_t*>(args.acc) + strip * kStripLanes);
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) x[row] += pair_inputs;
  }
}

// ---- many rows of int4 ----

// A tile of packed codes takes them apart for each few rows that it holds, and makes grids of heads: a quarter of its time (LAB.md). So a block
// of a strip is taken apart once, into L1: of each pair of groups the zeros of both, the units of each, and codes in whole bytes.
constexpr int kSpreadRows = 4;

void spread_int4(const uint8_t* strip, int64_t group, int64_t first, int64_t count, uint8_t* out) {
  const __m256i nibble = _mm256_set1_epi8(15);
  const uint8_t* in = strip + first / 2 * (2 * kHeadBytes + group * kStripLanes);
  for (int64_t at = 0; at < count; at += 2) {
    __m256i* to = reinterpret_cast<__m256i*>(out);
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) to[half] = zeros_of(in, half), to[2 + half] = units_of(in, 0, half), to[4 + half] = units_of(in, 1, half);
    in += 2 * kHeadBytes, out += 3 * kStepBytes;
    for (int64_t steps = std::min<int64_t>(2, count - at) * group / 8; steps > 0; --steps, in += kStepBytes, out += 2 * kStepBytes)
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
        const __m256i words = load_words(in, half);
        to = reinterpret_cast<__m256i*>(out) + half;
        to[0] = _mm256_and_si256(words, nibble), to[kHalves] = _mm256_and_si256(_mm256_srli_epi16(words, 4), nibble);
      }
  }
}

// Zeros first, in registers; then the sums of each 32 inputs join those in memory, as in tile_int4.
void tile_int4_many(const TileArgs& args) {
  __m256i* const acc = static_cast<__m256i*>(args.acc);
  constexpr int kRow = kPanelLanes / 8;
  const int64_t group = args.group, pair_bytes = bytes_of_spread(group);
  __m256i whole[kSpreadRows][kHalves];
#pragma GCC unroll 4
  for (int row = 0; row < kSpreadRows; ++row)
    for (int half = 0; half < kHalves; ++half) whole[row][half] = args.resume ? _mm256_load_si256(acc + row * kRow + half) : _mm256_setzero_si256();
  for (int64_t pair = 0; pair < args.units; pair += 2) {
    const uint8_t* zeros = args.strip + pair / 2 * pair_bytes;
#pragma GCC unroll 4
    for (int row = 0; row < kSpreadRows; ++row) {
      const __m256i both = _mm256_set1_epi32(sums_of_pair(args, row, pair));
      for (int half = 0; half < kHalves; ++half) whole[row][half] = chained(_mm256_add_epi32(whole[row][half], _mm256_madd_epi16(load_words(zeros, half), both)));
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kSpreadRows; ++row)
    for (int half = 0; half < kHalves; ++half) _mm256_store_si256(acc + row * kRow + half, whole[row][half]);
  const uint8_t *pair = args.strip, *x = args.words;
  for (int64_t i = 0; i < args.units; ++i, pair += i % 2 == 0 ? pair_bytes : 0) {
    const uint8_t *units = pair + (1 + i % 2) * kStepBytes, *w = pair + 3 * kStepBytes + i % 2 * group * kStripLanes;
    for (int64_t from = 0; from < group; from += 32, w += 8 * kStepBytes, x += 8 * 4 * kSpreadRows) {
      __m256i sums[kSpreadRows][kHalves];
#pragma GCC unroll 8
      for (int step = 0; step < 8; ++step) {
        const __m256i former = load_words(w + step * kStepBytes, 0), latter = load_words(w + step * kStepBytes, 1);
#pragma GCC unroll 4
        for (int row = 0; row < kSpreadRows; ++row) {
          const __m256i word = broadcast_word(x + (step * kSpreadRows + row) * 4);
          if (step == 0) sums[row][0] = _mm256_maddubs_epi16(former, word), sums[row][1] = _mm256_maddubs_epi16(latter, word);
          else add_codes(sums[row], former, latter, word);
        }
      }
#pragma GCC unroll 4
      for (int row = 0; row < kSpreadRows; ++row)
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) {
          __m256i* to = acc + row * kRow + half;
          _mm256_store_si256(to, _mm256_add_epi32(_mm256_madd_epi16(sums[row][half], load_words(units, half)), _mm256_load_si256(to)));
        }
    }
  }
}

// 8 words of each of 8 rows -> 8 registers of a word of each row.
inline void transpose_8x8(__m256i (&block)[8]) {
  __m256i pairs[8], fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(block[i], block[i + 1]), pairs[i + 1] = _mm256_unpackhi_epi32(block[i], block[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]), fours[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]), fours[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    block[i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20), block[i + 4] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
  }
}

// 8 words from `word` on of kRows rows, of which `count` are there, word by word.
template <int kRows>
DIPTYCH_FORCED void load_turned(const uint8_t* const* rows, int64_t count, int64_t word, __m256i (&block)[8]) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < 8; ++i)
    block[i] = i < kRows && i < count ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + word * 4)) : _mm256_setzero_si256();
  transpose_8x8(block);
}

// A row of n_words words -> out [n_words][2], the even and the odd values of each word, wider.
template <typename Widen>
void widen_row(const uint8_t* row, int64_t n_words, uint8_t* out, Widen widen) {
  for (int64_t word = 0; word < n_words; word += 8, out += 64) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + word * 4)), even = widen(words, 0), odd = widen(words, 1);
    const __m256i former = _mm256_unpacklo_epi32(even, odd), latter = _mm256_unpackhi_epi32(even, odd);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute2x128_si256(former, latter, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + 1, _mm256_permute2x128_si256(former, latter, 0x31));
  }
}

// The first kCount of 8 words.
template <int kCount>
DIPTYCH_FORCED void store_first(__m256i words, uint8_t* out) {
  const __m128i low = _mm256_castsi256_si128(words), rest = kCount > 4 ? _mm256_extracti128_si256(words, 1) : low;
  uint8_t* to = kCount > 4 ? out + 16 : out;
  if (kCount >= 4) _mm_storeu_si128(reinterpret_cast<__m128i*>(out), low);
  if (kCount % 4 >= 2) _mm_storel_epi64(reinterpret_cast<__m128i*>(to), rest);
  if (kCount % 2 == 0) return;
  const int32_t last = _mm_cvtsi128_si32(kCount % 4 == 1 ? rest : _mm_unpackhi_epi64(rest, rest));
  std::memcpy(to + (kCount % 4 == 1 ? 0 : 8), &last, sizeof(last));
}

// rows [count] likewise -> out [n_words][2][kRows], zero where row >= count. n_words is a multiple of 8.
template <int kRows, typename Widen>
void widen_as(const uint8_t* const* rows, int64_t count, int64_t n_words, uint8_t* out, Widen widen) {
  if constexpr (kRows == 1) return widen_row(rows[0], n_words, out, widen);
  for (int64_t word = 0; word < n_words; word += 8) {
    __m256i block[8];
    load_turned<kRows>(rows, count, word, block);
#pragma GCC unroll 8
    for (int64_t i = 0; i < 8; ++i)
#pragma GCC unroll 2
      for (int parity = 0; parity < 2; ++parity, out += kRows * 4) store_first<kRows>(widen(block[i], parity), out);
  }
}
template <typename Widen>
void widen(const uint8_t* const* rows, int64_t count, int64_t n_words, int64_t tile_rows, uint8_t* out, Widen widen) {
  switch (tile_rows) {
    case 1: return widen_as<1>(rows, count, n_words, out, widen);
    case 2: return widen_as<2>(rows, count, n_words, out, widen);
    case 3: return widen_as<3>(rows, count, n_words, out, widen);
    case 4: return widen_as<4>(rows, count, n_words, out, widen);
    case 5: return widen_as<5>(rows, count, n_words, out, widen);
    default: return widen_as<kManyRows>(rows, count, n_words, out, widen);
  }
}
// Of kSpreadRows rows [word][row].
void interleave_rows(const uint8_t* const* rows, int64_t count, int64_t n_words, int64_t, uint8_t* out) {
  for (int64_t word = 0; word < n_words; word += 8, out += 8 * 4 * kSpreadRows) {
    __m256i block[8];
    load_turned<kSpreadRows>(rows, count, word, block);
#pragma GCC unroll 8
    for (int64_t i = 0; i < 8; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(out) + i, _mm256_castsi256_si128(block[i]));
  }
}
void widen_rows(const uint8_t* const* rows, int64_t count, int64_t n_words, int64_t tile_rows, uint8_t* out) {
  widen(rows, count, n_words, tile_rows, out, [](__m256i words, int parity) __attribute__((always_inline)) {
    return parity == 0 ? _mm256_slli_epi32(words, 16) : _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  });
}
void widen_bytes(const uint8_t* const* rows, int64_t count, int64_t n_words, int64_t tile_rows, uint8_t* out) {
  widen(rows, count, n_words, tile_rows, out, [](__m256i words, int parity) __attribute__((always_inline)) {
    return _mm256_srai_epi16(parity == 0 ? _mm256_slli_epi16(words, 8) : words, 8);
  });
}

#include "gemm/gemm_fp8.inl"

}  // namespace

namespace avx2 {

#define DIPTYCH_WIDENED(product, height, width) {height, width, XForm::widened, tile_widened<product, height, width>}
#define DIPTYCH_BY_ROW(height) {height, 1, XForm::rows, tile_int8<height>}  // what adapters take
#define DIPTYCH_FEW(height, width) {height, width, XForm::rows, tile_int4<height, width>}
extern const Tiles kBf16Tiles = {
    {DIPTYCH_WIDENED(FloatProduct, 1, 4), DIPTYCH_WIDENED(FloatProduct, 1, 1), DIPTYCH_WIDENED(FloatProduct, 2, 2), DIPTYCH_WIDENED(FloatProduct, 2, 1),
     DIPTYCH_WIDENED(FloatProduct, 3, 1), DIPTYCH_WIDENED(FloatProduct, 4, 1), DIPTYCH_WIDENED(FloatProduct, 5, 1), DIPTYCH_WIDENED(FloatProduct, kManyRows, 1)},
    DIPTYCH_WIDENED(FloatProduct, kManyRows, 1),
};
extern const Tiles kInt8Tiles = {
    {DIPTYCH_WIDENED(WholeProduct, 1, 4), DIPTYCH_WIDENED(WholeProduct, 1, 1), DIPTYCH_BY_ROW(1), DIPTYCH_WIDENED(WholeProduct, 2, 2),
     DIPTYCH_WIDENED(WholeProduct, 2, 1), DIPTYCH_BY_ROW(2), DIPTYCH_WIDENED(WholeProduct, 3, 1), DIPTYCH_BY_ROW(3), DIPTYCH_WIDENED(WholeProduct, 4, 1),
     DIPTYCH_BY_ROW(4), DIPTYCH_WIDENED(WholeProduct, 5, 1), DIPTYCH_WIDENED(WholeProduct, kManyRows, 1)},
    DIPTYCH_WIDENED(WholeProduct, kManyRows, 1),
};
extern const Tiles kInt4Tiles = {
    {DIPTYCH_FEW(1, 4), DIPTYCH_FEW(1, 1), DIPTYCH_FEW(2, 2), DIPTYCH_FEW(2, 1), DIPTYCH_FEW(3, 1),
     DIPTYCH_FEW(4, 1)},
    {kSpreadRows, 1, XForm::words, tile_int4_many, true},
};
#undef DIPTYCH_FEW
#undef DIPTYCH_BY_ROW
#undef DIPTYCH_WIDENED
extern const Tiles kFp8Tiles = {};
extern const LinearKernels kLinear = {
    interleave_rows, widen_rows, widen_bytes, finish, transpose_words, load_inputs, round_inputs, abs_max, quantize_int8, quantize_row,
    sum_groups, quantize_group, expand_int4, expand_fp8, spread_int4,
};
extern const GroupTiles kGroupTiles = {
    {kDirectTiles<false>, kDirectTiles<true>}, {kExpandedRows, 1, tile_expanded}, {kExpandedRows, 1, tile_expanded_wide}, ready_rows_of_pairs, expand_pairs,
    quantize_groups, {}, row_form_of_pairs, {8, 8}, kPanelStrips,
};

}  // namespace avx2

}  // namespace diptych
#endif

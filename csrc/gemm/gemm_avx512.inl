// AVX-512 kernels (F, BW, DQ, VL, VNNI), compiled with and without BF16 under the name DIPTYCH_ISA. One register tile is up to 6 rows x 64 lanes = 24 accumulators, 4 vectors of
// weights and one broadcast of x: 24 dot instructions per 10 loads.
#include "sets/kernel_sets.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "sets/avx512_math.h"

namespace diptych {
namespace {

constexpr int kVectors = kPanelLanes / 16;
constexpr int kUnroll = 4;  // steps between two rounds of prefetches
constexpr int64_t kCacheLine = 64;

// Reading ahead (see TileArgs). A stream asks for one line with each that it takes (`pass`): for the line itself, past the caches (`here`), for
// one that follows into L2 (`each`: 2 KiB ahead, `l2`: 6, `far`: 10), or past the caches (`past`: 6). Tiles that share W bring what follows
// into the same cache by `turn`, which is called once in every kUnroll steps; so do streams of `l1` (4 KiB ahead) and of fp8.
// AMD: one and two rows do best by the processor's prefetchers, and ask past the caches for what they take: it pushes nothing on to L3 then
// (Zen 4, threads far apart: two rows of int4 70 GB/s, by 10 KiB 48, where plain reading has 65; LAB.md). With more rows a tile computes for a
// good part of the time that the memory needs: it reads into L2 and leaves L1 to x. Zen 5 asks past L2, 6 KiB ahead (LAB.md: up to 17 %).
// Intel: L2 takes more lines under way than L1, and the processor's prefetchers bring several streams faster than one: strips side by side,
// one line asked for with each that is taken, a little ahead, and taken in the order of addresses (LAB.md, machine C).
enum class Reach { here, l1, l2, far, each, past };
constexpr int64_t ahead_bytes(Reach reach) {
  return reach == Reach::here ? 0 : reach == Reach::l1 ? 4096 : reach == Reach::far ? 10240 : reach == Reach::each ? 2048 : 6144;
}
static_assert(ahead_bytes(Reach::past) == kPastBytes);

// kMayPass: whether a stream asks by `pass`; not of fp8, whose tables fill L1.
template <int kStrips, Reach kReach, bool kMayPass = kReach != Reach::l1>
struct Ahead {
  static constexpr _mm_hint kHint = kReach == Reach::here || kReach == Reach::past ? _MM_HINT_NTA : kReach == Reach::l1 ? _MM_HINT_T0 : _MM_HINT_T1;
  const uint8_t* next;
  const uint8_t* next_strip;
  const uint8_t* last;  // of `each`: from where on the lines asked for are those of the following strips, to_next further
  const int64_t to_next;
  const int64_t strip_bytes;
  const int64_t lines;   // per turn, of tiles that share W
  const int64_t distance;
  int64_t turns_left;    // in the own strips, of streams that ask by `turn`
  const bool is_by_turn;  // a stream that does
  // Without a branch: GCC 12 keeps a tile's sums in memory behind one.
  Ahead(const TileArgs& args, int64_t turns, int64_t block_bytes)
      : next(args.is_stream ? args.strip + ahead_bytes(kReach) : args.next),
        next_strip(args.next_strip),
        last(args.strip + args.strip_bytes - ahead_bytes(kReach)),
        to_next(args.next_strip - args.strip - args.strip_bytes),
        strip_bytes(args.strip_bytes),
        lines(kMayPass && args.is_stream ? 0 : (args.next_bytes / kCacheLine + turns - 1) / turns),
        distance(kMayPass && args.is_stream ? ahead_bytes(kReach) : 0),
        turns_left(turns - turns * ahead_bytes(kReach) / block_bytes),
        is_by_turn(!kMayPass && args.is_stream) {}
  static DIPTYCH_FORCED void prefetch(const uint8_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line), kHint); }
  // With a line w that is taken of each strip.
  DIPTYCH_FORCED void pass(const uint8_t* w) const {
    const uint8_t* at = w + distance + (kReach == Reach::each && kStrips > 1 && w >= last ? to_next : 0);
    if constexpr (kMayPass)
#pragma GCC unroll 4
      for (int v = 0; v < kStrips; ++v) prefetch(at + v * strip_bytes);
  }
  // Lines of a stream are loaded one after the other: what GCC orders otherwise the prefetchers take for no stream.
  static inline void in_order(__m512i& line) {
    if constexpr (kReach == Reach::each) __asm__ volatile("" : "+v"(line));
  }
  inline void line() {
    if constexpr (kMayPass) return;
    prefetch(next);
    next += kCacheLine;
  }
  inline void turn() {
    if constexpr (kReach == Reach::here) return;
    if (is_by_turn) {
      if (turns_left-- == 0) next = next_strip;
      for (int step = 0; step < kUnroll; ++step, next += kCacheLine)
        for (int v = 0; v < kStrips; ++v) prefetch(next + v * strip_bytes);
    } else {
      for (int64_t line = 0; line < lines; ++line, next += kCacheLine) prefetch(next);
    }
  }
};

// A tile of a set for AMD: kPast where streams ask past the caches.
template <TileKernel kUsual, TileKernel kPast>
void tile_either(const TileArgs& args) { return (args.is_past ? kPast : kUsual)(args); }

// The tile's view of x: word `at` of a row, from separate rows (few) or from words interleaved row after row (many).
template <int kRows, bool kInterleaved>
struct Words {
  const uint8_t* x[kInterleaved ? 1 : kRows];
  explicit Words(const TileArgs& args) {
    if constexpr (kInterleaved) {
      x[0] = args.words;
    } else {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) x[row] = args.x[row];
    }
  }
  inline __m512i get(int row, int64_t at) const {
    const uint8_t* word = kInterleaved ? x[0] + (at * kRows + row) * 4 : x[row] + at * 4;
    return _mm512_set1_epi32(*reinterpret_cast<const int*>(word));
  }
  inline const uint8_t* at(int row, int64_t at) const { return x[row] + at * 4; }  // of separate rows
};

#if defined(__AVX512BF16__)
inline void add_dot(__m512& sum, __m512i w, __m512i x) { add_dot_bf16(sum, w, x); }
#endif
inline void add_dot(__m512i& sum, __m512i w, __m512i x) { add_dot_int8(sum, w, x); }

template <typename Sum>
constexpr bool kIsWhole = std::is_integral_v<std::remove_reference_t<decltype(std::declval<Sum>()[0])>>;

// bf16 (Sum = __m512) and int8 (Sum = __m512i): one dot instruction per word and vector.
template <typename Sum, int kRows, int kStrips, bool kInterleaved, Reach kReach>
void tile_dot(const TileArgs& args) {
  // Whole numbers may be added in any order: where rows are few, two chains, as one waits for its own sums (5 cycles a step).
  constexpr int kChains = kIsWhole<Sum> && kRows * kStrips <= 8 ? 2 : 1;
  Sum sums[kChains][kRows][kStrips];
  Sum* acc = static_cast<Sum*>(args.acc);
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) {
      sums[kChains - 1][row][v] = Sum{};
      sums[0][row][v] = args.resume ? acc[row * kVectors + v] : Sum{};
    }
  const Words<kRows, kInterleaved> x(args);
  const uint8_t* w = args.strip;
  const int64_t strip_bytes = args.strip_bytes;
  Ahead<kStrips, kReach> ahead(args, args.units / kUnroll, args.units * kStepBytes);
  for (int64_t at = 0; at < args.units; at += kUnroll) {
    ahead.turn();
#pragma GCC unroll 4
    for (int step = 0; step < kUnroll; ++step, w += kStepBytes) {
      __m512i lanes[kStrips];
#pragma GCC unroll 4
      for (int v = 0; v < kStrips; ++v) lanes[v] = _mm512_load_si512(w + v * strip_bytes), ahead.in_order(lanes[v]);
      ahead.pass(w);
#pragma GCC unroll 24
      for (int row = 0; row < kRows; ++row) {
        const __m512i word = x.get(row, at + step);
#pragma GCC unroll 4
        for (int v = 0; v < kStrips; ++v) add_dot(sums[step % kChains][row][v], lanes[v], word);
      }
    }
  }
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) {
      if constexpr (kChains == 2) sums[0][row][v] = _mm512_add_epi32(sums[0][row][v], sums[1][row][v]);
      acc[row * kVectors + v] = sums[0][row][v];
    }
}

// The heads of one int4 group, spread over the bytes of each lane's word.
struct Grid {
  __m512i unit, zero;  // unit: twice as 16 bits, so that one multiplication serves two nibbles: 15 * 17 fits a byte
  explicit Grid(const uint8_t* head) {
    const __m512i both = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(head)));
    unit = _mm512_or_si512(_mm512_and_si512(both, _mm512_set1_epi32(0xff)),
                           _mm512_and_si512(_mm512_slli_epi32(both, 16), _mm512_set1_epi32(0xff0000)));
    zero = _mm512_shuffle_epi8(both, _mm512_set4_epi32(0x0d0d0d0d, 0x09090909, 0x05050505, 0x01010101));
  }
  inline __m512i low(__m512i nibbles) const { return spread(_mm512_and_si512(nibbles, _mm512_set1_epi8(15))); }
  inline __m512i high(__m512i nibbles) const {
    return spread(_mm512_and_si512(_mm512_srli_epi16(nibbles, 4), _mm512_set1_epi8(15)));
  }

 private:
  inline __m512i spread(__m512i q) const { return _mm512_add_epi8(_mm512_mullo_epi16(q, unit), zero); }
};

#if !defined(__AVX512BF16__)
#include "gemm/gemm_int4_avx512.inl"

// bf16 by fp32: on Intel an FMA does half the work of vdpbf16ps in a quarter of its time. Each word of W is widened to its two inputs,
// first the even, then the odd; x comes widened.
template <int kRows, int kStrips, Reach kReach>
void tile_widened(const TileArgs& args) {
  __m512 sums[kRows][kStrips];
  __m512* acc = static_cast<__m512*>(args.acc);
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) sums[row][v] = args.resume ? acc[row * kVectors + v] : __m512{};
  const float* x = reinterpret_cast<const float*>(args.words);
  const uint8_t* w = args.strip;
  const int64_t strip_bytes = args.strip_bytes;
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  Ahead<kStrips, kReach> ahead(args, args.units / kUnroll, args.units * kStepBytes);
  for (int64_t at = 0; at < args.units; at += kUnroll) {
    ahead.turn();
#pragma GCC unroll 4
    for (int step = 0; step < kUnroll; ++step, w += kStepBytes, x += 2 * kRows) {
      ahead.pass(w);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m512 lanes[kStrips];
#pragma GCC unroll 4
        for (int v = 0; v < kStrips; ++v) {
          const __m512i pairs = _mm512_load_si512(w + v * strip_bytes);
          lanes[v] = _mm512_castsi512_ps(half == 0 ? _mm512_slli_epi32(pairs, 16) : _mm512_and_si512(pairs, odd));
        }
#pragma GCC unroll 24
        for (int row = 0; row < kRows; ++row) {
          const __m512 value = _mm512_set1_ps(x[half * kRows + row]);
#pragma GCC unroll 4
          for (int v = 0; v < kStrips; ++v) sums[row][v] = _mm512_fmadd_ps(lanes[v], value, sums[row][v]);
        }
      }
    }
  }
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) acc[row * kVectors + v] = sums[row][v];
}

void widen_rows(const uint8_t* const* rows, int64_t count, int64_t n_words, int64_t tile_rows, uint8_t* out) {
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int64_t first = 0; first < tile_rows; first += 16) {
    const int64_t height = tile_rows - first < 16 ? tile_rows - first : 16;
    const __mmask16 wanted = static_cast<__mmask16>((1u << height) - 1);
    for (int64_t word = 0; word < n_words; word += 16) {
      const __mmask16 mask = n_words - word < 16 ? static_cast<__mmask16>((1u << (n_words - word)) - 1) : 0xffff;
      __m512i block[16];
      for (int64_t i = 0; i < 16; ++i)
        block[i] = first + i < count ? _mm512_maskz_loadu_epi32(mask, rows[first + i] + word * 4) : _mm512_setzero_si512();
      transpose_16x16(block);
      const int64_t present = n_words - word < 16 ? n_words - word : 16;
      for (int64_t i = 0; i < present; ++i) {
        uint8_t* at = out + (2 * (word + i) * tile_rows + first) * 4;
        _mm512_mask_storeu_epi32(at, wanted, _mm512_slli_epi32(block[i], 16));
        _mm512_mask_storeu_epi32(at + tile_rows * 4, wanted, _mm512_and_si512(block[i], odd));
      }
    }
  }
}
#endif

void expand_int4(const uint8_t* strip, int64_t group, int64_t first, int64_t count, uint8_t* out) {
  for (int64_t g = first; g < first + count; ++g) {
    const Grid grid(strip + head_of_group(group, g));
    const uint8_t* w = strip + steps_of_group(group, g);
    for (int64_t step = 0; step < group / 8; ++step, w += kStepBytes, out += 2 * kStepBytes) {
      const __m512i nibbles = _mm512_load_si512(w);
      _mm512_store_si512(out, grid.low(nibbles));
      _mm512_store_si512(out + kStepBytes, grid.high(nibbles));
    }
  }
}

void interleave_rows(const uint8_t* const* rows, int64_t count, int64_t n_words, int64_t tile_rows, uint8_t* out) {
  for (int64_t first = 0; first < tile_rows; first += 16) {
    const int64_t height = tile_rows - first < 16 ? tile_rows - first : 16;
    const __mmask16 wanted = static_cast<__mmask16>((1u << height) - 1);
    for (int64_t word = 0; word < n_words; word += 16) {
      const __mmask16 mask = n_words - word < 16 ? static_cast<__mmask16>((1u << (n_words - word)) - 1) : 0xffff;
      __m512i block[16];
      for (int64_t i = 0; i < 16; ++i)
        block[i] = first + i < count ? _mm512_maskz_loadu_epi32(mask, rows[first + i] + word * 4) : _mm512_setzero_si512();
      transpose_16x16(block);
      const int64_t present = n_words - word < 16 ? n_words - word : 16;
      for (int64_t i = 0; i < present; ++i)
        _mm512_mask_storeu_epi32(out + ((word + i) * tile_rows + first) * 4, wanted, block[i]);
    }
  }
}

#include "gemm/gemm_finish_avx512.inl"

void finish(const FinishArgs& args) {
  has_whole_sums(args.w->shape.format) ? finish_gate<true>(args) : finish_gate<false>(args);
}

// ---- activations and packing -------------------------------------------------------------------------------------

void load_inputs(const void* row, Source source, int64_t begin, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask = head(count - i);
    __m512 values;
    if (source == Source::f32) {
      values = _mm512_maskz_loadu_ps(mask, static_cast<const float*>(row) + begin + i);
    } else {
      const __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(row) + begin + i);
      values = source == Source::bf16 ? widen_bf16(bits) : _mm512_cvtph_ps(bits);
    }
    _mm512_mask_storeu_ps(out + i, mask, values);
  }
}

void round_inputs(const float* x, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask = head(count - i);
    _mm256_mask_storeu_epi16(out + i, mask, round_bf16(_mm512_maskz_loadu_ps(mask, x + i)));
  }
}

// Magnitudes compare as whole numbers: then infinity is above all others, and what is no number above that. As floats it would be lost, and a
// row that holds one would answer as if it were plain.
inline __m512i magnitude_bits(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }
inline float highest_of(__m512i magnitudes) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(magnitudes)))); }

float abs_max(const float* x, int64_t count) {
  __m512i highest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32)
    for (int v = 0; v < 2; ++v) highest[v] = _mm512_max_epi32(highest[v], magnitude_bits(_mm512_loadu_ps(x + i + 16 * v)));
  for (; i < count; i += 16) highest[0] = _mm512_max_epi32(highest[0], magnitude_bits(_mm512_maskz_loadu_ps(head(count - i), x + i)));
  return highest_of(_mm512_max_epi32(highest[0], highest[1]));
}

// Four vectors of levels as 64 bytes in their order.
inline __m512i pack_levels(const __m512i level[4]) {
  const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(level[0], level[1]), _mm512_packs_epi32(level[2], level[3]));
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}

inline __mmask64 head64(int64_t count) { return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1; }

void quantize_int8(const float* x, int64_t count, float inverse_scale, int8_t* out) {
  const __m512 inverse = _mm512_set1_ps(inverse_scale);
  for (int64_t i = 0; i < count; i += 64) {
    __m512i level[4];
    for (int v = 0; v < 4; ++v)
      level[v] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(head(count - i - 16 * v), x + i + 16 * v), inverse));
    _mm512_mask_storeu_epi8(out + i, head64(count - i), pack_levels(level));
  }
}

inline float row_abs_max(const float* x, int64_t count) { return abs_max(x, count); }

// Of bf16 as whole numbers of 16 bits.
inline float row_abs_max(const uint16_t* x, int64_t count) {
  __m512i highest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int v = 0; v < 2; ++v)
      highest[v] = _mm512_max_epu16(highest[v], _mm512_and_si512(magnitude, _mm512_loadu_si512(x + i + 32 * v)));
  for (; i < count; i += 32) {
    const __mmask32 mask = static_cast<__mmask32>(head64(count - i));
    highest[0] = _mm512_max_epu16(highest[0], _mm512_and_si512(magnitude, _mm512_maskz_loadu_epi16(mask, x + i)));
  }
  const __m512i most = _mm512_max_epu16(highest[0], highest[1]);
  return highest_of(_mm512_max_epi32(_mm512_slli_epi32(most, 16), _mm512_slli_epi32(_mm512_srli_epi32(most, 16), 16)));
}

inline __m512 load_some(const float* x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
inline __m512 load_some(const uint16_t* x, __mmask16 mask) { return widen_bf16(_mm256_maskz_loadu_epi16(mask, x)); }

template <typename Value>
inline void quantize_values(const Value* x, int64_t count, int8_t* out, float* scale, int32_t* sum) {
  const float highest = row_abs_max(x, count);
  const __m512 inverse = _mm512_set1_ps(steps_per_unit(highest, 127.0f));
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums = _mm512_setzero_si512();
  int64_t i = 0;
  auto quantize = [&](int64_t left) {
    __m512i level[4];
    for (int v = 0; v < 4; ++v)
      level[v] = _mm512_cvtps_epi32(_mm512_mul_ps(load_some(x + i + 16 * v, head(left - 16 * v)), inverse));
    const __m512i bytes = pack_levels(level);
    add_dot_int8(sums, ones, bytes);
    _mm512_store_si512(out + i, bytes);
  };
  for (; i + 64 <= count; i += 64) quantize(64);
  for (; i < round_up(count, kMaxGroup); i += 64) quantize(count - i);
  *scale = highest / 127.0f;
  *sum = _mm512_reduce_add_epi32(sums);
}

void quantize_row(const void* x, Source source, int64_t count, int8_t* out, float* scale, int32_t* sum) {
  if (source == Source::bf16) return quantize_values(static_cast<const uint16_t*>(x), count, out, scale, sum);
  quantize_values(static_cast<const float*>(x), count, out, scale, sum);
}

void sum_groups(const int8_t* x, int64_t group, int64_t groups, int16_t* sums) {
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t g = 0; g < groups; ++g) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < group; i += 64) add_dot_int8(sum, ones, _mm512_maskz_loadu_epi8(head64(group - i), x + g * group + i));
    sums[g] = static_cast<int16_t>(_mm512_reduce_add_epi32(sum));
  }
}

void transpose_words(const uint32_t* words, int64_t stride, int64_t n_words, uint8_t* out) {
  for (int64_t word = 0; word < n_words; word += 16) {
    const __mmask16 mask = head(n_words - word);
    __m512i block[16];
    for (int i = 0; i < 16; ++i) block[i] = _mm512_maskz_loadu_epi32(mask, words + i * stride + word);
    transpose_16x16(block);
    const int64_t present = n_words - word < 16 ? n_words - word : 16;
    for (int64_t i = 0; i < present; ++i) _mm512_store_si512(out + (word + i) * kStepBytes, block[i]);
  }
}

#include "sets/lanes.inl"

#include "gemm/quantize_int4.inl"

#if defined(__AVX512BF16__)
#include "gemm/gemm_fp8_avx512.inl"
#else
#include "gemm/gemm_fp8.inl"

#include "gemm/gemm_groups_avx512.inl"
#endif

// A few rows by their pointers, more interleaved: from 7 rows on the address registers run short.
#define DIPTYCH_RUN(n, reach, ...) __VA_ARGS__ n, 1, (n > 6), reach>
#define DIPTYCH_TILE(n, run) {n, 1, (n > 6 ? XForm::words : XForm::rows), run}
#define DIPTYCH_INTERLEAVED(run, reach, ...)                                                                                   \
  DIPTYCH_TILE(8, run(8, reach, __VA_ARGS__)), DIPTYCH_TILE(10, run(10, reach, __VA_ARGS__)),                                  \
  DIPTYCH_TILE(12, run(12, reach, __VA_ARGS__)), DIPTYCH_TILE(14, run(14, reach, __VA_ARGS__)),                                \
  DIPTYCH_TILE(16, run(16, reach, __VA_ARGS__)), DIPTYCH_TILE(18, run(18, reach, __VA_ARGS__)),                                \
  DIPTYCH_TILE(20, run(20, reach, __VA_ARGS__)), DIPTYCH_TILE(22, run(22, reach, __VA_ARGS__)),                                \
  DIPTYCH_TILE(24, run(24, reach, __VA_ARGS__))
// On AMD. reach: of three rows and more.
#define DIPTYCH_EITHER(n, reach, ...) tile_either<DIPTYCH_RUN(n, reach, __VA_ARGS__), DIPTYCH_RUN(n, Reach::past, __VA_ARGS__)>
#define DIPTYCH_NARROW(reach, ...)                                                                                             \
  {                                                                                                                            \
    DIPTYCH_TILE(1, DIPTYCH_EITHER(1, Reach::here, __VA_ARGS__)), DIPTYCH_TILE(2, DIPTYCH_EITHER(2, Reach::here, __VA_ARGS__)), \
    DIPTYCH_TILE(3, DIPTYCH_EITHER(3, reach, __VA_ARGS__)), DIPTYCH_TILE(4, DIPTYCH_EITHER(4, reach, __VA_ARGS__)),            \
    DIPTYCH_TILE(5, DIPTYCH_EITHER(5, reach, __VA_ARGS__)), DIPTYCH_TILE(6, DIPTYCH_EITHER(6, reach, __VA_ARGS__)),            \
    DIPTYCH_INTERLEAVED(DIPTYCH_EITHER, reach, __VA_ARGS__)                                                                    \
  }

#if !defined(__AVX512BF16__)
// Few rows of whole numbers on Intel: strips side by side, and one by one where panels cannot be shared evenly. kPair: the strips of two to six rows.
#define DIPTYCH_BESIDE(n, strips, ...) {n, strips, XForm::rows, __VA_ARGS__ n, strips, false, Reach::each>}
#define DIPTYCH_FEW(n, strips, ...) DIPTYCH_BESIDE(n, strips, __VA_ARGS__), DIPTYCH_BESIDE(n, 1, __VA_ARGS__)
#define DIPTYCH_NARROW_BESIDE(kPair, kMany, ...)                                                                               \
  {                                                                                                                            \
    DIPTYCH_FEW(1, 4, __VA_ARGS__), DIPTYCH_FEW(2, kPair, __VA_ARGS__), DIPTYCH_FEW(3, kPair, __VA_ARGS__),                    \
    DIPTYCH_FEW(4, kPair, __VA_ARGS__), DIPTYCH_FEW(5, kPair, __VA_ARGS__), DIPTYCH_FEW(6, kPair, __VA_ARGS__),                \
    DIPTYCH_INTERLEAVED(DIPTYCH_RUN, kMany, __VA_ARGS__)                                                                       \
  }
// Few rows of bf16 take two strips: one chain of sums, whose order is fixed, takes 8 cycles a step.
#define DIPTYCH_WIDENED(n) {n, (n > 6 ? 1 : 2), XForm::widened, tile_widened<n, (n > 6 ? 1 : 2), Reach::each>}
#define DIPTYCH_NARROW_WIDENED                                                                                             \
  {                                                                                                                        \
    DIPTYCH_WIDENED(1), DIPTYCH_WIDENED(2), DIPTYCH_WIDENED(3), DIPTYCH_WIDENED(4), DIPTYCH_WIDENED(5), DIPTYCH_WIDENED(6), \
    DIPTYCH_WIDENED(8), DIPTYCH_WIDENED(10), DIPTYCH_WIDENED(12), DIPTYCH_WIDENED(14), DIPTYCH_WIDENED(16),                \
    DIPTYCH_WIDENED(18), DIPTYCH_WIDENED(20), DIPTYCH_WIDENED(22), DIPTYCH_WIDENED(24),                                    \
  }
#endif

}  // namespace

namespace DIPTYCH_ISA {

#if defined(__AVX512BF16__)
extern const Tiles kBf16Tiles = {DIPTYCH_NARROW(Reach::l2, tile_dot<__m512, ), {6, 4, XForm::rows, tile_dot<__m512, 6, 4, false, Reach::l1>}};
#define DIPTYCH_FP8(n, width) {n, width, (n > 6 ? XForm::words : XForm::rows), tile_fp8<n, width, (n > 6), Reach::l2>}
extern const Tiles kFp8Tiles = {
    {{1, 4, XForm::rows, tile_fp8<1, 4, false, Reach::far>}, DIPTYCH_FP8(2, 2), DIPTYCH_FP8(3, 2), DIPTYCH_FP8(4, 2), DIPTYCH_FP8(5, 2), DIPTYCH_FP8(6, 2), DIPTYCH_FP8(8, 2),
     DIPTYCH_FP8(10, 2), DIPTYCH_FP8(12, 1), DIPTYCH_FP8(14, 1), DIPTYCH_FP8(16, 1)},
    {},
};
extern const LinearKernels kLinear = {
    interleave_rows, nullptr, nullptr, finish, transpose_words, load_inputs, round_inputs, abs_max, quantize_int8, quantize_row,
    sum_groups, quantize_group, expand_int4, expand_fp8,
};
#else
constexpr TileShape kWideInt8 = {6, 4, XForm::rows, tile_dot<__m512i, 6, 4, false, Reach::l1>};
extern const Tiles kBf16Tiles = {DIPTYCH_NARROW_WIDENED, {12, 2, XForm::widened, tile_widened<12, 2, Reach::l1>}};
extern const Tiles kInt8Tiles = {DIPTYCH_NARROW_BESIDE(4, Reach::l2, tile_dot<__m512i, ), kWideInt8};
extern const Tiles kInt4Tiles = {DIPTYCH_NARROW_BESIDE(2, Reach::l1, tile_int4<), {}};
extern const Tiles kFp8Tiles = {};
extern const LinearKernels kLinear = {
    interleave_rows, widen_rows, nullptr, finish, transpose_words, load_inputs, round_inputs, abs_max, quantize_int8, quantize_row,
    sum_groups, quantize_group, expand_int4, expand_fp8,
};
extern const ExpandGroups kExpandSigned = expand_with<0>;
#define DIPTYCH_EXPANDED(rows, strips, is_wide, ports) {rows, strips, tile_expanded<rows, strips, is_wide, ports>}
extern const GroupTiles kGroupTiles = {
    {kDirectTiles<false>, kDirectTiles<true>}, DIPTYCH_EXPANDED(6, 2, false, Ports::shared), DIPTYCH_EXPANDED(6, 2, true, Ports::shared), ready_rows,
    expand_groups, quantize_groups, DIPTYCH_EXPANDED(8, 2, false, Ports::shared), nullptr, {64, 40}, 1, kRowsBeside,
};
#endif

}  // namespace DIPTYCH_ISA

#if !defined(__AVX512BF16__)
namespace avx512 {  // its tiles of int8, int4 and groups need no BF16, so they are compiled here
extern const Tiles kInt8Tiles = {DIPTYCH_NARROW(Reach::l2, tile_dot<__m512i, ), avx512_fma::kWideInt8};
extern const Tiles kInt4Tiles = {DIPTYCH_NARROW(Reach::far, tile_int4<), {}};
extern const GroupTiles kGroupTiles = {
    {kDirectTiles<false>, kDirectTiles<true>}, DIPTYCH_EXPANDED(6, 2, false, Ports::shared), DIPTYCH_EXPANDED(6, 2, true, Ports::apart), ready_rows,
    expand_groups, quantize_groups,
};
}  // namespace avx512
#endif

}  // namespace diptych
#endif

// AVX-512 kernels (F, BW, DQ, VL, BF16, VNNI). One register tile is up to 6 rows x 64 lanes = 24 accumulators, 4 vectors of
// weights and one broadcast of x: 24 dot instructions per 10 loads.
#include "gemm_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <initializer_list>

#include "avx512_math.h"

namespace diptych {
namespace {

constexpr int kVectors = kPanelLanes / 16;
constexpr int kUnroll = 4;  // steps between two rounds of prefetches
constexpr int64_t kCacheLine = 64;

inline void prefetch(const uint8_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T0); }

// Reading ahead (see TileArgs); `turn` is called once in every kUnroll steps.
template <int kStrips>
struct Ahead {
  const uint8_t* next;
  const uint8_t* next_strip;
  const int64_t strip_bytes;
  const int64_t lines;   // per turn, second way
  int64_t turns_left;    // in the own strips, first way
  const bool is_stream;
  Ahead(const TileArgs& args, int64_t turns, int64_t block_bytes)
      : next(args.ahead_bytes != 0 ? args.strip + args.ahead_bytes : args.next),
        next_strip(args.next_strip),
        strip_bytes(args.strip_bytes),
        lines((args.next_bytes / kCacheLine + turns - 1) / turns),
        turns_left(turns - turns * args.ahead_bytes / block_bytes),
        is_stream(args.ahead_bytes != 0) {}
  inline void turn() {
    if (is_stream) {
      if (turns_left-- == 0) next = next_strip;
      for (int step = 0; step < kUnroll; ++step, next += kCacheLine)
        for (int v = 0; v < kStrips; ++v) prefetch(next + v * strip_bytes);
    } else {
      for (int64_t line = 0; line < lines; ++line, next += kCacheLine) prefetch(next);
    }
  }
};

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
};

inline void add_dot(__m512& sum, __m512i w, __m512i x) { add_dot_bf16(sum, w, x); }
inline void add_dot(__m512i& sum, __m512i w, __m512i x) { add_dot_int8(sum, w, x); }

// bf16 (Sum = __m512) and int8 (Sum = __m512i): one dot instruction per word and vector.
template <typename Sum, int kRows, int kStrips, bool kInterleaved>
void tile_dot(const TileArgs& args) {
  Sum sums[kRows][kStrips];
  Sum* acc = static_cast<Sum*>(args.acc);
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) sums[row][v] = args.resume ? acc[row * kVectors + v] : Sum{};
  const Words<kRows, kInterleaved> x(args);
  const uint8_t* w = args.strip;
  const int64_t strip_bytes = args.strip_bytes;
  Ahead<kStrips> ahead(args, args.units / kUnroll, args.units * kStepBytes);
  for (int64_t at = 0; at < args.units; at += kUnroll) {
    ahead.turn();
#pragma GCC unroll 4
    for (int step = 0; step < kUnroll; ++step, w += kStepBytes) {
      __m512i lanes[kStrips];
#pragma GCC unroll 4
      for (int v = 0; v < kStrips; ++v) lanes[v] = _mm512_load_si512(w + v * strip_bytes);
#pragma GCC unroll 24
      for (int row = 0; row < kRows; ++row) {
        const __m512i word = x.get(row, at + step);
#pragma GCC unroll 4
        for (int v = 0; v < kStrips; ++v) add_dot(sums[row][v], lanes[v], word);
      }
    }
  }
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) acc[row * kVectors + v] = sums[row][v];
}

// Integer sums may be cut at will: few rows keep those of the high nibbles apart, so that no sum waits for itself.
template <int kRows, int kStrips>
struct NibbleSums {
  static constexpr int kChains = kRows * kStrips <= 8 ? 2 : 1;
  __m512i chain[kChains][kRows][kStrips];
  inline void clear() {
#pragma GCC unroll 2
    for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 24
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < kStrips; ++v) chain[c][row][v] = _mm512_setzero_si512();
  }
  inline __m512i sum(int row, int v) const {
    return kChains == 1 ? chain[0][row][v] : _mm512_add_epi32(chain[0][row][v], chain[kChains - 1][row][v]);
  }
};

// One step of int4: 8 inputs per lane, the low nibbles first.
template <int kRows, int kStrips, bool kInterleaved>
inline void step_int4(NibbleSums<kRows, kStrips>& sums, const Words<kRows, kInterleaved>& x, int64_t at, const uint8_t* w,
                      int64_t strip_bytes) {
  const __m512i low_nibbles = _mm512_set1_epi8(15);
  __m512i lanes[kStrips];
#pragma GCC unroll 4
  for (int v = 0; v < kStrips; ++v) lanes[v] = _mm512_and_si512(_mm512_load_si512(w + v * strip_bytes), low_nibbles);
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row) {
    const __m512i word = x.get(row, at);
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) add_dot_int8(sums.chain[0][row][v], lanes[v], word);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kStrips; ++v)
    lanes[v] = _mm512_and_si512(_mm512_srli_epi16(_mm512_load_si512(w + v * strip_bytes), 4), low_nibbles);
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row) {
    const __m512i word = x.get(row, at + 1);
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) add_dot_int8(sums.chain[sums.kChains - 1][row][v], lanes[v], word);
  }
}

// The fp32 totals stay in memory (L1): the registers hold the integer sums of the group.
template <int kRows, int kStrips, bool kInterleaved>
void tile_int4(const TileArgs& args) {
  __m512* totals = static_cast<__m512*>(args.acc);
  if (!args.resume)
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kStrips; ++v) totals[row * kVectors + v] = _mm512_setzero_ps();
  const Words<kRows, kInterleaved> x(args);
  const uint8_t* w = args.strip;
  const int64_t strip_bytes = args.strip_bytes, words = args.group / 4;
  Ahead<kStrips> ahead(args, args.units * (words / 8), args.units * (args.group / 8 * kStepBytes + kGroupTailBytes));
  int64_t at = 0;
  for (int64_t group = 0; group < args.units; ++group) {
    __asm__ volatile("" ::: "memory");  // the totals are not to be carried in registers: they would push the sums out
    NibbleSums<kRows, kStrips> sums;
    sums.clear();
    for (const int64_t end = at + words; at < end; at += 8) {
      ahead.turn();
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step, w += kStepBytes) step_int4(sums, x, at + 2 * step, w, strip_bytes);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kStrips; ++v) {
      const __m256i* tail = reinterpret_cast<const __m256i*>(w + v * strip_bytes);
      const __m512 scale = widen_bf16(_mm256_load_si256(tail)), minimum = widen_bf16(_mm256_load_si256(tail + 1));
#pragma GCC unroll 24
      for (int row = 0; row < kRows; ++row) {
        __m512& total = totals[row * kVectors + v];
        const __m512 scaled = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums.sum(row, v)), scale, total);
        total = _mm512_fmadd_ps(_mm512_set1_ps(args.group_sums[row][group]), minimum, scaled);
      }
    }
    w += kGroupTailBytes;
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

// ---- finish ------------------------------------------------------------------------------------------------------

// act(gate): both activations are x / (1 + 2^-t), t = log2(e) x (silu) or 2 log2(e) u with tanh's argument u (gelu).
inline __m512 activate(Activation activation, __m512 x) {
  __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
  if (activation == Activation::gelu_tanh)
    t = _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(-2.3022082f)),
                      _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp2_ps(t)));
}

template <Store kStore>
inline void put(const FinishArgs& args, int64_t row, int64_t output, __m512 y) {
  const int64_t left = args.w->n_outputs - output;
  if (left <= 0) return;
  const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  if constexpr (kStore == Store::bf16) {
    uint16_t* out = static_cast<uint16_t*>(args.out[row]) + output;
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(y));
  } else {
    float* out = static_cast<float*>(args.out[row]) + output;
    if constexpr (kStore == Store::add_f32)
      y = _mm512_fmadd_ps(_mm512_set1_ps(args.row_weights[row]), y, _mm512_maskz_loadu_ps(mask, out));
    _mm512_mask_storeu_ps(out, mask, y);
  }
}

template <Format kFormat>
inline __m512 scaled(const FinishArgs& args, int64_t row, int v, __m512 lane_scale) {
  const int64_t at = row * kPanelLanes + v * 16;
  if constexpr (kFormat == Format::int8) {
    const __m512i offset = _mm512_set1_epi32(128 * *args.row_sums[row]);
    const __m512i sum = _mm512_sub_epi32(_mm512_load_si512(static_cast<const int32_t*>(args.acc) + at), offset);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(_mm512_set1_ps(*args.row_scales[row]), lane_scale));
  } else {
    const __m512 sum = _mm512_load_ps(static_cast<const float*>(args.acc) + at);
    return kFormat == Format::int4 ? _mm512_mul_ps(sum, _mm512_set1_ps(*args.row_scales[row])) : sum;
  }
}

template <Format kFormat, bool kGated, Store kStore>
void finish_as(const FinishArgs& args) {
  const PackedLinear& w = *args.w;
  const int64_t first_lane = args.panel * kPanelLanes;
  __m512 scales[kVectors], bias[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    scales[v] = kFormat == Format::int8 ? _mm512_load_ps(w.scales + first_lane + v * 16) : _mm512_setzero_ps();
    bias[v] = w.bias != nullptr ? _mm512_load_ps(w.bias + first_lane + v * 16) : _mm512_setzero_ps();
  }
  const bool has_bias = w.bias != nullptr;
  for (int64_t row = 0; row < args.rows; ++row) {
    __m512 y[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      y[v] = scaled<kFormat>(args, row, v, scales[v]);
      if (has_bias) y[v] = _mm512_add_ps(y[v], bias[v]);
    }
    if constexpr (kGated) {
      for (int v = 0; v < kVectors; v += 2)
        put<kStore>(args, row, first_lane / 2 + v * 8, _mm512_mul_ps(activate(args.activation, y[v]), y[v + 1]));
    } else {
      for (int v = 0; v < kVectors; ++v) put<kStore>(args, row, first_lane + v * 16, y[v]);
    }
  }
}

template <Format kFormat, bool kGated>
void finish_store(const FinishArgs& args) {
  switch (args.store) {
    case Store::f32: return finish_as<kFormat, kGated, Store::f32>(args);
    case Store::bf16: return finish_as<kFormat, kGated, Store::bf16>(args);
    case Store::add_f32: return finish_as<kFormat, kGated, Store::add_f32>(args);
  }
}

template <Format kFormat>
void finish_gate(const FinishArgs& args) {
  args.w->shape.gated ? finish_store<kFormat, true>(args) : finish_store<kFormat, false>(args);
}

void finish(const FinishArgs& args) {
  switch (args.w->shape.format) {
    case Format::bf16: return finish_gate<Format::bf16>(args);
    case Format::int8: return finish_gate<Format::int8>(args);
    case Format::int4: return finish_gate<Format::int4>(args);
  }
}

// ---- activations and packing -------------------------------------------------------------------------------------

inline __mmask16 head(int64_t count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }

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
    _mm256_mask_storeu_epi16(out + i, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i)));
  }
}

float abs_max(const float* x, int64_t count) {
  __m512 highest[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32)
    for (int v = 0; v < 2; ++v) highest[v] = _mm512_max_ps(highest[v], _mm512_abs_ps(_mm512_loadu_ps(x + i + 16 * v)));
  for (; i < count; i += 16) highest[0] = _mm512_max_ps(highest[0], _mm512_abs_ps(_mm512_maskz_loadu_ps(head(count - i), x + i)));
  return _mm512_reduce_max_ps(_mm512_max_ps(highest[0], highest[1]));
}

void quantize_int8(const float* x, int64_t count, float inverse_scale, int8_t* out) {
  const __m512 inverse = _mm512_set1_ps(inverse_scale);
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask = head(count - i);
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), inverse));
    _mm512_mask_cvtsepi32_storeu_epi8(out + i, mask, q);
  }
}

int32_t sum_int8(const int8_t* x, int64_t count) {
  __m512i sum = _mm512_setzero_si512();
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t i = 0; i < count; i += 64) {
    const int64_t left = count - i;
    const __mmask64 mask = left >= 64 ? ~0ull : (1ull << left) - 1;
    sum = _mm512_dpbusd_epi32(sum, ones, _mm512_maskz_loadu_epi8(mask, x + i));
  }
  return _mm512_reduce_add_epi32(sum);
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

#include "lanes.inl"

#include "quantize_int4.inl"

// A few rows by their pointers, more interleaved. int4 is short of address registers from 3 rows on, the others from 7.
#define DIPTYCH_NARROW(kFew, ...)                                                                          \
  {                                                                                                        \
    {1, 1, (1 > kFew), __VA_ARGS__ 1, 1, (1 > kFew)>}, {2, 1, (2 > kFew), __VA_ARGS__ 2, 1, (2 > kFew)>},  \
    {3, 1, (3 > kFew), __VA_ARGS__ 3, 1, (3 > kFew)>}, {4, 1, (4 > kFew), __VA_ARGS__ 4, 1, (4 > kFew)>},  \
    {5, 1, (5 > kFew), __VA_ARGS__ 5, 1, (5 > kFew)>}, {6, 1, (6 > kFew), __VA_ARGS__ 6, 1, (6 > kFew)>},  \
    {8, 1, true, __VA_ARGS__ 8, 1, true>}, {10, 1, true, __VA_ARGS__ 10, 1, true>},                        \
    {12, 1, true, __VA_ARGS__ 12, 1, true>}, {14, 1, true, __VA_ARGS__ 14, 1, true>},                      \
    {16, 1, true, __VA_ARGS__ 16, 1, true>}, {20, 1, true, __VA_ARGS__ 20, 1, true>},                      \
    {24, 1, true, __VA_ARGS__ 24, 1, true>},                                                               \
  }

}  // namespace

const KernelTable& avx512_kernels() {
  static const KernelTable table{
      {DIPTYCH_NARROW(6, tile_dot<__m512, ), DIPTYCH_NARROW(6, tile_dot<__m512i, ), DIPTYCH_NARROW(2, tile_int4<)},
      {{6, 4, false, tile_dot<__m512, 6, 4, false>}, {6, 4, false, tile_dot<__m512i, 6, 4, false>}, {8, 2, true, tile_int4<8, 2, true>}},
      interleave_rows,
      finish,
      transpose_words,
      load_inputs,
      round_inputs,
      abs_max,
      quantize_int8,
      sum_int8,
      quantize_group,
  };
  return table;
}

}  // namespace diptych
#endif

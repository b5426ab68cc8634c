// AVX-512 kernels (F, BW, DQ, VL, BF16, VNNI). One register tile is up to 6 rows x 64 lanes = 24 accumulators, 4 vectors of
// weights and one broadcast of x: 24 dot instructions per 10 loads.
#include "gemm_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "avx512_math.h"

namespace diptych {
namespace {

constexpr int kVectors = kPanelLanes / 16;
constexpr int kUnroll = 4;          // steps between two rounds of prefetches
constexpr int64_t kCacheLine = 64;

inline __m512i broadcast_word(const uint8_t* x) { return _mm512_set1_epi32(*reinterpret_cast<const int*>(x)); }

// Reads ahead `prefetch_bytes` in equal parts over the calls of one tile.
struct Ahead {
  const uint8_t* next;
  int64_t lines;  // per call
  Ahead(const TileArgs& args, int64_t calls)
      : next(args.prefetch), lines((args.prefetch_bytes / kCacheLine + calls - 1) / calls) {}
  inline void step() {
    for (int64_t line = 0; line < lines; ++line, next += kCacheLine) _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
  }
};

template <int kRows>
void tile_bf16(const TileArgs& args) {
  __m512 sums[kRows][kVectors];
  float* acc = static_cast<float*>(args.acc);
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sums[row][v] = args.resume ? _mm512_load_ps(acc + row * kPanelLanes + v * 16) : _mm512_setzero_ps();
  const uint8_t* x[kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) x[row] = args.x[row];
  const uint8_t* w = args.panel;
  Ahead ahead(args, args.units / kUnroll);
  for (int64_t at = 0; at < args.units * 4; at += 4 * kUnroll) {
    ahead.step();
#pragma GCC unroll 4
    for (int step = 0; step < kUnroll; ++step, w += kStepBytes) {
      __m512i lanes[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) lanes[v] = _mm512_load_si512(w + v * 64);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const __m512i pair = broadcast_word(x[row] + at + 4 * step);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) add_dot_bf16(sums[row][v], lanes[v], pair);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_store_ps(acc + row * kPanelLanes + v * 16, sums[row][v]);
}

template <int kRows>
void tile_int8(const TileArgs& args) {
  __m512i sums[kRows][kVectors];
  int32_t* acc = static_cast<int32_t*>(args.acc);
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sums[row][v] = args.resume ? _mm512_load_si512(acc + row * kPanelLanes + v * 16) : _mm512_setzero_si512();
  const uint8_t* x[kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) x[row] = args.x[row];
  const uint8_t* w = args.panel;
  Ahead ahead(args, args.units / kUnroll);
  for (int64_t at = 0; at < args.units * 4; at += 4 * kUnroll) {
    ahead.step();
#pragma GCC unroll 4
    for (int step = 0; step < kUnroll; ++step, w += kStepBytes) {
      __m512i lanes[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) lanes[v] = _mm512_load_si512(w + v * 64);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const __m512i quad = broadcast_word(x[row] + at + 4 * step);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) add_dot_int8(sums[row][v], lanes[v], quad);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_store_si512(acc + row * kPanelLanes + v * 16, sums[row][v]);
}

// The fp32 totals stay in memory (L1): 24 registers hold the integer sums of the group.
template <int kRows>
void tile_int4(const TileArgs& args) {
  float* acc = static_cast<float*>(args.acc);
  if (!args.resume)
    for (int i = 0; i < kRows * kVectors; ++i) _mm512_store_ps(acc + i * 16, _mm512_setzero_ps());
  const uint8_t* x[kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) x[row] = args.x[row];
  const uint8_t* w = args.panel;
  const __m512i low_nibbles = _mm512_set1_epi8(15);
  Ahead ahead(args, args.units * (args.group / 32));
  int64_t at = 0;
  for (int64_t group = 0; group < args.units; ++group) {
    __m512i sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[row][v] = _mm512_setzero_si512();
    for (int64_t end = at + args.group; at < end; at += 32) {
      ahead.step();
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step, w += kStepBytes) {
        __m512i lanes[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) lanes[v] = _mm512_and_si512(_mm512_load_si512(w + v * 64), low_nibbles);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const __m512i quad = broadcast_word(x[row] + at + 8 * step);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) add_dot_int8(sums[row][v], lanes[v], quad);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          lanes[v] = _mm512_and_si512(_mm512_srli_epi16(_mm512_load_si512(w + v * 64), 4), low_nibbles);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const __m512i quad = broadcast_word(x[row] + at + 8 * step + 4);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) add_dot_int8(sums[row][v], lanes[v], quad);
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m512 scale = widen_bf16(_mm256_load_si256(reinterpret_cast<const __m256i*>(w + v * 32)));
      const __m512 minimum = widen_bf16(_mm256_load_si256(reinterpret_cast<const __m256i*>(w + 128 + v * 32)));
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        float* total = acc + row * kPanelLanes + v * 16;
        const __m512 scaled = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row][v]), scale, _mm512_load_ps(total));
        _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_set1_ps(args.group_sums[row][group]), minimum, scaled));
      }
    }
    w += kGroupTailBytes;
  }
}

// ---- finish ------------------------------------------------------------------------------------------------------

inline __m512 activate(Activation activation, __m512 x) {
  __m512 t = x;
  if (activation == Activation::gelu_tanh) {  // 0.5 x (1 + tanh u) = x / (1 + exp(-2u))
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    t = _mm512_mul_ps(_mm512_set1_ps(1.5957691216057308f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x));
  }
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), t))));
}

inline void put(const FinishArgs& args, int64_t row, int64_t output, __m512 y) {
  const int64_t left = args.w->n_outputs - output;
  if (left <= 0) return;
  const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  if (args.store == Store::bf16) {
    uint16_t* out = static_cast<uint16_t*>(args.out[row]) + output;
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(y));
    return;
  }
  float* out = static_cast<float*>(args.out[row]) + output;
  if (args.store == Store::add_f32)
    y = _mm512_fmadd_ps(_mm512_set1_ps(args.row_weights[row]), y, _mm512_maskz_loadu_ps(mask, out));
  _mm512_mask_storeu_ps(out, mask, y);
}

void finish(const FinishArgs& args) {
  const PackedLinear& w = *args.w;
  const int64_t first_lane = args.panel * kPanelLanes;
  for (int64_t row = 0; row < args.rows; ++row) {
    __m512 y[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = row * kPanelLanes + v * 16, lane = first_lane + v * 16;
      if (w.shape.format == Format::int8) {
        const __m512i offset = _mm512_set1_epi32(128 * *args.row_sums[row]);
        const __m512i sum = _mm512_sub_epi32(_mm512_load_si512(static_cast<const int32_t*>(args.acc) + at), offset);
        const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(*args.row_scales[row]), _mm512_load_ps(w.scales + lane));
        y[v] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
      } else {
        y[v] = _mm512_load_ps(static_cast<const float*>(args.acc) + at);
        if (w.shape.format == Format::int4) y[v] = _mm512_mul_ps(y[v], _mm512_set1_ps(*args.row_scales[row]));
      }
      if (w.bias != nullptr) y[v] = _mm512_add_ps(y[v], _mm512_load_ps(w.bias + lane));
    }
    if (!w.shape.gated) {
      for (int v = 0; v < kVectors; ++v) put(args, row, first_lane + v * 16, y[v]);
    } else {
      for (int v = 0; v < kVectors; v += 2)
        put(args, row, first_lane / 2 + v * 8, _mm512_mul_ps(activate(args.activation, y[v]), y[v + 1]));
    }
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
  uint32_t* to = reinterpret_cast<uint32_t*>(out);
  for (int64_t lane = 0; lane < kPanelLanes; lane += 16)
    for (int64_t word = 0; word < n_words; word += 16) {
      const __mmask16 mask = head(n_words - word);
      __m512i block[16];
      for (int i = 0; i < 16; ++i) block[i] = _mm512_maskz_loadu_epi32(mask, words + (lane + i) * stride + word);
      transpose_16x16(block);
      const int64_t present = n_words - word < 16 ? n_words - word : 16;
      for (int64_t i = 0; i < present; ++i) _mm512_store_si512(to + (word + i) * kPanelLanes + lane, block[i]);
    }
}

}  // namespace

const KernelTable& avx512_kernels() {
  static const KernelTable table{
      6,
      {{nullptr, tile_bf16<1>, tile_bf16<2>, tile_bf16<3>, tile_bf16<4>, tile_bf16<5>, tile_bf16<6>},
       {nullptr, tile_int8<1>, tile_int8<2>, tile_int8<3>, tile_int8<4>, tile_int8<5>, tile_int8<6>},
       {nullptr, tile_int4<1>, tile_int4<2>, tile_int4<3>, tile_int4<4>, tile_int4<5>, tile_int4<6>}},
      finish,
      transpose_words,
      load_inputs,
      round_inputs,
      abs_max,
      quantize_int8,
      sum_int8,
      scalar_kernels().quantize_group,
  };
  return table;
}

}  // namespace diptych
#endif

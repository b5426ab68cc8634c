// The scalar twin: the plainest form of every kernel, right on any CPU and the text to read first.
#include <cmath>
#include <cstring>

#include "gemm_kernels.h"

namespace diptych {
namespace {

float from_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

uint16_t to_bf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((word >> 16) | 0x40);
  return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

float from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  uint32_t word;
  if (exponent == 31) {
    word = sign | 0x7f800000 | (static_cast<uint32_t>(mantissa) << 13);
  } else if (exponent != 0) {
    word = sign | (static_cast<uint32_t>(exponent + 112) << 23) | (static_cast<uint32_t>(mantissa) << 13);
  } else {
    const float value = std::ldexp(static_cast<float>(mantissa), -24);
    std::memcpy(&word, &value, 4);
    word |= sign;
  }
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// The scalar tiles are 1 row x 16 lanes.
void tile_bf16(const TileArgs& args) {
  float* sums = static_cast<float*>(args.acc);
  if (!args.resume) std::memset(sums, 0, sizeof(float) * kStripLanes);
  const uint16_t* x = reinterpret_cast<const uint16_t*>(args.x[0]);
  for (int64_t step = 0; step < args.units; ++step) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(args.strip + step * kStepBytes);
    const float x0 = from_bf16(x[step * 2]), x1 = from_bf16(x[step * 2 + 1]);
    for (int lane = 0; lane < kStripLanes; ++lane)
      sums[lane] = (sums[lane] + from_bf16(w[lane * 2]) * x0) + from_bf16(w[lane * 2 + 1]) * x1;
  }
}

void tile_int8(const TileArgs& args) {
  int32_t* sums = static_cast<int32_t*>(args.acc);
  if (!args.resume) std::memset(sums, 0, sizeof(int32_t) * kStripLanes);
  const int8_t* x = reinterpret_cast<const int8_t*>(args.x[0]);
  for (int64_t step = 0; step < args.units; ++step) {
    const uint8_t* w = args.strip + step * kStepBytes;
    for (int lane = 0; lane < kStripLanes; ++lane)
      for (int j = 0; j < 4; ++j) sums[lane] += w[lane * 4 + j] * x[step * 4 + j];
  }
}

void tile_int4(const TileArgs& args) {
  float* totals = static_cast<float*>(args.acc);
  if (!args.resume) std::memset(totals, 0, sizeof(float) * kStripLanes);
  const int64_t steps = args.group / 8, group_bytes = steps * kStepBytes + kGroupTailBytes;
  for (int64_t group = 0; group < args.units; ++group) {
    const uint8_t* w = args.strip + group * group_bytes;
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(w + steps * kStepBytes);
    const int8_t* x = reinterpret_cast<const int8_t*>(args.x[0]) + group * args.group;
    for (int lane = 0; lane < kStripLanes; ++lane) {
      int32_t sum = 0;
      for (int64_t step = 0; step < steps; ++step)
        for (int j = 0; j < 4; ++j) {
          const uint8_t pair = w[step * kStepBytes + lane * 4 + j];
          sum += (pair & 15) * x[step * 8 + j] + (pair >> 4) * x[step * 8 + 4 + j];
        }
      totals[lane] = std::fma(static_cast<float>(sum), from_bf16(scales[lane]), totals[lane]);
      totals[lane] = std::fma(args.group_sums[0][group], from_bf16(scales[kStripLanes + lane]), totals[lane]);
    }
  }
}

float activate(Activation activation, float x) {
  if (activation == Activation::silu) return x / (1.0f + std::exp(-x));
  return 0.5f * x * (1.0f + std::tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

void put(const FinishArgs& args, int64_t row, int64_t output, float y) {
  if (output >= args.w->n_outputs) return;
  if (args.store == Store::bf16) {
    static_cast<uint16_t*>(args.out[row])[output] = to_bf16(y);
    return;
  }
  float& out = static_cast<float*>(args.out[row])[output];
  out = args.store == Store::f32 ? y : std::fma(args.row_weights[row], y, out);
}

void finish(const FinishArgs& args) {
  const PackedLinear& w = *args.w;
  const Format format = w.shape.format;
  const int64_t first_lane = args.panel * kPanelLanes;
  for (int64_t row = 0; row < args.rows; ++row) {
    float y[kPanelLanes];
    for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
      const int64_t at = row * kPanelLanes + lane;
      if (format == Format::int8) {
        const int32_t sum = static_cast<const int32_t*>(args.acc)[at] - 128 * *args.row_sums[row];
        y[lane] = static_cast<float>(sum) * (*args.row_scales[row] * w.scales[first_lane + lane]);
      } else {
        y[lane] = static_cast<const float*>(args.acc)[at];
        if (format == Format::int4) y[lane] *= *args.row_scales[row];
      }
      if (w.bias != nullptr) y[lane] += w.bias[first_lane + lane];
    }
    if (!w.shape.gated) {
      for (int64_t lane = 0; lane < kPanelLanes; ++lane) put(args, row, first_lane + lane, y[lane]);
      continue;
    }
    for (int64_t i = 0; i < 32; ++i) {
      const int64_t lane = i / 16 * 32 + i % 16;
      put(args, row, first_lane / 2 + i, activate(args.activation, y[lane]) * y[lane + 16]);
    }
  }
}

void transpose_words(const uint32_t* words, int64_t stride, int64_t n_words, uint8_t* out) {
  uint32_t* to = reinterpret_cast<uint32_t*>(out);
  for (int64_t word = 0; word < n_words; ++word)
    for (int64_t lane = 0; lane < kStripLanes; ++lane) to[word * kStripLanes + lane] = words[lane * stride + word];
}

void load_inputs(const void* row, Source source, int64_t begin, int64_t count, float* out) {
  if (source == Source::f32) {
    std::memcpy(out, static_cast<const float*>(row) + begin, sizeof(float) * count);
    return;
  }
  const uint16_t* bits = static_cast<const uint16_t*>(row) + begin;
  for (int64_t i = 0; i < count; ++i) out[i] = source == Source::bf16 ? from_bf16(bits[i]) : from_f16(bits[i]);
}

void round_inputs(const float* x, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_bf16(x[i]);
}

float abs_max(const float* x, int64_t count) {
  float highest = 0.0f;
  for (int64_t i = 0; i < count; ++i) highest = std::fabs(x[i]) > highest ? std::fabs(x[i]) : highest;
  return highest;
}

void quantize_int8(const float* x, int64_t count, float inverse_scale, int8_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int8_t>(std::nearbyint(x[i] * inverse_scale));
}

int32_t sum_int8(const int8_t* x, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  return sum;
}

void quantize_group(const float* x, int64_t group, uint16_t* scale, uint16_t* minimum, uint32_t* words) {
  float low = x[0], high = x[0];
  for (int64_t i = 1; i < group; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  *scale = to_bf16((high - low) / 15.0f);
  *minimum = to_bf16(low);
  const float step = from_bf16(*scale), base = from_bf16(*minimum);
  const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
  for (int64_t i = 0; i < group; ++i) {
    float q = std::nearbyint((x[i] - base) * inverse);
    q = q < 0.0f ? 0.0f : q > 15.0f ? 15.0f : q;
    const int64_t within = i % 8, shift = within % 4 * 8 + within / 4 * 4;
    if (within == 0) words[i / 8] = 0;
    words[i / 8] |= static_cast<uint32_t>(q) << shift;
  }
}

}  // namespace

const KernelTable& scalar_kernels() {
  static const KernelTable table{
      {{{1, 1, false, tile_bf16}}, {{1, 1, false, tile_int8}}, {{1, 1, false, tile_int4}}},
      {{1, 1, false, tile_bf16}, {1, 1, false, tile_int8}, {1, 1, false, tile_int4}},
      nullptr,  // no interleaved shape
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

// Packing of weights: checkpoint rows -> panels of 64 lanes (layout in gemm_kernels.h), and back.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "packing/pack.h"
#include "sets/kernel_sets.h"

namespace diptych {
namespace {

constexpr int64_t kBlockInputs = 512;  // inputs of 64 lanes converted at a time: 64 KiB of words, in L2
static_assert(kBlockInputs <= 2 * kStripLanes * kMaxGroup, "one row of a block fits the scratch");

struct SourceRow {
  const void* data = nullptr;  // null: padding, all zero
  Source source = Source::f32;
};

int64_t element_bytes(Source source) { return source == Source::f32 ? 4 : 2; }

SourceRow find_row(const LinearShape& shape, const WeightPart* parts, int64_t n_parts, int64_t lane) {
  SourceRow found;
  int64_t row = row_of_lane(shape, lane);
  if (row < 0) return found;
  for (int64_t part = 0; part < n_parts; ++part) {
    if (row < parts[part].rows) {
      found.source = parts[part].source;
      found.data = static_cast<const uint8_t*>(parts[part].data) + row * parts[part].stride * element_bytes(found.source);
      return found;
    }
    row -= parts[part].rows;
  }
  return found;
}

// Inputs [begin, begin + count) of one row as fp32, zero past k.
void load_row(const LinearKernels& kernels, const SourceRow& row, int64_t k, int64_t begin, int64_t count, float* out) {
  const int64_t present = row.data == nullptr ? 0 : std::clamp<int64_t>(k - begin, 0, count);
  if (present > 0) kernels.load_inputs(row.data, row.source, begin, present, out);
  std::memset(out + present, 0, sizeof(float) * (count - present));
}

// Working memory of one thread.
struct alignas(64) Scratch {
  float inputs[2 * kStripLanes * kMaxGroup];
  uint32_t words[kPanelLanes * kBlockInputs / 2];
};

// Words of 64 lanes [64][n_words] to their four strips; first is the place of the first word in strip 0.
void transpose_panel(const LinearKernels& kernels, const LinearShape& shape, const uint32_t* words, int64_t stride, int64_t n_words,
                     uint8_t* first) {
  for (int64_t strip = 0; strip < kPanelStrips; ++strip)
    kernels.transpose_words(words + strip * kStripLanes * stride, stride, n_words, first + strip * bytes_of_strip(shape));
}

void pack_bf16(const LinearKernels& kernels, const LinearShape& shape, const SourceRow* rows, Scratch& scratch, uint8_t* panel) {
  const int64_t k = padded_inputs(shape), stride = kBlockInputs / 2;
  for (int64_t begin = 0; begin < k; begin += kBlockInputs) {
    const int64_t count = std::min(kBlockInputs, k - begin);
    for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
      uint16_t* out = reinterpret_cast<uint16_t*>(scratch.words + lane * stride);
      if (rows[lane].data != nullptr && rows[lane].source == Source::bf16 && begin + count <= shape.k) {
        std::memcpy(out, static_cast<const uint16_t*>(rows[lane].data) + begin, 2 * count);
        continue;
      }
      load_row(kernels, rows[lane], shape.k, begin, count, scratch.inputs);
      kernels.round_inputs(scratch.inputs, count, out);
    }
    transpose_panel(kernels, shape, scratch.words, stride, count / 2, panel + begin / 2 * kStepBytes);
  }
}

// Symmetric, one scale per lane: scale = max |w| / 127. inverse is 0 for a lane of zeros.
void find_scales(const LinearKernels& kernels, const LinearShape& shape, const SourceRow* rows, Scratch& scratch, float* scales,
                 float* inverse) {
  for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
    float highest = 0.0f;
    for (int64_t begin = 0; begin < shape.k; begin += kBlockInputs) {
      const int64_t count = std::min(kBlockInputs, shape.k - begin);
      load_row(kernels, rows[lane], shape.k, begin, count, scratch.inputs);
      highest = std::max(highest, kernels.abs_max(scratch.inputs, count));
    }
    scales[lane] = highest / 127.0f;
    inverse[lane] = steps_per_unit(highest, 127.0f);
  }
}

void pack_int8(const LinearKernels& kernels, const LinearShape& shape, const SourceRow* rows, Scratch& scratch, uint8_t* panel,
               float* scales) {
  const int64_t k = padded_inputs(shape), stride = kBlockInputs / 4;
  float inverse[kPanelLanes];
  find_scales(kernels, shape, rows, scratch, scales, inverse);
  for (int64_t begin = 0; begin < k; begin += kBlockInputs) {
    const int64_t count = std::min(kBlockInputs, k - begin);
    for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
      uint32_t* out = scratch.words + lane * stride;
      load_row(kernels, rows[lane], shape.k, begin, count, scratch.inputs);
      kernels.quantize_int8(scratch.inputs, count, inverse[lane], reinterpret_cast<int8_t*>(out));
      for (int64_t word = 0; word < count / 4; ++word) out[word] ^= 0x80808080u;  // s8 -> u8 with offset 128
    }
    transpose_panel(kernels, shape, scratch.words, stride, count / 4, panel + begin / 4 * kStepBytes);
  }
}

// The grid of int8, of which each group uses 16 levels.
void pack_int4(const LinearKernels& kernels, const LinearShape& shape, const SourceRow* rows, Scratch& scratch, uint8_t* panel,
               float* scales, const Feedback& feedback) {
  alignas(64) float left[kMostDirections * kStripLanes];
  const int64_t group = shape.group, k = padded_inputs(shape), groups = k / group;
  alignas(64) float inverse[kPanelLanes];
  find_scales(kernels, shape, rows, scratch, scales, inverse);
  float* by_lane = scratch.inputs;                     // [16][kMaxGroup]
  float* by_input = by_lane + kStripLanes * kMaxGroup;  // [kMaxGroup][16]
  for (int64_t strip = 0; strip < kPanelStrips; ++strip) {
    uint8_t* out = panel + strip * bytes_of_strip(shape);
    std::memset(left, 0, static_cast<size_t>(feedback.n * kStripLanes) * sizeof(float));
    if (groups % 2 != 0) std::memset(out + head_of_group(group, groups), 0, kHeadBytes);  // the last pair has one group
    for (int64_t begin = 0; begin < k; begin += kMaxGroup) {
      const int64_t count = std::min(kMaxGroup, k - begin);
      for (int64_t lane = 0; lane < kStripLanes; ++lane)
        load_row(kernels, rows[strip * kStripLanes + lane], shape.k, begin, count, by_lane + lane * kMaxGroup);
      kernels.transpose_words(reinterpret_cast<const uint32_t*>(by_lane), kMaxGroup, count, reinterpret_cast<uint8_t*>(by_input));
      for (int64_t i = 0; i < count; i += group) {
        const int64_t g = (begin + i) / group, at = (begin + i) * feedback.n;
        kernels.quantize_group(by_input + i * kStripLanes, inverse + strip * kStripLanes, group, out + head_of_group(group, g),
                               reinterpret_cast<uint32_t*>(out + steps_of_group(group, g)),
                               {feedback.n, feedback.take.data() + at, feedback.give.data() + at, left});
      }
    }
  }
}

// splitmix64: the random weights of pack_random, a function of position alone.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

void pack_panel(const LinearKernels& kernels, const LinearShape& shape, const SourceRow* rows, Scratch& scratch, const Blob& blob,
                int64_t panel, const Feedback& feedback) {
  uint8_t* out = blob.panels + panel * bytes_of_panel(shape);
  float* scales = blob.scales + panel * kPanelLanes;
  switch (shape.format) {
    case Format::bf16: pack_bf16(kernels, shape, rows, scratch, out); break;
    case Format::int8: pack_int8(kernels, shape, rows, scratch, out, scales); break;
    case Format::int4: pack_int4(kernels, shape, rows, scratch, out, scales, feedback); break;
    default: break;  // of codes only: pack_codes
  }
}

}  // namespace

Blob lay_out(const LinearShape& shape, void* blob) {
  Blob parts;
  const int64_t lanes = packed_lanes(shape);
  parts.panels = static_cast<uint8_t*>(blob);
  uint8_t* next = parts.panels + lanes / kPanelLanes * bytes_of_panel(shape);
  parts.scales = has_lane_scales(shape.format) ? reinterpret_cast<float*>(next) : nullptr;
  if (parts.scales != nullptr) next += lanes * 4;
  parts.bias = shape.has_bias ? reinterpret_cast<float*>(next) : nullptr;
  return parts;
}

int64_t packed_bytes(const LinearShape& shape) {
  const int64_t lanes = packed_lanes(shape);
  return lanes / kPanelLanes * bytes_of_panel(shape) + (has_lane_scales(shape.format) ? lanes * 4 : 0) +
         (shape.has_bias ? lanes * 4 : 0);
}

PackedLinear view_packed(const LinearShape& shape, const void* blob) {
  const Blob parts = lay_out(shape, const_cast<void*>(blob));
  PackedLinear w;
  w.shape = shape;
  w.n_outputs = shape.gated ? shape.n / 2 : shape.n;
  w.n_panels = packed_lanes(shape) / kPanelLanes;
  w.k_padded = padded_inputs(shape);
  w.panel_bytes = bytes_of_panel(shape);
  w.panels = parts.panels;
  w.scales = parts.scales;
  w.bias = parts.bias;
  w.balance = std::make_shared<Balance>();
  return w;
}

void pack_linear(const KernelSet& set, const LinearShape& shape, const WeightPart* parts, int64_t n_parts, const float* bias,
                 void* blob, int thread, int threads, const Feedback& feedback) {
  const LinearKernels& kernels = *set.linear;
  const Blob out = lay_out(shape, blob);
  const Range mine = share(packed_lanes(shape) / kPanelLanes, thread, threads);
  Scratch scratch;
  SourceRow rows[kPanelLanes];
  for (int64_t panel = mine.begin; panel < mine.end; ++panel) {
    for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
      const int64_t at = panel * kPanelLanes + lane, row = row_of_lane(shape, at);
      rows[lane] = find_row(shape, parts, n_parts, at);
      if (out.bias != nullptr) out.bias[at] = row < 0 ? 0.0f : bias[row];
    }
    pack_panel(kernels, shape, rows, scratch, out, panel, feedback);
  }
}

namespace {

// Which row of the whole weight is `row` of the part.
int64_t row_of_whole(const std::vector<Range>& rows, int64_t row) {
  for (const Range& range : rows) {
    const int64_t n = range.end - range.begin;
    if (row < n) return range.begin + row;
    row -= n;
  }
  return -1;
}

// The lane of the whole where the strip of the part from `lane` on lies; -1: a strip of padding.
int64_t strip_of_whole(const LinearShape& shape, const LinearShape& whole, const std::vector<Range>& rows, int64_t lane) {
  const int64_t first = row_of_lane(shape, lane);
  if (first < 0) return -1;
  const int64_t found = lane_of_row(whole, row_of_whole(rows, first));
  for (int64_t i = 0; i < kStripLanes; ++i) {
    const int64_t row = row_of_lane(shape, lane + i), there = row_of_lane(whole, found + i);
    if (found % kStripLanes != 0 || there != (row < 0 ? -1 : row_of_whole(rows, row)))
      throw std::invalid_argument("the rows cut a strip of 16 lanes of the packed weight");
  }
  return found;
}

}  // namespace

void check_part(const LinearShape& shape, const LinearShape& whole, const std::vector<Range>& rows) {
  int64_t n = 0;
  for (const Range& range : rows) {
    if (range.begin < 0 || range.begin > range.end || range.end > whole.n) throw std::invalid_argument("no such rows");
    n += range.end - range.begin;
  }
  const Grid &grid = shape.grid, &other = whole.grid;
  const auto all = [](const Grid& of) { return std::make_tuple(of.scale, of.offset, of.levels, of.nested, of.e4m3, of.e8m0, of.halves); };
  const bool is_alike = all(grid) == all(other);
  if (n != shape.n || shape.k != whole.k || shape.format != whole.format || shape.group != whole.group || !is_alike || shape.gated != whole.gated || shape.has_bias != whole.has_bias)
    throw std::invalid_argument("a part of a weight has its rows and all else of the whole");
  for (int64_t lane = 0; lane < packed_lanes(shape); lane += kStripLanes) strip_of_whole(shape, whole, rows, lane);
}

void copy_packed_part(const LinearShape& shape, const LinearShape& whole, const std::vector<Range>& rows, const uint8_t* from, void* blob,
                      int thread, int threads) {
  const Blob in = lay_out(whole, const_cast<uint8_t*>(from)), out = lay_out(shape, blob);
  const int64_t strip_bytes = bytes_of_strip(shape);
  const Range mine = share(packed_lanes(shape), thread, threads, kPanelLanes);
  for (int64_t lane = mine.begin; lane < mine.end; lane += kStripLanes) {
    const int64_t there = strip_of_whole(shape, whole, rows, lane);
    if (there < 0) continue;  // padding is zero, as the blob begins
    std::memcpy(out.panels + lane / kStripLanes * strip_bytes, in.panels + there / kStripLanes * strip_bytes, strip_bytes);
    if (out.scales != nullptr) std::memcpy(out.scales + lane, in.scales + there, kStripLanes * 4);
    if (out.bias != nullptr) std::memcpy(out.bias + lane, in.bias + there, kStripLanes * 4);
  }
}

void pack_random(const KernelSet& set, const LinearShape& shape, uint64_t seed, float amplitude, void* blob, int thread, int threads,
                 const LinearShape* whole, const std::vector<Range>* part) {
  if (is_grouped(shape.format) || shape.format == Format::fp8) {
    if (part != nullptr) throw std::invalid_argument("random codes have no parts");
    return pack_random_codes(set, shape, seed, amplitude, blob, thread, threads);
  }
  const LinearKernels& kernels = *set.linear;
  const Blob out = lay_out(shape, blob);
  const Range mine = share(packed_lanes(shape) / kPanelLanes, thread, threads);
  Scratch scratch;
  std::vector<float> weights(kPanelLanes * shape.k);
  SourceRow rows[kPanelLanes];
  for (int64_t panel = mine.begin; panel < mine.end; ++panel) {
    for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
      const int64_t at = panel * kPanelLanes + lane, row = row_of_lane(shape, at);
      float* values = weights.data() + lane * shape.k;
      const int64_t place = part == nullptr || row < 0 ? at : lane_of_row(*whole, row_of_whole(*part, row));
      uint64_t state = mix(seed ^ mix(static_cast<uint64_t>(place)));
      for (int64_t i = 0; i < shape.k; ++i) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        values[i] = amplitude * (static_cast<float>(static_cast<int64_t>(state >> 40)) * (2.0f / 16777216.0f) - 1.0f);
      }
      rows[lane].data = row < 0 ? nullptr : values;
      rows[lane].source = Source::f32;
      if (out.bias != nullptr) out.bias[at] = row < 0 ? 0.0f : values[0];
    }
    pack_panel(kernels, shape, rows, scratch, out, panel, {});
  }
}

namespace {

float bf16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

float weight_at(const PackedLinear& w, int64_t lane, int64_t k) {
  if (is_grouped(w.shape.format)) return group_weight_at(w, lane, k);
  const uint8_t* strip = w.panels + lane / kStripLanes * (w.panel_bytes / kPanelStrips);
  const int64_t within = lane % kStripLanes;
  if (w.shape.format == Format::bf16) {
    const uint16_t* pairs = reinterpret_cast<const uint16_t*>(strip + k / 2 * kStepBytes);
    return bf16_value(pairs[within * 2 + k % 2]);
  }
  if (w.shape.format == Format::fp8) {
    const int64_t inside = k % 4, step = bytes_of_fp8_scales(w.k_padded / kFp8Inputs) + k / 4 * kStepBytes;
    const uint8_t code = strip[step + within / 4 * 16 + inside / 2 * 8 + within % 4 * 2 + inside % 2];
    return w.scales[lane] * bf16_value(ScaledE4m3(fp8_scale(strip, k / kFp8Inputs)).of(code));
  }
  int level = 0;  // of int8
  if (w.shape.format == Format::int8) {
    level = strip[k / 4 * kStepBytes + within * 4 + k % 4];
  } else {
    const int64_t group = k / w.shape.group, inside = k % w.shape.group;
    const uint8_t* head = strip + head_of_group(w.shape.group, group) + within * 2;
    const uint8_t pair = strip[steps_of_group(w.shape.group, group) + inside / 8 * kStepBytes + within * 4 + inside % 4];
    level = head[1] + head[0] * (inside % 8 < 4 ? pair & 15 : pair >> 4);
  }
  return w.scales[lane] * static_cast<float>(level - 128);
}

}  // namespace

void unpack_rows(const PackedLinear& w, int64_t first_row, int64_t n_rows, float* out, int64_t out_stride) {
  for (int64_t row = 0; row < n_rows; ++row) {
    const int64_t lane = lane_of_row(w.shape, first_row + row);
    for (int64_t k = 0; k < w.shape.k; ++k) out[row * out_stride + k] = weight_at(w, lane, k);
  }
}

// One word of each step. The strip's other words come along from memory, 16 times the row, but as one ascending stream.
void read_bf16_row(const PackedLinear& w, int64_t row, uint16_t* out) {
  const uint8_t* word = w.panels + row / kStripLanes * (w.panel_bytes / kPanelStrips) + row % kStripLanes * 4;
  for (int64_t k = 0; k < w.k_padded; k += 2, word += kStepBytes) std::memcpy(out + k, word, 4);
}

}  // namespace diptych

// Packing of weights that are quantised already: codes, scales and offsets -> panels of 64 lanes (layout in gemm_kernels.h).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "packing/pack.h"
#include "sets/kernel_sets.h"

namespace diptych {
namespace {

// Where a row's values begin; null: padding.
struct CodeRow {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  const uint8_t* offsets = nullptr;
  const uint8_t* factors = nullptr;
};

int64_t count_groups(const LinearShape& shape) {
  return is_grouped(shape.format) || (shape.format == Format::fp8 && shape.group != 0) ? padded_inputs(shape) / shape.group : 1;
}

constexpr int64_t kFactorsBytes = 4;  // of one row's kNestedInputs: two f16, or an f32

int64_t count_nests(const LinearShape& shape) { return (shape.k + kNestedInputs - 1) / kNestedInputs; }

CodeRow find_row(const LinearShape& shape, const CodePart* parts, int64_t n_parts, int64_t lane) {
  CodeRow found;
  int64_t row = row_of_lane(shape, lane);
  if (row < 0) return found;
  const int64_t groups = count_groups(shape);
  for (int64_t part = 0; part < n_parts; row -= parts[part++].rows) {
    if (row >= parts[part].rows) continue;
    found.codes = parts[part].codes + row * shape.k;
    found.scales = static_cast<const uint8_t*>(parts[part].scales) + row * groups * bytes_of_scale(shape);
    if (parts[part].offsets != nullptr) found.offsets = static_cast<const uint8_t*>(parts[part].offsets) + row * groups * bytes_of_offset(shape);
    if (parts[part].factors != nullptr) found.factors = static_cast<const uint8_t*>(parts[part].factors) + row * count_nests(shape) * kFactorsBytes;
    return found;
  }
  return found;
}

// 16 codes as words of the steps; out: as many as there are steps.
void join_codes(Format format, const uint8_t* codes, uint32_t* out) {
  uint32_t words[4];
  std::memcpy(words, codes, sizeof(words));
  const auto pick = [&](int i, int from, uint32_t mask) { return words[i] >> from & mask * 0x01010101u; };
  switch (format) {
    case Format::group8: std::copy(words, words + 4, out); return;
    case Format::group2: case Format::group3: out[0] = pick(0, 0, 3) | pick(1, 0, 3) << 2 | pick(2, 0, 3) << 4 | pick(3, 0, 3) << 6; return;
    default: out[0] = pick(0, 0, 15) | pick(1, 0, 15) << 4, out[1] = pick(2, 0, 15) | pick(3, 0, 15) << 4;
  }
  if (format == Format::group6) out[2] = pick(0, 4, 3) | pick(1, 4, 3) << 2 | pick(2, 4, 3) << 4 | pick(3, 4, 3) << 6;
}

// The words of one group of one lane, and its highest bits where they lie apart.
void join_group(const LinearShape& shape, const CodeRow& row, int64_t group, int64_t lane, uint32_t* words, uint8_t* tops) {
  uint8_t codes[kMaxGroup] = {};  // zero past k
  const int64_t begin = group * shape.group, present = row.codes == nullptr ? 0 : std::clamp<int64_t>(shape.k - begin, 0, shape.group);
  if (present > 0) std::memcpy(codes, row.codes + begin, static_cast<size_t>(present));
  for (int64_t i = 0; i < shape.group; i += 16, words += bytes_of_steps(shape.format, 16) / kStepBytes) join_codes(shape.format, codes + i, words);
  if (!has_tops(shape.format)) return;
  const int64_t top = bits_of(shape.format) - 1;
  for (int64_t i = 0; i < shape.group; ++i) tops[i / 4 * 8 + lane / 2] |= static_cast<uint8_t>((codes[i] >> top & 1) << (lane % 2 * 4 + i % 4));
}

// What a head holds of one lane of a group.
void put_grid(const LinearKernels& kernels, const LinearShape& shape, const CodeRow& row, int64_t group, int64_t lane, uint8_t* out) {
  if (row.codes == nullptr) return;
  const GroupPlace place = place_of_group(shape, group);
  const int64_t scale = bytes_of_scale(shape), offset = bytes_of_offset(shape);
  uint8_t* scale_at = out + place.scales + lane * scale;
  std::memcpy(scale_at, row.scales + group * scale, static_cast<size_t>(scale));
  if (row.offsets != nullptr) std::memcpy(out + place.offsets + lane * offset, row.offsets + group * offset, static_cast<size_t>(offset));
  if (shape.grid.e8m0) {
    *scale_at = field_of_e8m0(*scale_at);
  } else if (!shape.grid.nested) {
    float value;
    kernels.load_inputs(scale_at, shape.grid.scale, 0, 1, &value);
    if (std::fabs(value) < kLeastScale) std::memset(scale_at, 0, static_cast<size_t>(scale));
  } else if (group % groups_of_head(shape) == 0) {  // no f16, or an eighth of one, comes below kLeastScale, and no global scale of fp32 that a loader lets pass
    const int64_t width = shape.grid.scale == Source::f32 ? 4 : 2;
    for (int64_t i = 0; i < kFactorsBytes / width; ++i)
      std::memcpy(out + place.factors + (i * kStripLanes + lane) * width, row.factors + group / groups_of_head(shape) * kFactorsBytes + i * width, static_cast<size_t>(width));
  }
}

void pack_strip(const LinearKernels& kernels, const LinearShape& shape, const CodeRow* rows, uint8_t* out) {
  constexpr int64_t kStride = kMaxGroup / 4;
  alignas(64) uint32_t words[kStripLanes * kStride];
  const int64_t groups = count_groups(shape);
  for (int64_t g = 0; g < groups; ++g) {
    const GroupPlace place = place_of_group(shape, g);
    if (g % groups_of_head(shape) == 0) std::memset(out + place.factors, 0, static_cast<size_t>(bytes_of_group_head(shape)));
    for (int64_t lane = 0; lane < kStripLanes; ++lane) {
      put_grid(kernels, shape, rows[lane], g, lane, out);
      join_group(shape, rows[lane], g, lane, words + lane * kStride, out + place.tops);
    }
    kernels.transpose_words(words, kStride, bytes_of_group_steps(shape) / kStepBytes, out + place.steps);
  }
}

// int8 whose levels and lane scales are given.
void pack_lanes(const LinearKernels& kernels, const LinearShape& shape, const CodeRow* rows, uint8_t* panel, float* scales) {
  const int64_t k = padded_inputs(shape);
  std::vector<uint32_t> words(kStripLanes * k / 4);
  for (int64_t strip = 0; strip < kPanelStrips; ++strip) {
    for (int64_t lane = 0; lane < kStripLanes; ++lane) {
      const CodeRow& row = rows[strip * kStripLanes + lane];
      uint8_t* codes = reinterpret_cast<uint8_t*>(words.data() + lane * k / 4);
      std::memset(codes, 128, static_cast<size_t>(k));
      scales[strip * kStripLanes + lane] = 0.0f;
      if (row.codes == nullptr) continue;
      std::memcpy(codes, row.codes, static_cast<size_t>(shape.k));
      kernels.load_inputs(row.scales, shape.grid.scale, 0, 1, scales + strip * kStripLanes + lane);
    }
    kernels.transpose_words(words.data(), k / 4, k / 4, panel + strip * bytes_of_strip(shape));
  }
}

// The scale of fp8 that the rows of a strip share; padding comes last and has none.
float scale_of_strip(const CodeRow* rows, int64_t group) {
  float scale = 0.0f;
  if (rows[0].codes != nullptr) std::memcpy(&scale, rows[0].scales + group * 4, 4);
  return scale;
}

// Scales of fp8 are those of strips, or where a row has one, of lanes.
void pack_fp8(const LinearKernels& kernels, const LinearShape& shape, const CodeRow* rows, uint8_t* panel, float* lane_scales) {
  const int64_t k = padded_inputs(shape), groups = k / kFp8Inputs;
  std::vector<uint8_t> codes(kStripLanes * k);
  for (int64_t strip = 0; strip < kPanelStrips; ++strip, rows += kStripLanes, lane_scales += kStripLanes) {
    uint8_t* out = panel + strip * bytes_of_strip(shape);
    std::memset(out, 0, static_cast<size_t>(bytes_of_fp8_scales(groups)));
    std::fill(codes.begin(), codes.end(), uint8_t{0});
    for (int64_t lane = 0; lane < kStripLanes; ++lane) {
      lane_scales[lane] = 0.0f;
      if (rows[lane].codes == nullptr) continue;
      std::memcpy(codes.data() + lane * k, rows[lane].codes, static_cast<size_t>(shape.k));
      if (shape.group == 0) std::memcpy(lane_scales + lane, rows[lane].scales, 4);
      else lane_scales[lane] = 1.0f;
    }
    for (int64_t group = 0; group < groups; ++group) {
      const float scale = shape.group == 0 ? 1.0f : scale_of_strip(rows, group);
      if (scale == 0.0f)
        for (int64_t lane = 0; lane < kStripLanes; ++lane) std::memset(codes.data() + lane * k + group * kFp8Inputs, 0, kFp8Inputs);
      std::memcpy(out + group * 4, &scale, 4);
    }
    uint8_t* steps = out + bytes_of_fp8_scales(groups);
    kernels.transpose_words(reinterpret_cast<const uint32_t*>(codes.data()), k / 4, k / 4, steps);
    for (int64_t quad = 0; quad < k * kStripLanes / 16; ++quad) {  // of 4 lanes: the first two inputs of all before the last two
      uint16_t pairs[8], in_order[8];
      std::memcpy(pairs, steps + quad * 16, sizeof(pairs));
      for (int lane = 0; lane < 4; ++lane) in_order[lane] = pairs[2 * lane], in_order[4 + lane] = pairs[2 * lane + 1];
      std::memcpy(steps + quad * 16, in_order, sizeof(in_order));
    }
  }
}

}  // namespace

void check_codes(const LinearShape& shape, const CodePart* parts, int64_t n_parts) {
  if (shape.format != Format::fp8 || shape.group == 0) return;
  const size_t bytes = static_cast<size_t>(count_groups(shape)) * 4;
  for (int64_t first = 0; first < packed_lanes(shape); first += kStripLanes)
    for (int64_t lane = first + 1; lane < first + kStripLanes; ++lane) {
      const CodeRow own = find_row(shape, parts, n_parts, lane), strip = find_row(shape, parts, n_parts, first);
      if (own.codes != nullptr && std::memcmp(own.scales, strip.scales, bytes) != 0)
        throw std::invalid_argument("rows of fp8 that share a strip of 16 lanes have several scales");
    }
}

void pack_codes(const KernelSet& set, const LinearShape& shape, const CodePart* parts, int64_t n_parts, const float* bias, void* blob,
                int thread, int threads) {
  const Blob out = lay_out(shape, blob);
  const Range mine = share(packed_lanes(shape) / kPanelLanes, thread, threads);
  CodeRow rows[kPanelLanes];
  for (int64_t panel = mine.begin; panel < mine.end; ++panel) {
    for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
      const int64_t at = panel * kPanelLanes + lane, row = row_of_lane(shape, at);
      rows[lane] = find_row(shape, parts, n_parts, at);
      if (out.bias != nullptr) out.bias[at] = row < 0 ? 0.0f : bias[row];
    }
    uint8_t* at = out.panels + panel * bytes_of_panel(shape);
    if (shape.format == Format::int8) {
      pack_lanes(*set.linear, shape, rows, at, out.scales + panel * kPanelLanes);
      continue;
    }
    if (shape.format == Format::fp8) {
      pack_fp8(*set.linear, shape, rows, at, out.scales + panel * kPanelLanes);
      continue;
    }
    for (int64_t strip = 0; strip < kPanelStrips; ++strip)
      pack_strip(*set.linear, shape, rows + strip * kStripLanes, at + strip * bytes_of_strip(shape));
  }
}

void pack_random_codes(const KernelSet& set, const LinearShape& shape, uint64_t seed, float amplitude, void* blob, int thread, int threads) {
  const int64_t groups = count_groups(shape);
  std::vector<uint8_t> codes(shape.n * shape.k), zeros(shape.n * groups, 8);
  std::vector<float> scales(shape.n * groups, amplitude / (shape.format == Format::group8 ? 128.0f : shape.format == Format::fp8 ? 2.0f : 8.0f)), minima(shape.n * groups);
  std::vector<uint16_t> halves(shape.n * std::max(groups, 2 * count_nests(shape)), shape.grid.scale == Source::bf16 ? 0x3c00 : 0x2000);  // 2^-7
  std::vector<uint8_t> ones(shape.n * groups, shape.grid.e4m3 ? 0x38 : shape.grid.e8m0 ? 121 : 1);  // E8M0: 2^-7
  std::vector<float> factors(shape.n * count_nests(shape), 0x1p-7f);
  for (size_t i = 0; i < codes.size(); ++i) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    codes[i] = static_cast<uint8_t>(seed >> (64 - bits_of(shape.format)));
    if (shape.format == Format::fp8) codes[i] &= 0xbf;  // below 2, no NaN
  }
  const void* offsets = shape.grid.offset == Offset::none ? nullptr : shape.grid.offset == Offset::zeros ? static_cast<const void*>(zeros.data()) : minima.data();
  const CodePart part = shape.grid.nested
      ? CodePart{codes.data(), ones.data(), shape.grid.offset == Offset::none ? nullptr : ones.data(), shape.n,
                 shape.grid.scale == Source::f32 ? static_cast<const void*>(factors.data()) : halves.data()}
      : CodePart{codes.data(), shape.grid.e8m0 ? ones.data() : shape.grid.scale == Source::f32 ? static_cast<const void*>(scales.data()) : halves.data(), offsets, shape.n};
  const std::vector<float> bias(shape.n);
  pack_codes(set, shape, &part, 1, bias.data(), blob, thread, threads);
}

namespace {

// One group of one lane of packed weights.
struct LaneGroup {
  LaneGroup(const PackedLinear& w, int64_t lane, int64_t group) : shape(w.shape), within(lane % kStripLanes) {
    const uint8_t* strip = w.panels + lane / kStripLanes * (w.panel_bytes / kPanelStrips);
    const GroupPlace place = place_of_group(shape, group);
    words = strip + place.steps + within * 4;
    tops = strip + place.tops;
    zero = middle_of(shape);
    if (shape.grid.offset == Offset::zeros) zero += strip[place.offsets + within];
    if (shape.grid.nested) {
      const auto nested = [&](int64_t which, int64_t at) {
        float factor;
        scalar::kLinear.load_inputs(strip + place.factors, shape.grid.scale, which * kStripLanes + within, 1, &factor);
        return factor * nested_value(shape, strip[at + within]);
      };
      scale = nested(0, place.scales);
      if (shape.grid.offset == Offset::minima) minimum = nested(1, place.offsets);
      return;
    }
    if (shape.grid.e8m0) scale = power_of_field(strip[place.scales + within]);
    else scalar::kLinear.load_inputs(strip + place.scales, shape.grid.scale, within, 1, &scale);
    if (shape.grid.offset == Offset::minima)
      scalar::kLinear.load_inputs(strip + place.offsets, shape.grid.halves ? shape.grid.scale : Source::f32, within, 1, &minimum);
  }
  int code(int64_t inside) const {
    const int64_t word = inside % 16 / 4;
    const uint8_t* unit = words + bytes_of_steps(shape.format, inside / 16 * 16) + inside % 4;
    const auto pair = [&](const uint8_t* at) { return *at >> 2 * word & 3; };
    const auto nibble = [&] { return unit[word / 2 * kStepBytes] >> word % 2 * 4 & 15; };
    const auto top = [&] { return tops[inside / 4 * 8 + within / 2] >> (within % 2 * 4 + inside % 4) & 1; };
    switch (shape.format) {
      case Format::group8: return unit[word * kStepBytes];
      case Format::group6: return nibble() | pair(unit + 2 * kStepBytes) << 4;
      case Format::group5: return nibble() | top() << 4;
      case Format::group3: return pair(unit) | top() << 2;
      case Format::group2: return pair(unit);
      default: return nibble();
    }
  }
  float at(int64_t inside) const {
    const int found = code(inside), level = is_table(shape) ? table_of(shape)[found] : found;
    return scale * static_cast<float>(level - zero) + minimum;
  }

  const LinearShape& shape;
  const int64_t within;
  const uint8_t *words, *tops;
  float scale = 0.0f, minimum = 0.0f;
  int zero;
};

}  // namespace

float group_weight_at(const PackedLinear& w, int64_t lane, int64_t k) {
  return LaneGroup(w, lane, k / w.shape.group).at(k % w.shape.group);
}

void read_group_row(const PackedLinear& w, int64_t row, float* out) {
  for (int64_t group = 0; group < count_groups(w.shape); ++group) {
    const LaneGroup lane(w, row, group);
    for (int64_t i = 0; i < w.shape.group; ++i) *out++ = lane.at(i);
  }
}

}  // namespace diptych

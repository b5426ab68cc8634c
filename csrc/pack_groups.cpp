// Packing of weights that are quantised already: codes, scales and offsets -> panels of 64 lanes (layout in gemm_kernels.h).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernel_sets.h"
#include "pack.h"

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
  return is_grouped(shape.format) ? padded_inputs(shape) / shape.group : 1;
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

// Words of inputs [begin, begin + group) of one row, zero past k.
void load_words(const LinearShape& shape, const CodeRow& row, int64_t begin, uint32_t* words) {
  uint8_t codes[kMaxGroup] = {};
  const int64_t present = row.codes == nullptr ? 0 : std::clamp<int64_t>(shape.k - begin, 0, shape.group);
  if (present > 0) std::memcpy(codes, row.codes + begin, static_cast<size_t>(present));
  if (shape.format == Format::group8) {
    std::memcpy(words, codes, static_cast<size_t>(shape.group));
    return;
  }
  uint32_t pairs = 0;  // of group6: the fifth and sixth bits of 16 inputs
  for (int64_t i = 0; i < shape.group; i += 8) {
    uint32_t low, high;
    std::memcpy(&low, codes + i, 4);
    std::memcpy(&high, codes + i + 4, 4);
    *words++ = (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4;
    if (shape.format != Format::group6) continue;
    const uint32_t own = (low >> 4 & 0x03030303u) | (high >> 4 & 0x03030303u) << 2;
    if (i % 16 == 0) pairs = own; else *words++ = pairs | own << 4;
  }
}

void pack_strip(const LinearKernels& kernels, const LinearShape& shape, const CodeRow* rows, uint8_t* out) {
  constexpr int64_t kStride = kMaxGroup / 4;
  alignas(64) uint32_t words[kStripLanes * kStride];
  const int64_t groups = count_groups(shape), scale = bytes_of_scale(shape), offset = bytes_of_offset(shape);
  const int64_t last_head = (groups - 1) / kHeadGroups * kHeadGroups;
  std::memset(out + place_of_group(shape, last_head).scales, 0, static_cast<size_t>(bytes_of_group_head(shape)));
  for (int64_t g = 0; g < groups; ++g) {
    const GroupPlace place = place_of_group(shape, g);
    for (int64_t lane = 0; lane < kStripLanes; ++lane) {
      const CodeRow& row = rows[lane];
      uint8_t* scale_at = out + place.scales + lane * scale;
      uint8_t* offset_at = out + place.offsets + lane * offset;
      std::memset(scale_at, 0, static_cast<size_t>(scale)), std::memset(offset_at, 0, static_cast<size_t>(offset));
      if (row.codes != nullptr) std::memcpy(scale_at, row.scales + g * scale, static_cast<size_t>(scale));
      if (shape.grid.nested) {  // no f16, or an eighth of one, comes below kLeastScale
        const int64_t width = shape.grid.scale == Source::f32 ? 4 : 2, count = g % kHeadGroups == 0 ? kFactorsBytes / width : 0;
        for (int64_t i = 0; i < count; ++i) {
          uint8_t* factor_at = out + place.factors + (i * kStripLanes + lane) * width;
          std::memset(factor_at, 0, static_cast<size_t>(width));
          if (row.codes != nullptr) std::memcpy(factor_at, row.factors + g * shape.group / kNestedInputs * kFactorsBytes + i * width, static_cast<size_t>(width));
        }
      } else {
        float value;
        kernels.load_inputs(scale_at, shape.grid.scale, 0, 1, &value);
        if (std::fabs(value) < kLeastScale) std::memset(scale_at, 0, static_cast<size_t>(scale));
      }
      if (row.offsets != nullptr) std::memcpy(offset_at, row.offsets + g * offset, static_cast<size_t>(offset));
      load_words(shape, row, g * shape.group, words + lane * kStride);
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

}  // namespace

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
    for (int64_t strip = 0; strip < kPanelStrips; ++strip)
      pack_strip(*set.linear, shape, rows + strip * kStripLanes, at + strip * bytes_of_strip(shape));
  }
}

void pack_random_codes(const KernelSet& set, const LinearShape& shape, uint64_t seed, float amplitude, void* blob, int thread, int threads) {
  const int64_t groups = count_groups(shape);
  std::vector<uint8_t> codes(shape.n * shape.k), zeros(shape.n * groups, 8);
  std::vector<float> scales(shape.n * groups, amplitude / (shape.format == Format::group8 ? 128.0f : 8.0f)), minima(shape.n * groups);
  std::vector<uint16_t> halves(shape.n * std::max(groups, 2 * count_nests(shape)), shape.grid.scale == Source::bf16 ? 0x3c00 : 0x2000);  // 2^-7
  std::vector<uint8_t> ones(shape.n * groups, 1);
  std::vector<float> factors(shape.n * count_nests(shape), 0x1p-7f);
  for (size_t i = 0; i < codes.size(); ++i) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    codes[i] = static_cast<uint8_t>(seed >> (64 - bits_of(shape.format)));
  }
  const void* offsets = shape.grid.offset == Offset::none ? nullptr : shape.grid.offset == Offset::zeros ? static_cast<const void*>(zeros.data()) : minima.data();
  const CodePart part = shape.grid.nested
      ? CodePart{codes.data(), ones.data(), shape.grid.offset == Offset::none ? nullptr : ones.data(), shape.n,
                 shape.grid.scale == Source::f32 ? static_cast<const void*>(factors.data()) : halves.data()}
      : CodePart{codes.data(), shape.grid.scale == Source::f32 ? static_cast<const void*>(scales.data()) : halves.data(), offsets, shape.n};
  const std::vector<float> bias(shape.n);
  pack_codes(set, shape, &part, 1, bias.data(), blob, thread, threads);
}

namespace {

// One group of one lane of packed weights.
struct LaneGroup {
  LaneGroup(const PackedLinear& w, int64_t lane, int64_t group) : shape(w.shape), levels(levels_of(w.shape)) {
    const uint8_t* strip = w.panels + lane / kStripLanes * (w.panel_bytes / kPanelStrips);
    const int64_t within = lane % kStripLanes;
    const GroupPlace place = place_of_group(shape, group);
    words = strip + place.steps + within * 4;
    zero = shape.format == Format::group8 ? 128 : shape.format == Format::group6 ? middle_of_sixes(shape) : 0;
    if (shape.grid.offset == Offset::zeros) zero += strip[place.offsets + within];
    if (shape.grid.nested) {
      const auto nested = [&](int64_t which, int64_t at) {
        float factor;
        scalar::kLinear.load_inputs(strip + place.factors, shape.grid.scale, which * kStripLanes + within, 1, &factor);
        return factor * static_cast<int8_t>(strip[at + within]);
      };
      scale = nested(0, place.scales);
      if (shape.grid.offset == Offset::minima) minimum = nested(1, place.offsets);
      return;
    }
    scalar::kLinear.load_inputs(strip + place.scales, shape.grid.scale, within, 1, &scale);
    if (shape.grid.offset == Offset::minima) std::memcpy(&minimum, strip + place.offsets + within * 4, 4);
  }
  float at(int64_t inside) const {
    int level;
    if (shape.format == Format::group8) {
      level = words[inside / 4 * kStepBytes + inside % 4];
    } else if (shape.format == Format::group6) {
      const uint8_t* three = words + inside / 16 * 3 * kStepBytes + inside % 4;
      const int64_t step = inside % 16 / 4;
      const int nibbles = three[step / 2 * kStepBytes], high = three[2 * kStepBytes] >> 2 * step & 3;
      level = (step % 2 == 0 ? nibbles & 15 : nibbles >> 4) | high << 4;
    } else {
      const uint8_t pair = words[inside / 8 * kStepBytes + inside % 4];
      level = levels[inside % 8 < 4 ? pair & 15 : pair >> 4];
    }
    return scale * static_cast<float>(level - zero) + minimum;
  }

  const LinearShape& shape;
  const int8_t* levels;
  const uint8_t* words;
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

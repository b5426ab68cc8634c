#include "adapters.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "gemm_driver.h"
#include "thread_pool.h"

namespace diptych {
namespace {

constexpr int64_t kBlock = kAdapterRows;  // rows of x that pass over A together
// A bias that changes no sum, of whatever sign its zero is.
alignas(64) const float kNone[kStripLanes] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f,
                                              -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};

int64_t all_ranks(const AdapterParts& site) {
  int64_t ranks = 0;
  for (const AdapterPart& part : site.parts) ranks += part.ranks;
  return ranks;
}

void check_parts(const AdapterParts& site) {
  int64_t end = 0;
  for (const AdapterPart& part : site.parts) {
    if (part.row_begin < end || part.row_end <= part.row_begin || part.row_end > site.layer.shape.n || part.ranks < 1)
      throw std::invalid_argument("an adapter's parts must be ascending rows of the layer");
    end = part.row_end;
  }
  if (site.parts.empty()) throw std::invalid_argument("an adapter's site has no parts");
}

// Which parts have lanes in a strip. Of a gated layer a strip holds rows of one half; parts are ascending, so they follow one another.
std::vector<Adapter::Strip> lay_strips(const AdapterParts& site, int64_t& b_size) {
  std::vector<Adapter::Strip> strips(site.layer.n_panels * kPanelStrips);
  for (size_t s = 0; s < strips.size(); ++s) {
    int64_t rank = 0, first = -1, end = 0;
    for (const AdapterPart& part : site.parts) {
      for (int64_t lane = static_cast<int64_t>(s) * kStripLanes; lane < static_cast<int64_t>(s + 1) * kStripLanes; ++lane) {
        const int64_t row = row_of_lane(site.layer.shape, lane);
        if (row < part.row_begin || row >= part.row_end) continue;
        if (first < 0) first = rank;
        end = rank + part.ranks;
        break;
      }
      rank += part.ranks;
    }
    if (first < 0) continue;
    strips[s] = {static_cast<int32_t>(first), static_cast<int32_t>(end - first), b_size};
    b_size += (end - first) * kStripLanes;
  }
  return strips;
}

void fill_b(const AdapterParts& site, const Adapter::Strip& strip, int64_t first_lane, const LinearKernels& kernels, uint16_t* b) {
  float lanes[kStripLanes];
  int64_t rank = 0;
  for (const AdapterPart& part : site.parts) {
    for (int64_t r = 0; r < part.ranks; ++r, ++rank) {
      if (rank < strip.first_rank || rank >= strip.first_rank + strip.ranks) continue;
      for (int64_t lane = 0; lane < kStripLanes; ++lane) {
        const int64_t row = row_of_lane(site.layer.shape, first_lane + lane);
        lanes[lane] = row >= part.row_begin && row < part.row_end ? part.b[(row - part.row_begin) * part.ranks + r] : 0.0f;
      }
      kernels.round_inputs(lanes, kStripLanes, b + strip.begin + (rank - strip.first_rank) * kStripLanes);
    }
  }
}

// A row of groups as bf16, its inputs in the order that the layer's own weights had: each value is rounded by itself.
void widen_groups(const LinearKernels& kernels, const Rows& x, int64_t row, uint16_t* out) {
  const int8_t* q = reinterpret_cast<const int8_t*>(x.data + row * x.stride_bytes);
  const int64_t group = group_of(x.kind);
  for (int64_t begin = 0; begin < x.k_padded; begin += group) {
    const float scale = x.scales[row * x.groups + begin / group];
    float values[kMaxGroup];
    for (int64_t i = 0; i < group; ++i) {
      const int32_t high = q[begin + i];
      values[i] = scale * static_cast<float>(is_wide(x.kind) ? high * (1 << kLowBits) + q[x.k_padded + begin + i] : high);
    }
    uint16_t rounded[kMaxGroup];
    kernels.round_inputs(values, group, x.order == nullptr ? out + begin : rounded);
    if (x.order != nullptr)
      for (int64_t i = begin; i < std::min(begin + group, x.k_padded); ++i) out[i < x.k ? x.order[i] : i] = rounded[i - begin];
  }
}

// A row of activations as bf16: whole numbers where one scale is behind all of them, else what they stand for.
const uint16_t* widened(const KernelSet& set, const Rows& x, int64_t row, uint16_t* out) {
  const uint8_t* data = x.data + row * x.stride_bytes;
  if (x.kind == RowsKind::bf16) return reinterpret_cast<const uint16_t*>(data);
  if (group_of(x.kind) != 0) widen_groups(*set.linear, x, row, out);
  else set.step->widen_row(reinterpret_cast<const int8_t*>(data), x.k_padded, out);
  return out;
}

}  // namespace

std::unique_ptr<Adapter> pack_adapter(const KernelSet& set, const std::vector<AdapterParts>& sites) {
  auto adapter = std::make_unique<Adapter>();
  std::vector<std::pair<int64_t, int64_t>> begins;  // of a and b, in elements
  int64_t elements = 0;
  for (const AdapterParts& site : sites) {
    check_parts(site);
    if (site.weight >= static_cast<int>(adapter->places_.size())) adapter->places_.resize(site.weight + 1, -1);
    if (adapter->places_[site.weight] >= 0) throw std::invalid_argument("an adapter names a layer twice");
    adapter->places_[site.weight] = static_cast<int32_t>(adapter->sites_.size());
    Adapter::Site made;
    made.ranks = all_ranks(site);
    made.stride = round_up(site.layer.shape.k, kMaxGroup);
    int64_t b_size = 0;
    made.strips = lay_strips(site, b_size);
    begins.push_back({elements, elements + made.ranks * made.stride});
    elements += round_up(made.ranks * made.stride + b_size, 32);
    adapter->most_ranks_ = std::max(adapter->most_ranks_, made.ranks);
    adapter->sites_.push_back(std::move(made));
  }
  adapter->memory_ = PageBuffer(elements * 2);
  uint16_t* memory = reinterpret_cast<uint16_t*>(adapter->memory_.data());
  for (size_t i = 0; i < sites.size(); ++i) {
    Adapter::Site& made = adapter->sites_[i];
    uint16_t *a = memory + begins[i].first, *b = memory + begins[i].second;
    int64_t rank = 0;
    for (const AdapterPart& part : sites[i].parts)
      for (int64_t r = 0; r < part.ranks; ++r, ++rank)  // fresh pages are zero behind k
        set.linear->round_inputs(part.a + r * sites[i].layer.shape.k, sites[i].layer.shape.k, a + rank * made.stride);
    for (size_t s = 0; s < made.strips.size(); ++s)
      if (made.strips[s].ranks > 0) fill_b(sites[i], made.strips[s], static_cast<int64_t>(s) * kStripLanes, *set.linear, b);
    made.a = a, made.b = b;
  }
  return adapter;
}

void AdaptedRows::plan(const int32_t* adapter_of, const int32_t* query_start, int64_t n_sequences,
                       const std::vector<std::unique_ptr<Adapter>>& adapters) {
  groups_.clear();
  rows_.clear();
  if (adapter_of == nullptr) return;
  const int64_t tokens = query_start[n_sequences];
  places_.assign(tokens, -1);
  group_of_.assign(tokens, -1);
  stride_ = 0;
  for (size_t number = 0; number < adapters.size(); ++number) {
    const int64_t begin = static_cast<int64_t>(rows_.size());
    for (int64_t s = 0; s < n_sequences; ++s) {
      if (adapter_of[s] != static_cast<int32_t>(number)) continue;
      for (int32_t t = query_start[s]; t < query_start[s + 1]; ++t) {
        places_[t] = static_cast<int32_t>(rows_.size());
        group_of_[t] = static_cast<int32_t>(groups_.size());
        rows_.push_back(t);
      }
    }
    const int64_t end = static_cast<int64_t>(rows_.size());
    if (end == begin) continue;
    groups_.push_back({adapters[number].get(), begin, end});
    stride_ = std::max(stride_, round_up(adapters[number]->ranks(), 16));
  }
  if (static_cast<int64_t>(shrunk_.size()) < static_cast<int64_t>(rows_.size()) * stride_) shrunk_.resize(rows_.size() * stride_);
}

void AdaptedRows::shrink(const KernelSet& set, int weight, const Rows& x, int thread, int threads) const {
  int64_t units = 0;  // some rows times some ranks
  auto units_of = [&](const Group& group, const Adapter::Site& site) {
    return ((group.end - group.begin + kBlock - 1) / kBlock) * ((site.ranks + kAdapterRanks - 1) / kAdapterRanks);
  };
  for (const Group& group : groups_)
    if (const Adapter::Site* site = group.adapter->site(weight)) units += units_of(group, *site);
  const Range own = share(units, thread, threads);
  uint16_t* wide = x.kind != RowsKind::bf16 ? reinterpret_cast<uint16_t*>(linear_scratch(kBlock * x.k_padded * 2)) : nullptr;
  int64_t first = 0;
  for (const Group& group : groups_) {
    const Adapter::Site* site = group.adapter->site(weight);
    if (site == nullptr) continue;
    const int64_t tiles = (site->ranks + kAdapterRanks - 1) / kAdapterRanks, count = units_of(group, *site);
    const int64_t begin = std::max<int64_t>(own.begin - first, 0), end = std::min(own.end - first, count);
    first += count;
    for (int64_t unit = begin; unit < end;) {
      const int64_t block = unit / tiles, row = group.begin + block * kBlock, rows = std::min(kBlock, group.end - row);
      const int64_t rank = unit % tiles * kAdapterRanks;
      const int64_t taken = std::min(end, (block + 1) * tiles) - unit, ranks = std::min(site->ranks - rank, taken * kAdapterRanks);
      const uint16_t* inputs[kBlock];
      float* out[kBlock];
      for (int64_t i = 0; i < rows; ++i) {
        inputs[i] = widened(set, x, rows_[row + i], wide != nullptr ? wide + i * x.k_padded : nullptr);
        out[i] = const_cast<float*>(shrunk_.data()) + (row + i) * stride_ + rank;
      }
      set.step->shrink_rows(inputs, rows, site->a + rank * site->stride, site->stride, ranks, out);
      if (x.kind == RowsKind::int8)
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t r = 0; r < ranks; ++r) out[i][r] *= x.scales[rows_[row + i]];
      unit += taken;
    }
  }
}

bool AdapterBiases::write(int64_t row, int64_t n_rows, int64_t first_lane, int64_t lanes, float* out) const {
  const int32_t* groups = rows_.group_of_.data() + row;
  auto site_of = [&](int32_t group) { return group < 0 ? nullptr : rows_.groups_[group].adapter->site(weight_); };
  int32_t seen = -1;
  bool has_any = false;
  for (int64_t i = 0; i < n_rows && !has_any; ++i)
    if (groups[i] != seen) seen = groups[i], has_any = site_of(seen) != nullptr;
  if (!has_any) return false;
  bool is_written[kMaxTileRows] = {};
  for (int64_t i = 0; i < n_rows; ++i) {
    if (is_written[i]) continue;
    const Adapter::Site* site = site_of(groups[i]);
    int64_t count = 0, of_tile[kBlock];
    for (int64_t j = i; j < n_rows && count < kBlock; ++j)  // sequences of one adapter seldom stand together
      if (groups[j] == groups[i] && !is_written[j]) is_written[j] = true, of_tile[count++] = j;
    alignas(64) float made[kBlock * kPanelLanes];
    for (int64_t lane = 0; lane < lanes; lane += kStripLanes) {
      const Adapter::Strip strip = site != nullptr ? site->strips[(first_lane + lane) / kStripLanes] : Adapter::Strip{};
      const float *shrunk[kBlock] = {}, *bias = layer_.bias != nullptr ? layer_.bias + first_lane + lane : kNone;
      for (int64_t j = 0; site != nullptr && j < count; ++j)
        shrunk[j] = rows_.shrunk_.data() + rows_.places_[row + of_tile[j]] * rows_.stride_ + strip.first_rank;
      set_.step->expand_rows(shrunk, count, site != nullptr ? site->b + strip.begin : nullptr, strip.ranks, bias, made + lane, kPanelLanes);
    }
    for (int64_t j = 0; j < count; ++j)
      std::memcpy(out + of_tile[j] * kPanelLanes, made + j * kPanelLanes, static_cast<size_t>(lanes) * sizeof(float));
  }
  return true;
}

void AdapterBiases::fetch(int64_t first_lane, int64_t lanes) const {
  for (const AdaptedRows::Group& group : rows_.groups_) {
    const Adapter::Site* site = group.adapter->site(weight_);
    if (site == nullptr) continue;
    for (int64_t lane = first_lane; lane < first_lane + lanes; lane += kStripLanes) {
      const Adapter::Strip& strip = site->strips[lane / kStripLanes];
      for (int64_t i = 0; i < strip.ranks; i += 2) __builtin_prefetch(site->b + strip.begin + i * kStripLanes, 0, 2);  // 32 bytes a rank
    }
  }
}

}  // namespace diptych

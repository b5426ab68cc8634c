#include "program/adapters.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "gemm/gemm_driver.h"
#include "threads/thread_pool.h"

namespace diptych {
namespace {

constexpr int64_t kBlock = kAdapterRows;  // rows of x that pass over A together
constexpr int64_t kMostRows = 8;          // of int8: at most so many, of what the set's tiles take by their pointers
constexpr int64_t kBlockRanks = 16;       // of int8: a strip of A, four steps of B
constexpr int64_t kBlockSteps = kBlockRanks / 4, kBlockBytes = kBlockSteps * kStepBytes;
// A bias that changes no sum, of whatever sign its zero is.
alignas(64) const float kNone[kStripLanes] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f,
                                              -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};

int64_t units_of(const AdapterPart& part, bool is_whole) { return is_whole ? (part.ranks + kBlockRanks - 1) / kBlockRanks : part.ranks; }

int64_t all_units(const AdapterParts& site, bool is_whole) {
  int64_t units = 0;
  for (const AdapterPart& part : site.parts) units += units_of(part, is_whole);
  return units;
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
std::vector<Adapter::Strip> lay_strips(const AdapterParts& site, bool is_whole, int64_t& b_size) {
  std::vector<Adapter::Strip> strips(site.layer.n_panels * kPanelStrips);
  for (size_t s = 0; s < strips.size(); ++s) {
    int64_t rank = 0, first = -1, end = 0;
    for (const AdapterPart& part : site.parts) {
      for (int64_t lane = static_cast<int64_t>(s) * kStripLanes; lane < static_cast<int64_t>(s + 1) * kStripLanes; ++lane) {
        const int64_t row = row_of_lane(site.layer.shape, lane);
        if (row < part.row_begin || row >= part.row_end) continue;
        if (first < 0) first = rank;
        end = rank + units_of(part, is_whole);
        break;
      }
      rank += units_of(part, is_whole);
    }
    if (first < 0) continue;
    strips[s] = {static_cast<int32_t>(first), static_cast<int32_t>(end - first), b_size};
    b_size += (end - first) * (is_whole ? kBlockBytes : kStripLanes);
  }
  return strips;
}

void fill_b(const AdapterParts& site, const Adapter::Strip& strip, int64_t first_lane, const LinearKernels& kernels, uint16_t* b) {
  float lanes[kStripLanes];
  int64_t rank = 0;
  for (const AdapterPart& part : site.parts) {
    for (int64_t r = 0; r < part.ranks; ++r, ++rank) {
      if (rank < strip.first || rank >= strip.first + strip.count) continue;
      for (int64_t lane = 0; lane < kStripLanes; ++lane) {
        const int64_t row = row_of_lane(site.layer.shape, first_lane + lane);
        lanes[lane] = row >= part.row_begin && row < part.row_end ? part.b[(row - part.row_begin) * part.ranks + r] : 0.0f;
      }
      kernels.round_inputs(lanes, kStripLanes, b + strip.begin + (rank - strip.first) * kStripLanes);
    }
  }
}

// A row of groups as bf16, its inputs in the order that the layer's own weights had: each value is rounded by itself.
void widen_groups(const LinearKernels& kernels, const Rows& x, int64_t row, uint16_t* out) {
  const int8_t* q = reinterpret_cast<const int8_t*>(x.data + row * x.stride_bytes);
  const int64_t group = group_of(x.kind);
  for (int64_t begin = 0; begin < x.k_padded; begin += group) {
    const float scale = x.scales[row] * x.powers[row * x.groups + begin / group];
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

void fill_bf16(const AdapterParts& from, Adapter::Site& site, const LinearKernels& kernels, uint16_t* a, uint16_t* b) {
  int64_t rank = 0;
  for (const AdapterPart& part : from.parts)
    for (int64_t r = 0; r < part.ranks; ++r, ++rank)  // fresh pages are zero behind k
      kernels.round_inputs(part.a + r * from.layer.shape.k, from.layer.shape.k, a + rank * site.stride);
  for (size_t s = 0; s < site.strips.size(); ++s)
    if (site.strips[s].count > 0) fill_b(from, site.strips[s], static_cast<int64_t>(s) * kStripLanes, kernels, b);
  site.a = a, site.b = b;
}

// Values [count] of one lane as the bytes of its words, `lane` of the steps at `out`; returns the scale.
float fill_lane(const float* values, int64_t count, const LinearKernels& kernels, std::vector<int8_t>& q, uint8_t* out) {
  const float scale = kernels.abs_max(values, count) / 127.0f;
  if (scale < std::numeric_limits<float>::min()) return 0.0f;  // nothing, or too little for an inverse
  q.resize(round_up(count, 64));
  kernels.quantize_int8(values, count, 1.0f / scale, q.data());
  for (int64_t i = 0; i < count; ++i) out[i / 4 * kStepBytes + i % 4] = static_cast<uint8_t>(q[i] + 128);
  return scale;
}

void fill_whole(const AdapterParts& from, Adapter::Site& site, const LinearKernels& kernels, uint8_t* a, uint8_t* b, float* scales) {
  const int64_t k = from.layer.shape.k, block_bytes = site.stride * kStripLanes;
  std::memset(a, 128, static_cast<size_t>(site.ranks * block_bytes));
  std::vector<int8_t> q;
  float* lane_scales = scales + site.ranks * kStripLanes;
  int64_t block = 0;
  for (const AdapterPart& part : from.parts) {
    for (int64_t r = 0; r < part.ranks; ++r) {
      uint8_t* out = a + (block + r / kBlockRanks) * block_bytes + r % kBlockRanks * 4;
      scales[block * kStripLanes + r] = fill_lane(part.a + r * k, k, kernels, q, out);
    }
    for (size_t s = 0; s < site.strips.size(); ++s) {
      const Adapter::Strip& strip = site.strips[s];
      if (block < strip.first || block >= strip.first + strip.count) continue;
      for (int64_t lane = 0; lane < kStripLanes; ++lane) {
        const int64_t at = static_cast<int64_t>(s) * kStripLanes + lane, row = row_of_lane(from.layer.shape, at);
        if (row < part.row_begin || row >= part.row_end) continue;
        uint8_t* out = b + strip.begin + (block - strip.first) * kBlockBytes + lane * 4;
        lane_scales[at] = fill_lane(part.b + (row - part.row_begin) * part.ranks, part.ranks, kernels, q, out);
      }
    }
    block += units_of(part, true);
  }
  site.a8 = a, site.b8 = b, site.a_scales = scales;
  site.lanes.shape.format = Format::int8;
  site.lanes.shape.gated = false;
  site.lanes.scales = lane_scales;
}

// One tile of few rows that the set reads by their pointers, a strip wide.
const TileShape& tile_of(const KernelSet& set, int64_t rows) {
  const TileShape* shape = set.tiles[static_cast<int>(Format::int8)]->narrow;
  while (shape->rows < rows || shape->strips != 1 || shape->interleaved()) ++shape;
  return *shape;
}

int64_t most_rows(const KernelSet& set) {
  int64_t most = 1;
  for (const TileShape* shape = set.tiles[static_cast<int>(Format::int8)]->narrow; shape->rows != 0; ++shape)
    if (!shape->interleaved()) most = std::min(kMostRows, shape->rows);
  return most;
}

// What a packed site takes.
struct Sizes {
  int64_t a, b, scales;  // bytes, each a multiple of 64
  int64_t all() const { return a + b + scales; }
};

}  // namespace

std::unique_ptr<Adapter> pack_adapter(const KernelSet& set, const std::vector<AdapterParts>& sites) {
  auto adapter = std::make_unique<Adapter>();
  std::vector<Sizes> sizes;
  int64_t bytes = 0;
  for (const AdapterParts& site : sites) {
    check_parts(site);
    if (site.weight >= static_cast<int>(adapter->places_.size())) adapter->places_.resize(site.weight + 1, -1);
    if (adapter->places_[site.weight] >= 0) throw std::invalid_argument("an adapter names a layer twice");
    adapter->places_[site.weight] = static_cast<int32_t>(adapter->sites_.size());
    Adapter::Site made;
    made.is_whole = has_whole_sums(site.layer.shape.format);
    made.ranks = all_units(site, made.is_whole);
    made.stride = round_up(site.layer.shape.k, kMaxGroup);
    int64_t b_size = 0;
    made.strips = lay_strips(site, made.is_whole, b_size);
    if (made.is_whole) {
      const int64_t scales = made.ranks * kStripLanes + site.layer.n_panels * kPanelLanes;
      sizes.push_back({made.ranks * kStripLanes * made.stride, b_size, scales * 4});
    } else {
      sizes.push_back({made.ranks * made.stride * 2, round_up(b_size * 2, 64), 0});
    }
    bytes += sizes.back().all();
    adapter->most_ranks_ = std::max(adapter->most_ranks_, made.ranks);
    adapter->sites_.push_back(std::move(made));
  }
  adapter->memory_ = PageBuffer(bytes);
  uint8_t* memory = adapter->memory_.data();
  for (size_t i = 0; i < sites.size(); memory += sizes[i].all(), ++i) {
    Adapter::Site& made = adapter->sites_[i];
    uint8_t* b = memory + sizes[i].a;
    if (made.is_whole) {
      std::memset(b, 128, static_cast<size_t>(sizes[i].b));
      fill_whole(sites[i], made, *set.linear, memory, b, reinterpret_cast<float*>(b + sizes[i].b));
    } else {
      fill_bf16(sites[i], made, *set.linear, reinterpret_cast<uint16_t*>(memory), reinterpret_cast<uint16_t*>(b));
    }
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
    if (end > begin) groups_.push_back({adapters[number].get(), begin, end});
  }
  reserve();
}

void AdaptedRows::plan(const AdaptedRows& tokens, const int32_t* token_of, int64_t n) {
  groups_.clear();
  rows_.clear();
  if (tokens.groups_.empty()) return;
  places_.assign(n, -1);
  group_of_.assign(n, -1);
  for (size_t number = 0; number < tokens.groups_.size(); ++number) {
    const int64_t begin = static_cast<int64_t>(rows_.size());
    for (int64_t i = 0; i < n; ++i) {
      if (tokens.group_of_[token_of[i]] != static_cast<int32_t>(number)) continue;
      places_[i] = static_cast<int32_t>(rows_.size());
      group_of_[i] = static_cast<int32_t>(groups_.size());
      rows_.push_back(static_cast<int32_t>(i));
    }
    const int64_t end = static_cast<int64_t>(rows_.size());
    if (end > begin) groups_.push_back({tokens.groups_[number].adapter, begin, end});
  }
  reserve();
}

void AdaptedRows::reserve() {
  stride_ = 0;
  for (const Group& group : groups_) stride_ = std::max(stride_, round_up(group.adapter->ranks(), 16));
  const size_t needed = rows_.size() * static_cast<size_t>(stride_);
  if (shrunk_.size() < needed) shrunk_.resize(needed), blocks_.resize(needed);
}

// Visits the rows of each layer that is a site of their adapter.
template <class Function>
void AdaptedRows::each(const AdapterCalls& calls, Function&& function) const {
  for (int64_t call = 0; call < calls.count; ++call) {
    if (calls.begins[call] == calls.begins[call + 1]) continue;
    for (const Group& group : groups_) {
      const Adapter::Site* site = group.adapter->site(calls.weights[call]);
      if (site == nullptr) continue;
      const auto rows = rows_.begin(), first = rows + group.begin, last = rows + group.end;
      const int64_t begin = std::lower_bound(first, last, calls.begins[call]) - rows;
      const int64_t end = std::lower_bound(first, last, calls.begins[call + 1]) - rows;
      if (begin < end) function(Some{site, begin, end});
    }
  }
}

// Blocks of u as int8, a block of ranks of some rows after the other.
void AdaptedRows::shrink_whole(const KernelSet& set, const Some& some, const AdapterCalls& calls, const Rows& x, Range units) const {
  const Adapter::Site& site = *some.site;
  const int64_t most = most_rows(set);
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const int64_t first = some.begin + unit / site.ranks * most, block = unit % site.ranks, rows = std::min(most, some.end - first);
    alignas(64) int32_t sums[kMostRows * kPanelLanes];
    alignas(64) float u[kMostRows * kStripLanes];
    const TileShape& shape = tile_of(set, rows);
    PackedLinear lanes = site.lanes;
    lanes.scales = site.a_scales + block * kStripLanes;
    TileArgs args = {};
    FinishArgs last = {};
    int32_t taken[kMostRows];
    for (int64_t i = 0; i < shape.rows; ++i) {
      taken[i] = static_cast<int32_t>(calls.row(rows_[first + std::min(i, rows - 1)]));  // the shape's spare rows repeat the last one
      args.x[i] = x.data + taken[i] * x.stride_bytes;
    }
    last.x_rows = taken, last.row_scales = x.scales, last.row_sums = x.sums;
    last.out = reinterpret_cast<uint8_t*>(u), last.out_stride = kStripLanes * 4;
    args.units = site.stride / 4;
    args.strip_bytes = args.units * kStepBytes;
    args.strip = args.next = args.next_strip = site.a8 + block * args.strip_bytes;
    args.is_stream = true;
    args.acc = sums;
    shape.run(args);
    last.w = &lanes, last.lanes = last.outputs = kStripLanes, last.rows = rows, last.acc = sums, last.store = Store::f32;
    set.linear->finish(last);
    for (int64_t i = 0; i < rows; ++i) {
      alignas(64) int8_t q[kMaxGroup];
      ShrunkBlock& out = const_cast<ShrunkBlock&>(blocks_[(first + i) * stride_ + block]);
      set.linear->quantize_row(u + i * kStripLanes, Source::f32, kStripLanes, q, &out.scale, &out.sum);
      std::memcpy(out.q, q, sizeof out.q);
    }
  }
}

// u in fp32, some ranks of some rows after the other.
void AdaptedRows::shrink_some(const KernelSet& set, const Some& some, const AdapterCalls& calls, const Rows& x, Range units,
                              uint16_t* wide) const {
  const Adapter::Site& site = *some.site;
  const int64_t tiles = (site.ranks + kAdapterRanks - 1) / kAdapterRanks;
  for (int64_t unit = units.begin; unit < units.end;) {
    const int64_t block = unit / tiles, first = some.begin + block * kBlock, rows = std::min(kBlock, some.end - first);
    const int64_t rank = unit % tiles * kAdapterRanks;
    const int64_t taken = std::min(units.end, (block + 1) * tiles) - unit, ranks = std::min(site.ranks - rank, taken * kAdapterRanks);
    const uint16_t* inputs[kBlock];
    float* out[kBlock];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = calls.row(rows_[first + i]);
      const uint8_t* own = x.data + row * rows_of_one(x.kind) * x.stride_bytes;  // of a pair the first: A has no more bits
      inputs[i] = wide != nullptr ? wide + i * x.k_padded : reinterpret_cast<const uint16_t*>(own);
      if (wide != nullptr) widen_groups(*set.linear, x, row, wide + i * x.k_padded);
      out[i] = const_cast<float*>(shrunk_.data()) + (first + i) * stride_ + rank;
    }
    set.step->shrink_rows(inputs, rows, site.a + rank * site.stride, site.stride, ranks, out);
    unit += taken;
  }
}

void AdaptedRows::shrink(const KernelSet& set, const AdapterCalls& calls, const Rows& x, int thread, int threads) const {
  const int64_t most = most_rows(set);
  auto units_of = [&](const Some& some) {  // some rows times some ranks
    const int64_t rows = some.end - some.begin;
    if (some.site->is_whole) return ((rows + most - 1) / most) * some.site->ranks;
    return ((rows + kBlock - 1) / kBlock) * ((some.site->ranks + kAdapterRanks - 1) / kAdapterRanks);
  };
  int64_t units = 0, first = 0;
  each(calls, [&](const Some& some) { units += units_of(some); });
  const Range own = share(units, thread, threads);
  uint16_t* wide = group_of(x.kind) != 0 ? reinterpret_cast<uint16_t*>(linear_scratch(kBlock * x.k_padded * 2)) : nullptr;
  each(calls, [&](const Some& some) {
    const int64_t count = units_of(some);
    const Range part{std::max<int64_t>(own.begin - first, 0), std::min(own.end - first, count)};
    first += count;
    some.site->is_whole ? shrink_whole(set, some, calls, x, part) : shrink_some(set, some, calls, x, part, wide);
  });
}

// The same as write_whole, by the set's own kernel for it.
void AdapterBiases::write_blocks(const Adapter::Site& site, int64_t row, const int32_t* of_tile, int64_t count, int64_t first_lane,
                                 int64_t lanes, float* out) const {
  const ShrunkBlock* shrunk[kMostRows];
  float* target[kMostRows];
  for (int64_t lane = 0; lane < lanes; lane += kStripLanes) {
    const Adapter::Strip& strip = site.strips[(first_lane + lane) / kStripLanes];
    const float* bias = layer_.bias != nullptr ? layer_.bias + first_lane + lane : nullptr;
    for (int64_t i = 0; i < count; ++i) {
      shrunk[i] = rows_.blocks_.data() + rows_.places_[row + of_tile[i]] * rows_.stride_ + strip.first;
      target[i] = out + of_tile[i] * kPanelLanes + lane;
      if (strip.count == 0) std::memcpy(target[i], bias != nullptr ? bias : kNone, sizeof kNone);
    }
    if (strip.count > 0)
      set_.step->expand_blocks(shrunk, count, site.b8 + strip.begin, strip.count, site.lanes.scales + first_lane + lane, bias, target);
  }
}

// What B adds to rows row + of_tile[i] of the call, which have one adapter, at out + of_tile[i] * 64.
void AdapterBiases::write_whole(const Adapter::Site& site, int64_t row, const int32_t* of_tile, int64_t count, int64_t first_lane,
                                int64_t lanes, float* out) const {
  alignas(64) int32_t sums[kMostRows * kPanelLanes];
  const Adapter::Strip* strips = site.strips.data() + first_lane / kStripLanes;
  int64_t together = lanes / kStripLanes;  // strips that the same blocks reach
  for (int64_t s = 1; s < lanes / kStripLanes; ++s)
    if (strips[s].first != strips[0].first || strips[s].count != strips[0].count) together = 1;
  const TileShape& wide = set_.tiles[static_cast<int>(Format::int8)]->wide;
  const bool is_wide = together == wide.strips && together > 1 && !wide.interleaved() && wide.rows <= kMostRows && count <= wide.rows && 2 * count > wide.rows;
  const TileShape& shape = is_wide ? wide : tile_of(set_, count);
  TileArgs args = {};
  FinishArgs last = {};
  args.units = kBlockSteps;
  last.w = &site.lanes, last.lanes = last.outputs = together * kStripLanes, last.rows = count, last.acc = sums;
  float scales[kMostRows];
  int32_t row_sums[kMostRows];
  last.row_scales = scales, last.row_sums = row_sums;
  last.out_rows = of_tile, last.out_stride = kPanelLanes * 4;
  for (int64_t lane = 0; lane < lanes; lane += together * kStripLanes) {
    const Adapter::Strip& strip = strips[lane / kStripLanes];
    const float* bias = layer_.bias != nullptr ? layer_.bias + first_lane + lane : nullptr;
    last.out = reinterpret_cast<uint8_t*>(out + lane);
    if (strip.count == 0)
      for (int64_t i = 0; i < count; ++i)
        for (int64_t s = 0; s < together; ++s)
          std::memcpy(out + of_tile[i] * kPanelLanes + lane + s * kStripLanes, bias != nullptr ? bias + s * kStripLanes : kNone, sizeof kNone);
    last.first_lane = first_lane + lane, last.bias = bias, last.store = Store::f32;
    args.strip_bytes = strip.count * kBlockBytes;
    for (int64_t block = 0; block < strip.count; ++block, last.bias = nullptr, last.store = Store::add_f32) {
      for (int64_t i = 0; i < shape.rows; ++i) {
        const int64_t place = rows_.places_[row + of_tile[std::min(i, count - 1)]];  // the shape's spare rows repeat the last one
        const ShrunkBlock& shrunk = rows_.blocks_[place * rows_.stride_ + strip.first + block];
        args.x[i] = reinterpret_cast<const uint8_t*>(shrunk.q);
        scales[i] = shrunk.scale, row_sums[i] = shrunk.sum;
      }
      for (int64_t s = 0; s < together; s += shape.strips) {
        args.strip = args.next = args.next_strip = site.b8 + strip.begin + s * args.strip_bytes + block * kBlockBytes;
        args.acc = sums + s * kStripLanes;
        shape.run(args);
      }
      set_.linear->finish(last);
    }
  }
}

bool AdapterBiases::write(int64_t row_of_call, int64_t n_rows, int64_t first_lane, int64_t lanes, float* out) const {
  const int64_t row = first_ + row_of_call;
  const int32_t* groups = rows_.group_of_.data() + row;
  auto site_of = [&](int32_t group) { return group < 0 ? nullptr : rows_.groups_[group].adapter->site(weight_); };
  int32_t seen = -1;
  bool has_any = false;
  for (int64_t i = 0; i < n_rows && !has_any; ++i)
    if (groups[i] != seen) seen = groups[i], has_any = site_of(seen) != nullptr;
  if (!has_any) return false;
  bool is_written[kMaxTileRows] = {};
  const int64_t most = most_rows(set_);
  for (int64_t i = 0; i < n_rows; ++i) {
    if (is_written[i]) continue;
    const Adapter::Site* site = site_of(groups[i]);
    const bool is_whole = site != nullptr && site->is_whole;
    int64_t count = 0;
    int32_t of_tile[kMostRows];
    for (int64_t j = i; j < n_rows && count < (is_whole ? most : kBlock); ++j)  // sequences of one adapter seldom stand together
      if (groups[j] == groups[i] && !is_written[j]) is_written[j] = true, of_tile[count++] = static_cast<int32_t>(j);
    if (is_whole) {
      if (set_.step->expand_blocks != nullptr)
        write_blocks(*site, row, of_tile, count, first_lane, lanes, out);
      else
        write_whole(*site, row, of_tile, count, first_lane, lanes, out);
      continue;
    }
    alignas(64) float made[kBlock * kPanelLanes];
    for (int64_t lane = 0; lane < lanes; lane += kStripLanes) {
      const Adapter::Strip strip = site != nullptr ? site->strips[(first_lane + lane) / kStripLanes] : Adapter::Strip{};
      const float *shrunk[kBlock] = {}, *bias = layer_.bias != nullptr ? layer_.bias + first_lane + lane : kNone;
      for (int64_t j = 0; site != nullptr && j < count; ++j)
        shrunk[j] = rows_.shrunk_.data() + rows_.places_[row + of_tile[j]] * rows_.stride_ + strip.first;
      set_.step->expand_rows(shrunk, count, site != nullptr ? site->b + strip.begin : nullptr, strip.count, bias, made + lane, kPanelLanes);
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
      const uint8_t* b = site->is_whole ? site->b8 + strip.begin : reinterpret_cast<const uint8_t*>(site->b + strip.begin);
      const int64_t bytes = strip.count * (site->is_whole ? kBlockBytes : kStripLanes * 2);
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(b + i, 0, 2);
    }
  }
}

}  // namespace diptych

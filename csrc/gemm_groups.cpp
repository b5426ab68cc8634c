// The driver of the linear layers for weights in groups (group4, group8). Few rows meet the codes as they are packed, strip after strip,
// in one stream. More rows: some groups of a few strips are expanded to the form of int8, which lies in L1 while the rows of a block
// pass over it. Nothing here touches the order of a sum: it ascends over the groups, wherever they are cut.
#include <cstring>

#include "gemm_driver.h"

namespace diptych {
namespace {

constexpr int64_t kDirectPasses = 2;     // of few rows over a strip, before expanding it is cheaper
constexpr int64_t kBlockRows = 192;      // their fp32 sums of a panel and some groups of x lie in L2

struct Job : LinearCall {
  const GroupTiles& tiles;
  const ExpandedTile& tile;
  int64_t groups;  // of a strip
  float* acc;      // [kBlockRows][64]
  uint8_t* steps;  // one block of the tile's strips, expanded
  float* scales;
  float* minima;
  const LinearShape& shape() const { return w.shape; }
  int64_t strip_bytes() const { return w.panel_bytes / kPanelStrips; }
};

void point_at_row(const Job& job, GroupArgs& args, int64_t i, int64_t row, int64_t group) {
  const int64_t from = job.row_of(row);
  args.x[i] = job.x.data + from * job.x.stride_bytes + group * job.shape().group;
  args.low = job.x.k_padded;
  args.x_scales[i] = job.x.scales + from * job.x.groups + group;
  args.x_sums[i] = job.x.sums + from * job.x.groups + group;
}

// Of so many rows, or null.
GroupKernel direct_tile(const GroupTiles& tiles, const LinearShape& shape, int64_t rows) {
  const DirectTiles& direct = tiles.direct;
  if (shape.format == Format::group8) return (shape.wide ? direct.wide : direct.bytes)[rows - 1];
  const bool is_linear = shape.grid.levels == Table4::signed4 || shape.grid.levels == Table4::unsigned4;
  if (shape.group == 16) return is_linear ? direct.linear16[rows - 1] : nullptr;
  return (is_linear ? direct.linear : direct.table)[rows - 1];
}

const ExpandedTile& expanded_tile(const GroupTiles& tiles, const LinearShape& shape) {
  const bool is_long = shape.group / 4 * (shape.wide ? 2 : 1) >= kLongWords;
  return (shape.wide ? tiles.expanded_wide : tiles.expanded)[is_long];
}

// A strip passes once or twice, from memory and then from cache.
void run_direct(const Job& job, int thread, int threads) {
  const int64_t pieces = pieces_per_panel(job.w, threads), strips = kPanelStrips / pieces;
  const int64_t passes = (job.m + kDirectRows - 1) / kDirectRows;
  for (Tasks tasks(pieces * job.w.n_panels, *job.w.balance, thread, threads); tasks.has_task(); tasks.advance()) {
    const int64_t panel = tasks.current() / pieces, first = tasks.current() % pieces * strips;
    for (int64_t strip = 0; strip < strips; ++strip)
      for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t begin = job.m * pass / passes, end = job.m * (pass + 1) / passes;
        GroupArgs args{};
        args.shape = &job.shape();
        args.groups = job.groups;
        args.strip = job.w.panels + panel * job.w.panel_bytes + (first + strip) * job.strip_bytes();
        args.acc = job.acc + begin * kPanelLanes + strip * kStripLanes;
        for (int64_t row = begin; row < end; ++row) point_at_row(job, args, row - begin, row, 0);
        direct_tile(job.tiles, job.shape(), end - begin)(args);
      }
    finish_tile(job, panel, {first, first + strips}, {0, job.m}, reinterpret_cast<uint8_t*>(job.acc));
  }
}

// Some groups of the tile's strips of a panel.
struct Block {
  int64_t panel, strip, group, count;
};

const uint8_t* strip_of(const Job& job, const Block& block, int64_t i) {
  return job.w.panels + block.panel * job.w.panel_bytes + (block.strip + i) * job.strip_bytes();
}

// Part `part` of `parts` of what will be expanded next, into L2. Inline: GCC drops calls of a function that only prefetches.
DIPTYCH_FORCED void read_ahead(const Job& job, const Block& next, int64_t part, int64_t parts) {
  const int64_t head = bytes_of_group_head(job.shape()) / kHeadGroups, begin = place_of_group(job.shape(), next.group).scales;
  const int64_t lines = next.count * (head + bytes_of_group_steps(job.shape())) / kStepBytes;
  for (int64_t i = 0; i < job.tile.strips; ++i)
    for (int64_t line = lines * part / parts; line < lines * (part + 1) / parts; ++line)
      __builtin_prefetch(strip_of(job, next, i) + begin + line * kStepBytes, 0, 2);
}

// A block against rows [begin, end).
void run_block(const Job& job, const Block& block, const Block& next, Range rows) {
  const auto [panel, strip, group, count] = block;
  const LinearShape& shape = job.shape();
  GroupArgs args{};
  args.shape = &shape;
  args.groups = count;
  args.resume = group != 0;
  args.steps = job.steps;
  args.scales = job.scales;
  args.minima = shape.grid.offset == Offset::minima ? job.minima : nullptr;
  for (int64_t i = 0; i < job.tile.strips; ++i) {
    const int64_t at = i * kExpandedScales;
    job.tiles.expand(shape, strip_of(job, block, i), group, count, job.steps + i * kExpandedBytes, job.scales + at, job.minima + at);
  }
  const bool is_last = strip + job.tile.strips == kPanelStrips && group + count == job.groups;
  const int64_t tiles = (rows.end - rows.begin + job.tile.rows - 1) / job.tile.rows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    read_ahead(job, next, tile, tiles);
    const int64_t row = rows.begin + tile * job.tile.rows, height = std::min(job.tile.rows, rows.end - row);
    for (int64_t i = 0; i < job.tile.rows; ++i)  // the tile's spare rows repeat the last one
      point_at_row(job, args, i, row + std::min(i, height - 1), group);
    float* acc = job.acc + (row - rows.begin) * kPanelLanes;
    args.acc = acc + strip * kStripLanes;
    job.tile.run(args);
    if (is_last) finish_tile(job, panel, {0, kPanelStrips}, {row, row + height}, reinterpret_cast<uint8_t*>(acc));
  }
}

void run_expanded(const Job& job, int thread, int threads) {
  const int64_t blocks = (job.m + kBlockRows - 1) / kBlockRows, block_rows = round_up((job.m + blocks - 1) / blocks, job.tile.rows);
  const int64_t per_block = kBlockInputs / job.shape().group, panels = job.w.n_panels;
  for (Tasks tasks(blocks * panels, *job.w.balance, thread, threads); tasks.has_task(); tasks.advance()) {
    const int64_t begin = tasks.current() / panels * block_rows, end = std::min(job.m, begin + block_rows);
    if (begin >= end) continue;
    auto count = [&](int64_t group) { return std::min(per_block, job.groups - group); };
    Block block{tasks.current() % panels, 0, 0, count(0)};
    for (int64_t left = kPanelStrips / job.tile.strips * ((job.groups + per_block - 1) / per_block); left > 0; --left) {
      Block next = block;
      next.group += per_block;
      if (next.group >= job.groups) next.group = 0, next.strip += job.tile.strips;
      if (next.strip == kPanelStrips) next.strip = 0, next.panel = tasks.following() % panels;
      next.count = count(next.group);
      run_block(job, block, next, {begin, end});
      block = next;
    }
  }
}

}  // namespace

void linear_by_groups(const LinearCall& call, const GroupTiles& tiles, int thread, int threads) {
  const LinearShape& shape = call.w.shape;
  const ExpandedTile& tile = expanded_tile(tiles, shape);
  const int64_t acc_bytes = (kBlockRows + kMaxTileRows) * kPanelLanes * 4, steps_bytes = tile.strips * kExpandedBytes;
  const int64_t scales_bytes = tile.strips * kExpandedScales * 4;
  uint8_t* memory = linear_scratch(acc_bytes + steps_bytes + 2 * scales_bytes);
  uint8_t* scales = memory + acc_bytes + steps_bytes;
  const Job job{call, tiles, tile, call.w.k_padded / shape.group, reinterpret_cast<float*>(memory), memory + acc_bytes,
                reinterpret_cast<float*>(scales), reinterpret_cast<float*>(scales + scales_bytes)};
  const bool is_direct = call.m <= kDirectPasses * kDirectRows && direct_tile(tiles, shape, 1) != nullptr;
  is_direct ? run_direct(job, thread, threads) : run_expanded(job, thread, threads);
}

}  // namespace diptych

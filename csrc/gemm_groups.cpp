// The driver of the linear layers for weights in groups (group4, group8). Few rows meet the codes as they are packed, strip after strip,
// in one stream. More rows: some groups of a few strips are expanded to the form of int8, which lies in L1 while the rows of a block
// pass over it. Nothing here touches the order of a sum: it ascends over the groups, wherever they are cut.
#include <cstring>

#include "gemm_driver.h"

namespace diptych {
namespace {

constexpr int64_t kDirectPasses = 2;     // of few rows over a strip, before expanding it is cheaper
constexpr int64_t kBlockRows = 192;      // their fp32 sums of a panel and some groups of x lie in L2
constexpr int64_t kBlockInputs = 512;    // of the strips that are expanded at one time; whole heads of every group size

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

// Groups [group, group + count) of the tile's strips of a panel against rows [begin, end).
void run_block(const Job& job, int64_t panel, int64_t strip, int64_t group, int64_t count, Range rows) {
  const LinearShape& shape = job.shape();
  GroupArgs args{};
  args.shape = &shape;
  args.groups = count;
  args.resume = group != 0;
  args.steps = job.steps;
  args.steps_bytes = kBlockInputs / 4 * kStepBytes;
  args.scales = job.scales;
  args.minima = shape.grid.offset == Offset::minima ? job.minima : nullptr;
  args.scales_stride = kBlockInputs / shape.group * kStripLanes;
  for (int64_t i = 0; i < job.tile.strips; ++i) {
    const uint8_t* packed = job.w.panels + panel * job.w.panel_bytes + (strip + i) * job.strip_bytes();
    const int64_t at = i * args.scales_stride;
    job.tiles.expand(shape, packed, group, count, job.steps + i * args.steps_bytes, job.scales + at, job.minima + at);
  }
  const bool is_last = strip + job.tile.strips == kPanelStrips && group + count == job.groups;
  for (int64_t row = rows.begin; row < rows.end; row += job.tile.rows) {
    const int64_t height = std::min(job.tile.rows, rows.end - row);
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
    for (int64_t strip = 0; strip < kPanelStrips; strip += job.tile.strips)
      for (int64_t group = 0; group < job.groups; group += per_block)
        run_block(job, tasks.current() % panels, strip, group, std::min(per_block, job.groups - group), {begin, end});
  }
}

}  // namespace

void linear_by_groups(const LinearCall& call, const GroupTiles& tiles, int thread, int threads) {
  const LinearShape& shape = call.w.shape;
  const ExpandedTile& tile = shape.wide ? tiles.expanded_wide : tiles.expanded;
  const int64_t acc_bytes = (kBlockRows + kMaxTileRows) * kPanelLanes * 4, steps_bytes = tile.strips * kBlockInputs / 4 * kStepBytes;
  const int64_t scales_bytes = tile.strips * kBlockInputs / shape.group * kStripLanes * 4;
  uint8_t* memory = linear_scratch(acc_bytes + steps_bytes + 2 * scales_bytes);
  uint8_t* scales = memory + acc_bytes + steps_bytes;
  const Job job{call, tiles, tile, call.w.k_padded / shape.group, reinterpret_cast<float*>(memory), memory + acc_bytes,
                reinterpret_cast<float*>(scales), reinterpret_cast<float*>(scales + scales_bytes)};
  const bool is_direct = call.m <= kDirectPasses * kDirectRows && direct_tile(tiles, shape, 1) != nullptr;
  is_direct ? run_direct(job, thread, threads) : run_expanded(job, thread, threads);
}

}  // namespace diptych

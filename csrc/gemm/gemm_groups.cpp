// The driver of the linear layers for weights in groups (group2 to group8). Few rows meet the codes as they are packed, strip after strip,
// in one stream, as all do where dot products cost so much that taking codes apart costs little beside them (AVX-VNNI, NEON). More rows: some groups
// of a few strips are expanded to the form of int8, or what a set has in its place, which lies in L1 while the rows of a block
// pass over it. Nothing here touches the order of a sum: it ascends over the groups, wherever they are cut.
#include <type_traits>

#include "gemm/gemm_driver.h"
#include "sets/kernel_sets.h"

namespace diptych {
namespace {

int64_t bytes_of_row(const RowForm& form, int64_t inputs) { return form.bytes * inputs + form.gap; }

struct Job : LinearCall {
  const GroupTiles& tiles;
  const ExpandedTile& tile;
  int64_t groups;  // of a strip
  int64_t blocks, block_rows;  // of rows
  // Of one block of rows; the spare rows of its last tile repeat the last one.
  const uint8_t** x_of;
  const float** powers_of;
  const int32_t** sums_of;
  RowOfGroup* rows;  // [tiles][groups][rows of the tile]
  float* acc;        // [rows][64]
  uint8_t* steps;    // one block of the tile's strips, expanded
  float* scales;
  float* minima;
  RowForm form;
  uint8_t* own_rows;  // of the block in that form, row_bytes() apart
  const LinearShape& shape() const { return w.shape; }
  int64_t row_bytes() const { return bytes_of_row(form, x.k_padded); }
  int64_t strip_bytes() const { return w.panel_bytes / kPanelStrips; }
};

// Pads to whole tiles of so many rows, in the form that the tiles read; one row lies well enough where its bytes are left alone.
void point_at_rows(const Job& job, Range rows, int64_t height) {
  const int64_t count = round_up(rows.end - rows.begin, height);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = job.row_of(std::min(rows.begin + i, rows.end - 1));
    job.x_of[i] = job.x.data + from * job.x.stride_bytes;
    job.powers_of[i] = job.x.powers + from * job.x.groups;
    job.sums_of[i] = job.x.sums + from * job.x.groups;
  }
  if (job.form.make == nullptr || (count == 1 && job.form.bytes == 1)) return;
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* out = job.own_rows + i * job.row_bytes();
    job.form.make(job.x_of[i], job.x.k_padded, job.x.k_padded, out);
    job.x_of[i] = out;
  }
}

GroupArgs args_of(const Job& job) {
  GroupArgs args{};
  args.shape = &job.shape();
  args.low = job.x.k_padded;
  return args;
}

// Of so many rows, or null.
GroupKernel direct_tile(const GroupTiles& tiles, const LinearShape& shape, int64_t rows) {
  return tiles.direct[shape.wide].of[static_cast<int>(form_of(shape))][rows - 1];
}

// Of one tile.
void ready_rows(const Job& job, Range rows, bool is_direct) {
  job.tiles.ready(job.shape(), is_direct, job.powers_of + rows.begin, job.sums_of + rows.begin, rows.end - rows.begin, job.groups, job.rows + rows.begin * job.groups);
}

// Rows [begin, end) of the call as passes of at most kDirectRows, of even size.
struct Passes {
  int64_t begin, end;
  int64_t count() const { return (end - begin + kDirectRows - 1) / kDirectRows; }
  Range rows(int64_t pass) const { return {(end - begin) * pass / count(), (end - begin) * (pass + 1) / count()}; }  // from begin
};

void ready_passes(const Job& job, const Passes& passes) {
  point_at_rows(job, {passes.begin, passes.end}, 1);
  for (int64_t pass = 0; pass < passes.count(); ++pass) ready_rows(job, passes.rows(pass), true);
}

// Intel's processors bring strips side by side faster than one. AMD's are asked once for each line: asked twice, rows of which a line costs
// more than some dot products waited for half of their time and more (Zen 4, LAB.md). Where a line costs less than memory needs for it, the
// processor's own prefetchers do best, and what is taken passes L3 by, as in other streams there: two rows of codes of six and eight bits, one of
// four and five. Zen 5 is asked past L2, as other streams there, but for strips that pass again.
Asking asking_for(const Job& job) {
  if (is_zen5()) return job.m <= kDirectRows ? Asking::past : Asking::once;
  if (!is_zen4()) return job.m <= job.tiles.beside_rows ? Asking::beside : Asking::twice;
  const Format format = job.shape().format;
  const bool is_long = format == Format::group6 || format == Format::group8, is_middle = format == Format::group4 || format == Format::group5;
  return job.m <= (is_long ? 2 : is_middle ? 1 : 0) ? Asking::here : Asking::once;
}

// Strips of one piece.
int64_t strips_of_piece(const Job& job, Asking asking, int threads) {
  const int64_t least = kPanelStrips / pieces_per_panel(job.w, threads);
  int64_t strips = asking == Asking::beside ? kPanelStrips : least;
  while (strips > least && !is_shared_evenly(job.w, strips, threads)) strips /= 2;
  return strips;
}

// A strip passes once or several times, from memory and then from cache.
void run_direct(const Job& job, int thread, int threads) {
  const Asking asking = asking_for(job);
  const int64_t strips = strips_of_piece(job, asking, threads), pieces = kPanelStrips / strips, n_pieces = pieces * job.w.n_panels;
  const int64_t beside = asking == Asking::beside ? strips : std::min(strips, job.tiles.direct_strips);
  int64_t ready = -1;
  for (Tasks tasks(job.blocks * n_pieces, *job.w.balance, thread, threads); tasks.has_task(); tasks.advance()) {
    const int64_t block = tasks.current() / n_pieces, piece = tasks.current() % n_pieces, panel = piece / pieces, first = piece % pieces * strips;
    const Passes passes{block * job.block_rows, std::min(job.m, (block + 1) * job.block_rows)};
    if (passes.begin >= passes.end) continue;
    if (block != ready) ready_passes(job, passes);
    ready = block;
    ask_for_end(job, panel, {first, first + strips}, {passes.begin, passes.end});
    const uint8_t *own = job.w.panels + panel * job.w.panel_bytes + first * job.strip_bytes();
    const uint8_t *next = job.w.panels + tasks.following() % n_pieces * strips * job.strip_bytes();
    for (int64_t strip = 0; strip < strips; strip += beside)
      for (int64_t pass = 0; pass < passes.count(); ++pass) {
        const auto [begin, end] = passes.rows(pass);
        GroupArgs args = args_of(job);
        args.groups = job.groups;
        args.asking = asking;
        args.strip = own + strip * job.strip_bytes();
        args.strips = beside, args.strip_bytes = job.strip_bytes();
        args.next_strip = strip + beside < strips ? args.strip + beside * job.strip_bytes() : next;
        args.acc = job.acc + begin * kPanelLanes + strip * kStripLanes;
        args.x = job.x_of + begin, args.rows = job.rows + begin * job.groups;
        direct_tile(job.tiles, job.shape(), end - begin)(args);
      }
    for (int64_t row = passes.begin; row < passes.end; row += kMaxTileRows)
      finish_tile(job, panel, {first, first + strips}, {row, std::min<int64_t>(row + kMaxTileRows, passes.end)},
                  reinterpret_cast<uint8_t*>(job.acc + (row - passes.begin) * kPanelLanes));
  }
}

// Some groups of the tile's strips of a panel.
struct Block {
  int64_t panel, strip, group, count;
};

const uint8_t* strip_of(const Job& job, const Block& block, int64_t i) {
  return job.w.panels + block.panel * job.w.panel_bytes + (block.strip + i) * job.strip_bytes();
}

// What will be expanded next, brought into L2 in as many turns. Inline: GCC drops calls of a function that only prefetches.
class ReadingAhead {
 public:
  ReadingAhead(const Job& job, const Block& next, int64_t turns) : strips_(job.tile.strips), strip_bytes_(job.strip_bytes()) {
    const int64_t head = bytes_of_group_head(job.shape()) / groups_of_head(job.shape()), begin = place_of_group(job.shape(), next.group).factors;
    const int64_t lines = next.count * (head + bytes_of_group_steps(job.shape())) / kStepBytes;
    at_ = strip_of(job, next, 0) + begin;
    end_ = at_ + lines * kStepBytes;
    turn_bytes_ = (lines + turns - 1) / turns * kStepBytes;
  }
  DIPTYCH_FORCED void turn() {
    for (const uint8_t* end = std::min(at_ + turn_bytes_, end_); at_ < end; at_ += kStepBytes)
      for (int64_t i = 0; i < strips_; ++i) __builtin_prefetch(at_ + i * strip_bytes_, 0, 2);
  }

 private:
  const int64_t strips_, strip_bytes_;
  const uint8_t *at_, *end_;
  int64_t turn_bytes_;
};

void ready_block(const Job& job, Range rows) {
  const int64_t height = job.tile.rows;
  point_at_rows(job, rows, height);
  for (int64_t i = 0; i < rows.end - rows.begin; i += height) ready_rows(job, {i, i + height}, false);
}

// A block against rows [begin, end).
void run_block(const Job& job, const Block& block, const Block& next, Range rows) {
  const auto [panel, strip, group, count] = block;
  const LinearShape& shape = job.shape();
  GroupArgs args = args_of(job);
  args.groups = count;
  args.first = group;
  args.resume = group != 0;
  args.steps = job.steps;
  args.scales = job.scales;
  args.minima = shape.grid.offset == Offset::minima ? job.minima : nullptr;
  args.zeros = shape.grid.offset == Offset::zeros ? reinterpret_cast<const int32_t*>(job.minima) : nullptr;
  for (int64_t i = 0; i < job.tile.strips; ++i) {
    const int64_t at = i * kExpandedScales;
    job.tiles.expand(shape, strip_of(job, block, i), group, count, job.steps + i * kExpandedBytes, job.scales + at, job.minima + at);
  }
  const int64_t finished = std::min(kPanelStrips, 2 * job.tile.strips), end = strip + job.tile.strips;  // strips at once: gate and up, and few calls
  const bool is_last = end % finished == 0 && group + count == job.groups;
  const int64_t tiles = (rows.end - rows.begin + job.tile.rows - 1) / job.tile.rows;
  ReadingAhead ahead(job, next, tiles);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    ahead.turn();
    const int64_t row = tile * job.tile.rows;
    args.x = job.x_of + row;
    args.next_x = job.x_of + (tile + 1 < tiles ? row + job.tile.rows : 0);
    args.rows = job.rows + row * job.groups + group * job.tile.rows;
    float* acc = job.acc + row * kPanelLanes;
    args.acc = acc + strip * kStripLanes;
    const Range strips{end - finished, end}, of_tile{rows.begin + row, std::min(rows.begin + row + job.tile.rows, rows.end)};
    if (is_last) ask_for_end(job, panel, strips, of_tile);
    job.tile.run(args);
    if (is_last) finish_tile(job, panel, strips, of_tile, reinterpret_cast<uint8_t*>(acc + strips.begin * kStripLanes));
  }
}

void run_expanded(const Job& job, int thread, int threads) {
  const int64_t per_block = kBlockInputs / job.shape().group, panels = job.w.n_panels;
  int64_t ready = -1;
  for (Tasks tasks(job.blocks * panels, *job.w.balance, thread, threads); tasks.has_task(); tasks.advance()) {
    const int64_t begin = tasks.current() / panels * job.block_rows, end = std::min(job.m, begin + job.block_rows);
    if (begin >= end) continue;
    if (begin != ready) ready_block(job, {begin, end});
    ready = begin;
    auto count = [&](int64_t group) { return std::min(per_block, job.groups - group); };
    Block block{tasks.current() % panels, 0, 0, count(0)};
    for (int64_t left = kPanelStrips / job.tile.strips * ((job.groups + per_block - 1) / per_block); left > 0; --left) {
      Block next = block;  // all strips of some groups before the next groups: that part of x stays in L2, all of K may not
      next.strip += job.tile.strips;
      if (next.strip == kPanelStrips) next.strip = 0, next.group += per_block;
      if (next.group >= job.groups) next.group = 0, next.panel = tasks.following() % panels;
      next.count = count(next.group);
      run_block(job, block, next, {begin, end});
      block = next;
    }
  }
}

// Whether rows meet the codes as they are packed: few do, and all where a set has no other tiles.
bool is_direct(const PackedLinear& w, const GroupTiles& tiles, int64_t m) {
  if (tiles.expanded.run == nullptr) return true;
  return m <= tiles.most_direct[w.shape.wide] && direct_tile(tiles, w.shape, 1) != nullptr;
}

const ExpandedTile& tile_of(const LinearShape& shape, const GroupTiles& tiles) {
  const bool is_long = shape.group == kMaxGroup && tiles.expanded_long.run != nullptr;
  return shape.wide ? tiles.expanded_wide : is_long ? tiles.expanded_long : tiles.expanded;
}

RowForm row_form_of(const LinearShape& shape, const GroupTiles& tiles, bool is_direct) {
  return tiles.row_form == nullptr ? RowForm{} : tiles.row_form(shape, is_direct);
}

// Parts of a thread's memory for a call of m rows, in bytes; acc, steps, two of scales, three of pointers, rows, those in the form of the tiles.
struct Memory {
  int64_t acc, steps, scales, pointers, rows, own_rows;
  int64_t bytes() const { return acc + steps + 2 * scales + 3 * pointers + rows + own_rows; }
};

Memory memory_of(const PackedLinear& w, const GroupTiles& tiles, int64_t m, const RowForm& form) {
  const ExpandedTile& tile = tile_of(w.shape, tiles);
  const int64_t block_rows = std::min(m, tiles.block_rows) + kMaxTileRows;
  return {block_rows * kPanelLanes * 4, std::max<int64_t>(form.bytes, 1) * tile.strips * kExpandedBytes, tile.strips * kExpandedScales * 4,
          round_up(block_rows * 8, kStepBytes), round_up(block_rows * (w.k_padded / w.shape.group) * static_cast<int64_t>(sizeof(RowOfGroup)), kStepBytes),
          form.make == nullptr ? 0 : round_up(block_rows * bytes_of_row(form, round_up(w.k_padded, kMaxGroup)), kStepBytes)};
}

}  // namespace

int64_t group_scratch_bytes(const PackedLinear& w, const GroupTiles& tiles, int64_t m) {
  return memory_of(w, tiles, m, row_form_of(w.shape, tiles, is_direct(w, tiles, m))).bytes();
}

void linear_by_groups(const LinearCall& call, const GroupTiles& tiles, int thread, int threads) {
  const ExpandedTile& tile = tile_of(call.w.shape, tiles);
  const bool is_direct_call = is_direct(call.w, tiles, call.m);
  const RowForm form = row_form_of(call.w.shape, tiles, is_direct_call);
  const Memory memory = memory_of(call.w, tiles, call.m, form);
  uint8_t* next = linear_scratch(memory.bytes());
  auto take = [&](auto*& part, int64_t bytes) { part = reinterpret_cast<std::decay_t<decltype(part)>>(next), next += bytes; };
  const int64_t blocks = (call.m + tiles.block_rows - 1) / tiles.block_rows;
  Job job{call, tiles, tile, call.w.k_padded / call.w.shape.group, blocks, round_up((call.m + blocks - 1) / blocks, is_direct_call ? kDirectRows : tile.rows),
          nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, form, nullptr};
  take(job.acc, memory.acc), take(job.steps, memory.steps), take(job.scales, memory.scales), take(job.minima, memory.scales);
  take(job.x_of, memory.pointers), take(job.powers_of, memory.pointers), take(job.sums_of, memory.pointers), take(job.rows, memory.rows), take(job.own_rows, memory.own_rows);
  if (is_direct_call) return run_direct(job, thread, threads);
  if (tile.begin != nullptr) tile.begin(call.w.shape);
  run_expanded(job, thread, threads);
  if (tile.end != nullptr) tile.end();
}

}  // namespace diptych

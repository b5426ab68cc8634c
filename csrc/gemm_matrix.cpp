// The driver of the linear layers for matrix tiles (AMX), which compute as fast as the caches can feed them. Few rows, one tile of them:
// W passes once, strip after strip, and the sums stay in registers over the whole K. More rows: a block of K of one panel lies in L1
// while the rows of a block of x pass over it with their sums, a tile at a time; W comes from memory once for each block of rows.
// Nothing here touches the order of a sum: it ascends in K by the inputs of one tile, wherever K is cut.
#include <cstring>

#include "gemm_driver.h"

namespace diptych {
namespace {

constexpr int64_t kStepsPerTile = 16;
constexpr int64_t kSumsStride = kPanelLanes * 4;
constexpr int64_t kCacheLine = 64;

struct Job {
  const LinearCall& call;
  const MatrixShape& shape;
  const MatrixBlocking& blocking;
  int64_t steps, steps_per_block;  // of a strip as the tiles see it
  int64_t block_rows;
  bool is_narrow, is_expanded;     // int4 and fp8 are expanded
  uint8_t* sums;                   // [panels of a task][block_rows][64]
  uint8_t* rows;                   // copied x
  uint8_t* expanded;               // one block of the shape's strips
  int64_t strip_bytes() const { return call.w.panel_bytes / kPanelStrips; }
  int64_t row_bytes() const { return round_up(steps, kStepsPerTile) * 4; }
  // Where a step begins in a packed strip, of what is expanded about; blocks of int4 begin with whole pairs of groups.
  int64_t packed_offset(int64_t step) const { return is_expanded ? strip_bytes() * step / steps : step * kStepBytes; }
};

// Rows of x at one distance, from row `first` of the call on.
struct View {
  const uint8_t* data = nullptr;
  int64_t first = 0, stride = 0;
  const uint8_t* row(int64_t i) const { return data + (i - first) * stride; }
};

// What one task covers: some panels, or some strips of one.
struct Piece {
  Range panels, strips;
  const uint8_t* next;  // what the thread likely reads after it
};

// Steps [step, step + steps) of the shape's strips, the first of which begins at `strip`.
struct Block {
  const uint8_t* strip;
  int64_t step, steps;
};

const MatrixShape& choose_shape(const MatrixTiles& tiles, int64_t m) {
  for (const MatrixShape& shape : tiles.narrow)
    if (shape.rows >= m) return shape;
  return tiles.wide;
}

int64_t count_steps_per_block(const LinearShape& w, const MatrixShape& shape, const MatrixBlocking& blocking, int64_t steps) {
  const int64_t blocks = (shape.strips * steps * kStepBytes + blocking.w_bytes - 1) / blocking.w_bytes;
  const int64_t round = w.format == Format::int4 ? w.group / 2 : w.format == Format::fp8 ? kFp8Inputs / 2 : kStepsPerTile;
  return round_up((steps + blocks - 1) / blocks, std::max(kStepsPerTile, round));
}

// The first row of tile `tile` of a block of rows. A tile always has the shape's rows where the call has as many: the last one begins
// before the rows that are left, and computes some again into sums of its own.
int64_t first_row(const Job& job, int64_t begin, int64_t tile) {
  return std::min(begin + tile * job.shape.rows, std::max<int64_t>(0, job.call.m - job.shape.rows));
}

// Rows [begin, end) of the call's x, where they are if they lie at one distance, else copied.
View view_block(const Job& job, int64_t begin, int64_t end) {
  const LinearCall& call = job.call;
  auto place = [&](int64_t i) { return call.x.data + call.row_of(i) * call.x.stride_bytes; };
  const int64_t stride = end - begin > 1 ? place(begin + 1) - place(begin) : call.x.stride_bytes;
  bool is_even = true;
  if (call.x_rows != nullptr)
    for (int64_t i = begin + 1; i < end; ++i) is_even = is_even && place(i) - place(i - 1) == stride;
  if (is_even) return {place(begin), begin, stride};
  const View copy{job.rows, begin, job.row_bytes() + kCacheLine};
  for (int64_t i = begin; i < end; ++i) std::memcpy(job.rows + (i - begin) * copy.stride, place(i), static_cast<size_t>(job.row_bytes()));
  return copy;
}

// The part of `next` that tile `tile` of `tiles` brings into L2.
void read_ahead(const Job& job, MatrixArgs& args, const Block& next, int64_t tile, int64_t tiles) {
  const int64_t begin = job.packed_offset(next.step), end = job.packed_offset(next.step + next.steps);
  const int64_t lines = (end - begin) / kCacheLine, from = lines * tile / tiles, to = lines * (tile + 1) / tiles;
  args.next_w = next.strip + begin + from * kCacheLine;
  args.next_strip_bytes = job.strip_bytes();
  args.next_bytes = (to - from) * kCacheLine;
}

// Points args at a block of W, where the tiles can read it.
void point_at_weights(const Job& job, MatrixArgs& args, const Block& block) {
  args.steps = block.steps;
  args.resume = block.step != 0;
  args.strip_bytes = job.is_expanded ? job.steps_per_block * kStepBytes : job.strip_bytes();
  args.w = job.is_expanded ? job.expanded : block.strip + block.step * kStepBytes;
  if (!job.is_expanded) return;
  for (int64_t i = 0; i < job.shape.strips; ++i)
    expand_steps(job.call, block.strip + i * job.strip_bytes(), block.step, block.steps, job.expanded + i * args.strip_bytes);
}

// Rows [begin, end) of the call against one piece.
class Walk {
 public:
  Walk(const Job& job, const View& x, const Piece& piece, int64_t begin, int64_t end)
      : job_(job), x_(x), piece_(piece), begin_(begin), end_(end), tiles_((end - begin + job.shape.rows - 1) / job.shape.rows) {}

  void run() const {
    for (int64_t strip = piece_.strips.begin; strip < piece_.strips.end; strip += job_.shape.strips)
      for (int64_t step = 0; step < job_.steps; step += job_.steps_per_block)
        for (int64_t panel = piece_.panels.begin; panel < piece_.panels.end; ++panel) run_block(panel, strip, step);
  }

 private:
  Block block(int64_t panel, int64_t strip, int64_t step) const {
    const uint8_t* base = job_.call.w.panels + panel * job_.call.w.panel_bytes + strip * job_.strip_bytes();
    return {base, step, std::min(job_.steps_per_block, job_.steps - step)};
  }

  Block following(int64_t panel, int64_t strip, int64_t step) const {
    if (panel + 1 < piece_.panels.end) return block(panel + 1, strip, step);
    if (step + job_.steps_per_block < job_.steps) return block(piece_.panels.begin, strip, step + job_.steps_per_block);
    if (strip + job_.shape.strips < piece_.strips.end) return block(piece_.panels.begin, strip + job_.shape.strips, 0);
    return {piece_.next, 0, std::min(job_.steps_per_block, job_.steps)};
  }

  void run_block(int64_t panel, int64_t strip, int64_t step) const {
    const Block own = block(panel, strip, step), next = following(panel, strip, step);
    const bool is_stream = job_.is_narrow && !job_.is_expanded, is_last_step = step + own.steps == job_.steps;
    const bool is_one_pass = !job_.is_narrow && job_.shape.strips == kPanelStrips && own.steps == job_.steps;  // the tiles share sums in L1
    uint8_t* sums = job_.sums + (panel - piece_.panels.begin) * job_.block_rows * kSumsStride;
    const int64_t sums_step = is_one_pass ? 0 : job_.shape.rows * kSumsStride, strip_offset = (strip - piece_.strips.begin) * kStepBytes;
    MatrixArgs args;
    point_at_weights(job_, args, own);
    args.x_stride = x_.stride;
    args.rows = std::min(job_.call.m, job_.shape.rows);
    args.x_ahead = job_.blocking.x_ahead;
    for (int64_t tile = 0; tile < tiles_; ++tile, sums += sums_step) {
      const int64_t first = first_row(job_, begin_, tile);
      const bool is_last = tile + 1 == tiles_;
      args.x = x_.row(first) + step * 4;
      args.next_x = is_last ? x_.row(first_row(job_, begin_, 0)) + next.step * 4 : x_.row(first_row(job_, begin_, tile + 1)) + step * 4;
      args.sums = sums + strip_offset;
      args.next_sums = args.resume && !is_last ? sums + sums_step + strip_offset : nullptr;
      args.w_ahead = job_.is_expanded || tile != 0 ? 0 : job_.blocking.w_ahead;
      read_ahead(job_, args, next, tile, tiles_);
      if (is_stream) args.next_w = args.w + job_.blocking.stream_ahead, args.next_bytes = own.steps * kStepBytes;
      job_.shape.run(args);
      if (is_last_step && strip + job_.shape.strips == piece_.strips.end) finish(panel, tile, first, sums);
    }
  }

  // A tile's rows that no other has.
  void finish(int64_t panel, int64_t tile, int64_t first, uint8_t* sums) const {
    const int64_t begin = begin_ + tile * job_.shape.rows, end = std::min(end_, begin + job_.shape.rows);
    for (int64_t row = begin; row < end; row += kMaxTileRows)
      finish_tile(job_.call, panel, piece_.strips, {row, std::min(row + kMaxTileRows, end)}, sums + (row - first) * kSumsStride);
  }

  const Job& job_;
  const View& x_;
  const Piece& piece_;
  const int64_t begin_, end_, tiles_;
};

// How many panels share a block of K, so that x is read from beyond L2 once for all of them.
int64_t panels_per_task(const Job& job, int threads) {
  if (job.is_narrow || job.steps_per_block >= job.steps || job.block_rows * job.row_bytes() <= job.blocking.x_bytes) return 1;
  const int64_t most = (job.call.w.n_panels + threads - 1) / threads;
  return std::clamp<int64_t>(job.blocking.sums_bytes / (job.block_rows * kSumsStride), 1, most);
}

}  // namespace

void linear_by_matrix(const LinearCall& call, const MatrixTiles& tiles, int thread, int threads) {
  const PackedLinear& w = call.w;
  const MatrixShape& shape = choose_shape(tiles, call.m);
  const bool is_narrow = call.m <= shape.rows, is_expanded = expanded_form(w.shape.format) != w.shape.format;
  const int64_t steps = w.k_padded / (has_bf16_rows(w.shape.format) ? 2 : 4);
  const int64_t per_block = is_narrow && !is_expanded ? steps : count_steps_per_block(w.shape, shape, tiles.blocking, steps);
  const int64_t row_tiles = (call.m + shape.rows - 1) / shape.rows, blocks = (call.m + tiles.blocking.rows - 1) / tiles.blocking.rows;
  const int64_t block_rows = (row_tiles + blocks - 1) / blocks * shape.rows;
  Job job{call, shape, tiles.blocking, steps, per_block, block_rows, is_narrow, is_expanded, nullptr, nullptr, nullptr};

  // A task is a piece and a block of rows. Pieces of few rows are strips, as they are for register tiles.
  const int64_t panels = panels_per_task(job, threads), groups = std::min(w.n_panels, round_up((w.n_panels + panels - 1) / panels, panels > 1 ? threads : 1));
  const int64_t cuts = is_narrow ? pieces_per_panel(w, threads) : 1, strips = kPanelStrips / cuts, n_pieces = cuts * groups;
  auto piece_at = [&](int64_t i) {
    const Range own = share(w.n_panels, static_cast<int>(i / cuts), static_cast<int>(groups));
    return Piece{own, {i % cuts * strips, i % cuts * strips + strips}, nullptr};
  };
  auto begin_of = [&](const Piece& piece) { return w.panels + piece.panels.begin * w.panel_bytes + piece.strips.begin * job.strip_bytes(); };

  const int64_t sums_bytes = ((w.n_panels + groups - 1) / groups) * block_rows * kSumsStride;
  const int64_t rows_bytes = call.x_rows == nullptr ? 0 : round_up((block_rows + shape.rows) * (job.row_bytes() + kCacheLine), kCacheLine);
  job.sums = linear_scratch(sums_bytes + rows_bytes + (is_expanded ? shape.strips * per_block * kStepBytes : 0));
  job.rows = job.sums + sums_bytes;
  job.expanded = job.rows + rows_bytes;

  shape.begin(call.m);
  View x;
  int64_t ready = -1;
  for (Tasks tasks(blocks * n_pieces, *w.balance, thread, threads); tasks.has_task(); tasks.advance()) {
    const int64_t block = tasks.current() / n_pieces, begin = block * block_rows, end = std::min(call.m, begin + block_rows);
    if (begin >= end) continue;
    if (block != ready) x = view_block(job, first_row(job, begin, 0), end);
    ready = block;
    Piece piece = piece_at(tasks.current() % n_pieces);
    piece.next = begin_of(piece_at(tasks.following() % n_pieces));
    const RowBiases* biases = is_narrow ? call.epilogue.biases : nullptr;
    if (biases != nullptr)
      biases->fetch(piece.panels.begin * kPanelLanes + piece.strips.begin * kStripLanes, (piece.strips.end - piece.strips.begin) * kStripLanes);
    Walk(job, x, piece, begin, end).run();
  }
  shape.end();
}

}  // namespace diptych

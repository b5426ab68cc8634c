// The driver of the linear layers for matrix tiles (AMX), which compute as fast as the caches can feed them. Few rows, one tile of them:
// W passes once, strip after strip, and the sums stay in registers over the whole K. More rows: a block of K of two strips lies in L1
// while the rows of a block of x pass over it from L2, a tile at a time; W comes from memory once for each block of rows.
// Nothing here touches the order of a sum: it ascends in K by the inputs of one tile, wherever K is cut.
#include <cstring>

#include "gemm/gemm_driver.h"

namespace diptych {
namespace {

constexpr int64_t kStepsPerTile = 16;
constexpr int64_t kSumsStride = kPanelLanes * 4;
constexpr int64_t kCacheLine = 64;

int64_t row_bytes_of(int64_t steps) { return round_up(steps, kStepsPerTile) * 4; }

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
  int64_t row_bytes() const { return row_bytes_of(steps); }
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

const MatrixShape& choose_shape(const MatrixTiles& tiles, const PackedLinear& w, int64_t m, int threads) {
  for (const MatrixShape& shape : tiles.narrow)
    if (shape.rows >= m && (shape.strips == 1 || is_shared_evenly(w, shape.strips, threads))) return shape;
  return tiles.wide;
}

int64_t count_steps_per_block(const LinearShape& w, int64_t strips, int64_t block_bytes, int64_t steps) {
  const int64_t blocks = (strips * steps * kStepBytes + block_bytes - 1) / block_bytes;
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
  args.next_bytes = args.first_bytes = (to - from) * kCacheLine;
  args.then_w = args.next_w + args.next_bytes;
}

// A stream runs ahead of itself in its own strips, and from their ends on in those that follow.
void read_on(const Job& job, MatrixArgs& args, const Block& next) {
  const int64_t bytes = args.steps * kStepBytes, ahead = std::min(job.blocking.stream_ahead, bytes);
  args.next_w = args.w + ahead, args.then_w = next.strip;
  args.next_strip_bytes = args.strip_bytes;
  args.next_bytes = bytes, args.first_bytes = bytes - ahead;
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

// The epilogue of the tile before, done beside the products of the next, whichever task has it: the next writes its own sums behind them.
class Finish {
 public:
  explicit Finish(const LinearCall& call) : call_(call) {}
  ~Finish() { rest(); }

  // acc: of the first row at the first strip. It must stay as it is until the next tile has multiplied. At once where the rows have biases
  // of their own, or where the outputs lie nowhere but in acc.
  void begin(int64_t panel, Range strips, Range rows, uint8_t* acc) {
    if (call_.epilogue.biases == nullptr && call_.epilogue.out != nullptr) {
      point_at_tile(call_, panel, strips, rows, acc, args_);
      first_row_ = rows.begin / rows_of_one(call_.x.kind);
      is_pending_ = args_.outputs > 0;
      return;
    }
    for (int64_t row = rows.begin; row < rows.end; row += kMaxTileRows)
      finish_tile(call_, panel, strips, {row, std::min(row + kMaxTileRows, rows.end)}, acc + (row - rows.begin) * kSumsStride);
  }

  const FinishArgs* pending() const { return is_pending_ ? &args_ : nullptr; }
  void done() {
    if (is_pending_) show_outputs(call_, first_row_, args_);
    is_pending_ = false;
  }
  void rest() {
    if (is_pending_) call_.kernels.finish(args_);
    done();
  }

 private:
  const LinearCall& call_;
  FinishArgs args_;
  int64_t first_row_ = 0;
  bool is_pending_ = false;
};

// Rows [begin, end) of the call against one piece.
class Walk {
 public:
  Walk(const Job& job, const View& x, const Piece& piece, int64_t begin, int64_t end, Finish& finish)
      : job_(job), x_(x), piece_(piece), begin_(begin), end_(end), tiles_((end - begin + job.shape.rows - 1) / job.shape.rows), finish_(finish) {}

  void run() {
    for (int64_t step = 0; step < job_.steps; step += job_.steps_per_block)
      for (int64_t panel = piece_.panels.begin; panel < piece_.panels.end; ++panel)
        for (int64_t strip = piece_.strips.begin; strip < piece_.strips.end; strip += job_.shape.strips) run_block(panel, strip, step);
  }

 private:
  Block block(int64_t panel, int64_t strip, int64_t step) const {
    const uint8_t* base = job_.call.w.panels + panel * job_.call.w.panel_bytes + strip * job_.strip_bytes();
    return {base, step, std::min(job_.steps_per_block, job_.steps - step)};
  }

  Block following(int64_t panel, int64_t strip, int64_t step) const {
    if (strip + job_.shape.strips < piece_.strips.end) return block(panel, strip + job_.shape.strips, step);
    if (panel + 1 < piece_.panels.end) return block(panel + 1, piece_.strips.begin, step);
    if (step + job_.steps_per_block < job_.steps) return block(piece_.panels.begin, piece_.strips.begin, step + job_.steps_per_block);
    return {piece_.next, 0, std::min(job_.steps_per_block, job_.steps)};
  }

  // Where the sums of a tile lie. In one pass over K nobody comes back to them: two places in L1 are used in turn.
  uint8_t* place_sums(int64_t panel, int64_t tile, bool is_one_pass) {
    const int64_t place = is_one_pass ? turn_ : (panel - piece_.panels.begin) * job_.block_rows / job_.shape.rows + tile;
    turn_ ^= 1;
    return job_.sums + place * job_.shape.rows * kSumsStride;
  }

  void run_block(int64_t panel, int64_t strip, int64_t step) {
    const Block own = block(panel, strip, step), next = following(panel, strip, step);
    const bool is_stream = job_.is_narrow && !job_.is_expanded, is_last_step = step + own.steps == job_.steps;
    const bool is_one_pass = !job_.is_narrow && own.steps == job_.steps;
    // Where strips pass alone gate and up meet when all are done. A stream waits for memory, and its loads would come later beside an epilogue.
    const bool is_apart = is_stream || job_.shape.strips == 1;
    const Range done = {is_apart ? piece_.strips.begin : strip, strip + job_.shape.strips};
    MatrixArgs args = {};
    point_at_weights(job_, args, own);
    args.x_stride = x_.stride;
    args.rows = std::min(job_.call.m, job_.shape.rows);
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      const int64_t first = first_row(job_, begin_, tile), begin = begin_ + tile * job_.shape.rows;
      uint8_t* sums = place_sums(panel, tile, is_one_pass);
      args.x = x_.row(first) + step * 4;
      args.sums = sums + (strip - piece_.strips.begin) * kStepBytes;
      is_stream ? read_on(job_, args, next) : read_ahead(job_, args, next, tile, tiles_);
      args.finish = finish_.pending();
      job_.shape.run(args);
      finish_.done();
      if (!is_last_step || (is_apart && done.end != piece_.strips.end)) continue;
      // the rows that no other tile has
      finish_.begin(panel, done, {begin, std::min(end_, begin + job_.shape.rows)},
                    sums + (done.begin - piece_.strips.begin) * kStepBytes + (begin - first) * kSumsStride);
      if (is_apart) finish_.rest();
    }
  }

  const Job& job_;
  const View& x_;
  const Piece& piece_;
  const int64_t begin_, end_, tiles_;
  int64_t turn_ = 0;
  Finish& finish_;
};

// How a call is cut, and the parts of a thread's memory that it works in.
struct Layout {
  const MatrixShape& shape;
  bool is_narrow, is_expanded;
  int64_t steps, per_block, blocks, block_rows;
  int64_t groups;  // of panels that share a block of K, so that x is read from beyond L2 once for all of them
  int64_t sums_bytes, rows_bytes, expanded_bytes;
  int64_t row_bytes() const { return row_bytes_of(steps); }
  int64_t bytes() const { return sums_bytes + rows_bytes + expanded_bytes; }
};

int64_t panels_per_task(const PackedLinear& w, const MatrixBlocking& blocking, const Layout& cut, int threads) {
  if (cut.is_narrow || cut.per_block >= cut.steps || cut.block_rows * cut.row_bytes() <= blocking.x_bytes) return 1;
  const int64_t sharing = (threads + cut.blocks - 1) / cut.blocks, most = (w.n_panels + sharing - 1) / sharing;
  return std::clamp<int64_t>(blocking.sums_bytes / (cut.block_rows * kSumsStride), 1, most);
}

Layout layout_of(const PackedLinear& w, const MatrixTiles& tiles, int64_t m, bool is_routed, int threads) {
  const MatrixShape& shape = choose_shape(tiles, w, m, threads);
  Layout cut{shape, tiles.is_narrow(m), expanded_form(w.shape.format) != w.shape.format, w.k_padded / (has_bf16_rows(w.shape.format) ? 2 : 4), 0, 0, 0, 0, 0, 0, 0};
  const int64_t block_bytes = cut.is_narrow ? tiles.blocking.passing_bytes : tiles.blocking.w_bytes;
  cut.per_block = cut.is_narrow && !cut.is_expanded ? cut.steps : count_steps_per_block(w.shape, shape.strips, block_bytes, cut.steps);
  const int64_t most_rows = cut.per_block < cut.steps && !cut.is_narrow ? tiles.blocking.rows / 2 : tiles.blocking.rows;
  const int64_t row_tiles = (m + shape.rows - 1) / shape.rows;
  cut.blocks = (m + most_rows - 1) / most_rows, cut.block_rows = (row_tiles + cut.blocks - 1) / cut.blocks * shape.rows;
  const int64_t panels = panels_per_task(w, tiles.blocking, cut, threads);
  cut.groups = std::min(w.n_panels, round_up((w.n_panels + panels - 1) / panels, panels > 1 ? threads : 1));
  cut.sums_bytes = std::max((w.n_panels + cut.groups - 1) / cut.groups * cut.block_rows, 2 * shape.rows) * kSumsStride;
  cut.rows_bytes = is_routed ? round_up((cut.block_rows + shape.rows) * (cut.row_bytes() + kCacheLine), kCacheLine) : 0;
  cut.expanded_bytes = cut.is_expanded ? shape.strips * cut.per_block * kStepBytes : 0;
  return cut;
}

}  // namespace

int64_t matrix_scratch_bytes(const PackedLinear& w, const MatrixTiles& tiles, int64_t m, bool is_routed, int threads) {
  return layout_of(w, tiles, m, is_routed, threads).bytes();
}

void linear_by_matrix(const LinearCall& call, const MatrixTiles& tiles, int thread, int threads) {
  const PackedLinear& w = call.w;
  const Layout cut = layout_of(w, tiles, call.m, call.x_rows != nullptr, threads);
  const MatrixShape& shape = cut.shape;
  const int64_t blocks = cut.blocks, block_rows = cut.block_rows, groups = cut.groups;
  uint8_t* memory = linear_scratch(cut.bytes());
  Job job{call, shape, tiles.blocking, cut.steps, cut.per_block, block_rows, cut.is_narrow, cut.is_expanded,
          memory, memory + cut.sums_bytes, memory + cut.sums_bytes + cut.rows_bytes};

  // A task is a piece and a block of rows. Pieces of few rows are strips, as they are for register tiles.
  const int64_t cuts = cut.is_narrow ? std::min(pieces_per_panel(w, threads), kPanelStrips / shape.strips) : 1, strips = kPanelStrips / cuts, n_pieces = cuts * groups;
  auto piece_at = [&](int64_t i) {
    const Range own = share(w.n_panels, static_cast<int>(i / cuts), static_cast<int>(groups));
    return Piece{own, {i % cuts * strips, i % cuts * strips + strips}, nullptr};
  };
  auto begin_of = [&](const Piece& piece) { return w.panels + piece.panels.begin * w.panel_bytes + piece.strips.begin * job.strip_bytes(); };

  shape.begin(call.m);
  View x;
  Finish finish(call);
  int64_t ready = -1;
  for (Tasks tasks(blocks * n_pieces, *w.balance, thread, threads); tasks.has_task(); tasks.advance()) {
    const int64_t block = tasks.current() / n_pieces, begin = block * block_rows, end = std::min(call.m, begin + block_rows);
    if (begin >= end) continue;
    if (block != ready) x = view_block(job, first_row(job, begin, 0), end);
    ready = block;
    Piece piece = piece_at(tasks.current() % n_pieces);
    piece.next = begin_of(piece_at(tasks.following() % n_pieces));
    const RowBiases* biases = cut.is_narrow ? call.epilogue.biases : nullptr;
    if (biases != nullptr)
      biases->fetch(piece.panels.begin * kPanelLanes + piece.strips.begin * kStripLanes, (piece.strips.end - piece.strips.begin) * kStripLanes);
    Walk(job, x, piece, begin, end, finish).run();
  }
  shape.end();
}

}  // namespace diptych

// The driver of the linear layers: cuts (rows x panels) among threads, blocks K and rows for the caches, and calls the
// tiles of a kernel set. Nothing here touches the order of a sum.
#include "gemm/gemm.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "gemm/gemm_driver.h"
#include "sets/cpu_features.h"
#include "sets/kernel_sets.h"

namespace diptych {
namespace {

// Rows of one block: its partial sums (64 lanes, 4 bytes) stay in L1/L2 and its activations in L2 while the panels of W pass.
constexpr int64_t kBlockRows = 192;
// Bytes of one panel that stay in L2 while the tiles of a block of rows pass over them; expanded for a single tile, in L1.
constexpr int64_t kBlockPanelBytes = 256 << 10, kSingleExpandedBytes = 16 << 10;
// Inputs of a strip that stay in L1, spread, while the tiles of a block of rows pass over them: whole pairs of groups.
constexpr int64_t kSpreadInputs = 512;

// The most passes of few rows in place of wide tiles: those of packed codes are level with spread ones at 16 rows (AVX2, LAB.md).
constexpr int64_t kMostPasses = 2, kMostPackedPasses = 4;

// Most weights to bring in while waiting: what memory delivers between two layers.
constexpr int64_t kWaitBytes = 32 << 10;

// How the K of a format is addressed and cut.
struct KBlocks {
  int64_t units;            // of the whole K: steps (bf16, int8) or groups (int4, fp8)
  int64_t units_per_block;
  int64_t unit_bytes;       // of a strip; tiles of int4 and fp8 have one block, or what is made for each, and need none
  int64_t unit_words;       // of a row of x
};

struct Job : LinearCall {
  KBlocks cut;
  const TileShape& shape;
  uint8_t* acc;       // [kBlockRows][64]
  uint8_t* words;     // interleaved shapes: the tiles of the current block of rows, one after the other
  int16_t* sums;      // int4 shapes that ask for them: x summed by group, likewise, [rows of the shape][sums_stride]
  uint8_t* expanded;  // int4 spread or met by int8 tiles, fp8 by bf16's: one block of the shape's strips, else null
  int64_t tile_rows;  // the shape's rows, which divide no pair
  Format tile_format;
  int64_t words_per_row() const { return cut.units * cut.unit_words; }
};

KBlocks cut_inputs(const PackedLinear& w, Format tile_format, const TileShape& shape, bool is_single_tile) {
  if (tile_format == Format::int4 || tile_format == Format::fp8) {
    const int64_t group = tile_format == Format::int4 ? w.shape.group : kFp8Inputs, groups = w.k_padded / group;
    const int64_t blocks = shape.spread ? (w.k_padded + kSpreadInputs - 1) / kSpreadInputs : 1;
    return {groups, round_up((groups + blocks - 1) / blocks, shape.spread ? 2 : 1), 0, group / (tile_format == Format::int4 ? 4 : 2)};
  }
  const int64_t units = w.k_padded / inputs_per_step(tile_format), panel_bytes = kPanelStrips * units * kStepBytes;
  const bool is_expanded = tile_format != w.shape.format;
  const int64_t most = !is_single_tile ? kBlockPanelBytes : is_expanded ? kSingleExpandedBytes : panel_bytes;
  const int64_t blocks = std::max<int64_t>(1, (panel_bytes + most - 1) / most);
  // Whole unrolled rounds of the kernels (8 steps), and whole groups where fp8 is expanded, of int4 pairs of them.
  const int64_t round = !is_expanded ? 8 : w.shape.format == Format::int4 ? w.shape.group / 2 : kFp8Inputs / 2;
  return {units, round_up((units + blocks - 1) / blocks, round), kStepBytes, shape.form == XForm::widened ? 2 : 1};
}

// What one task covers: a panel, or some strips of it.
struct Piece {
  int64_t panel;
  Range strips;
  const uint8_t* next;  // what the thread likely reads after it
};

// Few rows: the lowest narrow shape that takes them all in one pass over W, or a part of them in each of few passes where that leaves fewer
// spare rows than the wide tiles of many rows, or costs less than spreading. The format becomes that of the tiles where they meet the
// weights expanded.
const TileShape& choose_shape(const KernelSet& set, int64_t m, Format& format) {
  const Tiles& tiles = *set.tiles[static_cast<int>(format)];
  const TileShape* highest = tiles.narrow;
  for (const TileShape* shape = highest; shape->rows != 0; ++shape) {
    if (shape->rows >= m) return *shape;
    highest = shape;
  }
  if (tiles.wide.run == nullptr) {
    format = expanded_form(format);
    return choose_shape(set, m, format);
  }
  const TileShape& wide = tiles.wide;
  const int64_t passes = (m + highest->rows - 1) / highest->rows;
  if (passes > (wide.spread ? kMostPackedPasses : kMostPasses)) return wide;
  const TileShape& part = choose_shape(set, (m + passes - 1) / passes, format);
  return wide.spread || passes * part.rows < round_up(m, wide.rows) ? part : wide;
}

// Where strips side by side would leave threads without work, the shape of as many rows that is a strip wide.
const TileShape& divisible_shape(const KernelSet& set, const TileShape& shape, Format format, int64_t m, const PackedLinear& w, int threads) {
  if (shape.strips == 1 || m > shape.rows || is_shared_evenly(w, kPanelStrips, threads)) return shape;
  for (const TileShape* other = set.tiles[static_cast<int>(format)]->narrow; other->rows != 0; ++other)
    if (other->rows == shape.rows && other->strips == 1) return *other;
  return shape;
}

int64_t count_tiles(const Job& job, int64_t rows) { return (rows + job.tile_rows - 1) / job.tile_rows; }

// Rows of one tile of [begin, end), fewer in the last.
Range tile_rows(const Job& job, int64_t begin, int64_t end, int64_t tile) {
  return {begin + tile * job.tile_rows, std::min(end, begin + (tile + 1) * job.tile_rows)};
}

// The rows of every tile of [begin, end) as interleaved words.
void interleave_block(const Job& job, int64_t begin, int64_t end) {
  const int64_t tiles = count_tiles(job, end - begin);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const Range rows = tile_rows(job, begin, end, tile);
    const uint8_t* x[kMaxTileRows];
    for (int64_t i = rows.begin; i < rows.end; ++i) x[i - rows.begin] = job.x.data + job.row_of(i) * job.x.stride_bytes;
    uint8_t* words = job.words + tile * job.words_per_row() * job.shape.rows * 4;
    if (job.shape.form == XForm::widened) {
      const InterleaveRows widen = job.tile_format == Format::int8 ? job.kernels.widen_bytes : job.kernels.widen_rows;
      widen(x, rows.end - rows.begin, job.cut.units, job.shape.rows, words);
    } else {
      job.kernels.interleave_rows(x, rows.end - rows.begin, job.words_per_row(), job.shape.rows, words);
    }
  }
}

int64_t sums_stride(const KBlocks& cut) { return round_up(cut.units, 2); }

// What the zeros of int4 groups are multiplied by, for every tile of [begin, end).
void sum_groups(const Job& job, int64_t begin, int64_t end) {
  for (int64_t row = 0; row < count_tiles(job, end - begin) * job.shape.rows; ++row) {
    const uint8_t* x = job.x.data + job.row_of(std::min(begin + row, end - 1)) * job.x.stride_bytes;
    int16_t* sums = job.sums + row * sums_stride(job.cut);
    sums[sums_stride(job.cut) - 1] = 0;
    job.kernels.sum_groups(reinterpret_cast<const int8_t*>(x), job.w.shape.group, job.cut.units, sums);
  }
}

// Points args at the rows of one tile and at one block of K from `unit` on.
void point_at_rows(const Job& job, TileArgs& args, int64_t tile, Range rows, int64_t unit) {
  const int64_t height = rows.end - rows.begin;
  for (int64_t i = 0; i < job.shape.rows; ++i) {
    const int64_t row = job.row_of(rows.begin + std::min(i, height - 1));  // the shape's spare rows repeat the last one
    args.x[i] = job.x.data + row * job.x.stride_bytes + unit * job.cut.unit_words * 4;
  }
  args.group_sums = job.sums + tile * job.shape.rows * sums_stride(job.cut) + unit;
  args.words = job.words + (tile * job.words_per_row() + unit * job.cut.unit_words) * job.shape.rows * 4;
}

// Block [unit, unit + units) of the shape's strips of one panel, from `strip` on, as the tiles take it.
void expand_block(const Job& job, const uint8_t* strip, int64_t unit, int64_t units) {
  const int64_t strip_bytes = job.w.panel_bytes / kPanelStrips;
  if (job.shape.spread) return job.kernels.spread_int4(strip, job.w.shape.group, unit, units, job.expanded);
  for (int64_t i = 0; i < job.shape.strips; ++i)
    expand_steps(job, strip + i * strip_bytes, unit, units, job.expanded + i * job.cut.units_per_block * kStepBytes);
}

// One piece against rows [begin, end), end - begin <= kBlockRows: strips outside, so that W is one stream; then blocks of K; then
// tiles. A tile is finished as soon as its sums are whole, behind the dot products of the next; where one pass makes them whole
// all tiles share the same partial sums, in L1.
void run_piece(const Job& job, const Piece& piece, int64_t begin, int64_t end) {
  const int64_t tiles = count_tiles(job, end - begin), strips = job.shape.strips, strip_bytes = job.w.panel_bytes / kPanelStrips;
  const bool is_expanded = job.expanded != nullptr, is_one_pass = strips == kPanelStrips && job.cut.units_per_block >= job.cut.units;
  TileArgs args;
  args.strip_bytes = is_expanded ? job.cut.units_per_block * kStepBytes : strip_bytes;
  args.group = job.w.shape.group;
  args.sums_stride = sums_stride(job.cut);
  args.is_stream = tiles == 1 && !is_expanded;
  args.is_past = args.is_stream && is_zen5();
  if (args.is_stream) ask_for_end(job, piece.panel, piece.strips, {begin, end});
  for (int64_t strip = piece.strips.begin; strip < piece.strips.end; strip += strips) {
    const uint8_t* base = job.w.panels + piece.panel * job.w.panel_bytes + strip * strip_bytes;
    const bool is_last = strip + strips == piece.strips.end;
    args.next = args.next_strip = is_last ? piece.next : base + strips * strip_bytes;
    for (int64_t unit = 0; unit < job.cut.units; unit += job.cut.units_per_block) {
      args.units = std::min(job.cut.units_per_block, job.cut.units - unit);
      args.strip = is_expanded ? job.expanded : base + unit * job.cut.unit_bytes;
      args.resume = unit != 0;
      args.next_bytes = args.units * strip_bytes * strips / (job.cut.units * tiles);
      if (is_expanded) expand_block(job, base, unit, args.units);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        uint8_t* acc = job.acc + (is_one_pass ? 0 : tile * job.shape.rows * kPanelLanes * 4);
        args.acc = acc + (strip - piece.strips.begin) * kStripLanes * 4;
        if (strip == piece.strips.begin || tiles > 1 || job.cut.units > args.units)  // one tile and one block: once for all strips
          point_at_rows(job, args, tile, tile_rows(job, begin, end, tile), unit);
        const bool is_whole = is_last && unit + args.units == job.cut.units;
        if (is_whole && !args.is_stream) ask_for_end(job, piece.panel, piece.strips, tile_rows(job, begin, end, tile));
        job.shape.run(args);
        args.next += args.next_bytes;
        if (is_whole) finish_tile(job, piece.panel, piece.strips, tile_rows(job, begin, end, tile), acc);
      }
    }
  }
}

}  // namespace

// Working memory of one thread, grown to the largest layer it has met.
uint8_t* linear_scratch(int64_t bytes) {
  static thread_local PageBuffer buffer;
  if (buffer.bytes() < bytes) buffer = PageBuffer(bytes);
  return buffer.data();
}

namespace {

// A tile of a call whose rows may have biases of their own.
void finish_rows(const LinearCall& call, int64_t first_row, FinishArgs& args) {
  alignas(64) float biases[kMaxTileRows * kPanelLanes];
  if (call.epilogue.biases->write(first_row, args.rows, args.first_lane, args.lanes, biases)) args.bias = biases, args.bias_stride = kPanelLanes;
  call.kernels.finish(args);
}

// Sums of pairs in place of those of their rows; each of these is whole, so that all are added in one order.
void add_pairs(float* sums, int64_t pairs, int64_t lanes) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float* own = sums + 2 * i * kPanelLanes;
    for (int64_t lane = 0; lane < lanes; ++lane) sums[i * kPanelLanes + lane] = own[lane] + own[kPanelLanes + lane];
  }
}

}  // namespace

void finish_tile(const LinearCall& call, int64_t panel, Range strips, Range rows, uint8_t* acc) {
  FinishArgs args;
  point_at_tile(call, panel, strips, rows, acc, args);
  if (args.outputs <= 0) return;  // padding
  const int64_t first_row = rows.begin / rows_of_one(call.x.kind);
  call.epilogue.biases == nullptr ? call.kernels.finish(args) : finish_rows(call, first_row, args);
  show_outputs(call, first_row, args);
}

void point_at_tile(const LinearCall& call, int64_t panel, Range strips, Range rows, uint8_t* acc, FinishArgs& args) {
  const Epilogue& epilogue = call.epilogue;
  const int64_t lanes_per_output = call.w.shape.gated ? 2 : 1;
  args.w = &call.w;
  args.first_lane = panel * kPanelLanes + strips.begin * kStripLanes;
  args.lanes = (strips.end - strips.begin) * kStripLanes;
  const int64_t first_output = args.first_lane / lanes_per_output;
  args.rows = rows.end - rows.begin;
  args.outputs = std::min(args.lanes / lanes_per_output, call.w.n_outputs - first_output);
  if (call.x.kind == RowsKind::bf16_pair) {
    rows = {rows.begin / 2, rows.end / 2}, args.rows /= 2;
    add_pairs(reinterpret_cast<float*>(acc), args.rows, args.lanes);
  }
  args.acc = acc;
  args.store = epilogue.store;
  args.activation = epilogue.activation;
  args.x_rows = call.x_rows != nullptr ? call.x_rows + rows.begin : nullptr;
  const int64_t first_x = call.x_rows != nullptr ? 0 : rows.begin;
  args.row_scales = call.x.scales + first_x, args.row_sums = call.x.sums + first_x;
  args.row_weights = epilogue.row_weights != nullptr ? epilogue.row_weights + rows.begin : nullptr;
  const int64_t element = args.store == Store::bf16 ? 2 : 4;
  args.out = acc, args.out_stride = kPanelLanes * element;
  if (epilogue.out != nullptr) {
    const int64_t first_row = epilogue.out_rows != nullptr ? 0 : rows.begin;
    args.out = static_cast<uint8_t*>(epilogue.out) + (first_row * epilogue.out_stride + first_output) * element;
    args.out_stride = epilogue.out_stride * element;
  }
  args.out_rows = epilogue.out != nullptr && epilogue.out_rows != nullptr ? epilogue.out_rows + rows.begin : nullptr;
  args.bias = call.w.bias != nullptr ? call.w.bias + args.first_lane : nullptr;
  args.bias_stride = 0;
}

void show_outputs(const LinearCall& call, int64_t first_row, const FinishArgs& args) {
  if (call.epilogue.reader == nullptr) return;
  const int64_t first = args.first_lane / (call.w.shape.gated ? 2 : 1);
  call.epilogue.reader->read(first_row, args.rows, first, args.outputs, reinterpret_cast<float*>(args.out), args.out_stride / 4);
}

void expand_steps(const LinearCall& call, const uint8_t* strip, int64_t step, int64_t steps, uint8_t* out) {
  if (call.w.shape.format == Format::fp8) {
    constexpr int64_t kSteps = kFp8Inputs / 2;
    return call.kernels.expand_fp8(strip, call.w.k_padded / kFp8Inputs, step / kSteps, steps / kSteps, out);
  }
  const int64_t group = call.w.shape.group, group_steps = group / 4;
  call.kernels.expand_int4(strip, group, step / group_steps, steps / group_steps, out);
}

namespace {

// How a call is cut, and the parts of a thread's memory that it works in.
struct Layout {
  Format tile_format;
  const TileShape& shape;
  KBlocks cut;
  int64_t tile_rows;           // the shape's rows, which divide no pair
  int64_t blocks, block_rows;
  int64_t acc_bytes, words_bytes, sums_bytes, expanded_bytes;
  int64_t bytes() const { return acc_bytes + words_bytes + sums_bytes + expanded_bytes; }
};

// m: rows in memory, of which so many stand for one.
Layout layout_of(const KernelSet& set, const PackedLinear& w, int64_t m, int64_t rows_of_one, int threads) {
  Format tile_format = w.shape.format;
  const TileShape& chosen = choose_shape(set, m, tile_format);
  const TileShape& shape = divisible_shape(set, chosen, tile_format, m, w, threads);
  const int64_t tile_rows = shape.rows / rows_of_one * rows_of_one, tiles = (m + tile_rows - 1) / tile_rows;
  const int64_t blocks = (m + kBlockRows - 1) / kBlockRows, block_tiles = (tiles + blocks - 1) / blocks, sums_rows = block_tiles * shape.rows;
  const KBlocks cut = cut_inputs(w, tile_format, shape, tiles == 1);
  const int64_t words_bytes = shape.interleaved() ? sums_rows * cut.units * cut.unit_words * 4 : 0;
  const int64_t sums_bytes = shape.has_sums(tile_format) ? sums_rows * sums_stride(cut) * 2 : 0;
  const int64_t expanded_bytes = shape.spread ? (cut.units_per_block + 1) / 2 * bytes_of_spread(w.shape.group)
                                 : tile_format != w.shape.format ? shape.strips * cut.units_per_block * kStepBytes : 0;
  return {tile_format, shape, cut, tile_rows, blocks, block_tiles * tile_rows, sums_rows * kPanelLanes * 4, round_up(words_bytes, 64), round_up(sums_bytes, 64),
          expanded_bytes};
}

const MatrixTiles* matrix_tiles(const KernelSet& set, const PackedLinear& w, int64_t m) {
  const MatrixTiles* matrix = set.matrix[static_cast<int>(w.shape.format)];
  return matrix != nullptr && m >= matrix->least_rows ? matrix : nullptr;
}

}  // namespace

int64_t linear_scratch_bytes(const KernelSet& set, const LinearShape& shape, int64_t m, bool is_routed, int threads) {
  const PackedLinear w = view_packed(shape, nullptr);
  if (is_grouped(shape.format)) return group_scratch_bytes(w, *set.groups, m);
  if (const MatrixTiles* matrix = matrix_tiles(set, w, m)) return matrix_scratch_bytes(w, *matrix, m, is_routed, threads);
  return layout_of(set, w, m, 1, threads).bytes();
}

void linear(const KernelSet& set, const PackedLinear& w, const Rows& x, const int32_t* x_rows, int64_t m,
            const Epilogue& epilogue, int thread, int threads) {
  if (m <= 0) return;
  const int64_t rows_of_one = diptych::rows_of_one(x.kind);
  m *= rows_of_one;
  const LinearCall call{*set.linear, w, x, x_rows, m, epilogue};
  if (is_grouped(w.shape.format)) return linear_by_groups(call, *set.groups, thread, threads);
  if (const MatrixTiles* matrix = matrix_tiles(set, w, m)) return linear_by_matrix(call, *matrix, thread, threads);
  const Layout layout = layout_of(set, w, m, rows_of_one, threads);
  const TileShape& shape = layout.shape;
  uint8_t* memory = linear_scratch(layout.bytes());
  uint8_t *words = memory + layout.acc_bytes, *sums = words + layout.words_bytes;
  uint8_t* expanded = layout.expanded_bytes > 0 ? sums + layout.sums_bytes : nullptr;
  const Job job{call, layout.cut, shape, memory, words, reinterpret_cast<int16_t*>(sums), expanded, layout.tile_rows, layout.tile_format};
  const int64_t pieces = std::min(pieces_per_panel(w, threads), kPanelStrips / shape.strips), strips = kPanelStrips / pieces, n_pieces = pieces * w.n_panels;
  int64_t ready = -1;
  for (Tasks tasks(layout.blocks * n_pieces, *w.balance, thread, threads); tasks.has_task(); tasks.advance()) {
    const int64_t block = tasks.current() / n_pieces, begin = block * layout.block_rows, end = std::min(m, begin + layout.block_rows);
    if (shape.interleaved() && block != ready) interleave_block(job, begin, end);
    if (layout.sums_bytes > 0 && block != ready) sum_groups(job, begin, end);
    ready = block;
    const int64_t piece = tasks.current() % n_pieces, strip = piece % pieces * strips;
    const uint8_t* next = w.panels + tasks.following() % n_pieces * (w.panel_bytes / pieces);
    if (epilogue.biases != nullptr) epilogue.biases->fetch(piece / pieces * kPanelLanes + strip * kStripLanes, strips * kStripLanes);
    if (begin < end) run_piece(job, {piece / pieces, {strip, strip + strips}, next}, begin, end);
  }
}

ReadAhead first_weights(const PackedLinear& w, int thread, int threads) {
  const int64_t pieces = pieces_per_panel(w, threads), piece_bytes = w.panel_bytes / pieces;
  const Range own = share(w.n_panels * pieces, part_of(thread, threads), count_parts(threads));
  const uint8_t* first = w.panels + own.begin * piece_bytes;
  return {first, first + std::min(kWaitBytes, (own.end - own.begin) * piece_bytes) / kStepBytes * kStepBytes};
}

// ---- activations -------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kInputPad = kMaxGroup;  // x is zero up to there, whatever the group of the weights

// Rows one after the other, one cache line more than their data so that a power-of-two K does not put all rows of a tile in the
// same cache sets.
int64_t row_stride(RowsKind kind, int64_t k) {
  return round_up(k, kInputPad) * (is_bf16(kind) || is_wide(kind) ? 2 : 1) + 64;
}

int64_t count_groups(RowsKind kind, int64_t k) { return group_of(kind) == 0 ? 1 : round_up(k, kInputPad) / group_of(kind); }

}  // namespace

int64_t rows_bytes(RowsKind kind, int64_t m, int64_t k) {
  const int64_t data = m * rows_of_one(kind) * row_stride(kind, k);
  if (is_bf16(kind)) return data;
  const int64_t of_groups = round_up(m * count_groups(kind, k) * 4, 64);
  return data + round_up(m * 4, 64) + (group_of(kind) == 0 ? 1 : 2) * of_groups;
}

Rows view_rows(RowsKind kind, int64_t m, int64_t k, void* memory) {
  Rows rows;
  rows.kind = kind;
  rows.m = m;
  rows.k = k;
  rows.k_padded = round_up(k, kInputPad);
  rows.stride_bytes = row_stride(kind, k);
  rows.data = static_cast<uint8_t*>(memory);
  if (is_bf16(kind)) return rows;
  rows.groups = count_groups(kind, k);
  uint8_t* next = rows.data + m * rows.stride_bytes;
  auto take = [&](auto*& part, int64_t count) { part = reinterpret_cast<std::decay_t<decltype(part)>>(next), next += round_up(count * 4, 64); };
  take(rows.scales, m), take(rows.sums, m * rows.groups);
  if (group_of(kind) != 0) take(rows.powers, m * rows.groups);
  return rows;
}

namespace {

template <typename Value>
const void* reordered(const Rows& rows, const void* x) {
  Value* out = reinterpret_cast<Value*>(linear_scratch(rows.k * static_cast<int64_t>(sizeof(Value))));
  for (int64_t i = 0; i < rows.k; ++i) out[i] = static_cast<const Value*>(x)[rows.order[i]];
  return out;
}

// What rounding x to bf16 took away, as bf16.
void round_rest(const LinearKernels& kernels, const float* x, int64_t k, const uint16_t* rounded, uint16_t* out) {
  for (int64_t begin = 0; begin < k; begin += kMaxGroup) {
    const int64_t count = std::min(kMaxGroup, k - begin);
    float rest[kMaxGroup];
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = static_cast<uint32_t>(rounded[begin + i]) << 16;
      std::memcpy(rest + i, &bits, 4);
      rest[i] = x[begin + i] - rest[i];
    }
    kernels.round_inputs(rest, count, out + begin);
  }
}

void prepare_source(const KernelSet& set, const Rows& rows, int64_t row, const void* x, Source source) {
  const LinearKernels& kernels = *set.linear;
  uint8_t* data = rows.data + row * rows_of_one(rows.kind) * rows.stride_bytes;
  if (rows.order != nullptr) x = source == Source::bf16 ? reordered<uint16_t>(rows, x) : reordered<float>(rows, x);
  if (const int64_t group = group_of(rows.kind); group != 0) {
    int8_t* high = reinterpret_cast<int8_t*>(data);
    int8_t* low = is_wide(rows.kind) ? high + rows.k_padded : nullptr;
    const int64_t first = row * rows.groups;
    set.groups->quantize(x, source, rows.k, group, high, low, rows.scales + row, rows.powers + first, rows.sums + first);
    return;
  }
  if (rows.kind == RowsKind::int8) {
    kernels.quantize_row(x, source, rows.k, reinterpret_cast<int8_t*>(data), rows.scales + row, rows.sums + row);
    return;
  }
  uint16_t* out = reinterpret_cast<uint16_t*>(data);
  if (source == Source::bf16) {
    std::memcpy(out, x, 2 * rows.k);
  } else {
    kernels.round_inputs(static_cast<const float*>(x), rows.k, out);
  }
  std::memset(out + rows.k, 0, 2 * (rows.k_padded - rows.k));
  if (rows.kind == RowsKind::bf16_pair) {
    uint16_t* rest = out + rows.stride_bytes / 2;
    std::memset(rest, 0, 2 * rows.k_padded);
    if (source == Source::f32) round_rest(kernels, static_cast<const float*>(x), rows.k, out, rest);
  }
}

}  // namespace

void prepare_row(const KernelSet& set, const Rows& rows, int64_t row, const float* x) {
  prepare_source(set, rows, row, x, Source::f32);
}

void prepare_rows(const KernelSet& set, const Rows& rows, const float* x, int64_t x_stride, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) prepare_source(set, rows, row, x + row * x_stride, Source::f32);
}

void prepare_rows(const KernelSet& set, const Rows& rows, const uint16_t* x, int64_t x_stride, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) prepare_source(set, rows, row, x + row * x_stride, Source::bf16);
}

}  // namespace diptych

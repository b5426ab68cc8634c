// The driver of the linear layers: cuts (rows x panels) among threads, blocks K and rows for the caches, and calls the
// tiles of the active instruction set. Nothing here touches the order of a sum.
#include "gemm.h"

#include <algorithm>
#include <cstring>

#include "cpu_features.h"
#include "gemm_kernels.h"

namespace diptych {
namespace {

// Rows of one block: its partial sums (64 lanes, 4 bytes) stay in L1/L2 and its activations in L2 while the panels of W pass.
constexpr int64_t kBlockRows = 192;
// Bytes of one panel that stay in L2 while the tiles of a block of rows pass over them.
constexpr int64_t kBlockPanelBytes = 256 << 10;

// How one K block of a format is addressed.
struct KBlocks {
  int64_t units;            // of the whole K
  int64_t units_per_block;
  int64_t unit_bytes;       // of the panel
  int64_t x_bytes;          // of a row of x, per unit
};

KBlocks cut_inputs(const PackedLinear& w) {
  KBlocks cut;
  if (w.shape.format == Format::int4) {
    cut.units = w.k_padded / w.shape.group;
    cut.unit_bytes = w.shape.group / 8 * kStepBytes + kGroupTailBytes;
    cut.x_bytes = w.shape.group;
  } else {
    cut.units = w.k_padded / inputs_per_step(w.shape.format);
    cut.unit_bytes = kStepBytes;
    cut.x_bytes = 4;
  }
  const int64_t blocks = std::max<int64_t>(1, (w.panel_bytes + kBlockPanelBytes - 1) / kBlockPanelBytes);
  // Whole unrolled rounds of the kernels (8 steps); an int4 group is a unit of its own.
  cut.units_per_block = round_up((cut.units + blocks - 1) / blocks, w.shape.format == Format::int4 ? 1 : 8);
  return cut;
}

struct Job {
  const KernelTable& kernels;
  const PackedLinear& w;
  const Rows& x;
  const int32_t* x_rows;
  const Epilogue& epilogue;
  KBlocks cut;
  int64_t row_of(int64_t i) const { return x_rows != nullptr ? x_rows[i] : i; }
};

void finish_tile(const Job& job, int64_t panel, int64_t first, int64_t rows, const void* acc) {
  FinishArgs args;
  args.w = &job.w;
  args.panel = panel;
  args.rows = rows;
  args.acc = acc;
  args.store = job.epilogue.store;
  args.activation = job.epilogue.activation;
  const int64_t element = args.store == Store::bf16 ? 2 : 4;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t from = job.row_of(first + i);
    const int64_t to = job.epilogue.out_rows != nullptr ? job.epilogue.out_rows[first + i] : first + i;
    args.row_scales[i] = job.x.scales + from;
    args.row_sums[i] = job.x.sums + from;
    args.out[i] = static_cast<uint8_t*>(job.epilogue.out) + to * job.epilogue.out_stride * element;
    args.row_weights[i] = job.epilogue.row_weights != nullptr ? job.epilogue.row_weights[first + i] : 1.0f;
  }
  job.kernels.finish(args);
}

// One panel against rows [begin, end), end - begin <= kBlockRows.
void run_panel(const Job& job, int64_t panel, int64_t begin, int64_t end, uint8_t* acc) {
  const int format = static_cast<int>(job.w.shape.format);
  const int64_t groups = job.x.k_padded / job.x.group, tiles = (end - begin + job.kernels.tile_rows - 1) / job.kernels.tile_rows;
  const uint8_t* base = job.w.panels + panel * job.w.panel_bytes;
  for (int64_t unit = 0; unit < job.cut.units; unit += job.cut.units_per_block) {
    TileArgs args;
    args.units = std::min(job.cut.units_per_block, job.cut.units - unit);
    args.panel = base + unit * job.cut.unit_bytes;
    args.group = job.w.shape.group;
    args.resume = unit != 0;
    args.prefetch = nullptr;
    args.prefetch_bytes = 0;
    const bool is_last = unit + args.units == job.cut.units;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      // Tiles of nearly equal height: 16 rows are 6 + 5 + 5, not 6 + 6 + 4.
      const int64_t first = begin + (end - begin) * tile / tiles, last = begin + (end - begin) * (tile + 1) / tiles;
      for (int64_t i = first; i < last; ++i) {
        const int64_t row = job.row_of(i);
        args.x[i - first] = job.x.data + row * job.x.stride_bytes + unit * job.cut.x_bytes;
        args.group_sums[i - first] = job.x.group_sums + row * groups + unit;
      }
      args.acc = acc + (first - begin) * kPanelLanes * 4;
      job.kernels.tile[format][last - first](args);
      if (is_last) finish_tile(job, panel, first, last - first, args.acc);
    }
  }
}

}  // namespace

const KernelTable& active_kernels() {
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::scalar: return scalar_kernels();
    case Isa::avx2: return avx2_kernels();
    case Isa::avx512: return avx512_kernels();
  }
#endif
  return scalar_kernels();
}

void linear(const PackedLinear& w, const Rows& x, const int32_t* x_rows, int64_t m, const Epilogue& epilogue,
            int thread, int threads) {
  alignas(64) uint8_t acc[kBlockRows * kPanelLanes * 4];
  const Job job{active_kernels(), w, x, x_rows, epilogue, cut_inputs(w)};
  const int64_t blocks = (m + kBlockRows - 1) / kBlockRows;
  const Range mine = share(blocks * w.n_panels, thread, threads);
  for (int64_t task = mine.begin; task < mine.end; ++task) {
    const int64_t block = task / w.n_panels, panel = task % w.n_panels;
    run_panel(job, panel, m * block / blocks, m * (block + 1) / blocks, acc);
  }
}

// ---- activations -------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kInputPad = 128;  // the largest int4 group: x is zero up to there

// Rows one after the other, one cache line more than their data so that a power-of-two K does not put all rows of a tile in the
// same cache sets.
int64_t row_stride(RowsKind kind, int64_t k) {
  return round_up(k, kInputPad) * (kind == RowsKind::bf16 ? 2 : 1) + 64;
}

}  // namespace

int64_t rows_bytes(RowsKind kind, int64_t m, int64_t k, int64_t group) {
  const int64_t data = m * row_stride(kind, k);
  if (kind == RowsKind::bf16) return data;
  return data + 2 * round_up(m * 4, 64) + round_up(m * (round_up(k, kInputPad) / group) * 4, 64);
}

Rows view_rows(RowsKind kind, int64_t m, int64_t k, int64_t group, void* memory) {
  Rows rows;
  rows.kind = kind;
  rows.m = m;
  rows.k = k;
  rows.k_padded = round_up(k, kInputPad);
  rows.group = group;
  rows.stride_bytes = row_stride(kind, k);
  rows.data = static_cast<uint8_t*>(memory);
  if (kind == RowsKind::bf16) return rows;
  uint8_t* next = rows.data + m * rows.stride_bytes;
  rows.scales = reinterpret_cast<float*>(next);
  rows.sums = reinterpret_cast<int32_t*>(next + round_up(m * 4, 64));
  rows.group_sums = reinterpret_cast<float*>(next + 2 * round_up(m * 4, 64));
  return rows;
}

void prepare_row(const Rows& rows, int64_t row, const float* x) {
  const KernelTable& kernels = active_kernels();
  uint8_t* data = rows.data + row * rows.stride_bytes;
  if (rows.kind == RowsKind::bf16) {
    uint16_t* out = reinterpret_cast<uint16_t*>(data);
    kernels.round_inputs(x, rows.k, out);
    std::memset(out + rows.k, 0, 2 * (rows.k_padded - rows.k));
    return;
  }
  int8_t* out = reinterpret_cast<int8_t*>(data);
  const float highest = kernels.abs_max(x, rows.k);
  const float scale = highest / 127.0f;
  const float inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
  kernels.quantize_int8(x, rows.k, inverse, out);
  std::memset(out + rows.k, 0, rows.k_padded - rows.k);
  const int64_t groups = rows.k_padded / rows.group;
  int32_t total = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int32_t sum = kernels.sum_int8(out + group * rows.group, rows.group);
    rows.group_sums[row * groups + group] = static_cast<float>(sum);
    total += sum;
  }
  rows.scales[row] = scale;
  rows.sums[row] = total;
}

void prepare_rows(const Rows& rows, const float* x, int64_t x_stride, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) prepare_row(rows, row, x + row * x_stride);
}

void clear_padding(const Rows& rows, int64_t begin, int64_t end) {
  const int64_t element = rows.kind == RowsKind::bf16 ? 2 : 1;
  for (int64_t row = begin; row < end; ++row)
    std::memset(rows.data + row * rows.stride_bytes + rows.k * element, 0, (rows.k_padded - rows.k) * element);
}

}  // namespace diptych

// Linear layers on matrix tiles, the text of gemm_amx.cpp (the instructions) and of gemm_amx_twin.cpp (their twin by AVX-512).
#include <immintrin.h>

#include <algorithm>
#include <utility>

#include "gemm/gemm_amx.h"
#include "sets/amx_tiles.h"
#include "sets/avx512_math.h"
#include "sets/kernel_sets.h"

namespace diptych {
namespace {

#include "gemm/gemm_finish_avx512.inl"

template <class Function, int... kI>
inline void each(std::integer_sequence<int, kI...>, Function&& function) {
  (function(std::integral_constant<int, kI>{}), ...);
}
template <int kCount, class Function>
inline void each(Function&& function) {
  each(std::make_integer_sequence<int, kCount>{}, function);
}

constexpr int64_t kStepsPerTile = kTileRows;  // a tile of W is 16 steps of a strip as they lie, 1,024 contiguous bytes
constexpr int64_t kSumsStride = kPanelLanes * 4;
constexpr int64_t kLine = 64;

// How the registers are shared out: sums, then x, then W. Where there are enough, x and W have two of each, used in turn.
template <int kRowTiles, int kStrips>
struct Registers {
  static constexpr int kSums = kRowTiles * kStrips, kTurns = kSums + 2 * (kRowTiles + kStrips) <= kTileRegisters ? 2 : 1;
  static constexpr int kFirstW = kSums + kTurns * kRowTiles, kCountW = kTileRegisters - kFirstW;
  static constexpr int sum(int row_tile, int strip) { return row_tile * kStrips + strip; }
  static constexpr int x(int turn, int row_tile) { return kSums + turn * kRowTiles + row_tile; }
  static constexpr int w(int turn, int strip) { return kFirstW + (turn * kStrips + strip) % kCountW; }
  static_assert(kCountW > 0);
};

template <int kRowTiles, int kStrips>
void begin(int64_t rows) {
  using R = Registers<kRowTiles, kStrips>;
  TileConfig config;
  for (int tile = 0; tile < kTileRegisters; ++tile) config.row_bytes[tile] = kTileRowBytes, config.rows[tile] = kTileRows;
  for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
    const auto height = static_cast<uint8_t>(std::clamp<int64_t>(rows - row_tile * kTileRows, 1, kTileRows));
    for (int strip = 0; strip < kStrips; ++strip) config.rows[R::sum(row_tile, strip)] = height;
    for (int turn = 0; turn < R::kTurns; ++turn) config.rows[R::x(turn, row_tile)] = height;
  }
  tile_configure(config);
}

void end() { tile_release(); }

// What a tile brings into L2 for those behind it, spread evenly over its steps. The rest is left to the processor: tiles that wait in L2
// come as fast as they are multiplied, and a prefetch takes a place in the queue of their loads.
template <int kStrips>
class ReadingAhead {
 public:
  DIPTYCH_FORCED ReadingAhead(const MatrixArgs& args, int64_t tiles)
      : at_(args.next_w), end_(args.next_w + args.first_bytes), then_(args.then_w), strip_bytes_(args.next_strip_bytes),
        turn_bytes_((args.next_bytes / kLine + tiles - 1) / tiles * kLine) {}

  DIPTYCH_FORCED void turn() {
    for (int64_t byte = 0; byte < turn_bytes_; byte += kLine, at_ += kLine) {
      if (at_ == end_) at_ = then_;
      for (int strip = 0; strip < kStrips; ++strip) __builtin_prefetch(at_ + strip * strip_bytes_, 0, 2);
    }
  }

 private:
  const uint8_t *at_, *const end_, *const then_;
  const int64_t strip_bytes_, turn_bytes_;
};

// The rows of the tile before, some with each step of the products.
template <class Rows>
class Finishing {
 public:
  DIPTYCH_FORCED Finishing(const FinishArgs& args, int64_t steps)
      : rows_(args), count_(args.rows), per_step_((count_ + steps - 1) / steps) {}
  DIPTYCH_FORCED void turn() {
    for (const int64_t end = std::min(next_ + per_step_, count_); next_ < end; ++next_) {
      rows_.finish(next_);
      rows_.ask(next_ + count_);
    }
  }

 private:
  Rows rows_;
  const int64_t count_, per_step_;
  int64_t next_ = 0;
};
struct NoFinishing {
  void turn() {}
};

// One step of all products. kWhole: int8. Rows pass over the strips of a wide shape, which stay in L1.
template <bool kWhole, int kRowTiles, int kStrips, int kTurn>
inline void multiply(const uint8_t* x, int64_t x_stride, const uint8_t* w, int64_t strip_bytes) {
  using R = Registers<kRowTiles, kStrips>;
  each<kRowTiles>([&](auto row_tile) {
    constexpr int kX = R::x(kTurn, row_tile);
    const uint8_t* from = x + row_tile * kTileRows * x_stride;
    kStrips > 1 ? tile_load_passing<kX>(from, x_stride) : tile_load<kX>(from, x_stride);
  });
  each<kStrips>([&](auto strip) {
    constexpr int kStrip = decltype(strip)::value, kW = R::w(kTurn, kStrip);
    tile_load<kW>(w + kStrip * strip_bytes, kTileRowBytes);
    each<kRowTiles>([&](auto row_tile) {
      constexpr int kSum = R::sum(row_tile, kStrip), kX = R::x(kTurn, row_tile);
      if constexpr (kWhole) {
        dot_int8<kSum, kX, kW>();
      } else {
        dot_bf16<kSum, kX, kW>();
      }
    });
  });
}

// What is left of W behind the last whole tile, filled up with zeros: it must not be read past its end.
template <bool kWhole, int kRowTiles, int kStrips>
inline void multiply_rest(const MatrixArgs& args, int64_t tiles) {
  alignas(64) uint8_t rest[kStrips][kTileBytes] = {};
  const int64_t bytes = (args.steps - tiles * kStepsPerTile) * kStepBytes;
  for (int strip = 0; strip < kStrips; ++strip) std::memcpy(rest[strip], args.w + strip * args.strip_bytes + tiles * kTileBytes, bytes);
  multiply<kWhole, kRowTiles, kStrips, 0>(args.x + tiles * kTileRowBytes, args.x_stride, rest[0], kTileBytes);
}

template <bool kWhole, int kRowTiles, int kStrips, class Beside>
DIPTYCH_FORCED void run_beside(const MatrixArgs& args, int64_t tiles, Beside beside) {
  using R = Registers<kRowTiles, kStrips>;
  uint8_t* sums = static_cast<uint8_t*>(args.sums);
  auto place = [&](int sum) { return sums + sum / kStrips * kTileRows * kSumsStride + sum % kStrips * kTileRowBytes; };
  each<R::kSums>([&](auto sum) {
    if (args.resume) {
      tile_load<sum>(place(sum), kSumsStride);
    } else {
      tile_zero<sum>();
    }
  });
  ReadingAhead<kStrips> ahead(args, std::max<int64_t>(tiles, 1));
  int64_t tile = 0;
  auto step = [&](auto turn) __attribute__((always_inline)) {
    ahead.turn();
    beside.turn();
    multiply<kWhole, kRowTiles, kStrips, turn>(args.x + tile * kTileRowBytes, args.x_stride, args.w + tile * kTileBytes, args.strip_bytes);
    ++tile;
  };
  while (tile + R::kTurns <= tiles) each<R::kTurns>(step);
  if (tile < tiles) step(std::integral_constant<int, 0>{});
  if (args.steps % kStepsPerTile != 0) {
    if (tiles == 0) beside.turn();
    multiply_rest<kWhole, kRowTiles, kStrips>(args, tiles);
  }
  each<R::kSums>([&](auto sum) { tile_store<sum>(place(sum), kSumsStride); });
}

template <bool kWhole, int kRowTiles, int kStrips, bool kGated, Store kStore>
void run_finishing(const MatrixArgs& args, int64_t tiles) {
  using Beside = Finishing<FinishRows<kWhole, kGated, kStrips, kStore>>;
  run_beside<kWhole, kRowTiles, kStrips>(args, tiles, Beside(*args.finish, std::max<int64_t>(tiles, 1)));
}

template <bool kWhole, int kRowTiles, int kStrips, bool kGated>
void run_storing(const MatrixArgs& args, int64_t tiles) {
  switch (args.finish->store) {
    case Store::f32: return run_finishing<kWhole, kRowTiles, kStrips, kGated, Store::f32>(args, tiles);
    case Store::bf16: return run_finishing<kWhole, kRowTiles, kStrips, kGated, Store::bf16>(args, tiles);
    case Store::add_f32: return run_finishing<kWhole, kRowTiles, kStrips, kGated, Store::add_f32>(args, tiles);
    case Store::gate_f32: return run_finishing<kWhole, kRowTiles, kStrips, kGated, Store::gate_f32>(args, tiles);
  }
}

template <bool kWhole, int kRowTiles, int kStrips>
void run(const MatrixArgs& args) {
  const int64_t tiles = args.steps / kStepsPerTile;
  if constexpr (kStrips > 1)  // a strip alone may hold gates without their up
    if (args.finish != nullptr)
      return args.finish->w->shape.gated ? run_storing<kWhole, kRowTiles, kStrips, true>(args, tiles) : run_storing<kWhole, kRowTiles, kStrips, false>(args, tiles);
  run_beside<kWhole, kRowTiles, kStrips>(args, tiles, NoFinishing{});
}

template <bool kWhole, int kRowTiles, int kStrips>
constexpr MatrixShape shape() {
  return {kRowTiles * kTileRows, kStrips, begin<kRowTiles, kStrips>, run<kWhole, kRowTiles, kStrips>, end};
}

// Tuned on an Emerald Rapids (csrc/bench/amx_bench.cpp; LAB.md says what it is near to): a core of 48 KiB of L1 and 2 MiB of L2, which
// brings 49 bytes a cycle from L2 and takes 16 back, so that W has to lie in L1 and sums should come back seldom.
constexpr MatrixBlocking kBlocking = {
    512,       // rows
    28 << 10,  // w_bytes
    1 << 20,   // x_bytes
    1 << 20,   // sums_bytes
    16 << 10,  // passing_bytes
    2 << 10,   // stream_ahead
};

// The fewest rows for which tiles beat the register tiles of AVX-512; whole sums have the same bits in both.
constexpr int64_t kLeastRowsInt8 = 7, kLeastRowsInt4 = 7;

template <bool kWhole>
constexpr MatrixTiles tiles(int64_t least_rows) {
  return {least_rows, {shape<kWhole, 1, 2>(), shape<kWhole, 1, 1>(), shape<kWhole, 2, 2>(), shape<kWhole, 2, 1>()}, shape<kWhole, 2, 2>(), kBlocking};
}

#include "gemm/gemm_amx_groups.inl"

}  // namespace

namespace DIPTYCH_AMX_SET {

extern constexpr MatrixTiles kBf16Matrix = tiles<false>(1), kInt8Matrix = tiles<true>(kLeastRowsInt8), kInt4Matrix = tiles<true>(kLeastRowsInt4);
extern constexpr MatrixGroups kGroups = {{kTileRows, kGroupStrips, run_group_tile<false>, begin_groups, end},
                                         {kTileRows, kGroupStrips, run_group_tile<true>, begin_groups, end}, row_form_of_groups, {16, 8}, kGroupRows};
extern const MatrixShape kWideShapes[2][2] = {{shape<false, 1, 4>(), shape<false, 2, 2>()}, {shape<true, 1, 4>(), shape<true, 2, 2>()}};

}  // namespace DIPTYCH_AMX_SET
}  // namespace diptych

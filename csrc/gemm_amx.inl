// Linear layers on matrix tiles, the text of gemm_amx.cpp (the instructions) and of gemm_amx_twin.cpp (their twin in plain C++).
#include <algorithm>
#include <utility>

#include "amx_tiles.h"
#include "gemm_amx.h"
#include "kernel_sets.h"

namespace diptych {
namespace {

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
  ReadingAhead(const MatrixArgs& args, int64_t tiles)
      : args_(args), lines_((args.next_bytes / kLine + tiles - 1) / tiles), to_then_(args.then_w - (args.next_w + args.first_bytes)) {}

  DIPTYCH_FORCED void turn(int64_t tile) {
    for (int64_t line = tile * lines_; line < (tile + 1) * lines_; ++line) {
      const uint8_t* at = args_.next_w + line * kLine + (line * kLine < args_.first_bytes ? 0 : to_then_);
      for (int strip = 0; strip < kStrips; ++strip) __builtin_prefetch(at + strip * args_.next_strip_bytes, 0, 2);
    }
  }

 private:
  const MatrixArgs& args_;
  const int64_t lines_, to_then_;
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

template <bool kWhole, int kRowTiles, int kStrips>
void run(const MatrixArgs& args) {
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
  const int64_t tiles = args.steps / kStepsPerTile;
  ReadingAhead<kStrips> ahead(args, std::max<int64_t>(tiles, 1));
  int64_t tile = 0;
  auto step = [&](auto turn) {
    ahead.turn(tile);
    if (args.beside != nullptr) args.beside->advance(tile, tiles);
    multiply<kWhole, kRowTiles, kStrips, turn>(args.x + tile * kTileRowBytes, args.x_stride, args.w + tile * kTileBytes, args.strip_bytes);
    ++tile;
  };
  while (tile + R::kTurns <= tiles) each<R::kTurns>(step);
  if (tile < tiles) step(std::integral_constant<int, 0>{});
  if (args.steps % kStepsPerTile != 0) multiply_rest<kWhole, kRowTiles, kStrips>(args, tiles);
  each<R::kSums>([&](auto sum) { tile_store<sum>(place(sum), kSumsStride); });
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

#include "gemm_amx_groups.inl"

}  // namespace

namespace DIPTYCH_AMX_SET {

extern constexpr MatrixTiles kBf16Matrix = tiles<false>(1), kInt8Matrix = tiles<true>(kLeastRowsInt8), kInt4Matrix = tiles<true>(kLeastRowsInt4);
extern constexpr MatrixGroups kGroups = {{kTileRows, kGroupStrips, run_group_tile<false>, begin_groups, end},
                                         {kTileRows, kGroupStrips, run_group_tile<true>, begin_groups, end}, row_form_of_groups, {15, 7}, kGroupRows};
extern const MatrixShape kWideShapes[2][2] = {{shape<false, 1, 4>(), shape<false, 2, 2>()}, {shape<true, 1, 4>(), shape<true, 2, 2>()}};

}  // namespace DIPTYCH_AMX_SET
}  // namespace diptych

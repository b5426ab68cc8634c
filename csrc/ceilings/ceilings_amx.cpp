// Products of tiles that stay in their registers, on random data: constants would draw less power and run at a higher clock.
#include "sets/amx_tiles.h"
#include "sets/kernel_sets.h"

namespace diptych {
namespace {

// Four sums, two tiles of each side: every product needs another sum than the one before it.
template <bool kWhole>
double burst(int64_t rounds) {
  TileConfig config;
  for (int tile = 0; tile < kTileRegisters; ++tile) config.rows[tile] = kTileRows, config.row_bytes[tile] = kTileRowBytes;
  alignas(64) uint8_t data[4][kTileBytes];
  uint32_t state = 12345;
  for (auto& tile : data)
    for (int64_t i = 0; i < kTileBytes; i += 2) {
      state = state * 1664525 + 1013904223;
      tile[i] = static_cast<uint8_t>(state >> 24);
      tile[i + 1] = static_cast<uint8_t>(kWhole ? state >> 16 : 0x3c | (state >> 16 & 0x83));  // bf16 of about one
    }
  tile_configure(config);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  tile_load<4>(data[0], kTileRowBytes), tile_load<5>(data[1], kTileRowBytes);
  tile_load<6>(data[2], kTileRowBytes), tile_load<7>(data[3], kTileRowBytes);
  for (int64_t round = 0; round < rounds; ++round) {
    if constexpr (kWhole) {
      dot_int8<0, 4, 6>(), dot_int8<1, 4, 7>(), dot_int8<2, 5, 6>(), dot_int8<3, 5, 7>();
    } else {
      dot_bf16<0, 4, 6>(), dot_bf16<1, 4, 7>(), dot_bf16<2, 5, 6>(), dot_bf16<3, 5, 7>();
    }
  }
  tile_release();
  return 2.0 * 4.0 * 16.0 * 16.0 * (kWhole ? 64.0 : 32.0) * static_cast<double>(rounds);
}

}  // namespace

namespace amx {
extern const CeilingLoops kCeilings = {nullptr, burst<false>, burst<true>, nullptr, nullptr};
}

}  // namespace diptych

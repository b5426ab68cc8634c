// The matrix tiles of AMX: eight registers of up to 16 rows of 64 bytes, their loads, stores and products. One set of functions in two
// forms, chosen by the translation unit: the instructions, or (DIPTYCH_AMX_TWIN) the same in plain C++ bit for bit, so that what
// is written for the tiles can be tested on any machine. Tile numbers are template arguments, as the instructions hold them.
//
// What the products compute (Intel's manual, and held against the processor on 20,000 random products each):
//   dot_bf16  C fp32 [rows][16] += A bf16 [rows][2 n] x B [n][16] pairs of bf16. The even and the odd products of an output are summed
//             apart by FMA in ascending order from zero, their sum is then added to C: one rounding each, to nearest even, denormals
//             read and written as zero.
//   dot_int8  C int32 [rows][16] += A s8 [rows][4 n] x B [n][16] words of four u8, exact; dot_signed of four s8.
// A row of C comes from that row of A alone, so the number of rows changes no bit.
#pragma once

#include <cstdint>
#include <cstring>

namespace diptych {
namespace {

constexpr int64_t kTileRows = 16, kTileRowBytes = 64, kTileBytes = kTileRows * kTileRowBytes;
constexpr int kTileRegisters = 8;

// What the registers hold, as LDTILECFG reads it.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#if !defined(DIPTYCH_AMX_TWIN)

// Own assembly and not the compiler's intrinsics: those want literals for tile numbers, and GCC's tell nothing of the memory that they
// read (of eight bytes in LDTILECFG), so that stores may move behind them.
inline void tile_configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
inline void tile_release() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int kTile>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
inline void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
// The same of what is read once while other tiles are to stay in L1: it takes no room there.
template <int kTile>
inline void tile_load_passing(const void* from, int64_t stride) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void tile_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kC, int kA, int kB>
inline void dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}
template <int kC, int kA, int kB>
inline void dot_int8() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}
template <int kC, int kA, int kB>
inline void dot_signed() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#else

typedef float TileLanes __attribute__((vector_size(64)));
typedef int32_t TileWhole __attribute__((vector_size(64)));

struct TileFile {
  TileConfig config;
  alignas(64) uint8_t data[kTileRegisters][kTileRows][kTileRowBytes];
};
inline TileFile& tile_file() {
  static thread_local TileFile file;
  return file;
}

inline void tile_configure(const TileConfig& config) {
  tile_file().config = config;
  std::memset(tile_file().data, 0, sizeof tile_file().data);
}
inline void tile_release() { tile_file().config = TileConfig{}; }

template <int kTile>
inline void tile_zero() {
  std::memset(tile_file().data[kTile], 0, kTileBytes);
}
template <int kTile>
inline void tile_load(const void* from, int64_t stride) {
  TileFile& file = tile_file();
  tile_zero<kTile>();
  for (int64_t row = 0; row < file.config.rows[kTile]; ++row)
    std::memcpy(file.data[kTile][row], static_cast<const uint8_t*>(from) + row * stride, file.config.row_bytes[kTile]);
}
template <int kTile>
inline void tile_load_passing(const void* from, int64_t stride) {
  tile_load<kTile>(from, stride);
}
template <int kTile>
inline void tile_store(void* to, int64_t stride) {
  const TileFile& file = tile_file();
  for (int64_t row = 0; row < file.config.rows[kTile]; ++row)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, file.data[kTile][row], file.config.row_bytes[kTile]);
}

// Denormals become zeros of their sign.
inline TileLanes tile_flush(TileLanes x) {
  const TileWhole bits = (TileWhole)x, is_normal = (bits & 0x7f800000) != 0;
  return (TileLanes)(bits & (is_normal | INT32_MIN));
}
inline TileLanes tile_fma(float x, TileLanes w, TileLanes sum) {
  for (int lane = 0; lane < 16; ++lane) sum[lane] = __builtin_fmaf(x, w[lane], sum[lane]);
  return tile_flush(sum);
}
inline TileWhole tile_words(const uint8_t* row) {
  TileWhole words;
  std::memcpy(&words, row, sizeof words);
  return words;
}

template <int kC, int kA, int kB>
inline void dot_bf16() {
  TileFile& file = tile_file();
  const int pairs = file.config.row_bytes[kA] / 4;
  TileLanes even_w[kTileRows], odd_w[kTileRows];
  for (int n = 0; n < pairs; ++n) {
    const TileWhole words = tile_words(file.data[kB][n]);
    even_w[n] = tile_flush((TileLanes)(words << 16)), odd_w[n] = tile_flush((TileLanes)(words & -65536));
  }
  for (int row = 0; row < file.config.rows[kC]; ++row) {
    const TileWhole words = tile_words(file.data[kA][row]);
    const TileLanes even_x = tile_flush((TileLanes)(words << 16)), odd_x = tile_flush((TileLanes)(words & -65536));
    TileLanes even = {}, odd = {};
    for (int n = 0; n < pairs; ++n) even = tile_fma(even_x[n], even_w[n], even), odd = tile_fma(odd_x[n], odd_w[n], odd);
    const TileLanes sum = tile_flush(tile_flush((TileLanes)tile_words(file.data[kC][row])) + tile_flush(even + odd));
    std::memcpy(file.data[kC][row], &sum, sizeof sum);
  }
}

template <int kC, int kA, int kB, bool kSigned>
inline void dot_bytes() {
  TileFile& file = tile_file();
  const int words = file.config.row_bytes[kA] / 4;
  TileWhole w[kTileRows][4];
  for (int n = 0; n < words; ++n)
    for (int i = 0; i < 4; ++i) {
      const TileWhole last = tile_words(file.data[kB][n]) << (24 - 8 * i);  // the byte as the highest of its word
      w[n][i] = kSigned ? last >> 24 : (last >> 24) & 0xff;
    }
  for (int row = 0; row < file.config.rows[kC]; ++row) {
    const int8_t* x = reinterpret_cast<const int8_t*>(file.data[kA][row]);
    TileWhole sum = tile_words(file.data[kC][row]);
    for (int n = 0; n < words; ++n)
      for (int i = 0; i < 4; ++i) sum += w[n][i] * x[4 * n + i];
    std::memcpy(file.data[kC][row], &sum, sizeof sum);
  }
}
template <int kC, int kA, int kB>
inline void dot_int8() {
  dot_bytes<kC, kA, kB, false>();
}
template <int kC, int kA, int kB>
inline void dot_signed() {
  dot_bytes<kC, kA, kB, true>();
}

#endif

}  // namespace
}  // namespace diptych

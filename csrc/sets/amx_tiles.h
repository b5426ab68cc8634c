// The matrix tiles of AMX: eight registers of up to 16 rows of 64 bytes, their loads, stores and products. One set of functions in two
// forms, chosen by the translation unit: the instructions, or (DIPTYCH_AMX_TWIN) the same by AVX-512 bit for bit, so that what
// is written for the tiles can be tested on more machines. Tile numbers are template arguments, as the instructions hold them.
//
// What the products compute (Intel's manual, and held against the processor on 20,000 random products each):
//   dot_bf16  C fp32 [rows][16] += A bf16 [rows][2 n] x B [n][16] pairs of bf16. The even and the odd products of an output are summed
//             apart by FMA in ascending order from zero, their sum is then added to C: one rounding each, to nearest even, denormals
//             read and written as zero.
//   dot_int8  C int32 [rows][16] += A s8 [rows][4 n] x B [n][16] words of four u8, exact; dot_signed of four s8.
// A row of C comes from that row of A alone, so the number of rows changes no bit.
#pragma once

#if defined(DIPTYCH_AMX_TWIN)
#include <immintrin.h>
#endif

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
inline __mmask64 tile_columns(const TileFile& file, int tile) { return ~uint64_t{0} >> (kTileRowBytes - file.config.row_bytes[tile]); }
template <int kTile>
inline void tile_load(const void* from, int64_t stride) {
  TileFile& file = tile_file();
  const int64_t rows = file.config.rows[kTile];
  const __mmask64 columns = tile_columns(file, kTile);
  for (int64_t row = 0; row < rows; ++row)
    _mm512_store_si512(file.data[kTile][row], _mm512_maskz_loadu_epi8(columns, static_cast<const uint8_t*>(from) + row * stride));
  for (int64_t row = rows; row < kTileRows; ++row) _mm512_store_si512(file.data[kTile][row], _mm512_setzero_si512());
}
template <int kTile>
inline void tile_load_passing(const void* from, int64_t stride) {
  tile_load<kTile>(from, stride);
}
template <int kTile>
inline void tile_store(void* to, int64_t stride) {
  const TileFile& file = tile_file();
  const __mmask64 columns = tile_columns(file, kTile);
  for (int64_t row = 0; row < file.config.rows[kTile]; ++row)
    _mm512_mask_storeu_epi8(static_cast<uint8_t*>(to) + row * stride, columns, _mm512_load_si512(file.data[kTile][row]));
}

// Denormals become zeros of their sign.
inline __m512 tile_flush(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 is_small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  return _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, is_small, bits, _mm512_set1_epi32(INT32_MIN)));
}
// The even and the odd bf16 of a row; `least` becomes the least exponent of those that are not zero, in its place.
inline void tile_halves(const uint8_t* row, __m512 (&halves)[2], __m512i* least) {
  const __m512i words = _mm512_load_si512(row);
  halves[0] = tile_flush(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)));
  halves[1] = tile_flush(_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536))));
  for (int half = 0; half < 2; ++half) {
    const __m512i exponents = _mm512_and_si512(_mm512_castps_si512(halves[half]), _mm512_set1_epi32(0x7f800000));
    *least = _mm512_mask_min_epi32(*least, _mm512_test_epi32_mask(exponents, exponents), *least, exponents);
  }
}
template <bool kFlush>
inline __m512 tile_fma(float x, __m512 w, __m512 sum) {
  sum = _mm512_fmadd_ps(_mm512_set1_ps(x), w, sum);
  return kFlush ? tile_flush(sum) : sum;
}
// kRows at once, whose sums do not wait for each other.
template <bool kFlush, int kRows>
inline void tile_dot_rows(int pairs, const __m512 (*x)[2], const __m512 (*w)[2], uint8_t (*c)[kTileRowBytes]) {
  __m512 sums[kRows][2] = {};
  for (int n = 0; n < pairs; ++n)
    for (int row = 0; row < kRows; ++row)
      for (int half = 0; half < 2; ++half)
        sums[row][half] = tile_fma<kFlush>(reinterpret_cast<const float*>(&x[row][half])[n], w[n][half], sums[row][half]);
  for (int row = 0; row < kRows; ++row) {
    const __m512 sum = tile_flush(_mm512_add_ps(sums[row][0], sums[row][1]));
    _mm512_store_ps(c[row], tile_flush(_mm512_add_ps(tile_flush(_mm512_load_ps(c[row])), sum)));
  }
}
template <bool kFlush>
inline void tile_dot(int rows, int pairs, const __m512 (*x)[2], const __m512 (*w)[2], uint8_t (*c)[kTileRowBytes]) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) tile_dot_rows<kFlush, 4>(pairs, x + row, w, c + row);
  for (; row < rows; ++row) tile_dot_rows<kFlush, 1>(pairs, x + row, w, c + row);
}

template <int kC, int kA, int kB>
inline void dot_bf16() {
  TileFile& file = tile_file();
  const int pairs = file.config.row_bytes[kA] / 4, rows = file.config.rows[kC];
  const __m512i none = _mm512_set1_epi32(0x7f800000);
  __m512i least_x = none, least_w = none;
  __m512 x[kTileRows][2], w[kTileRows][2];
  for (int row = 0; row < rows; ++row) tile_halves(file.data[kA][row], x[row], &least_x);
  for (int n = 0; n < pairs; ++n) tile_halves(file.data[kB][n], w[n], &least_w);
  // A product of significands of 8 bits is a multiple of 2^(exponents - 14), and so is every sum of such, rounded or not. Where that
  // is no denormal, no sum can become one.
  constexpr int kBias = 127, kLeast = -126, kBits = 14;
  const int exponents = (_mm512_reduce_min_epi32(least_x) >> 23) + (_mm512_reduce_min_epi32(least_w) >> 23) - 2 * kBias;
  if (exponents - kBits >= kLeast) {
    tile_dot<false>(rows, pairs, x, w, file.data[kC]);
  } else {
    tile_dot<true>(rows, pairs, x, w, file.data[kC]);
  }
}

template <int kC, int kA, int kB, bool kSigned>
inline void dot_bytes() {
  TileFile& file = tile_file();
  const int words = file.config.row_bytes[kA] / 4;
  const __m512i lift = _mm512_set1_epi8(kSigned ? -128 : 0);  // the instruction takes w without a sign: it is 128 more then
  __m512i w[kTileRows];
  for (int n = 0; n < words; ++n) w[n] = _mm512_xor_si512(_mm512_load_si512(file.data[kB][n]), lift);
  for (int row = 0; row < file.config.rows[kC]; ++row) {
    const uint8_t* x = file.data[kA][row];
    __m512i sum = _mm512_load_si512(file.data[kC][row]), lifted = _mm512_setzero_si512();
    for (int n = 0; n < words; ++n) {
      int32_t four;
      std::memcpy(&four, x + 4 * n, sizeof four);
      sum = _mm512_dpbusd_epi32(sum, w[n], _mm512_set1_epi32(four));
      if (kSigned) lifted = _mm512_dpbusd_epi32(lifted, lift, _mm512_set1_epi32(four));
    }
    _mm512_store_si512(file.data[kC][row], _mm512_sub_epi32(sum, lifted));
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

// NEON tiles, included by one gemm_<set>.cpp for each set, whose flags decide which instructions multiply:
//   neon       bf16 widened to fp32, the even input first; int8 as sums of two 16-bit products
//   neon_dot   the same bf16; int8 by SDOT
//   neon_mmla  bf16 by BFMMLA, int8 by USMMLA; int4 by USDOT
// Weights lie as u8 = q + 128. Where the instruction has signed operands only they are met as q, and 128 times the sum of x is added
// once a block: whole numbers, so all of them have the same sums.
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "sets/kernel_sets.h"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace diptych {
namespace {

#include "sets/lanes.inl"

#include "gemm/gemm_generic.inl"

constexpr int kQuads = 4;  // registers of 4 lanes in a strip
constexpr int64_t kQuadBytes = 16;
constexpr uint8_t kLaneOfByte[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr uint8_t kWeightFlip = 0;  // products of u8 and s8
#else
constexpr uint8_t kWeightFlip = 0x80;
#endif

constexpr int64_t kAheadBytes = 4096;
DIPTYCH_FORCED void read_ahead(const uint8_t* w, int64_t at, const TileArgs& args) {
  if (args.is_stream) __builtin_prefetch(w + at + kAheadBytes, 0, 3);
}

inline int32_t word_at(const uint8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return word;
}

// sums += the four products of each lane; `x` repeats one word of a row.
inline int32x4_t dot4(int32x4_t sums, uint8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_s32(sums, w, x);
#elif defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sums, vreinterpretq_s8_u8(w), x);
#else
  // |q| <= 128 and |x| <= 127: two products fit 16 bits.
  const int8x16_t q = vreinterpretq_s8_u8(w);
  const int16x8_t low = vmull_s8(vget_low_s8(q), vget_low_s8(x)), high = vmull_high_s8(q, x);
  return vpadalq_s16(sums, vpaddq_s16(low, high));
#endif
}

// What met weights lack by the flip, for `count` inputs of one row (a multiple of 16).
inline int32_t flipped_sum(const uint8_t* x, int64_t count) {
  if (kWeightFlip == 0) return 0;
  int32x4_t sums = vdupq_n_s32(0);
  for (int64_t i = 0; i < count; i += 16)
    sums = vpadalq_s16(sums, vpaddlq_s8(vld1q_s8(reinterpret_cast<const int8_t*>(x + i))));
  return 128 * vaddvq_s32(sums);
}

template <int kRows>
void tile_int8(const TileArgs& args) {
  int32x4_t sums[kRows][kQuads];
  int32_t* acc = static_cast<int32_t*>(args.acc);
  for (int row = 0; row < kRows; ++row) {
    const int32x4_t lacking = vdupq_n_s32(flipped_sum(args.x[row], args.units * 4));
    for (int quad = 0; quad < kQuads; ++quad)
      sums[row][quad] = args.resume ? vaddq_s32(vld1q_s32(acc + row * kPanelLanes + quad * 4), lacking) : lacking;
  }
  const uint8x16_t flip = vdupq_n_u8(kWeightFlip);
  const uint8_t* w = args.strip;
  for (int64_t step = 0; step < args.units; ++step, w += kStepBytes) {
    read_ahead(w, 0, args);
    uint8x16_t words[kQuads];
    for (int quad = 0; quad < kQuads; ++quad) words[quad] = veorq_u8(vld1q_u8(w + quad * kQuadBytes), flip);
    for (int row = 0; row < kRows; ++row) {
      const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(word_at(args.x[row] + step * 4)));
      for (int quad = 0; quad < kQuads; ++quad) sums[row][quad] = dot4(sums[row][quad], words[quad], x);
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int quad = 0; quad < kQuads; ++quad) vst1q_s32(acc + row * kPanelLanes + quad * 4, sums[row][quad]);
}

// The u8 (or q) of a nibble is unit * nibble + zero, modulo 256.
template <int kRows>
void tile_int4(const TileArgs& args) {
  int32x4_t sums[kRows][kQuads];
  int32_t* acc = static_cast<int32_t*>(args.acc);
  for (int row = 0; row < kRows; ++row) {
    const int32x4_t lacking = vdupq_n_s32(flipped_sum(args.x[row], args.units * args.group));
    for (int quad = 0; quad < kQuads; ++quad) sums[row][quad] = lacking;
  }
  const uint8x16_t nibble = vdupq_n_u8(15), flip = vdupq_n_u8(kWeightFlip);
  for (int64_t group = 0; group < args.units; ++group) {
    const uint8x16x2_t head = vld2q_u8(args.strip + head_of_group(args.group, group));  // 16 units, 16 zeros
    // each lane's byte four times, for the four bytes of its word
    uint8x16_t unit[kQuads], zero[kQuads];
    for (int quad = 0; quad < kQuads; ++quad) {
      const uint8x16_t spread = vaddq_u8(vld1q_u8(kLaneOfByte), vdupq_n_u8(static_cast<uint8_t>(quad * 4)));
      unit[quad] = vqtbl1q_u8(head.val[0], spread);
      zero[quad] = veorq_u8(vqtbl1q_u8(head.val[1], spread), flip);
    }
    const uint8_t* w = args.strip + steps_of_group(args.group, group);
    for (int64_t step = 0; step < args.group / 8; ++step, w += kStepBytes) {
      read_ahead(w, 0, args);
      int8x16_t first[kRows], second[kRows];
      for (int row = 0; row < kRows; ++row) {
        const uint8_t* x = args.x[row] + group * args.group + step * 8;
        first[row] = vreinterpretq_s8_s32(vdupq_n_s32(word_at(x)));
        second[row] = vreinterpretq_s8_s32(vdupq_n_s32(word_at(x + 4)));
      }
      for (int quad = 0; quad < kQuads; ++quad) {
        const uint8x16_t both = vld1q_u8(w + quad * kQuadBytes);
        const uint8x16_t low = vmlaq_u8(zero[quad], vandq_u8(both, nibble), unit[quad]);
        const uint8x16_t high = vmlaq_u8(zero[quad], vshrq_n_u8(both, 4), unit[quad]);
        for (int row = 0; row < kRows; ++row) sums[row][quad] = dot4(dot4(sums[row][quad], low, first[row]), high, second[row]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int quad = 0; quad < kQuads; ++quad) vst1q_s32(acc + row * kPanelLanes + quad * 4, sums[row][quad]);
}

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

// A matrix product takes two lanes by two rows over two steps: sums {lane 0 row 0, lane 0 row 1, lane 1 row 0, lane 1 row 1}.
struct Int8Product {
  using Sums = int32x4_t;
  using Value = int32_t;
  static Sums load(const Value* p) { return vld1q_s32(p); }
  static void store(Value* p, Sums x) { vst1q_s32(p, x); }
  static Sums none() { return vdupq_n_s32(0); }
  static Sums even(Sums a, Sums b) { return vuzp1q_s32(a, b); }
  static Sums odd(Sums a, Sums b) { return vuzp2q_s32(a, b); }
  static Sums first_pair(Sums a, Sums b) { return vzip1q_s32(a, b); }
  static Sums second_pair(Sums a, Sums b) { return vzip2q_s32(a, b); }
  static Sums add(Sums sums, uint32x4_t w, uint32x4_t x) { return vusmmlaq_s32(sums, vreinterpretq_u8_u32(w), vreinterpretq_s8_u32(x)); }
};

struct Bf16Product {
  using Sums = float32x4_t;
  using Value = float;
  static Sums load(const Value* p) { return vld1q_f32(p); }
  static void store(Value* p, Sums x) { vst1q_f32(p, x); }
  static Sums none() { return vdupq_n_f32(0.0f); }
  static Sums even(Sums a, Sums b) { return vuzp1q_f32(a, b); }
  static Sums odd(Sums a, Sums b) { return vuzp2q_f32(a, b); }
  static Sums first_pair(Sums a, Sums b) { return vzip1q_f32(a, b); }
  static Sums second_pair(Sums a, Sums b) { return vzip2q_f32(a, b); }
  static Sums add(Sums sums, uint32x4_t w, uint32x4_t x) { return vbfmmlaq_f32(sums, vreinterpretq_bf16_u32(w), vreinterpretq_bf16_u32(x)); }
};

// Rows by pairs; the last of an odd number meets itself.
template <class Product, int kRows>
void tile_matrix(const TileArgs& args) {
  using Value = typename Product::Value;
  constexpr int kPairs = (kRows + 1) / 2;
  typename Product::Sums sums[kPairs][2 * kQuads];
  Value* acc = static_cast<Value*>(args.acc);
  auto row_of = [](int pair, int i) { return 2 * pair + i < kRows ? 2 * pair + i : kRows - 1; };
  for (int pair = 0; pair < kPairs; ++pair)
    for (int quad = 0; quad < kQuads; ++quad) {
      sums[pair][2 * quad] = sums[pair][2 * quad + 1] = Product::none();
      if (!args.resume) continue;
      const auto a = Product::load(acc + row_of(pair, 0) * kPanelLanes + quad * 4), b = Product::load(acc + row_of(pair, 1) * kPanelLanes + quad * 4);
      sums[pair][2 * quad] = Product::first_pair(a, b), sums[pair][2 * quad + 1] = Product::second_pair(a, b);
    }
  const uint8_t* w = args.strip;
  for (int64_t step = 0; step < args.units; step += 2, w += 2 * kStepBytes) {
    read_ahead(w, 0, args), read_ahead(w, kStepBytes, args);
    uint32x4_t x[kPairs];
    for (int pair = 0; pair < kPairs; ++pair) {
      uint64_t a, b;
      std::memcpy(&a, args.x[row_of(pair, 0)] + step * 4, 8), std::memcpy(&b, args.x[row_of(pair, 1)] + step * 4, 8);
      x[pair] = vreinterpretq_u32_u64(vcombine_u64(vcreate_u64(a), vcreate_u64(b)));
    }
    for (int quad = 0; quad < kQuads; ++quad) {
      const uint32x4_t now = vreinterpretq_u32_u8(vld1q_u8(w + quad * kQuadBytes));
      const uint32x4_t then = vreinterpretq_u32_u8(vld1q_u8(w + kStepBytes + quad * kQuadBytes));
      const uint32x4_t first = vzip1q_u32(now, then), second = vzip2q_u32(now, then);
      for (int pair = 0; pair < kPairs; ++pair) {
        sums[pair][2 * quad] = Product::add(sums[pair][2 * quad], first, x[pair]);
        sums[pair][2 * quad + 1] = Product::add(sums[pair][2 * quad + 1], second, x[pair]);
      }
    }
  }
  for (int pair = 0; pair < kPairs; ++pair)
    for (int quad = 0; quad < kQuads; ++quad) {
      Product::store(acc + row_of(pair, 0) * kPanelLanes + quad * 4, Product::even(sums[pair][2 * quad], sums[pair][2 * quad + 1]));
      if (2 * pair + 1 < kRows)
        Product::store(acc + row_of(pair, 1) * kPanelLanes + quad * 4, Product::odd(sums[pair][2 * quad], sums[pair][2 * quad + 1]));
    }
}

#define DIPTYCH_MATRIX_TILE(height) {height, 1, XForm::rows, tile_matrix<Product, height>}
template <class Product>
constexpr Tiles matrix_tiles() {
  return {{DIPTYCH_MATRIX_TILE(1), DIPTYCH_MATRIX_TILE(2), DIPTYCH_MATRIX_TILE(3), DIPTYCH_MATRIX_TILE(4), DIPTYCH_MATRIX_TILE(5),
           DIPTYCH_MATRIX_TILE(6)},
          DIPTYCH_MATRIX_TILE(6)};
}
#undef DIPTYCH_MATRIX_TILE

#else

template <int kRows>
void tile_bf16(const TileArgs& args) {
  float32x4_t sums[kRows][kQuads];
  float* acc = static_cast<float*>(args.acc);
  for (int row = 0; row < kRows; ++row)
    for (int quad = 0; quad < kQuads; ++quad)
      sums[row][quad] = args.resume ? vld1q_f32(acc + row * kPanelLanes + quad * 4) : vdupq_n_f32(0.0f);
  const uint32x4_t odd_bits = vdupq_n_u32(0xffff0000u);
  const uint8_t* w = args.strip;
  for (int64_t step = 0; step < args.units; ++step, w += kStepBytes) {
    read_ahead(w, 0, args);
    float32x4_t even[kQuads], odd[kQuads];
    for (int quad = 0; quad < kQuads; ++quad) {
      const uint32x4_t words = vreinterpretq_u32_u8(vld1q_u8(w + quad * kQuadBytes));
      even[quad] = vreinterpretq_f32_u32(vshlq_n_u32(words, 16));
      odd[quad] = vreinterpretq_f32_u32(vandq_u32(words, odd_bits));
    }
    for (int row = 0; row < kRows; ++row) {
      const uint32x4_t word = vdupq_n_u32(static_cast<uint32_t>(word_at(args.x[row] + step * 4)));
      const float32x4_t x0 = vreinterpretq_f32_u32(vshlq_n_u32(word, 16)), x1 = vreinterpretq_f32_u32(vandq_u32(word, odd_bits));
      for (int quad = 0; quad < kQuads; ++quad) sums[row][quad] = vfmaq_f32(vfmaq_f32(sums[row][quad], even[quad], x0), odd[quad], x1);
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int quad = 0; quad < kQuads; ++quad) vst1q_f32(acc + row * kPanelLanes + quad * 4, sums[row][quad]);
}

#endif

#define DIPTYCH_FP8_NEON  // the scalar set is compiled for the same processor
#include "gemm/gemm_fp8.inl"

#include "gemm/gemm_groups_neon.inl"

#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "gemm/gemm_groups.inl"
#endif

}  // namespace

namespace DIPTYCH_ISA {

#define DIPTYCH_TILE(kernel, height) {height, 1, XForm::rows, kernel<height>}
#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
extern const Tiles kBf16Tiles = matrix_tiles<Bf16Product>();
extern const Tiles kInt8Tiles = {
    {DIPTYCH_TILE(tile_int8, 1), {2, 1, XForm::rows, tile_matrix<Int8Product, 2>}, {4, 1, XForm::rows, tile_matrix<Int8Product, 4>},
     {6, 1, XForm::rows, tile_matrix<Int8Product, 6>}},
    {6, 1, XForm::rows, tile_matrix<Int8Product, 6>},
};
#else
extern const Tiles kBf16Tiles = {
    {DIPTYCH_TILE(tile_bf16, 1), DIPTYCH_TILE(tile_bf16, 2), DIPTYCH_TILE(tile_bf16, 3), DIPTYCH_TILE(tile_bf16, 4)},
    DIPTYCH_TILE(tile_bf16, 4),
};
extern const Tiles kInt8Tiles = {
    {DIPTYCH_TILE(tile_int8, 1), DIPTYCH_TILE(tile_int8, 2), DIPTYCH_TILE(tile_int8, 3), DIPTYCH_TILE(tile_int8, 4), DIPTYCH_TILE(tile_int8, 6)},
    DIPTYCH_TILE(tile_int8, 6),
};
#endif
extern const Tiles kInt4Tiles = {{DIPTYCH_TILE(tile_int4, 1), DIPTYCH_TILE(tile_int4, 2), DIPTYCH_TILE(tile_int4, 3)}, {}};
extern const Tiles kFp8Tiles = {};
#undef DIPTYCH_TILE
extern const LinearKernels kLinear = {
    nullptr, nullptr, nullptr, finish, transpose_words, load_inputs, round_inputs, abs_max, quantize_int8, quantize_row,
    sum_groups, quantize_group, expand_int4, expand_fp8,
};
extern const GroupTiles kGroupTiles = {
    {kDirectTiles<false>, kDirectTiles<true>},
#if defined(__ARM_FEATURE_MATMUL_INT8)  // many rows: one instruction has twice the products of a dot product
    {6, 1, tile_groups<6, tile_matrix<Int8Product, 6>, false>}, {6, 1, tile_groups<6, tile_matrix<Int8Product, 6>, true>}, ready_rows_of_parts,
    expand_groups<load_inputs>,
#else
    {}, {}, ready_rows_of_parts, nullptr,
#endif
    quantize_groups,
};

}  // namespace DIPTYCH_ISA

}  // namespace diptych
#endif

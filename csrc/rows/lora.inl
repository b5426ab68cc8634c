// The two products of an adapter (adapters.h), written once over simd.h. Every sum runs over K, or over the ranks, in one order.

namespace diptych {
namespace DIPTYCH_ISA {

#if defined(DIPTYCH_AVX512) && !defined(__AVX512BF16__)
DIPTYCH_INLINE F32 add_products(F32 acc, Pairs a, Pairs b) {
  return fma(widen_half(a, 1), widen_half(b, 1), fma(widen_half(a, 0), widen_half(b, 0), acc));
}
#else
DIPTYCH_INLINE F32 add_products(F32 acc, Pairs a, Pairs b) { return dot2(acc, a, b); }
#endif

#if defined(DIPTYCH_AVX512)
constexpr int kShrinkRanks = 4;  // beside four rows: 16 of 32 registers hold sums
#else
constexpr int kShrinkRanks = 2;
#endif

template <int kRows, int kRanks>
DIPTYCH_INLINE void shrink_tile(const uint16_t* const* x, const uint16_t* a, int64_t stride, float* const* out, int64_t rank) {
  F32 acc[kRows][kRanks];
  for (int i = 0; i < kRows; ++i)
    for (int r = 0; r < kRanks; ++r) acc[i][r] = zero();
  for (int64_t k = 0; k < stride; k += 32) {
    Pairs weights[kRanks];
    for (int r = 0; r < kRanks; ++r) weights[r] = load_pairs(a + r * stride + k);
    for (int i = 0; i < kRows; ++i) {
      const Pairs inputs = load_pairs(x[i] + k);
      for (int r = 0; r < kRanks; ++r) acc[i][r] = add_products(acc[i][r], inputs, weights[r]);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int r = 0; r < kRanks; ++r) out[i][rank + r] = horizontal_sum(acc[i][r]);
}

template <int kRows>
static void shrink_some(const uint16_t* const* x, const uint16_t* a, int64_t stride, int64_t ranks, float* const* out) {
  int64_t rank = 0;
  for (; rank + kShrinkRanks <= ranks; rank += kShrinkRanks) shrink_tile<kRows, kShrinkRanks>(x, a + rank * stride, stride, out, rank);
  for (; rank < ranks; ++rank) shrink_tile<kRows, 1>(x, a + rank * stride, stride, out, rank);
}

static void shrink_rows(const uint16_t* const* x, int64_t rows, const uint16_t* a, int64_t stride, int64_t ranks, float* const* out) {
  switch (rows) {
    case 4: return shrink_some<4>(x, a, stride, ranks, out);
    case 3: return shrink_some<3>(x, a, stride, ranks, out);
    case 2: return shrink_some<2>(x, a, stride, ranks, out);
    default: return shrink_some<1>(x, a, stride, ranks, out);
  }
}

template <int kRows>
static void expand_some(const float* const* shrunk, const uint16_t* b, int64_t ranks, const float* bias, float* out, int64_t stride) {
  F32 acc[kRows];
  for (int i = 0; i < kRows; ++i) acc[i] = load(bias);
  for (int64_t r = 0; r < ranks; ++r) {
    const F32 weights = load_bf16(b + 16 * r);
    for (int i = 0; i < kRows; ++i) acc[i] = fma(set1(shrunk[i][r]), weights, acc[i]);
  }
  for (int i = 0; i < kRows; ++i) store(out + i * stride, acc[i]);
}

static void expand_rows(const float* const* shrunk, int64_t rows, const uint16_t* b, int64_t ranks, const float* bias, float* out,
                        int64_t stride) {
  switch (rows) {
    case 4: return expand_some<4>(shrunk, b, ranks, bias, out, stride);
    case 3: return expand_some<3>(shrunk, b, ranks, bias, out, stride);
    case 2: return expand_some<2>(shrunk, b, ranks, bias, out, stride);
    default: return expand_some<1>(shrunk, b, ranks, bias, out, stride);
  }
}

#if defined(__AVX512VNNI__)
// The bits are those of the tiles and of `finish`: sums are whole.
static void expand_blocks(const ShrunkBlock* const* shrunk, int64_t rows, const uint8_t* b, int64_t blocks, const float* scales,
                          const float* bias, float* const* out) {
  const __m512 of_lanes = _mm512_loadu_ps(scales);
  for (int64_t block = 0; block < blocks; ++block, b += 256) {
    __m512i steps[4];
    for (int s = 0; s < 4; ++s) steps[s] = _mm512_loadu_si512(b + 64 * s);
    for (int64_t i = 0; i < rows; ++i) {
      const ShrunkBlock& x = shrunk[i][block];
      int32_t words[4];
      std::memcpy(words, x.q, sizeof words);
      __m512i sum = _mm512_set1_epi32(-128 * x.sum);
      for (int s = 0; s < 4; ++s) sum = _mm512_dpbusd_epi32(sum, steps[s], _mm512_set1_epi32(words[s]));
      const __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(_mm512_set1_ps(x.scale), of_lanes));
      if (block > 0)
        _mm512_storeu_ps(out[i], _mm512_add_ps(y, _mm512_loadu_ps(out[i])));
      else
        _mm512_storeu_ps(out[i], bias != nullptr ? _mm512_add_ps(y, _mm512_loadu_ps(bias)) : y);
    }
  }
}
#else
constexpr ExpandBlocks expand_blocks = nullptr;
#endif

}  // namespace DIPTYCH_ISA
}  // namespace diptych

// What the tiles of AVX2 and AVX-VNNI share: how they read words, and tiles of groups. Included inside the anonymous namespace of their
// files, after gemm_generic.inl.

constexpr int kHalves = 2;  // registers of 8 lanes in a strip

inline __m256i broadcast_word(const uint8_t* x) { return _mm256_set1_epi32(*reinterpret_cast<const int*>(x)); }

inline __m256i load_words(const uint8_t* w, int half) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(w) + half);
}

#include "gemm/gemm_groups_avx2.inl"

// What the tiles of AVX2 and AVX-VNNI share: how they read words, and tiles of groups. Included inside the anonymous namespace of their
// files, after gemm_generic.inl.

constexpr int kHalves = 2;  // registers of 8 lanes in a strip

inline __m256i broadcast_word(const uint8_t* x) { return _mm256_set1_epi32(*reinterpret_cast<const int*>(x)); }

inline __m256i load_words(const uint8_t* w, int half) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(w) + half);
}

DIPTYCH_FORCED void add_codes(__m256i& sum, __m256i codes, __m256i x) {  // u8 by s8, into 16 bits
  __m256i products;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(codes), "x"(x));
}
// Two products and then two additions: in turns the additions would take more of the multiplications' ports (Zen 3, LAB.md).
DIPTYCH_FORCED void add_codes(__m256i (&sums)[kHalves], __m256i former, __m256i latter, __m256i x) {
  __m256i own, other;
  __asm__("vpmaddubsw %6, %4, %2\n\tvpmaddubsw %6, %5, %3\n\tvpaddw %2, %0, %0\n\tvpaddw %3, %1, %1"
          : "+x"(sums[0]), "+x"(sums[1]), "=&x"(own), "=&x"(other) : "x"(former), "x"(latter), "x"(x));
}

#include "gemm/gemm_groups_avx2.inl"

// Lanes side by side in the compiler's own vector type, as many as a register of the set holds (of wider ones GCC goes through memory); a
// strip is kStripPieces of them. Included inside the anonymous namespace of each set's file.
#if defined(__AVX512F__)
#define DIPTYCH_LANES 16
#elif defined(__AVX2__)
#define DIPTYCH_LANES 8
#else
#define DIPTYCH_LANES 4
#endif
typedef float Lanes __attribute__((vector_size(4 * DIPTYCH_LANES), may_alias));
typedef int32_t Whole __attribute__((vector_size(4 * DIPTYCH_LANES), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * DIPTYCH_LANES), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * DIPTYCH_LANES), may_alias));
constexpr int kLaneCount = DIPTYCH_LANES, kStripPieces = static_cast<int>(kStripLanes) / kLaneCount;
#undef DIPTYCH_LANES

inline Lanes fill(float value) { return Lanes{} + value; }
// lower, higher: b where either is NaN. Compilers do not find the instruction behind the comparison. fused: a * b + c, rounded once.
#if defined(__AVX512F__)
inline Lanes lower(Lanes a, Lanes b) { return (Lanes)_mm512_min_ps((__m512)a, (__m512)b); }
inline Lanes higher(Lanes a, Lanes b) { return (Lanes)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
inline Lanes lower(Lanes a, Lanes b) { return (Lanes)_mm256_min_ps((__m256)a, (__m256)b); }
inline Lanes higher(Lanes a, Lanes b) { return (Lanes)_mm256_max_ps((__m256)a, (__m256)b); }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
inline Lanes lower(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes higher(Lanes a, Lanes b) { return a > b ? a : b; }
#if defined(__aarch64__)
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
  for (int lane = 0; lane < kLaneCount; ++lane) c[lane] = std::fma(a[lane], b[lane], c[lane]);
  return c;
}
#endif
#endif

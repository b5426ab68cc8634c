// 16 lanes side by side in the compiler's own vector type, split into whatever registers a set has. Included inside the anonymous
// namespace of each set's file.
typedef float Lanes __attribute__((vector_size(64), may_alias));
typedef int32_t Whole __attribute__((vector_size(64), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), may_alias));

inline Lanes fill(float value) { return Lanes{} + value; }
// b where either is NaN. Compilers do not find the instruction behind the comparison.
#if defined(__AVX512F__)
inline Lanes lower(Lanes a, Lanes b) { return (Lanes)_mm512_min_ps((__m512)a, (__m512)b); }
inline Lanes higher(Lanes a, Lanes b) { return (Lanes)_mm512_max_ps((__m512)a, (__m512)b); }
#else
inline Lanes lower(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes higher(Lanes a, Lanes b) { return a > b ? a : b; }
#endif

// 16 lanes side by side in the compiler's own vector type, split into whatever registers a set has. Included inside the anonymous
// namespace of each set's file.
typedef float Lanes __attribute__((vector_size(64), may_alias));
typedef int32_t Whole __attribute__((vector_size(64), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), may_alias));

inline Lanes fill(float value) { return Lanes{} + value; }
inline Lanes lower(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes higher(Lanes a, Lanes b) { return a > b ? a : b; }

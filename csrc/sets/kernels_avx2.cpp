// The program's kernels compiled for avx2; see kernels.inl. Reached only through kernel_sets.h.
#define DIPTYCH_ISA avx2
#define DIPTYCH_AVX2 1
#include "sets/kernels.inl"

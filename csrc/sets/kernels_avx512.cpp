// The program's kernels compiled for avx512; see kernels.inl. Reached only through kernel_sets.h.
#define DIPTYCH_ISA avx512
#define DIPTYCH_AVX512 1
#include "sets/kernels.inl"

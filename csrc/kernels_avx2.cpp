// The program's kernels compiled for avx2; see kernels.inl. Reached only through program_kernels().
#define DIPTYCH_ISA avx2
#define DIPTYCH_AVX2 1
#include "kernels.inl"

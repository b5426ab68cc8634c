// The program's kernels compiled for AVX-512 without BF16; see kernels.inl. Reached only through kernel_sets.h.
#define DIPTYCH_ISA avx512_fma
#define DIPTYCH_AVX512 1
#include "sets/kernels.inl"

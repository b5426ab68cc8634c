// The linear layers on AVX-512 without BF16 (or where FMA is faster): tiles of widened bf16, and the tiles of int8 and int4, which
// need no BF16 and serve both sets.
#define DIPTYCH_ISA avx512_fma
#include "gemm/gemm_avx512.inl"

// The linear layers on AVX-512 with BF16: tiles of vdpbf16ps, rounding by the processor.
#define DIPTYCH_ISA avx512
#include "gemm/gemm_avx512.inl"

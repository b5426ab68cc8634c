// The linear layers of the set neon_mmla; see gemm_neon.inl.
#define DIPTYCH_ISA neon_mmla
#include "gemm/gemm_neon.inl"

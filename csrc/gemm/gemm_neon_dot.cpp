// The linear layers of the set neon_dot; see gemm_neon.inl.
#define DIPTYCH_ISA neon_dot
#include "gemm/gemm_neon.inl"

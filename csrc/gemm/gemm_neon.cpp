// The linear layers of the set neon; see gemm_neon.inl.
#define DIPTYCH_ISA neon
#include "gemm/gemm_neon.inl"

// The set avx2_vnni in AVX-512's encoding, for tests on processors that have no AVX-VNNI.
#define DIPTYCH_ISA avx2_vnni_twin
#define DIPTYCH_ENCODING "%{evex%} "
#include "gemm/gemm_avx2_vnni.inl"

// The set avx2_vnni (Intel since Alder Lake, AMD since Zen 5); see gemm_avx2_vnni.inl. All but whole numbers is avx2's.
#define DIPTYCH_ISA avx2_vnni
#define DIPTYCH_ENCODING "%{vex%} "
#include "gemm/gemm_avx2_vnni.inl"

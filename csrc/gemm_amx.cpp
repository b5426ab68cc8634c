// Linear layers on the tiles of AMX; see gemm_amx.inl.
#define DIPTYCH_AMX_TABLE amx_kernels
#include "gemm_amx.inl"

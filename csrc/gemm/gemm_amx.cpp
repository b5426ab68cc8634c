// Linear layers on the tiles of AMX; see gemm_amx.inl.
#define DIPTYCH_AMX_SET amx
#include "gemm/gemm_amx.inl"

// Linear layers on the tiles of AMX; see gemm_amx.inl.
#define DIPTYCH_AMX_SET amx
#include "gemm_amx.inl"

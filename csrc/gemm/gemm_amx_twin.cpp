// Linear layers on the twin of the AMX tiles: the bits of gemm_amx.cpp on a processor without them, for tests.
#define DIPTYCH_AMX_TWIN 1
#define DIPTYCH_AMX_SET amx_twin
#include "gemm/gemm_amx.inl"

// Attention on the twin of AMX's tiles; see attention_tiles.inl. The rest is that of avx512.
#define DIPTYCH_AMX_TWIN 1
#define DIPTYCH_ISA amx_twin
#define DIPTYCH_AVX512 1
#define DIPTYCH_ATTENTION_TILES 1
#include <utility>

#include "sets/amx_tiles.h"
#include "sets/kernel_sets.h"
#include "sets/simd.h"

#include "attention/attention.inl"

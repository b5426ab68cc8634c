// Attention on the tiles of AMX; see attention_tiles.inl. The rest is that of avx512.
#define DIPTYCH_ISA amx
#define DIPTYCH_AVX512 1
#define DIPTYCH_ATTENTION_TILES 1
#include <utility>

#include "sets/amx_tiles.h"
#include "sets/kernel_sets.h"
#include "sets/simd.h"

#include "attention/attention.inl"

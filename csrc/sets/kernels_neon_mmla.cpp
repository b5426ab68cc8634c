// The program's kernels compiled for neon_mmla; see kernels.inl. Reached only through kernel_sets.h.
#define DIPTYCH_ISA neon_mmla
#define DIPTYCH_NEON 1
#include "sets/kernels.inl"

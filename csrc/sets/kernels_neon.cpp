// The program's kernels compiled for neon; see kernels.inl. Reached only through kernel_sets.h.
#define DIPTYCH_ISA neon
#define DIPTYCH_NEON 1
#include "sets/kernels.inl"

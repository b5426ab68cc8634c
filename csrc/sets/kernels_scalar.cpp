// The program's kernels compiled for scalar; see kernels.inl. Reached only through kernel_sets.h.
#define DIPTYCH_ISA scalar
#define DIPTYCH_SCALAR 1
#include "sets/kernels.inl"

// The ceilings of the set neon_mmla; see ceilings_neon.inl.
#define DIPTYCH_ISA neon_mmla
#include "ceilings/ceilings_neon.inl"

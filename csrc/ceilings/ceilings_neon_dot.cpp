// The ceilings of the set neon_dot; see ceilings_neon.inl.
#define DIPTYCH_ISA neon_dot
#include "ceilings/ceilings_neon.inl"

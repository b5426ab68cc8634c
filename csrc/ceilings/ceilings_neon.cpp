// The ceilings of the set neon; see ceilings_neon.inl.
#define DIPTYCH_ISA neon
#include "ceilings/ceilings_neon.inl"

// Kernel sets: what one model is computed with, chosen when it is loaded. A set is a row of parts, each compiled for some
// instructions: tiles for each weight format, the rest of the linear layers, attention, and the small kernels. Two sets may share
// parts. A set's name stands for its bits: it is part of a model's revision, and a row whose parts give other bits is another set.
//
// To add a set: write the parts that are new in a file of their own with its own flags (CMakeLists.txt), declare them below, and
// add a row to kSets in kernel_sets.cpp, which is ordered by preference, with the capabilities that the row needs.
#pragma once

#include <string>
#include <vector>

#include "ceilings/ceilings.h"
#include "gemm/gemm_kernels.h"
#include "sets/cpu_features.h"
#include "sets/kernels.h"

namespace diptych {

struct KernelSet {
  const char* name;
  Capabilities needs;
  Capabilities wants;       // where the processor lacks them, the next row that it runs is better
  const Tiles* tiles[4];  // by Format, of bf16, int8, int4 and fp8
  const GroupTiles* groups;
  const LinearKernels* linear;
  const AttentionKernels* attention;
  const StepKernels* step;
  const CeilingLoops* ceilings;  // null: nothing of its own
  const MatrixTiles* matrix[4] = {};  // by Format, instead of tiles from their least_rows on; null: none
};

// Those that this processor runs, best first; never empty, the scalar set runs anywhere. Behind it, never the first, come twins of
// others, with their bits by other instructions, for tests.
const std::vector<const KernelSet*>& kernel_sets();

// Why a set that the processor could run is not among them; empty where nothing is missing.
std::string kernel_set_refusal();

// By name; throws std::invalid_argument with the names this machine has for any other.
const KernelSet& kernel_set(const std::string& name);

#define DIPTYCH_DECLARE_PARTS(isa)                                \
  namespace isa {                                                 \
  extern const Tiles kBf16Tiles, kInt8Tiles, kInt4Tiles, kFp8Tiles; \
  extern const GroupTiles kGroupTiles;                            \
  extern const LinearKernels kLinear;                             \
  extern const AttentionKernels kAttention;                       \
  extern const StepKernels kStep;                                 \
  extern const CeilingLoops kCeilings;                            \
  }
DIPTYCH_DECLARE_PARTS(amx)         // attention and ceilings; the rest is avx512's
DIPTYCH_DECLARE_PARTS(amx_twin)    // attention; likewise
DIPTYCH_DECLARE_PARTS(avx512)
DIPTYCH_DECLARE_PARTS(avx512_fma)
DIPTYCH_DECLARE_PARTS(avx2_vnni)   // tiles of whole numbers and ceilings; the rest is avx2's
DIPTYCH_DECLARE_PARTS(avx2_vnni_twin)  // likewise, but for ceilings
DIPTYCH_DECLARE_PARTS(avx2)
DIPTYCH_DECLARE_PARTS(neon_mmla)
DIPTYCH_DECLARE_PARTS(neon_dot)
DIPTYCH_DECLARE_PARTS(neon)
DIPTYCH_DECLARE_PARTS(scalar)
#undef DIPTYCH_DECLARE_PARTS

#define DIPTYCH_DECLARE_MATRIX(isa) \
  namespace isa {                   \
  extern const MatrixTiles kBf16Matrix, kInt8Matrix, kInt4Matrix; \
  extern const MatrixGroups kGroups; \
  }
DIPTYCH_DECLARE_MATRIX(amx)
DIPTYCH_DECLARE_MATRIX(amx_twin)
#undef DIPTYCH_DECLARE_MATRIX

namespace avx512_fma {
extern const ExpandGroups kExpandSigned;  // for matrix tiles
}
GroupTiles on_matrix_tiles(const MatrixGroups& matrix);

}  // namespace diptych

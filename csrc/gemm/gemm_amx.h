// What the kernel sets on AMX offer beside the shapes they use, for the benchmark that tunes them and the check that holds them equal.
#pragma once

#include "gemm/gemm_kernels.h"

namespace diptych {

namespace amx {
extern const MatrixShape kWideShapes[2][2];  // [bf16, int8][16 rows x 4 strips, 32 x 2]
}
namespace amx_twin {
extern const MatrixShape kWideShapes[2][2];
}

}  // namespace diptych

#include "kernels.h"

namespace diptych {

const Kernels& program_kernels() {
  switch (active_isa()) {
    case Isa::amx: case Isa::amx_twin:
    case Isa::avx512: return avx512::kKernels;
    case Isa::avx2: return avx2::kKernels;
    case Isa::scalar: break;
  }
  return scalar::kKernels;
}

}  // namespace diptych

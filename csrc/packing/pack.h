// What the two files of packing share: from floats (pack.cpp), and from codes that somebody else chose (pack_groups.cpp).
#pragma once

#include "gemm/gemm_kernels.h"

namespace diptych {

struct Blob {
  uint8_t* panels;
  float* scales;  // null but for int8, int4 and fp8
  float* bias;    // null without
};

Blob lay_out(const LinearShape& shape, void* blob);

// pack_random's in groups and of fp8.
void pack_random_codes(const KernelSet& set, const LinearShape& shape, uint64_t seed, float amplitude, void* blob, int thread, int threads);

// What a packed code of a group stands for.
float group_weight_at(const PackedLinear& w, int64_t lane, int64_t k);

}  // namespace diptych

#include "kernel_sets.h"

#include <stdexcept>

namespace diptych {
namespace {

// In order of preference.
const KernelSet kSets[] = {
#if defined(__x86_64__)
    {"avx512",
     {Capability::avx2, Capability::fma, Capability::f16c, Capability::avx512f, Capability::avx512bw, Capability::avx512dq,
      Capability::avx512vl, Capability::avx512_bf16, Capability::avx512_vnni},
     {&avx512::kBf16Tiles, &avx512::kInt8Tiles, &avx512::kInt4Tiles},
     &avx512::kLinear, &avx512::kAttention, &avx512::kStep, &avx512::kCeilings},
    {"avx2",
     {Capability::avx2, Capability::fma, Capability::f16c},
     {&avx2::kBf16Tiles, &avx2::kInt8Tiles, &avx2::kInt4Tiles},
     &avx2::kLinear, &avx2::kAttention, &avx2::kStep, &avx2::kCeilings},
#endif
    {"scalar",
     {},
     {&scalar::kBf16Tiles, &scalar::kInt8Tiles, &scalar::kInt4Tiles},
     &scalar::kLinear, &scalar::kAttention, &scalar::kStep, &scalar::kCeilings},
};

std::vector<const KernelSet*> find_sets() {
  std::vector<const KernelSet*> found;
  for (const KernelSet& set : kSets)
    if (cpu_capabilities().has_all(set.needs)) found.push_back(&set);
  return found;
}

}  // namespace

const std::vector<const KernelSet*>& kernel_sets() {
  static const std::vector<const KernelSet*> found = find_sets();
  return found;
}

const KernelSet& kernel_set(const std::string& name) {
  std::string names;
  for (const KernelSet* set : kernel_sets()) {
    if (name == set->name) return *set;
    names += (names.empty() ? "" : ", ") + std::string(set->name);
  }
  throw std::invalid_argument("no kernel set " + name + "; this machine has " + names);
}

}  // namespace diptych

#include "sets/kernel_sets.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace diptych {
namespace {

#if defined(__x86_64__)
constexpr Capabilities kAvx2Needs = {Capability::avx2, Capability::fma, Capability::f16c};
constexpr Capabilities kAvx512FmaNeeds = kAvx2Needs | Capabilities{Capability::avx512f, Capability::avx512bw, Capability::avx512dq, Capability::avx512vl,
                                                                   Capability::avx512_vnni};
// What has BF16 has VBMI too, but for Cooper Lake, which takes avx512_fma anyway.
constexpr Capabilities kAvx512Needs = kAvx512FmaNeeds | Capabilities{Capability::avx512_bf16, Capability::avx512vbmi};
constexpr Capabilities kTileNeeds = {Capability::amx_tile, Capability::amx_int8, Capability::amx_bf16};
constexpr Tiles kNoTiles = {};  // any number of rows meets matrix tiles, whose bits no other instruction has

#if defined(DIPTYCH_AMX)
const GroupTiles kAmxGroups = on_matrix_tiles(amx::kGroups);
#endif
const GroupTiles kAmxTwinGroups = on_matrix_tiles(amx_twin::kGroups);
#endif

// In order of preference.
const KernelSet kSets[] = {
#if defined(__x86_64__)
#if defined(DIPTYCH_AMX)
    {"amx", kAvx512Needs | kTileNeeds, {},
     {&kNoTiles, &avx512_fma::kInt8Tiles, &avx512_fma::kInt4Tiles, &kNoTiles},
     &kAmxGroups,
     &avx512::kLinear, &amx::kAttention, &avx512::kStep, &amx::kCeilings,
     {&amx::kBf16Matrix, &amx::kInt8Matrix, &amx::kInt4Matrix, &amx::kBf16Matrix}},
#endif
    {"avx512", kAvx512Needs, {Capability::full_rate_bf16},
     {&avx512::kBf16Tiles, &avx512::kInt8Tiles, &avx512::kInt4Tiles, &avx512::kFp8Tiles},
     &avx512::kGroupTiles,
     &avx512::kLinear, &avx512::kAttention, &avx512::kStep, &avx512::kCeilings},
    {"avx512_fma", kAvx512FmaNeeds, {},
     {&avx512_fma::kBf16Tiles, &avx512_fma::kInt8Tiles, &avx512_fma::kInt4Tiles, &avx512_fma::kFp8Tiles},
     &avx512_fma::kGroupTiles,
     &avx512_fma::kLinear, &avx512_fma::kAttention, &avx512_fma::kStep, &avx512_fma::kCeilings},
#if defined(DIPTYCH_AVX_VNNI)
    {"avx2_vnni", kAvx2Needs | Capabilities{Capability::avx_vnni}, {},
     {&avx2::kBf16Tiles, &avx2_vnni::kInt8Tiles, &avx2_vnni::kInt4Tiles, &avx2::kFp8Tiles},
     &avx2_vnni::kGroupTiles,
     &avx2::kLinear, &avx2::kAttention, &avx2::kStep, &avx2_vnni::kCeilings},
#endif
    {"avx2", kAvx2Needs, {},
     {&avx2::kBf16Tiles, &avx2::kInt8Tiles, &avx2::kInt4Tiles, &avx2::kFp8Tiles},
     &avx2::kGroupTiles,
     &avx2::kLinear, &avx2::kAttention, &avx2::kStep, &avx2::kCeilings},
#elif defined(__aarch64__)
    {"neon_mmla", {Capability::asimd, Capability::asimddp, Capability::i8mm, Capability::bf16}, {},
     {&neon_mmla::kBf16Tiles, &neon_mmla::kInt8Tiles, &neon_mmla::kInt4Tiles, &neon_mmla::kFp8Tiles},
     &neon_mmla::kGroupTiles,
     &neon_mmla::kLinear, &neon_mmla::kAttention, &neon_mmla::kStep, &neon_mmla::kCeilings},
    {"neon_dot", {Capability::asimd, Capability::asimddp}, {},
     {&neon_dot::kBf16Tiles, &neon_dot::kInt8Tiles, &neon_dot::kInt4Tiles, &neon_dot::kFp8Tiles},
     &neon_dot::kGroupTiles,
     &neon_dot::kLinear, &neon_dot::kAttention, &neon_dot::kStep, &neon_dot::kCeilings},
    {"neon", {Capability::asimd}, {},
     {&neon::kBf16Tiles, &neon::kInt8Tiles, &neon::kInt4Tiles, &neon::kFp8Tiles},
     &neon::kGroupTiles,
     &neon::kLinear, &neon::kAttention, &neon::kStep, &neon::kCeilings},
#endif
    {"scalar", {}, {},
     {&scalar::kBf16Tiles, &scalar::kInt8Tiles, &scalar::kInt4Tiles, &scalar::kFp8Tiles},
     &scalar::kGroupTiles,
     &scalar::kLinear, &scalar::kAttention, &scalar::kStep, &scalar::kCeilings},
#if defined(__x86_64__)
    {"amx_twin", kAvx512Needs, {},
     {&kNoTiles, &avx512_fma::kInt8Tiles, &avx512_fma::kInt4Tiles, &kNoTiles},
     &kAmxTwinGroups,
     &avx512::kLinear, &amx_twin::kAttention, &avx512::kStep, nullptr,
     {&amx_twin::kBf16Matrix, &amx_twin::kInt8Matrix, &amx_twin::kInt4Matrix, &amx_twin::kBf16Matrix}},
#if defined(DIPTYCH_AVX_VNNI)
    {"avx2_vnni_twin", kAvx2Needs | Capabilities{Capability::avx512_vnni, Capability::avx512vl}, {},
     {&avx2::kBf16Tiles, &avx2_vnni_twin::kInt8Tiles, &avx2_vnni_twin::kInt4Tiles, &avx2::kFp8Tiles},
     &avx2_vnni_twin::kGroupTiles,
     &avx2::kLinear, &avx2::kAttention, &avx2::kStep, nullptr},
#endif
#endif
};

bool needs_tiles(const KernelSet& set) { return set.needs.has(Capability::amx_tile); }

std::vector<const KernelSet*> find_sets() {
  std::vector<const KernelSet*> found;
  for (const KernelSet& set : kSets)
    if (cpu_capabilities().has_all(set.needs) && (!needs_tiles(set) || request_tiles() == 0)) found.push_back(&set);
  for (size_t i = 0; i + 1 < found.size(); ++i)
    if (!cpu_capabilities().has_all(found[i]->wants)) std::swap(found[i], found[i + 1]), ++i;
  return found;
}

}  // namespace

#if defined(__x86_64__)
GroupTiles on_matrix_tiles(const MatrixGroups& matrix) {
  GroupTiles tiles = avx512_fma::kGroupTiles;  // whole sums have the same bits in both
  tiles.expanded = matrix.expanded, tiles.expanded_wide = matrix.expanded_wide, tiles.expanded_long = {};
  tiles.expand = avx512_fma::kExpandSigned, tiles.row_form = matrix.row_form, tiles.block_rows = matrix.block_rows;
  std::copy(matrix.most_direct, matrix.most_direct + 2, tiles.most_direct);
  return tiles;
}
#endif

const std::vector<const KernelSet*>& kernel_sets() {
  static const std::vector<const KernelSet*> found = find_sets();
  return found;
}

std::string kernel_set_refusal() {
  for (const KernelSet& set : kSets)
    if (cpu_capabilities().has_all(set.needs) && needs_tiles(set) && request_tiles() != 0)
      return std::string("the system refuses the tiles of ") + set.name + " (arch_prctl: " + std::strerror(request_tiles()) + ")";
  return "";
}

const KernelSet& kernel_set(const std::string& name) {
  std::string names;
  for (const KernelSet* set : kernel_sets()) {
    if (name == set->name) return *set;
    names += (names.empty() ? "" : ", ") + std::string(set->name);
  }
  throw std::invalid_argument("no kernel set " + name + "; this machine has " + names + (kernel_set_refusal().empty() ? "" : "; " + kernel_set_refusal()));
}

}  // namespace diptych

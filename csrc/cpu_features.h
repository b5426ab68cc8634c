// What this CPU (and the operating system's saved state) can run, decided once. Kernels of one instruction set live in
// one translation unit; everything above them goes through active_isa().
#pragma once

namespace diptych {

enum class Isa : int { scalar = 0, avx2 = 1, avx512 = 2, amx_twin = 3, amx = 4 };

struct CpuFeatures {
  bool avx2 = false;         // AVX2, FMA and F16C together: what the avx2 kernels use
  bool avx512 = false;       // F, BW, DQ, VL together
  bool avx512_bf16 = false;  // vdpbf16ps
  bool avx512_vnni = false;  // vpdpbusd
  long l2_bytes = 0;         // per core; 1 MiB where the CPU does not say
};

const CpuFeatures& cpu_features();

// The widest set whose kernels this CPU runs: avx512 needs BF16 and VNNI, otherwise avx2, otherwise scalar.
Isa best_isa();

// best_isa() unless lowered by set_isa. Read by every dispatching function; change it only while no kernel runs.
Isa active_isa();

// False (and no change) when this CPU cannot run the set. For tests and comparisons.
bool set_isa(Isa isa);

const char* isa_name(Isa isa);

}  // namespace diptych

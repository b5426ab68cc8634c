#include "cpu_features.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <unistd.h>

namespace diptych {
namespace {

#if defined(__x86_64__)
unsigned long long saved_state() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

void detect_sets(CpuFeatures& features) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return;
  const bool has_fma = c & (1u << 12), has_f16c = c & (1u << 29), has_osxsave = c & (1u << 27);
  if (!has_osxsave) return;
  const unsigned long long state = saved_state();
  const bool keeps_ymm = (state & 0x6) == 0x6, keeps_zmm = (state & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  const unsigned last_subleaf = a;
  features.avx2 = keeps_ymm && has_fma && has_f16c && (b & (1u << 5));
  const unsigned wanted = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F DQ BW VL
  features.avx512 = keeps_zmm && features.avx2 && (b & wanted) == wanted;
  features.avx512_vnni = features.avx512 && (c & (1u << 11));
  if (last_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d))
    features.avx512_bf16 = features.avx512 && (a & (1u << 5));
}
#else
void detect_sets(CpuFeatures&) {}
#endif

CpuFeatures detect() {
  CpuFeatures features;
  detect_sets(features);
  features.l2_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (features.l2_bytes <= 0) features.l2_bytes = 1 << 20;
  return features;
}

std::atomic<int> chosen_isa{-1};

bool can_run(Isa isa) { return isa <= best_isa() || (isa >= Isa::amx_twin && best_isa() == Isa::avx512); }

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

Isa best_isa() {
  const CpuFeatures& features = cpu_features();
  if (features.avx512_bf16 && features.avx512_vnni) return Isa::avx512;
  return features.avx2 ? Isa::avx2 : Isa::scalar;
}

Isa active_isa() {
  const int isa = chosen_isa.load(std::memory_order_relaxed);
  return isa < 0 ? best_isa() : static_cast<Isa>(isa);
}

bool set_isa(Isa isa) {
  if (!can_run(isa)) return false;
  chosen_isa.store(static_cast<int>(isa), std::memory_order_relaxed);
  return true;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::scalar: return "scalar";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::amx_twin: return "amx_twin";
    case Isa::amx: return "amx";
  }
  return "unknown";
}

}  // namespace diptych

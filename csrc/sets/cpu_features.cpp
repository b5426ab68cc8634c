#include "sets/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cerrno>

namespace diptych {
namespace {

#if defined(__x86_64__)
uint64_t saved_state() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Cpuid(unsigned leaf, unsigned subleaf) { __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d); }
};

bool is_intel() {
  const Cpuid vendor(0, 0);
  return vendor.b == 0x756e6547 && vendor.d == 0x49656e69 && vendor.c == 0x6c65746e;  // "GenuineIntel"
}

Capabilities detect() {
  Capabilities found;
  const Cpuid basic(1, 0);
  if (!(basic.c & (1u << 27))) return found;  // no xgetbv: the system saves nothing wide
  const uint64_t state = saved_state();
  const Cpuid extended(7, 0), more(7, extended.a >= 1 ? 1 : 0);
  auto add = [&](Capability capability, bool is_there, uint64_t saved) {
    if (is_there && (state & saved) == saved) found.add(capability);
  };
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  add(Capability::avx2, extended.b & (1u << 5), kYmm);
  add(Capability::fma, basic.c & (1u << 12), kYmm);
  add(Capability::f16c, basic.c & (1u << 29), kYmm);
  add(Capability::avx512f, extended.b & (1u << 16), kZmm);
  add(Capability::avx512dq, extended.b & (1u << 17), kZmm);
  add(Capability::avx512bw, extended.b & (1u << 30), kZmm);
  add(Capability::avx512vl, extended.b & (1u << 31), kZmm);
  add(Capability::avx512vbmi, extended.c & (1u << 1), kZmm);
  add(Capability::avx512_vnni, extended.c & (1u << 11), kZmm);
  add(Capability::avx512_bf16, extended.a >= 1 && (more.a & (1u << 5)), kZmm);
  add(Capability::avx_vnni, extended.a >= 1 && (more.a & (1u << 4)), kYmm);
  // Measured from registers: Emerald Rapids 89 Gop/s a core by vdpbf16ps and 176 by FMA; Zen 4 and 5 twice FMA's (LAB.md).
  add(Capability::full_rate_bf16, found.has(Capability::avx512_bf16) && !is_intel(), kZmm);
  add(Capability::amx_bf16, extended.d & (1u << 22), kTiles);
  add(Capability::amx_tile, extended.d & (1u << 24), kTiles);
  add(Capability::amx_int8, extended.d & (1u << 25), kTiles);
  return found;
}
#elif defined(__aarch64__) && defined(__linux__)
// Bits of the kernel's HWCAP and HWCAP2 (Documentation/arch/arm64/elf_hwcaps.rst), written out as older headers lack some.
Capabilities detect() {
  Capabilities found;
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  if (first & (1ul << 1)) found.add(Capability::asimd);
  if (first & (1ul << 20)) found.add(Capability::asimddp);
  if (second & (1ul << 13)) found.add(Capability::i8mm);
  if (second & (1ul << 14)) found.add(Capability::bf16);
  return found;
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_feature(const char* name) {
  int value = 0;
  size_t bytes = sizeof value;
  return sysctlbyname(name, &value, &bytes, nullptr, 0) == 0 && value != 0;
}

Capabilities detect() {
  Capabilities found{Capability::asimd};
  if (has_feature("hw.optional.arm.FEAT_DotProd")) found.add(Capability::asimddp);
  if (has_feature("hw.optional.arm.FEAT_I8MM")) found.add(Capability::i8mm);
  if (has_feature("hw.optional.arm.FEAT_BF16")) found.add(Capability::bf16);
  return found;
}
#else
Capabilities detect() { return {}; }
#endif

}  // namespace

const Capabilities& cpu_capabilities() {
  static const Capabilities found = detect();
  return found;
}

bool is_zen4() { return cpu_capabilities().has(Capability::full_rate_bf16); }

bool is_zen5() { return is_zen4() && cpu_capabilities().has(Capability::avx_vnni); }

int request_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const int refusal = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
  return refusal;
#else
  return ENOSYS;
#endif
}

const char* capability_name(Capability capability) {
  static const char* const kNames[] = {"avx2",     "fma",         "f16c",        "avx_vnni",   "avx512f",  "avx512bw", "avx512dq",
                                       "avx512vl", "avx512_bf16", "avx512_vnni", "avx512vbmi", "amx_tile", "amx_int8", "amx_bf16",
                                       "asimd",    "asimddp",     "i8mm",        "bf16",       "full_rate_bf16"};
  static_assert(sizeof kNames / sizeof *kNames == static_cast<int>(Capability::count));
  return kNames[static_cast<int>(capability)];
}

}  // namespace diptych

// What this processor can do and the operating system saves the state of: a set of capabilities, not a ladder. Kernel sets say
// which of them they need (kernel_sets.h); else only how far what is streamed is read ahead goes by them (gemm.cpp, attention_beside.inl).
#pragma once

#include <cstdint>
#include <initializer_list>

namespace diptych {

enum class Capability : int {
  avx2, fma, f16c, avx_vnni, avx512f, avx512bw, avx512dq, avx512vl, avx512_bf16, avx512_vnni, avx512vbmi, amx_tile,
  amx_int8, amx_bf16,
  asimd, asimddp, i8mm, bf16,  // ARM: NEON, its dot products, its matrix products of int8 and of bf16
  full_rate_bf16,  // no flag but a fact: vdpbf16ps does at least the work of FMA. On Intel it does half of it.
  count
};

const char* capability_name(Capability capability);  // as Linux spells it in /proc/cpuinfo

class Capabilities {
 public:
  constexpr Capabilities() = default;
  constexpr Capabilities(std::initializer_list<Capability> all) {
    for (const Capability one : all) add(one);
  }
  constexpr void add(Capability one) { bits_ |= uint64_t{1} << static_cast<int>(one); }
  constexpr Capabilities operator|(const Capabilities& others) const {
    Capabilities all = *this;
    all.bits_ |= others.bits_;
    return all;
  }
  bool has(Capability one) const { return bits_ >> static_cast<int>(one) & 1; }
  bool has_all(const Capabilities& others) const { return (bits_ & others.bits_) == others.bits_; }

 private:
  uint64_t bits_ = 0;
};

const Capabilities& cpu_capabilities();

// AMD's processors with AVX-512, Zen 4 and what follows. Bytes of a cache are widened in the registers that multiply there, however many rows
// meet them; Intel's were not measured.
bool is_zen4();

// Those with AVX-VNNI besides, Zen 5 and what follows. What memory brings few rows is asked for past L2 there, and many rows of attention go
// by six; Zen 4 does not like the first and is level in the second.
bool is_zen5();

// Asks the system for the state of AMX's tiles, once for the process and all its threads: 0, or the error number of its refusal.
int request_tiles();

}  // namespace diptych

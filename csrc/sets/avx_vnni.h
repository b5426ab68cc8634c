// vpdpbusd on 256 bits, as assembly, so that the files that use it need no flag beyond AVX2's and the compiler copies no sums. They name the
// encoding before: AVX-VNNI's, or AVX-512's, which more processors have.
#pragma once

#include <immintrin.h>

namespace diptych {
namespace {

// sums += the four products u8 * s8 of each lane
inline __attribute__((always_inline)) void add_dot4(__m256i& sums, __m256i u8, __m256i s8) {
  __asm__(DIPTYCH_ENCODING "vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(u8), "x"(s8));
}

}  // namespace
}  // namespace diptych

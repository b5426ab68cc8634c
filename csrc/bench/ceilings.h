// What this machine can do at most, for one thread; the benchmark runs them on all threads at once.
#pragma once

#include <cstdint>

namespace diptych {

double bf16_burst(int64_t rounds);  // operations done (a multiply and an add are two)
double int8_burst(int64_t rounds);
void read_all(const uint8_t* data, int64_t bytes, int64_t ahead);  // ahead: software prefetch distance, 0: none

}  // namespace diptych

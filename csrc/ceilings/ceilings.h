// What this machine can do at most, on all threads of a pool: bytes read per second, and operations per second by the best instruction
// that it has for a width, whichever set a model uses. A rate means something only beside a ceiling measured just before and after it.
#pragma once

#include <cstdint>

#include "threads/thread_pool.h"

namespace diptych {

class PageBuffer;  // gemm.h

// How memory is read, as which is fastest depends on the machine and its neighbours: left to the processor's prefetchers; asked for a little
// ahead; or each line asked for as it is taken, past the caches, so that nothing is pushed on to the last of them.
enum class Reading { plain, ahead, past };
constexpr Reading kReadings[] = {Reading::plain, Reading::ahead, Reading::past};
constexpr int64_t kReadAheadBytes = 2048;

// A kernel set's loops, for one thread. Bursts return the operations done (a multiply and an add are two). Null: nothing of its own.
struct CeilingLoops {
  double (*fp32_burst)(int64_t rounds);
  double (*bf16_burst)(int64_t rounds);  // by a product of bf16, or widened by one of fp32
  double (*int8_burst)(int64_t rounds);
  double (*int4_burst)(int64_t rounds);  // of codes so few bits wide that several products fit 16 bits, where that is faster than int8
  void (*read_all)(const uint8_t* data, int64_t bytes, Reading how);
};

// Last caches keep a part of what is read again and again, most where it is read past them, and two chips have two: from so many bytes on a
// half is timed after the other has taken its place there.
constexpr int64_t kBeyondCaches = 512 << 20;

// Best of `repeats` passes over a fresh buffer of `bytes`: from kBeyondCaches on the rate of the memory, below it of whatever holds them.
double measure_read_bytes_per_s(ThreadPool& pool, int64_t bytes, int repeats);
// The same over a buffer that has been written to.
double measure_read_bytes_per_s(ThreadPool& pool, const PageBuffer& buffer, int repeats);

// Best of `repeats` bursts of each set that this machine runs.
double measure_ops_per_s(double (*CeilingLoops::* burst)(int64_t), ThreadPool& pool, int repeats);

// The same of codes of fewer than eight bits by int8: what int8 by int8 can do serves them, too.
double measure_codes_per_s(ThreadPool& pool, int repeats);

// How long a thread waits for what another has just written: best of `repeats` walks of a word round all threads, in seconds a hop; 0 of one
// thread. Threads that share a cache are some 40 ns apart, those that do not 150 and more: every meeting of threads costs a few of these.
double measure_signal_s(ThreadPool& pool, int repeats);

}  // namespace diptych

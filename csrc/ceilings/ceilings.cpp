#include "ceilings/ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "gemm/gemm.h"
#include "sets/kernel_sets.h"

namespace diptych {
namespace {

constexpr int64_t kBurstRounds = 100000;  // a few milliseconds
constexpr int kSignalRounds = 1000;  // of a walk
constexpr int kSignalSpins = 10000;  // from which on a thread has lost its core
constexpr int64_t kLeastRead = 16 << 20;  // less than this is read again and again, so that starting the threads takes no part of the time

// The scalar twins: what plain loops reach with the baseline instruction set.
double fp32_burst(int64_t rounds) {
  float sums[32] = {};
  volatile float seed = 1.0f;
  const float a = seed, b = seed * 0.5f;
  for (int64_t round = 0; round < rounds; ++round) {
    for (float& sum : sums) sum += a * b;
    __asm__ volatile("" : : "r"(sums) : "memory");
  }
  return 2.0 * 32.0 * static_cast<double>(rounds);
}

double int32_burst(int64_t rounds) {
  int32_t sums[32] = {};
  volatile int32_t seed = 3;
  const int32_t a = seed;
  for (int64_t round = 0; round < rounds; ++round) {
    for (int32_t& sum : sums) sum += a * static_cast<int32_t>(round);
    __asm__ volatile("" : : "r"(sums) : "memory");
  }
  return 2.0 * 32.0 * static_cast<double>(rounds);
}

void read_words(const uint8_t* data, int64_t bytes, Reading) {
  uint64_t total[8] = {};
  for (int64_t at = 0; at + 64 <= bytes; at += 64) {
    uint64_t words[8];
    std::memcpy(words, data + at, 64);
    for (int i = 0; i < 8; ++i) total[i] |= words[i];
  }
  volatile uint64_t sink = total[0] | total[1] | total[2] | total[3] | total[4] | total[5] | total[6] | total[7];
  (void)sink;
}

template <class Work>
double best_s(int repeats, Work&& work) {
  using Clock = std::chrono::steady_clock;
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = Clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best;
}

double ops_per_s(ThreadPool& pool, int repeats, double (*burst)(int64_t)) {
  double operations = 0;
  const double seconds = best_s(repeats, [&] {
    pool.run([&](int thread, int threads) {
      const double done = burst(kBurstRounds);
      if (thread == 0) operations = done * threads;
    });
  });
  return operations / seconds;
}

// What every set of this machine has of its own of one loop, but plain loops only where there is nothing else.
template <class Loop>
std::vector<Loop> loops_of_machine(Loop CeilingLoops::* loop) {
  std::vector<Loop> loops;
  for (const KernelSet* set : kernel_sets())
    if (set->ceilings != nullptr && set->ceilings->*loop != nullptr && (set->ceilings != &scalar::kCeilings || loops.empty()))
      loops.push_back(set->ceilings->*loop);
  return loops;
}

}  // namespace

namespace scalar {
extern const CeilingLoops kCeilings = {fp32_burst, fp32_burst, int32_burst, nullptr, read_words};
}

double measure_read_bytes_per_s(ThreadPool& pool, int64_t bytes, int repeats) {
  const PageBuffer buffer(bytes);
  // Untouched pages may all be one page of zeros, which would be read from the cache.
  pool.run([&](int thread, int threads) {
    const Range part = share(bytes, thread, threads, 4096);
    std::memset(buffer.data() + part.begin, 1, static_cast<size_t>(part.end - part.begin));
  });
  return measure_read_bytes_per_s(pool, buffer, repeats);
}

double measure_read_bytes_per_s(ThreadPool& pool, const PageBuffer& buffer, int repeats) {
  const auto read_all = loops_of_machine(&CeilingLoops::read_all).front();
  const bool by_halves = buffer.bytes() >= kBeyondCaches;
  const int64_t bytes = by_halves ? buffer.bytes() / 2 : buffer.bytes(), passes = (kLeastRead + bytes - 1) / bytes;
  const auto read = [&](const uint8_t* data, Reading how) {
    pool.run([&](int thread, int threads) {
      const Range part = share(bytes, thread, threads, 4096);
      for (int64_t pass = 0; pass < passes; ++pass) read_all(data + part.begin, part.end - part.begin, how);
    });
  };
  int64_t half = 0;
  const auto next_half = [&] { return buffer.data() + (by_halves ? half++ % 2 * bytes : 0); };
  double seconds = 1e30;
  if (by_halves) read(next_half(), Reading::plain);
  for (const Reading how : kReadings)
    for (int i = 0; i < repeats; ++i) {
      // what is read past the caches leaves there what was read before: that has to take its place in them
      if (by_halves && how == Reading::past) read(next_half(), Reading::plain);
      const uint8_t* data = next_half();
      seconds = std::min(seconds, best_s(1, [&] { read(data, how); }));
    }
  return static_cast<double>(bytes * passes) / seconds;
}

double measure_signal_s(ThreadPool& pool, int repeats) {
  const uint32_t threads = static_cast<uint32_t>(pool.size()), hops = kSignalRounds * threads;
  if (threads == 1) return 0;
  struct alignas(64) Word { std::atomic<uint32_t> hop{0}; } word;
  const double seconds = best_s(repeats, [&] {
    word.hop.store(0);
    pool.run([&](int thread, int) {
      for (uint32_t hop = static_cast<uint32_t>(thread); hop < hops; hop += threads) {
        for (int spin = 0; word.hop.load(std::memory_order_acquire) != hop; ++spin)
          if (spin > kSignalSpins) std::this_thread::yield();
        word.hop.store(hop + 1, std::memory_order_release);
      }
    });
  });
  return seconds / hops;
}

double measure_ops_per_s(double (*CeilingLoops::* burst)(int64_t), ThreadPool& pool, int repeats) {
  double best = 0;
  for (const auto loop : loops_of_machine(burst)) best = std::max(best, ops_per_s(pool, repeats, loop));
  return best;
}

double measure_codes_per_s(ThreadPool& pool, int repeats) {
  return std::max(measure_ops_per_s(&CeilingLoops::int4_burst, pool, repeats), measure_ops_per_s(&CeilingLoops::int8_burst, pool, repeats));
}

}  // namespace diptych

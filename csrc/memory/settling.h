// Weights that a program uses in a mapped file, copied into memory of its own while it runs: on one thread, which gives way to all
// others, and slowly beside steps, since memory that the host of a virtual machine has to find holds the processor meanwhile, and
// all threads of a step wait for each other. Who runs takes over what is copied between two runs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "memory/pages.h"

namespace diptych {

class Settling {
 public:
  struct Weight {
    int linear;
    const uint8_t* from;
    uint8_t* to;
    int64_t bytes;  // as Xxh3Copy takes them
  };

  explicit Settling(std::vector<Weight> weights);
  ~Settling();  // gives up what is not copied yet
  Settling(const Settling&) = delete;
  Settling& operator=(const Settling&) = delete;

  void wait() const;  // until all is copied: where no step is to run beside it

  // At the begin of a step: take(weight) for each that was copied since the last call; what it has mapped goes back behind that.
  // True: it was the last.
  template <class Take>
  bool take(Take&& take) {
    step_.store(Clock::now().time_since_epoch(), std::memory_order_relaxed);
    for (const size_t end = copied_.load(std::memory_order_acquire); taken_ < end; ++taken_) {
      take(weights_[taken_]);
      give_pages_back(weights_[taken_].from, weights_[taken_].bytes);
    }
    return taken_ == weights_.size();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void copy_all();
  void give_way() const;

  const std::vector<Weight> weights_;
  size_t taken_ = 0;
  std::atomic<size_t> copied_{0};
  std::atomic<bool> is_ending_{false};
  std::atomic<Clock::duration> step_{Clock::now().time_since_epoch()};  // when the last one began
  int64_t process_;  // a child of a fork has no such thread
  std::thread thread_;
};

}  // namespace diptych

// Weights that a program uses in a mapped file, copied into memory of its own while it runs: on one thread, which gives way to all
// others, since the memory may have to come from the host of a virtual machine. Who runs takes over what is copied between two runs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "pages.h"

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

  // take(weight) for each that was copied since the last call; what it has mapped goes back behind that. True: it was the last.
  template <class Take>
  bool take(Take&& take) {
    for (const size_t end = copied_.load(std::memory_order_acquire); taken_ < end; ++taken_) {
      take(weights_[taken_]);
      give_pages_back(weights_[taken_].from, weights_[taken_].bytes);
    }
    return taken_ == weights_.size();
  }

 private:
  void copy_all();

  const std::vector<Weight> weights_;
  size_t taken_ = 0;
  std::atomic<size_t> copied_{0};
  std::atomic<bool> is_ending_{false};
  int64_t process_;  // a child of a fork has no such thread
  std::thread thread_;
};

}  // namespace diptych

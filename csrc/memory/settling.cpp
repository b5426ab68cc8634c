#include "memory/settling.h"

#include <sys/resource.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <utility>

#include "memory/xxh3.h"

namespace diptych {

Settling::Settling(std::vector<Weight> weights)
    : weights_(std::move(weights)), process_(getpid()), thread_([this] { copy_all(); }) {}

Settling::~Settling() {
  is_ending_.store(true, std::memory_order_relaxed);
  process_ == getpid() ? thread_.join() : thread_.detach();
}

void Settling::wait() const {
  while (copied_.load(std::memory_order_acquire) < weights_.size()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Nothing between two pieces where no step begins; beside steps some tens of milliseconds, so that a copy costs them little.
void Settling::give_way() const {
  constexpr std::chrono::milliseconds kIdle{100}, kLongest{40}, kShort{2};
  const auto begin = Clock::now();
  while (!is_ending_.load(std::memory_order_relaxed)) {
    const auto now = Clock::now();
    if (now.time_since_epoch() - step_.load(std::memory_order_relaxed) > kIdle || now - begin > kLongest) return;
    std::this_thread::sleep_for(kShort);
  }
}

void Settling::copy_all() {
#if defined(__linux__)
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
#endif
  constexpr int64_t kPiece = 2 << 20;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const Weight& weight = weights_[i];
    Xxh3Copy pass(weight.bytes);
    for (int64_t at = 0; at < weight.bytes; at += kPiece) {
      give_way();
      if (is_ending_.load(std::memory_order_relaxed)) return;
      const int64_t n = std::min(kPiece, weight.bytes - at);
      ask_for_pages(weight.from + at, n);
      pass.copy_past_caches(weight.to + at, weight.from + at, n);
    }
    copied_.store(i + 1, std::memory_order_release);
  }
}

}  // namespace diptych

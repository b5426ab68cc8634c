// Ranks: processes that compute one model together. They see one memory (an anonymous file that each of them maps, so that nothing
// stays behind when the last is gone) and meet at one barrier; rank 0 says what is done next.
//
//   rank 0:  Team team(fd, 0, 2);  memcpy(team.message(n), ...);  team.post(kind, n);   work   team.meet(idle);
//   rank 1:  Team team(fd, 1, 2);  while (team.next(&kind, &n)) { read team.message(n);   work   team.meet(idle); }
//
// Ranks on several machines have a Link instead: each has a file of its own, and what one writes for the others is carried to them
// at the meeting behind it.
//
// Every message ends with one meeting of all ranks. That is why rank 0 may write the next one: who has arrived there reads no more
// of the last, nor of anything else that is shared.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "threads/thread_pool.h"

namespace diptych {

// A rank is gone, so the step has no result.
struct TeamBroken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Part of a file mapped for reading and writing.
class SharedPages {
 public:
  SharedPages(int fd, int64_t offset, int64_t bytes);  // throws std::bad_alloc
  ~SharedPages();
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int64_t offset() const { return offset_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t offset_, bytes_;
};

// Carries bytes between ranks that have no memory in common. Each returns false where a rank is gone.
class Link {
 public:
  virtual ~Link() = default;
  virtual bool gather(uint8_t* slots, int64_t ranks, int64_t bytes) = 0;  // [ranks, bytes]: each has written its own; then all are there
  virtual bool post(int32_t kind, const uint8_t* data, int64_t bytes) = 0;   // rank 0
  virtual bool next(int32_t* kind, std::vector<uint8_t>* data) = 0;          // others
};

class Team {
 public:
  static constexpr int kMostRanks = 64;
  static constexpr int64_t kErrorBytes = 1024;

  // fd: an anonymous file, empty when rank 0 comes, which makes it large; it stays the caller's. is_crowded: the ranks have more
  // threads than they have CPUs, and who waits sleeps at once instead of spinning. With a link the file is this rank's own.
  Team(int fd, int rank, int size, bool is_crowded, std::unique_ptr<Link> link = nullptr);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool is_linked() const { return link_ != nullptr; }

  // Waits for all ranks, calling `idle` (some nanoseconds) first, then sleeping. False: the team is broken.
  template <class Idle>
  bool meet(Idle&& idle) {
    if (is_linked()) return gather(nullptr, 0);
    uint32_t seen = 0;
    if (arrive(&seen)) return !is_broken();
    for (int spin = 0; spin < spins_; ++spin) {
      if (has_passed(seen)) return !is_broken();
      if (spin % 64 == 63 && is_broken()) return false;
      idle();
    }
    return sleep_until_passed(seen);
  }
  bool meet() { return meet(ThreadPool::relax); }

  // A meeting behind which rank 0 has the slots [size, bytes] of all. Ranks of one machine write them to one memory.
  bool gather(uint8_t* slots, int64_t bytes);

  bool is_broken() const { return control_->broken.load(std::memory_order_acquire) != 0; }
  void break_up();                      // every rank that waits, or will, is told; from any thread
  void say_error(const std::string& text);  // of this rank, kept where rank 0 finds it
  std::string error_of(int rank) const;

  // Room for a message of `bytes`, valid until the next call that asks for more.
  uint8_t* message(int64_t bytes);
  void give_back_message();                   // rank 0, between messages: its memory
  void post(int32_t kind, int64_t bytes);     // rank 0
  bool next(int32_t* kind, int64_t* bytes);   // others; false: the team is broken

  // Room for what a message gives back, shared by all ranks. Holders of an earlier, smaller view may keep it.
  std::shared_ptr<SharedPages> outputs(int64_t bytes);
  void give_back_outputs();  // rank 0, between messages: the memory, which is zero when it is next used

  // Zeroed memory for activations, the same on every rank that asks for the same sizes in the same order. `before` is no longer used.
  std::unique_ptr<SharedPages> arena(int64_t bytes, std::unique_ptr<SharedPages> before);

 private:
  struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
    uint32_t load(std::memory_order order) const { return value.load(order); }
  };
  // All zero is its first state, as the file begins.
  struct Control {
    Word arrived, passed, sleepers;  // of the barrier
    Word posted, listeners;          // of messages
    Word broken;
    int64_t message_bytes;
    int32_t message_kind;
    char errors[kMostRanks][kErrorBytes];
  };

  bool arrive(uint32_t* seen);  // true: the last, who lets all go
  bool has_passed(uint32_t seen) const { return control_->passed.load(std::memory_order_acquire) != seen; }
  bool sleep_until_passed(uint32_t seen);

  const int fd_, rank_, size_, spins_;
  const std::unique_ptr<Link> link_;
  std::vector<uint8_t> heard_bytes_;  // of the link's last message
  SharedPages control_pages_;
  Control* const control_;
  std::unique_ptr<SharedPages> messages_;
  std::shared_ptr<SharedPages> outputs_;
  int64_t next_arena_;
  uint32_t heard_ = 0;  // messages so far
};

}  // namespace diptych

#include "threads/team.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <ctime>
#endif

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>

namespace diptych {
namespace {

// Places in the file, which takes memory only where it is written. Arenas follow one another: a larger one must begin as zeros.
constexpr int64_t kControlBytes = 1 << 18;
constexpr int64_t kMessages = int64_t{1} << 36;
constexpr int64_t kOutputs = int64_t{1} << 40;
constexpr int64_t kArenas = int64_t{1} << 41;
constexpr int64_t kFileBytes = int64_t{1} << 43;
constexpr int64_t kPage = 2 << 20;

constexpr int kSpins = 4000;         // about 100 us; as in a region of one process
constexpr int kSpinsOfListeners = 1500;  // between two steps, then the CPU is offered to others, then they sleep
constexpr int kYields = 300;
constexpr int kCrowdedSpins = 20;

int64_t whole_pages(int64_t bytes) { return (std::max<int64_t>(bytes, 1) + kPage - 1) / kPage * kPage; }

#if defined(__linux__)
// Between processes: no FUTEX_PRIVATE. The time limit is for a waker that died between its store and its call.
void sleep_on(std::atomic<uint32_t>& word, uint32_t expected) {
  const timespec limit{0, 100'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &limit, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
void give_back(int fd, int64_t offset, int64_t bytes) {
  (void)!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}
#else
void sleep_on(std::atomic<uint32_t>&, uint32_t) { usleep(50); }
void wake_all(std::atomic<uint32_t>&) {}
void give_back(int, int64_t, int64_t) {}
#endif

int sized(int fd, bool is_owner) {
  if (is_owner && ftruncate(fd, kFileBytes) != 0) throw std::bad_alloc();
  return fd;
}

}  // namespace

SharedPages::SharedPages(int fd, int64_t offset, int64_t bytes) : offset_(offset), bytes_(bytes) {
  void* mapping = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(mapping);
#if defined(MADV_HUGEPAGE)
  madvise(mapping, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // where the system has them for shared memory
#endif
}

SharedPages::~SharedPages() { munmap(data_, static_cast<size_t>(bytes_)); }

Team::Team(int fd, int rank, int size, bool is_crowded, std::unique_ptr<Link> link)
    : fd_(sized(fd, rank == 0 || link != nullptr)), rank_(rank), size_(size), spins_(is_crowded ? kCrowdedSpins : kSpins), link_(std::move(link)),
      control_pages_(fd, 0, kControlBytes), control_(reinterpret_cast<Control*>(control_pages_.data())), next_arena_(kArenas) {
  static_assert(sizeof(Control) <= kControlBytes, "the control block has its pages");
  static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size) throw std::invalid_argument("a rank is 0 .. size - 1, at most 64");
}

bool Team::gather(uint8_t* slots, int64_t bytes) {
  if (!is_linked()) return meet();
  if (!is_broken() && !link_->gather(slots, size_, bytes)) break_up();
  return !is_broken();
}

bool Team::arrive(uint32_t* seen) {
  *seen = control_->passed.load(std::memory_order_relaxed);
  if (control_->arrived.value.fetch_add(1, std::memory_order_acq_rel) + 1 != static_cast<uint32_t>(size_)) return false;
  control_->arrived.value.store(0, std::memory_order_relaxed);
  control_->passed.value.store(*seen + 1);  // in one order with `sleepers`: who is not seen there sees this
  if (control_->sleepers.value.load() != 0) wake_all(control_->passed.value);
  return true;
}

bool Team::sleep_until_passed(uint32_t seen) {
  control_->sleepers.value.fetch_add(1);
  while (!has_passed(seen) && !is_broken()) sleep_on(control_->passed.value, seen);
  control_->sleepers.value.fetch_sub(1);
  return !is_broken();
}

void Team::break_up() {
  control_->broken.value.store(1);
  wake_all(control_->passed.value);
  wake_all(control_->posted.value);
}

void Team::say_error(const std::string& text) {
  const size_t n = std::min<size_t>(text.size(), kErrorBytes - 1);
  std::memcpy(control_->errors[rank_], text.data(), n);
  control_->errors[rank_][n] = '\0';
}

std::string Team::error_of(int rank) const {
  const char* text = control_->errors[rank];
  return std::string(text, strnlen(text, kErrorBytes));
}

uint8_t* Team::message(int64_t bytes) {
  if (messages_ == nullptr || messages_->bytes() < bytes) {
    messages_.reset();
    messages_ = std::make_unique<SharedPages>(fd_, kMessages, whole_pages(bytes));
  }
  return messages_->data();
}

void Team::give_back_message() {
  if (messages_ != nullptr) give_back(fd_, kMessages, messages_->bytes());
}

void Team::post(int32_t kind, int64_t bytes) {
  if (is_linked()) {
    if (is_broken() || !link_->post(kind, message(bytes), bytes)) break_up();
    return;  // the meeting at its end tells
  }
  control_->message_kind = kind;
  control_->message_bytes = bytes;
  control_->posted.value.fetch_add(1);
  if (control_->listeners.value.load() != 0) wake_all(control_->posted.value);
}

bool Team::next(int32_t* kind, int64_t* bytes) {
  if (is_linked()) {
    if (is_broken() || !link_->next(kind, &heard_bytes_)) break_up();
    if (is_broken()) return false;
    *bytes = static_cast<int64_t>(heard_bytes_.size());
    std::memcpy(message(*bytes), heard_bytes_.data(), heard_bytes_.size());
    return true;
  }
  auto is_there = [&] { return control_->posted.load(std::memory_order_acquire) != heard_; };
  const int spins = std::min(spins_, kSpinsOfListeners), yields = spins_ == kSpins ? kYields : 0;
  for (int spin = 0; spin < spins && !is_there(); ++spin) ThreadPool::relax();
  for (int turn = 0; turn < yields && !is_there(); ++turn) sched_yield();
  if (!is_there()) {
    control_->listeners.value.fetch_add(1);
    while (!is_there() && !is_broken()) sleep_on(control_->posted.value, heard_);
    control_->listeners.value.fetch_sub(1);
  }
  if (is_broken()) return false;
  ++heard_;
  *kind = control_->message_kind;
  *bytes = control_->message_bytes;
  return true;
}

std::shared_ptr<SharedPages> Team::outputs(int64_t bytes) {
  if (outputs_ == nullptr || outputs_->bytes() < bytes) outputs_ = std::make_shared<SharedPages>(fd_, kOutputs, whole_pages(bytes));
  return outputs_;
}

void Team::give_back_outputs() {
  if (outputs_ != nullptr) give_back(fd_, kOutputs, outputs_->bytes());
  outputs_.reset();
}

std::unique_ptr<SharedPages> Team::arena(int64_t bytes, std::unique_ptr<SharedPages> before) {
  if (before != nullptr && (rank_ == 0 || is_linked())) give_back(fd_, before->offset(), before->bytes());
  before.reset();
  auto pages = std::make_unique<SharedPages>(fd_, next_arena_, whole_pages(bytes));
  next_arena_ += pages->bytes();
  return pages;
}

}  // namespace diptych

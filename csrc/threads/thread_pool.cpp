#include "threads/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <system_error>
#include <utility>

namespace diptych {
namespace {

// Between regions a worker spins (about 50 us), then offers its CPU to others 1,500 times (about 1 ms where nobody takes it),
// then parks: the host's work between two regions of a busy engine is shorter than that, and an idle engine burns nothing.
constexpr int kSpinsBeforePark = 1500;
constexpr int kYieldsBeforePark = 1500;

#if defined(__linux__)
void park(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}
void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
}
#else
void park(std::atomic<uint32_t>&, uint32_t) { usleep(50); }
void wake_all(std::atomic<uint32_t>&) {}
void pin_to(int) {}
#endif

// Threads do not survive fork(): the child counts the fork and starts its own.
std::atomic<uint32_t> fork_generation{0};
void count_fork() { fork_generation.fetch_add(1); }
void watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
  (void)registered;
}

}  // namespace

void ThreadPool::relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // waits tens of cycles, where `yield` is nothing on most cores
#endif
}

void ThreadPool::yield() { sched_yield(); }

std::vector<int> ThreadPool::allowed_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
#endif
  return cpus;
}

ThreadPool::ThreadPool(int threads, std::vector<int> cpus)
    : threads_(threads > 0 ? threads : std::max<int>(1, static_cast<int>(cpus.size()))), cpus_(std::move(cpus)) {
  watch_forks();
  pin_ = static_cast<int>(cpus_.size()) >= threads_;
  start_workers();
}

ThreadPool::~ThreadPool() { stop_workers(); }

void ThreadPool::start_workers() {
  fork_generation_ = fork_generation.load();
  workers_.clear();
  workers_.reserve(threads_);
  for (int thread = 1; thread < threads_; ++thread) {
    workers_.push_back(Worker{this, thread, 0});
    pthread_t handle;
    const int failure = pthread_create(&handle, nullptr, worker_main, &workers_.back());
    if (failure != 0) {
      workers_.pop_back();
      stop_workers();
      throw std::system_error(failure, std::generic_category(), "cannot start a kernel thread");
    }
    workers_.back().handle = handle;
  }
}

void ThreadPool::stop_workers() {
  if (fork_generation_ != fork_generation.load()) return;  // they lived in the parent
  stopping_.store(true);
  epoch_.value.fetch_add(1);
  wake_all(epoch_.value);
  for (Worker& worker : workers_) pthread_join(worker.handle, nullptr);
  workers_.clear();
  stopping_.store(false);
}

void* ThreadPool::worker_main(void* argument) {
  const Worker& worker = *static_cast<Worker*>(argument);
  ThreadPool& pool = *worker.pool;
  if (pool.pin_) pin_to(pool.cpus_[worker.thread]);
  // Regions start only after the constructor (or the first run after fork) has started every worker, at epoch 0 or later;
  // finished_ makes the caller wait for each worker, so a worker is never more than one epoch behind.
  uint32_t seen = 0;
  while (true) {
    pool.wait_for_region(seen);
    seen = pool.epoch_.value.load(std::memory_order_acquire);
    if (pool.stopping_.load()) return nullptr;
    pool.task_(pool.context_, worker.thread, pool.threads_);
    pool.finished_.value.fetch_add(1, std::memory_order_release);
  }
}

void ThreadPool::wait_for_region(uint32_t seen) {
  for (int spin = 0; spin < kSpinsBeforePark; ++spin) {
    if (epoch_.value.load(std::memory_order_acquire) != seen) return;
    relax();
  }
  for (int turn = 0; turn < kYieldsBeforePark; ++turn) {
    if (epoch_.value.load(std::memory_order_acquire) != seen) return;
    sched_yield();
  }
  sleepers_.value.fetch_add(1);
  while (epoch_.value.load() == seen) park(epoch_.value, seen);
  sleepers_.value.fetch_sub(1);
}

// While a region runs the caller stays on its own CPU: moved onto a worker's it would halve the speed of both. Its mask is
// given back afterwards, so the thread (and those it starts) stay free between regions. About 1 us per region.
struct ThreadPool::HeldCpu {
#if defined(__linux__)
  explicit HeldCpu(const ThreadPool& pool) {
    held = pool.pin_ && sched_getaffinity(0, sizeof before, &before) == 0;
    if (held) pin_to(pool.cpus_[0]);
  }
  ~HeldCpu() {
    if (held) sched_setaffinity(0, sizeof before, &before);
  }
  cpu_set_t before;
  bool held;
#else
  explicit HeldCpu(const ThreadPool&) {}
#endif
};

// The child of fork() has this thread alone; whatever the lost threads held is taken back.
void ThreadPool::restart_after_fork() {
  for (Padded* word : {&lock_, &epoch_, &sleepers_, &arrived_, &passed_}) word->value.store(0);
  start_workers();
}

void ThreadPool::run(Task task, void* context) {
  if (fork_generation_ != fork_generation.load(std::memory_order_relaxed)) restart_after_fork();
  while (lock_.value.exchange(1, std::memory_order_acquire) != 0) sched_yield();
  if (threads_ == 1) {
    task(context, 0, 1);
  } else {
    const HeldCpu held(*this);
    run_with_workers(task, context);
  }
  lock_.value.store(0, std::memory_order_release);
}

void ThreadPool::run_with_workers(Task task, void* context) {
  task_ = task;
  context_ = context;
  finished_.value.store(0, std::memory_order_relaxed);
  epoch_.value.fetch_add(1);
  if (sleepers_.value.load() != 0) wake_all(epoch_.value);
  task(context, 0, threads_);
  const uint32_t others = static_cast<uint32_t>(threads_ - 1);
  for (int spin = 0; finished_.value.load(std::memory_order_acquire) != others; ++spin)
    spin < kSpinsBeforeYield ? relax() : static_cast<void>(sched_yield());
}

}  // namespace diptych

// One pool of pinned threads for all kernels. A region (`run`) enters every thread once; inside it the threads meet at
// `barrier`. The caller is thread 0, so a pool of one has no workers and costs nothing.
//
//   ThreadPool pool(2);
//   pool.run([&](int thread, int threads) { first(thread, threads); pool.barrier(thread); second(thread, threads); });
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace diptych {

class ThreadPool {
 public:
  using Task = void (*)(void* context, int thread, int threads);

  // threads <= 0: one per CPU this process may use. Thread i is pinned to cpus[i]; without enough of them (tests) none is pinned.
  explicit ThreadPool(int threads = 0) : ThreadPool(threads, allowed_cpus()) {}
  ThreadPool(int threads, std::vector<int> cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return threads_; }

  // Runs task on every thread and returns when all have finished. One region at a time: a second caller waits for the
  // first. Not to be called from inside a region. After fork() the child starts its own workers on first use.
  void run(Task task, void* context);

  template <class Function>
  void run(Function&& function) {
    auto call = [](void* context, int thread, int threads) {
      (*static_cast<std::remove_reference_t<Function>*>(context))(thread, threads);
    };
    run(call, &function);
  }

  // Meets all threads of the region. Every thread must call it the same number of times. While it waits it calls `idle`, which
  // should take a few nanoseconds.
  template <class Idle>
  void barrier(Idle&& idle) {
    barrier(idle, [] {});
  }
  // The thread that comes last calls `last` before any of them goes on.
  template <class Idle, class Last>
  void barrier(Idle&& idle, Last&& last) {
    if (threads_ == 1) return last();
    const uint32_t passed = passed_.value.load(std::memory_order_relaxed);
    if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads_)) {
      last();
      arrived_.value.store(0, std::memory_order_relaxed);
      passed_.value.store(passed + 1, std::memory_order_release);
      return;
    }
    for (int spin = 0; passed_.value.load(std::memory_order_acquire) == passed; ++spin)
      spin < kSpinsBeforeYield ? static_cast<void>(idle()) : yield();
  }
  void barrier() { barrier(relax); }

  static void relax();

  static std::vector<int> allowed_cpus();  // of this process

 private:
  struct alignas(64) Padded {
    std::atomic<uint32_t> value{0};
  };
  struct Worker {
    ThreadPool* pool;
    int thread;
    unsigned long handle;
  };

  struct HeldCpu;

  // Inside a region a late thread is usually microseconds away; after this the CPU is offered to others on a shared machine.
  static constexpr int kSpinsBeforeYield = 4000;

  static void yield();
  static void* worker_main(void* argument);
  void start_workers();
  void stop_workers();
  void wait_for_region(uint32_t seen);
  void run_with_workers(Task task, void* context);
  void restart_after_fork();

  int threads_;
  bool pin_;
  std::vector<int> cpus_;
  std::vector<Worker> workers_;
  uint32_t fork_generation_ = 0;
  Task task_ = nullptr;
  void* context_ = nullptr;
  Padded lock_;       // 1 while a region runs
  Padded epoch_;      // counts regions; workers wait on it
  Padded sleepers_;   // workers parked on epoch_
  Padded finished_;   // workers done with the current region
  Padded arrived_;    // threads inside the current barrier
  Padded passed_;     // counts barriers
  std::atomic<bool> stopping_{false};
};

}  // namespace diptych

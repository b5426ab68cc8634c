// What the drivers of the linear layers share: by register tiles (gemm.cpp), by matrix tiles (gemm_matrix.cpp) and by groups
// (gemm_groups.cpp).
#pragma once

#include <algorithm>

#include "gemm/gemm_kernels.h"

namespace diptych {

// One thread's part in a call of linear().
struct LinearCall {
  const LinearKernels& kernels;
  const PackedLinear& w;
  const Rows& x;
  const int32_t* x_rows;
  int64_t m;  // rows in memory
  const Epilogue& epilogue;
  int64_t row_of(int64_t i) const { return x_rows != nullptr ? x_rows[i] : i; }
};

// Of one thread, 64-byte aligned, contents undefined, until the next call on it.
uint8_t* linear_scratch(int64_t bytes);

// Asks for what the epilogue of some strips of a panel would wait for: the scales and biases of their lanes, and outputs that it adds to, which
// another thread may hold. Those that it only writes are better left: asked for they stay, and who reads them next takes twice as long.
DIPTYCH_FORCED void ask_for_end(const LinearCall& call, int64_t panel, Range strips, Range rows) {
  const Epilogue& epilogue = call.epilogue;
  const bool is_added = epilogue.store == Store::add_f32 && epilogue.out_rows == nullptr;
  const int64_t of_one = rows_of_one(call.x.kind);
  for (int64_t strip = strips.begin; strip < strips.end; ++strip) {
    const int64_t lane = panel * kPanelLanes + strip * kStripLanes;
    if (call.w.scales != nullptr) __builtin_prefetch(call.w.scales + lane);
    if (call.w.bias != nullptr) __builtin_prefetch(call.w.bias + lane);
    if (is_added)
      for (int64_t row = rows.begin / of_one; row < rows.end / of_one; ++row)
        __builtin_prefetch(static_cast<const float*>(epilogue.out) + row * epilogue.out_stride + lane, 1);
  }
}

// The epilogue of some strips of a panel for rows [begin, end) of the call, at most kMaxTileRows, of pairs both. acc: the first row's sums at the first
// strip; they may be overwritten.
void finish_tile(const LinearCall& call, int64_t panel, Range strips, Range rows, uint8_t* acc);

// The same for any number of rows in parts, for calls without biases of rows: what LinearKernels::finish is asked (no outputs: nothing), and
// what the call's reader sees of it then. Written in place: a copy would wait for all stores before it, of whole tiles.
void point_at_tile(const LinearCall& call, int64_t panel, Range strips, Range rows, uint8_t* acc, FinishArgs& args);
void show_outputs(const LinearCall& call, int64_t first_row, const FinishArgs& args);

// Steps [step, step + steps) of a strip of int4 or fp8, whole groups of it, as those of its expanded form.
void expand_steps(const LinearCall& call, const uint8_t* strip, int64_t step, int64_t steps, uint8_t* out);

void linear_by_matrix(const LinearCall& call, const MatrixTiles& tiles, int thread, int threads);
void linear_by_groups(const LinearCall& call, const GroupTiles& tiles, int thread, int threads);

// What each of the threads that multiply m rows by a weight works in; is_routed: some of the rows of x, as experts take.
int64_t linear_scratch_bytes(const KernelSet& set, const LinearShape& shape, int64_t m, bool is_routed, int threads);
int64_t matrix_scratch_bytes(const PackedLinear& w, const MatrixTiles& tiles, int64_t m, bool is_routed, int threads);
int64_t group_scratch_bytes(const PackedLinear& w, const GroupTiles& tiles, int64_t m);

// Pieces of a panel: one strip (two where gated) for few rows where a thread has so few panels that the last ones would not be
// shared evenly, else the panel.
constexpr int64_t kFewPanels = 64;
inline int64_t pieces_per_panel(const PackedLinear& w, int threads) {
  if (threads == 1 || w.n_panels >= kFewPanels * threads) return 1;
  return w.shape.gated ? kPanelStrips / 2 : kPanelStrips;
}

// Strips side by side belong to one thread: whether pieces of so many leave no thread a tenth more than its part.
inline bool is_shared_evenly(const PackedLinear& w, int64_t strips, int threads) {
  const int64_t all = w.n_panels * kPanelStrips, pieces = all / strips;
  return 10 * ((pieces + threads - 1) / threads * strips) <= 11 * ((all + threads - 1) / threads);
}

// The threads share the tasks of a call in parts, one each or several threads to one.
inline int count_parts(int threads) { return std::min(threads, Balance::kParts); }
inline int part_of(int thread, int threads) { return thread * count_parts(threads) / threads; }

// The tasks (piece times block of rows) of one call as one thread meets them: its own part from the front, then what others have not
// begun, from the back. It takes half of what is left of its own at once: taking waits for all stores before it.
class Tasks {
 public:
  Tasks(int64_t count, Balance& balance, int thread, int threads)
      : balance_(balance), count_(count), threads_(threads), parts_(count_parts(threads)), part_(part_of(thread, threads)) {
    const Range own = share(count_, part_, parts_);
    half_ = (own.end - own.begin + 1) / 2;
    take();
  }
  // The last thread leaves the balance as it found it: all have taken their last task by then.
  ~Tasks() {
    if (balance_.finished.fetch_add(1, std::memory_order_acq_rel) + 1 != threads_) return;
    for (int part = 0; part < parts_; ++part) balance_.parts[part].taken.store(0, std::memory_order_relaxed);
    balance_.finished.store(0, std::memory_order_release);
  }
  Tasks(const Tasks&) = delete;
  Tasks& operator=(const Tasks&) = delete;

  bool has_task() const { return visited_ < parts_; }
  int64_t current() const { return current_; }
  int64_t following() const { return following_; }  // likely the next, its weights can be read ahead
  void advance() {
    if (++current_ == end_) return take();
    following_ = std::min(current_ + 1, part_end_ - 1);
  }

 private:
  void take() {
    for (; visited_ < parts_; ++visited_, part_ = (part_ + 1) % parts_) {
      const bool is_own = visited_ == 0;
      const Range range = share(count_, part_, parts_);
      std::atomic<uint64_t>& part_taken = balance_.parts[part_].taken;
      auto left_of = [&](uint64_t taken) { return range.end - range.begin - taken_from_front(taken) - taken_from_back(taken); };
      // Another's part is looked at first: taking from it in vain would take its line away from a core far off.
      if (!is_own && left_of(part_taken.load(std::memory_order_relaxed)) <= 0) continue;
      const uint64_t taken = part_taken.fetch_add(is_own ? half_ : kFromBack, std::memory_order_relaxed);
      const int64_t front = taken_from_front(taken), back = taken_from_back(taken), left = left_of(taken);
      if (left <= 0) continue;
      part_end_ = range.end;
      current_ = is_own ? range.begin + front : range.end - 1 - back;
      end_ = is_own ? current_ + std::min<int64_t>(half_, left) : current_ + 1;
      following_ = is_own ? std::min(current_ + 1, part_end_ - 1) : std::max(current_ - 1, range.begin);
      half_ = std::max<int64_t>(1, (left - half_) / 2);
      return;
    }
  }
  static constexpr uint64_t kFromBack = uint64_t{1} << 32;
  static int64_t taken_from_front(uint64_t taken) { return static_cast<int64_t>(taken % kFromBack); }
  static int64_t taken_from_back(uint64_t taken) { return static_cast<int64_t>(taken / kFromBack); }
  Balance& balance_;
  int64_t count_, half_, current_ = 0, end_ = 0, following_ = 0, part_end_ = 0;
  int threads_, parts_, part_, visited_ = 0;  // visited_: parts that were found empty
};

}  // namespace diptych

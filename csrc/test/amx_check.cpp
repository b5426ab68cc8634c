// The AMX kernels against their twin, bit for bit, on random linear layers:
//   amx_check [seconds [seed]]
// On a processor without AMX its instructions are emulated. Exit 1 on a difference.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "amx_emulation.h"
#include "gemm_amx.h"
#include "kernel_sets.h"
#include "thread_pool.h"

namespace diptych {
namespace {

class Round {
 public:
  explicit Round(uint64_t seed) : random_(seed) {
    shape_.format = static_cast<Format>(pick(0, 2));
    shape_.n = 2 * pick(1, 100), shape_.k = pick(0, 4) == 0 ? pick(1000, 3000) : pick(1, 300);
    shape_.group = 32 << pick(0, 2), shape_.gated = pick(0, 1), shape_.has_bias = pick(0, 1);
    x_count_ = pick(0, 9) == 0 ? pick(500, 600) : pick(1, 80);
    if (pick(0, 1))
      for (int64_t i = pick(1, x_count_); i > 0; --i) row_ids_.push_back(static_cast<int32_t>(pick(0, x_count_ - 1)));
    m_ = row_ids_.empty() ? x_count_ : static_cast<int64_t>(row_ids_.size());
    threads_ = static_cast<int>(pick(1, 3));
    blocking_ = {16 * pick(1, 40), pick(1, 64) << 10, pick(0, 1) << 20, pick(64, 512) << 10, 64 * pick(0, 8), 64 * pick(0, 64), 64 * pick(0, 64)};
    has_other_shape_ = pick(0, 1);
    w_ = floats(shape_.n * shape_.k), bias_ = floats(shape_.n), x_ = floats(x_count_ * shape_.k);
  }

  std::vector<float> run(const KernelSet& set) const {
    PageBuffer blob(packed_bytes(shape_)), memory(rows_bytes(rows_kind(shape_.format), x_count_, shape_.k));
    const Rows rows = view_rows(rows_kind(shape_.format), x_count_, shape_.k, memory.data());
    const PackedLinear w = view_packed(shape_, blob.data());
    std::vector<float> out(m_ * w.n_outputs);
    Epilogue epilogue;
    epilogue.out = out.data(), epilogue.out_stride = w.n_outputs;
    const WeightPart part{w_.data(), Source::f32, shape_.n, shape_.k};
    ThreadPool pool(threads_);
    pool.run([&](int thread, int threads) {
      pack_linear(set, shape_, &part, 1, bias_.data(), blob.data(), thread, threads);
      const Range own = share(x_count_, thread, threads);
      prepare_rows(set, rows, x_.data(), shape_.k, own.begin, own.end);
      pool.barrier();
      linear(set, w, rows, row_ids_.empty() ? nullptr : row_ids_.data(), m_, epilogue, thread, threads);
    });
    return out;
  }

  // The set with this round's way through the caches in place of its own.
  std::vector<float> run_otherwise(KernelSet set, const MatrixShape (&wide)[2][2]) const {
    const int format = static_cast<int>(shape_.format);
    Tiles tiles = *set.tiles[format];
    MatrixTiles matrix = *tiles.matrix;
    matrix.blocking = blocking_, matrix.least_rows = 1, matrix.wide = wide[format != 0][has_other_shape_];
    tiles.matrix = &matrix, set.tiles[format] = &tiles;
    return run(set);
  }

  void print() const {
    std::printf("format %d, %lld rows, n %lld, k %lld, group %lld\n", static_cast<int>(shape_.format), static_cast<long long>(m_),
                static_cast<long long>(shape_.n), static_cast<long long>(shape_.k), static_cast<long long>(shape_.group));
  }

 private:
  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  std::vector<float> floats(int64_t count) {
    std::vector<float> out(count);
    std::normal_distribution<float> draw;
    for (float& value : out) value = draw(random_);
    return out;
  }

  std::mt19937_64 random_;
  MatrixBlocking blocking_;
  bool has_other_shape_ = false;
  LinearShape shape_;
  int64_t x_count_ = 0, m_ = 0;
  int threads_ = 1;
  std::vector<int32_t> row_ids_;
  std::vector<float> w_, bias_, x_;
};

}  // namespace
}  // namespace diptych

int main(int argc, char** argv) {
  using namespace diptych;
  using std::chrono::steady_clock;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const KernelSet& twin_set = kernel_set("amx_twin");
  KernelSet amx_set = twin_set;
  amx_set.tiles[0] = &amx::kBf16Tiles, amx_set.tiles[1] = &amx::kInt8Tiles, amx_set.tiles[2] = &amx::kInt4Tiles;
  const bool is_real = std::strcmp(kernel_sets().front()->name, "amx") == 0;
  if (!is_real) emulate_amx();
  const auto begin = steady_clock::now();
  uint64_t seed = first;
  for (; std::chrono::duration<double>(steady_clock::now() - begin).count() < seconds; ++seed) {
    const Round round(seed);
    const std::vector<float> twin = round.run(twin_set);
    auto is_equal = [&](const std::vector<float>& other) { return std::memcmp(twin.data(), other.data(), twin.size() * 4) == 0; };
    if (is_equal(round.run(amx_set)) && is_equal(round.run_otherwise(amx_set, amx::kWideShapes)) &&
        is_equal(round.run_otherwise(twin_set, amx_twin::kWideShapes)))
      continue;
    std::printf("bits differ with seed %llu: ", static_cast<unsigned long long>(seed));
    round.print();
    return 1;
  }
  std::printf("%llu random layers without a differing bit, AMX %s\n", static_cast<unsigned long long>(seed - first), is_real ? "of this processor" : "emulated");
  return 0;
}

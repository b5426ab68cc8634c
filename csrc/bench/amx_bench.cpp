// Tunes the matrix tiles on a processor that has them: every number of MatrixBlocking by itself, both wide shapes, and from how many
// rows on tiles beat AVX-512. One line for each trial, in TOP/s and GB/s of weights, with the ceilings of the same run above.
//   amx_bench [--set amx] [--threads N] [--formats bf16,int8,int4] [--rows 1,16,64,512] [--repeats 7]
// A and B alternate, the best of each is printed; the trial in use is marked. A host may run two threads on one core for a while, whose
// tiles they then share: each measurement stands between two of the peak, and what was taken in that state has a column of its own.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gemm/gemm_amx.h"
#include "sets/kernel_sets.h"
#include "threads/thread_pool.h"
#include "bench.h"

namespace diptych {
namespace {

struct Options {
  std::string set = "amx";
  int threads = 0, repeats = 7;
  std::vector<std::string> formats = {"bf16", "int8", "int4"};
  std::vector<int64_t> rows = {1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512, 2048};
};

// A way to compute: a kernel set whose tiles of one format are cut otherwise.
struct Trial {
  std::string name;
  MatrixTiles matrix;
};

constexpr double kNever = 1e30;

// The least seconds, with a core for each thread and with one for two.
struct Best {
  double apart = kNever, together = kNever;
};

// The peak of the tiles, and whether it is that of all cores: the highest seen so far says so.
class Peak {
 public:
  explicit Peak(ThreadPool& pool) : pool_(pool) {}
  double measure() {
    const double peak = measure_ops_per_s(&CeilingLoops::bf16_burst, pool_, 1);
    highest_ = std::max(highest_, peak);
    return peak;
  }
  bool is_apart(double peak) const { return peak > 0.85 * highest_; }
  bool is_together(double peak) const { return peak < 0.6 * highest_; }

 private:
  ThreadPool& pool_;
  double highest_ = 0;
};

// Weights that no cache holds, and rows of x.
class World {
 public:
  World(const KernelSet& set, ThreadPool& pool, LinearShape shape, int64_t rows)
      : set_(set), pool_(pool), shape_(shape), memory_(rows_bytes(rows_kind(shape.format), rows, shape.k)), out_(rows * shape.n * 4),
        rows_(view_rows(rows_kind(shape.format), rows, shape.k, memory_.data())) {
    const auto copies = std::max<int64_t>(1, kBytes / packed_bytes(shape));
    for (int64_t i = 0; i < copies; ++i) {
      blobs_.emplace_back(packed_bytes(shape));
      pool_.run([&](int thread, int threads) { pack_random(set_, shape_, i, 0.05f, blobs_.back().data(), thread, threads); });
      weights_.push_back(view_packed(shape, blobs_.back().data()));
    }
    std::vector<float> x(shape.k);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < shape.k; ++i) x[i] = static_cast<float>((row * 7919 + i * 104729) % 2001 - 1000) * 1e-3f;
      prepare_row(set_, rows_, row, x.data());
    }
  }

  // Seconds of one call; a few calls on weights that follow one another.
  double measure(const MatrixTiles& matrix) {
    KernelSet set = set_;
    set.matrix[static_cast<int>(shape_.format)] = &matrix;
    Epilogue epilogue;
    epilogue.out = out_.data(), epilogue.out_stride = shape_.n;
    const double operations = 2.0 * static_cast<double>(rows_.m) * shape_.n * shape_.k;
    const int64_t calls = std::clamp<int64_t>(static_cast<int64_t>(2e11 / operations), 2, static_cast<int64_t>(weights_.size()));
    const double begin = now_s();
    pool_.run([&](int thread, int threads) {
      for (int64_t i = 0; i < calls; ++i) {
        linear(set, weights_[i], rows_, nullptr, rows_.m, epilogue, thread, threads);
        pool_.barrier();
      }
    });
    return (now_s() - begin) / static_cast<double>(calls);
  }

  void print(const Trial& trial, const Best& best, bool is_own) const {
    std::printf("%-24s n %5lld k %5lld rows %4lld:", trial.name.c_str(), static_cast<long long>(shape_.n), static_cast<long long>(shape_.k),
                static_cast<long long>(rows_.m));
    for (const double seconds : {best.apart, best.together}) {
      if (seconds == kNever) std::printf("%11s us %7s TOP/s %6s GB/s", "-", "-", "-");
      if (seconds != kNever)
        std::printf("%11.1f us %7.3f TOP/s %6.1f GB/s", seconds * 1e6, 2e-12 * static_cast<double>(rows_.m) * shape_.n * shape_.k / seconds,
                    1e-9 * packed_bytes(shape_) / seconds);
    }
    std::printf("%s\n", is_own ? "   in use" : "");
    std::fflush(stdout);
  }

 private:
  static constexpr int64_t kBytes = 256 << 20;
  const KernelSet& set_;
  ThreadPool& pool_;
  LinearShape shape_;
  PageBuffer memory_, out_;
  Rows rows_;
  std::vector<PageBuffer> blobs_;
  std::vector<PackedLinear> weights_;
};

// One number at a time beside what is in use. Few rows take the narrow shapes, which know other numbers than the wide one.
std::vector<Trial> trials(const MatrixTiles& own, const MatrixShape (&wide)[2][2], int64_t rows, Format format) {
  std::vector<Trial> all = {{"own", own}};
  auto add = [&](const std::string& name, int64_t MatrixBlocking::* number, std::vector<int64_t> values) {
    for (const int64_t value : values) {
      all.push_back({name + " " + std::to_string(value), own});
      all.back().matrix.blocking.*number = value;
    }
  };
  if (own.is_narrow(rows)) {
    if (rows <= 16 && format != Format::bf16) {
      all.push_back({"avx512", own});
      all.back().matrix.least_rows = rows + 1;
    }
    add("stream_ahead", &MatrixBlocking::stream_ahead, {0, 2048, 4096, 8192, 12288, 16384});
    if (format == Format::int4) add("passing_bytes", &MatrixBlocking::passing_bytes, {8 << 10, 12 << 10, 20 << 10, 28 << 10});
  } else {
    all.push_back({"16 x 4, w_bytes 32768", own});
    all.back().matrix.wide = wide[format != Format::bf16][0], all.back().matrix.blocking.w_bytes = 32 << 10;
    add("w_bytes", &MatrixBlocking::w_bytes, {20 << 10, 40 << 10, 60 << 10, 120 << 10, 1 << 30});
    add("rows", &MatrixBlocking::rows, {128, 256, 1024});
    add("x_bytes", &MatrixBlocking::x_bytes, {512 << 10, 2048 << 10});
    add("sums_bytes", &MatrixBlocking::sums_bytes, {512 << 10, 1536 << 10});
  }
  for (Trial& trial : all)
    if (trial.name != "avx512") trial.matrix.least_rows = 1;
  return all;
}

void run(const KernelSet& set, ThreadPool& pool, Peak& peak, Format format, int64_t rows, int repeats) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{9728, 896}, {896, 4864}, {7168, 3584}}) {
    World world(set, pool, {format, n, k, 128, false, false}, rows);
    const MatrixTiles& own = *set.matrix[static_cast<int>(format)];
    const std::vector<Trial> all = trials(own, set.needs.has(Capability::amx_tile) ? amx::kWideShapes : amx_twin::kWideShapes, rows, format);
    std::vector<Best> best(all.size());
    for (int repeat = 0; repeat < repeats; ++repeat)
      for (size_t i = 0; i < all.size(); ++i) {
        const double before = peak.measure(), seconds = world.measure(all[i].matrix), behind = peak.measure();
        if (peak.is_apart(std::min(before, behind))) best[i].apart = std::min(best[i].apart, seconds);
        if (peak.is_together(std::max(before, behind))) best[i].together = std::min(best[i].together, seconds);
      }
    const size_t in_use = rows >= own.least_rows ? 0 : 1;
    for (size_t i = 0; i < all.size(); ++i) world.print(all[i], best[i], i == in_use);
  }
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--set") options.set = value;
    if (key == "--threads") options.threads = std::atoi(value.c_str());
    if (key == "--repeats") options.repeats = std::atoi(value.c_str());
    if (key == "--formats") options.formats = split(value);
    if (key == "--rows") options.rows = whole_numbers(value);
  }
  return options;
}

int main_(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const KernelSet& set = kernel_set(options.set);
  if (set.matrix[0] == nullptr) return std::fprintf(stderr, "%s has no matrix tiles\n", set.name), 1;
  ThreadPool pool(options.threads);
  std::printf("%s, %d threads: read %.1f GB/s, bf16 %.2f TOP/s, int8 %.2f TOP/s\n", set.name, pool.size(),
              1e-9 * measure_read_bytes_per_s(pool, kBeyondCaches, 5), 1e-12 * measure_ops_per_s(&CeilingLoops::bf16_burst, pool, 5),
              1e-12 * measure_ops_per_s(&CeilingLoops::int8_burst, pool, 5));
  Peak peak(pool);
  for (int i = 0; i < 20; ++i) peak.measure();
  for (const std::string& name : options.formats) {
    std::printf("\n%-56s%40s%40s\n", name.c_str(), "a core for each thread", "one for two");
    const Format format = name == "bf16" ? Format::bf16 : name == "int8" ? Format::int8 : Format::int4;
    for (const int64_t rows : options.rows) run(set, pool, peak, format, rows, options.repeats);
  }
  return 0;
}

}  // namespace
}  // namespace diptych

int main(int argc, char** argv) {
  try {
    return diptych::main_(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

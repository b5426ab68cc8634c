// The AMX kernels against their twin, bit for bit, on random linear layers and random attention:
//   amx_check [seconds [seed]]
// On a processor without AMX its instructions are emulated; the vectors beside them are AVX-512's: exit 77
// where the processor lacks those, 1 on a difference.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "amx_emulation.h"
#include "gemm/gemm_amx.h"
#include "sets/kernel_sets.h"
#include "threads/thread_pool.h"

namespace diptych {
namespace {

class Draws {
 public:
  explicit Draws(uint64_t seed) : random_(seed) {}

 protected:
  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  std::vector<float> floats(int64_t count) {
    std::vector<float> out(count);
    std::normal_distribution<float> draw;
    for (float& value : out) value = draw(random_);
    return out;
  }

 private:
  std::mt19937_64 random_;
};

class LinearRound : Draws {
 public:
  explicit LinearRound(uint64_t seed) : Draws(seed) {
    const Format of_groups[] = {Format::group2, Format::group3, Format::group4, Format::group5, Format::group6, Format::group8};
    shape_.format = pick(0, 1) ? of_groups[pick(0, 5)] : static_cast<Format>(pick(0, 2));
    shape_.n = 2 * pick(1, 100), shape_.k = pick(0, 4) == 0 ? pick(1000, 3000) : pick(1, 300);
    shape_.group = 32 << pick(0, 2), shape_.gated = pick(0, 1), shape_.has_bias = pick(0, 1);
    if (is_grouped(shape_.format)) {
      if (pick(0, 3) == 0) shape_.group = 16;
      shape_.wide = pick(0, 1), shape_.grid.scale = static_cast<Source>(pick(0, 2));
      const bool is_plain = shape_.format != Format::group8;  // whose levels are centred
      if (pick(0, 1)) shape_.grid.offset = shape_.format == Format::group4 && pick(0, 1) ? Offset::zeros : Offset::minima;
      if (shape_.grid.offset != Offset::none && is_plain) shape_.grid.levels = Levels::plain;
      if (shape_.grid.offset == Offset::minima) shape_.grid.halves = shape_.grid.scale != Source::f32 && pick(0, 1);
      if (shape_.grid.offset == Offset::none && shape_.format == Format::group4) shape_.grid.levels = Levels::e2m1, shape_.grid.e8m0 = pick(0, 1);
    }
    x_count_ = pick(0, 9) == 0 ? pick(500, 600) : pick(1, 80);
    if (pick(0, 1))
      for (int64_t i = pick(1, x_count_); i > 0; --i) row_ids_.push_back(static_cast<int32_t>(pick(0, x_count_ - 1)));
    m_ = row_ids_.empty() ? x_count_ : static_cast<int64_t>(row_ids_.size());
    threads_ = static_cast<int>(pick(1, 3));
    blocking_ = {16 * pick(1, 40), pick(1, 64) << 10, pick(0, 1) << 20, pick(64, 512) << 10, pick(1, 32) << 10, 64 * pick(0, 64)};
    has_other_shape_ = pick(0, 1);
    store_ = static_cast<Store>(pick(0, 3)), activation_ = static_cast<Activation>(pick(0, 2));
    if (pick(0, 1)) {
      out_rows_.resize(m_), row_weights_ = floats(m_);
      std::iota(out_rows_.begin(), out_rows_.end(), 0);
      for (int64_t i = m_ - 1; i > 0; --i) std::swap(out_rows_[i], out_rows_[pick(0, i)]);
    }
    w_ = floats(shape_.n * shape_.k), bias_ = floats(shape_.n), x_ = floats(x_count_ * shape_.k);
    for (int64_t i = 0, power = 0; i < x_count_ * shape_.k; ++i) {  // groups of many magnitudes
      if (i % 16 == 0) power = pick(0, 6);
      x_[i] /= static_cast<float>(int64_t{1} << power);
    }
    seed_ = seed;
  }

  std::vector<float> run(const KernelSet& set) const {
    PageBuffer blob(packed_bytes(shape_)), memory(rows_bytes(rows_kind(shape_), x_count_, shape_.k));
    const Rows rows = view_rows(rows_kind(shape_), x_count_, shape_.k, memory.data());
    const PackedLinear w = view_packed(shape_, blob.data());
    std::vector<float> out(m_ * w.n_outputs, 0.25f);  // of bf16 the first half is written
    Epilogue epilogue;
    epilogue.out = out.data(), epilogue.out_stride = w.n_outputs, epilogue.store = store_, epilogue.activation = activation_;
    if (!out_rows_.empty()) epilogue.out_rows = out_rows_.data(), epilogue.row_weights = row_weights_.data();
    const WeightPart part{w_.data(), Source::f32, shape_.n, shape_.k};
    ThreadPool pool(threads_);
    pool.run([&](int thread, int threads) {
      is_grouped(shape_.format) ? pack_random(set, shape_, seed_, 1.0f, blob.data(), thread, threads)
                                : pack_linear(set, shape_, &part, 1, bias_.data(), blob.data(), thread, threads);
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
    MatrixTiles matrix = *set.matrix[format];
    matrix.blocking = blocking_, matrix.least_rows = 1, matrix.wide = wide[format != 0][has_other_shape_];
    set.matrix[format] = &matrix;
    return run(set);
  }

  bool has_groups() const { return is_grouped(shape_.format); }
  bool has_whole_sums() const { return shape_.format != Format::bf16; }  // which register tiles have with the same bits

  void print() const {
    std::printf("store %d, activation %d%s, ", static_cast<int>(store_), static_cast<int>(activation_), out_rows_.empty() ? "" : ", rows out of order");
    std::printf("format %d%s, %lld rows, n %lld, k %lld, group %lld, offset %d\n", static_cast<int>(shape_.format), shape_.wide ? " wide" : "", static_cast<long long>(m_),
                static_cast<long long>(shape_.n), static_cast<long long>(shape_.k), static_cast<long long>(shape_.group), static_cast<int>(shape_.grid.offset));
  }

 private:
  MatrixBlocking blocking_;
  bool has_other_shape_ = false;
  LinearShape shape_;
  int64_t x_count_ = 0, m_ = 0;
  int threads_ = 1;
  uint64_t seed_ = 0;
  Store store_ = Store::f32;
  Activation activation_ = Activation::silu;
  std::vector<int32_t> row_ids_, out_rows_;
  std::vector<float> w_, bias_, x_, row_weights_;
};

// The last tokens of one sequence, a task for each kv head, its tiles joined as they come or split and combined.
class AttentionRound : Draws {
 public:
  explicit AttentionRound(uint64_t seed) : Draws(seed) {
    const int64_t dims[] = {2, 16, 24, 64, 80, 128}, groups[] = {1, 3, 7, 8, 20};
    shape_.n_kv_heads = pick(1, 2), shape_.n_heads = shape_.n_kv_heads * groups[pick(0, 4)], shape_.head_dim = dims[pick(0, 5)];
    shape_.v_head_dim = pick(0, 1) ? pick(1, 130) : shape_.head_dim;
    shape_.scale = 0.3f, shape_.has_softcap = pick(0, 3) == 0, shape_.softcap = 3.0f;
    if (pick(0, 1)) shape_.window = pick(1, 300);
    if (pick(0, 3) == 0) shape_.reach = pick(0, 200), distances_ = floats(shape_.n_heads * (2 * shape_.reach + 32)), shape_.distances = distances_.data();
    n_ = pick(1, 600), tokens_ = std::min<int64_t>(n_, pick(1, std::max<int64_t>(1, kTaskRows * shape_.n_kv_heads / shape_.n_heads)));
    is_split_ = pick(0, 1);
    KvShape kv;
    kv.n_layers = 1, kv.block_tokens = 16 * pick(1, 4), kv.n_blocks = (n_ + kv.block_tokens - 1) / kv.block_tokens;
    kv.n_kv_heads = shape_.n_kv_heads, kv.head_dim = shape_.head_dim, kv.v_head_dim = shape_.v_head_dim, kv.format = static_cast<KvFormat>(pick(0, 2));
    shape_.in_bytes = kv.format == KvFormat::int8 && pick(0, 1);
    for (int64_t i = kv.n_blocks; i > 0; --i) table_.push_back(static_cast<int32_t>(i - 1));
    for (int64_t i = 0; i < tokens_; ++i) positions_.push_back(static_cast<int32_t>(n_ - tokens_ + i));
    const int64_t written = n_ + n_ % 2, vectors = written * kv.n_kv_heads;  // in a step the odd neighbour would be zero
    kv_.reset(new KvCache(kv));
    std::memset(kv_->layer(0).data, 0xff, static_cast<size_t>(kv_->bytes()));  // NaN where nothing is written
    kv_->write(0, table_.data(), written, floats(vectors * kv.head_dim).data(), floats(vectors * kv.v_head_dim).data());
    for (float value : floats(tokens_ * shape_.n_heads * shape_.head_dim)) {
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      q_.push_back(static_cast<uint16_t>(bits >> 16));
    }
  }

  std::vector<float> run(const KernelSet& set) const {
    const int64_t group = shape_.n_heads / shape_.n_kv_heads, rows = tokens_ * group, dv = kv_->shape().value_dim();
    const int64_t low = std::max<int64_t>(0, n_ - tokens_ - std::min(shape_.window, n_) + 1);
    const auto first = static_cast<int32_t>(low / kTileTokens), end = static_cast<int32_t>((n_ - 1) / kTileTokens + 1);
    std::vector<float> out(tokens_ * shape_.n_heads * shape_.v_head_dim), partials((end - first) * rows * (dv + 2));
    AttentionCall call;
    call.shape = shape_, call.kv = kv_->layer(0), call.q = q_.data(), call.positions = positions_.data();
    call.block_table = table_.data(), call.table_width = static_cast<int64_t>(table_.size());
    call.out_f32 = out.data(), call.out_stride = shape_.n_heads * shape_.v_head_dim, call.partials = partials.data();
    PageBuffer scratch(set.attention->scratch_bytes(shape_));
    for (int32_t head = 0; head < shape_.n_kv_heads; ++head) {
      const AttentionTask task{0, head, 0, static_cast<int32_t>(tokens_), first, end, is_split_, 0, first};
      set.attention->run(call, task, nullptr, scratch.data());
      if (is_split_) set.attention->combine(call, task, 0, rows, scratch.data());
    }
    return out;
  }

  void print() const {
    std::printf("attention of %lld tokens over %lld, %lld heads, %lld kv heads of %lld and %lld\n", static_cast<long long>(tokens_), static_cast<long long>(n_),
                static_cast<long long>(shape_.n_heads), static_cast<long long>(shape_.n_kv_heads), static_cast<long long>(shape_.head_dim),
                static_cast<long long>(shape_.v_head_dim));
  }

 private:
  AttentionShape shape_;
  std::vector<float> distances_;
  int64_t n_ = 0, tokens_ = 0;
  bool is_split_ = false;
  std::unique_ptr<KvCache> kv_;
  std::vector<int32_t> table_, positions_;
  std::vector<uint16_t> q_;
};

bool is_equal(const std::vector<float>& a, const std::vector<float>& b) { return std::memcmp(a.data(), b.data(), a.size() * 4) == 0; }

}  // namespace
}  // namespace diptych

int main(int argc, char** argv) {
  using namespace diptych;
  using std::chrono::steady_clock;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  if (std::none_of(kernel_sets().begin(), kernel_sets().end(), [](const KernelSet* set) { return std::strcmp(set->name, "amx_twin") == 0; })) {
    std::printf("nothing was checked: this processor lacks instructions that the twin needs beside the tiles\n");
    return 77;
  }
  const KernelSet& twin_set = kernel_set("amx_twin");
  KernelSet amx_set = twin_set;
  amx_set.matrix[0] = &amx::kBf16Matrix, amx_set.matrix[1] = &amx::kInt8Matrix, amx_set.matrix[2] = &amx::kInt4Matrix;
  amx_set.attention = &amx::kAttention;
  const GroupTiles amx_groups = on_matrix_tiles(amx::kGroups);
  amx_set.groups = &amx_groups;
  const bool is_real = std::strcmp(kernel_sets().front()->name, "amx") == 0;
  if (!is_real) emulate_amx();
  const auto begin = steady_clock::now();
  uint64_t seed = first;
  for (; std::chrono::duration<double>(steady_clock::now() - begin).count() < seconds; ++seed) {
    const LinearRound linear(seed);
    const AttentionRound attention(seed);
    const std::vector<float> twin = linear.run(twin_set), attended = attention.run(twin_set);
    bool is_linear_right = is_equal(twin, linear.run(amx_set));
    if (linear.has_whole_sums()) is_linear_right = is_linear_right && is_equal(twin, linear.run(kernel_set("avx512_fma")));
    if (!linear.has_groups()) {
      is_linear_right = is_linear_right && is_equal(twin, linear.run_otherwise(amx_set, amx::kWideShapes)) &&
                        is_equal(twin, linear.run_otherwise(twin_set, amx_twin::kWideShapes));
    }
    bool is_attention_right = is_equal(attended, attention.run(amx_set));
    for (const float value : attended) is_attention_right = is_attention_right && value - value == 0.0f;
    if (is_linear_right && is_attention_right) continue;
    std::printf("bits differ, or are of no number, with seed %llu: ", static_cast<unsigned long long>(seed));
    is_linear_right ? attention.print() : linear.print();
    return 1;
  }
  std::printf("%llu rounds without a differing bit, AMX %s\n", static_cast<unsigned long long>(seed - first), is_real ? "of this processor" : "emulated");
  return 0;
}

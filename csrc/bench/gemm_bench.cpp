// Microbenchmark of the linear layers: every format and row count on the layers of a model shape, beside the machine's
// ceilings measured in the same run.   gemm_bench [--shape 0.5b|1b] [--threads N] [--rows 1,16,512] [--formats bf16,int8] [--group 64] [--clock cpu]
// group2 to group8 with w: met by wide rows; with n: nested scales (groups of up to 64); with m: with minima; with mh: in 16 bits; group4 with t:
// NF4's levels; with e: MXFP4's levels and scales
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "ceilings/ceilings.h"
#include "gemm/gemm.h"
#include "sets/kernel_sets.h"
#include "threads/thread_pool.h"
#include "bench.h"

namespace diptych {
namespace {

const KernelSet* set = kernel_sets().front();

double best_of(int repeats, const std::function<void()>& work) {
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const double start = now_s();
    work();
    best = std::min(best, now_s() - start);
  }
  return best;
}

struct Ceilings {
  double bytes_per_s = 0, bf16_per_s = 0, int8_per_s = 0;
};

double measure_bandwidth(ThreadPool& pool, const PageBuffer& buffer) { return measure_read_bytes_per_s(pool, buffer, 2); }

double measure_burst(ThreadPool& pool, double (*CeilingLoops::* burst)(int64_t)) { return measure_ops_per_s(burst, pool, 3); }

Ceilings measure_ceilings(ThreadPool& pool, const PageBuffer& buffer) {
  return {measure_bandwidth(pool, buffer), measure_burst(pool, &CeilingLoops::bf16_burst), measure_burst(pool, &CeilingLoops::int8_burst)};
}

struct ModelShape {
  const char* name;
  int64_t hidden, ffn, qkv, vocabulary;
};
constexpr ModelShape kShapes[] = {{"0.5b", 896, 4864, 1152, 151936}, {"1b", 2048, 8192, 3072, 128256}};

struct Layer {
  PackedLinear qkv, out, gate_up, down;
};

struct Model {
  std::vector<Layer> layers;
  std::vector<PageBuffer> blobs;
  int64_t bytes = 0, weights = 0;
};

PackedLinear make_linear(ThreadPool& pool, Model& model, LinearShape shape) {
  PageBuffer blob(packed_bytes(shape));
  pool.run([&](int thread, int threads) { pack_random(*set, shape, model.blobs.size(), 0.05f, blob.data(), thread, threads); });
  model.bytes += packed_bytes(shape);
  model.weights += shape.n * shape.k;
  model.blobs.push_back(std::move(blob));
  return view_packed(shape, model.blobs.back().data());
}

// As many layers as hold `bytes`, so that no cache holds the model.
Model make_model(ThreadPool& pool, const ModelShape& shape, Format format, int64_t group, const Grid& grid, bool wide, int64_t bytes) {
  Model model;
  while (model.bytes < bytes) {
    Layer layer;
    layer.qkv = make_linear(pool, model, {format, shape.qkv, shape.hidden, group, false, true, grid, wide});
    layer.out = make_linear(pool, model, {format, shape.hidden, shape.hidden, group, false, false, grid, wide});
    layer.gate_up = make_linear(pool, model, {format, 2 * shape.ffn, shape.hidden, group, true, false, grid, wide});
    layer.down = make_linear(pool, model, {format, shape.hidden, shape.ffn, group, false, false, grid, wide});
    model.layers.push_back(layer);
  }
  return model;
}

struct Buffers {
  PageBuffer memory;
  Rows hidden, ffn;
  float *f32_hidden, *f32_out, *residual;
};

Buffers make_buffers(const ModelShape& shape, const LinearShape& layer, int64_t m) {
  Buffers buffers;
  const RowsKind kind = rows_kind(layer);
  const int64_t wide = std::max(shape.qkv, shape.ffn);
  const int64_t sizes[] = {rows_bytes(kind, m, shape.hidden), rows_bytes(kind, m, shape.ffn), m * shape.hidden * 4,
                           m * wide * 4, m * shape.hidden * 4};
  int64_t total = 0;
  for (int64_t size : sizes) total += (size + 4095) / 4096 * 4096;
  buffers.memory = PageBuffer(total);
  uint8_t* at = buffers.memory.data();
  std::vector<uint8_t*> starts;
  for (int64_t size : sizes) {
    starts.push_back(at);
    at += (size + 4095) / 4096 * 4096;
  }
  buffers.hidden = view_rows(kind, m, shape.hidden, starts[0]);
  buffers.ffn = view_rows(kind, m, shape.ffn, starts[1]);
  buffers.f32_hidden = reinterpret_cast<float*>(starts[2]);
  buffers.f32_out = reinterpret_cast<float*>(starts[3]);
  buffers.residual = reinterpret_cast<float*>(starts[4]);
  for (int64_t i = 0; i < m * shape.hidden; ++i) buffers.f32_hidden[i] = static_cast<float>((i * 7919) % 2001 - 1000) * 1e-3f;
  for (int64_t i = 0; i < m * wide; ++i) buffers.f32_out[i] = static_cast<float>((i * 104729) % 2001 - 1000) * 1e-3f;
  prepare_rows(*set, buffers.hidden, buffers.f32_hidden, shape.hidden, 0, m);
  prepare_rows(*set, buffers.ffn, buffers.f32_out, shape.ffn, 0, m);
  return buffers;
}

void meet(ThreadPool& pool, ReadAhead ahead) {
  pool.barrier([&] { ahead.line() ? static_cast<void>(0) : ThreadPool::relax(); });
}

// The linear layers of one forward pass, `layers` of them, with the barriers a program needs.
double pass_s(ThreadPool& pool, const ModelShape& shape, const Model& model, const Buffers& b, int64_t m, int64_t layers, int repeats) {
  return best_of(repeats, [&] {
    pool.run([&](int thread, int threads) {
      Epilogue wide{Store::f32, Activation::silu, b.f32_out, shape.qkv, nullptr, nullptr};
      Epilogue gate{Store::f32, Activation::silu, b.f32_out, shape.ffn, nullptr, nullptr};
      Epilogue add{Store::add_f32, Activation::silu, b.residual, shape.hidden, nullptr, nullptr};
      for (int64_t i = 0; i < layers; ++i) {
        const Layer& layer = model.layers[i];
        const Layer& following = model.layers[(i + 1) % layers];
        linear(*set, layer.qkv, b.hidden, nullptr, m, wide, thread, threads);
        meet(pool, first_weights(layer.out, thread, threads));
        linear(*set, layer.out, b.hidden, nullptr, m, add, thread, threads);
        meet(pool, first_weights(layer.gate_up, thread, threads));
        linear(*set, layer.gate_up, b.hidden, nullptr, m, gate, thread, threads);
        meet(pool, first_weights(layer.down, thread, threads));
        linear(*set, layer.down, b.ffn, nullptr, m, add, thread, threads);
        meet(pool, first_weights(following.qkv, thread, threads));
      }
    });
  });
}

// Each linear layer by itself, as many copies as no cache holds, the numbers of rows in turns: what more rows cost beside the first.
struct LayerShape {
  const char* name;
  int64_t n, k;
  bool gated;
};

struct Copies {
  Model model;
  std::vector<PackedLinear> views;
};

Copies make_copies(ThreadPool& pool, const LayerShape& layer, Format format, int64_t group, const Grid& grid, bool wide, int64_t bytes) {
  Copies copies;
  while (copies.model.bytes < bytes)
    copies.views.push_back(make_linear(pool, copies.model, {format, layer.n, layer.k, group, layer.gated, false, grid, wide}));
  return copies;
}

struct LayerBuffers {
  PageBuffer memory;
  Rows x;
  float* out;
};

LayerBuffers make_layer_buffers(const PackedLinear& w, int64_t m) {
  LayerBuffers buffers;
  const RowsKind kind = rows_kind(w.shape);
  const int64_t x_bytes = (rows_bytes(kind, m, w.shape.k) + 4095) / 4096 * 4096, out_bytes = m * w.n_outputs * 4;
  buffers.memory = PageBuffer(x_bytes + out_bytes);
  buffers.x = view_rows(kind, m, w.shape.k, buffers.memory.data());
  buffers.out = reinterpret_cast<float*>(buffers.memory.data() + x_bytes);
  std::vector<float> x(m * w.shape.k);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 7919) % 2001) * 1e-3f - 1.0f;
  prepare_rows(*set, buffers.x, x.data(), w.shape.k, 0, m);
  return buffers;
}

double layer_s(ThreadPool& pool, const Copies& copies, const LayerBuffers& b) {
  const double start = now_s();
  pool.run([&](int thread, int threads) {
    const Epilogue store{Store::f32, Activation::silu, b.out, copies.views[0].n_outputs, nullptr, nullptr};
    for (size_t i = 0; i < copies.views.size(); ++i) {
      linear(*set, copies.views[i], b.x, nullptr, b.x.m, store, thread, threads);
      meet(pool, first_weights(copies.views[(i + 1) % copies.views.size()], thread, threads));
    }
  });
  return (now_s() - start) / static_cast<double>(copies.views.size());
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Options {
  std::string shape = "0.5b";
  int threads = 0;
  int64_t group = 64;
  int64_t megabytes = 320;
  int repeats = 5;
  std::vector<int64_t> rows = {1, 2, 4, 8, 12, 16, 24, 32, 64, 512, 2048};
  std::vector<std::string> formats = {"bf16", "int8", "int4"};
  std::vector<std::string> layers;  // each by itself; none: whole layers of the model
};

Format format_of(const std::string& name) {
  return name == "bf16"                 ? Format::bf16
         : name == "int8"               ? Format::int8
         : name == "fp8"                ? Format::fp8
         : name.rfind("group4", 0) == 0 ? Format::group4
         : name.rfind("group8", 0) == 0 ? Format::group8
         : name.rfind("group6", 0) == 0 ? Format::group6
         : name.rfind("group5", 0) == 0 ? Format::group5
         : name.rfind("group3", 0) == 0 ? Format::group3
         : name.rfind("group2", 0) == 0 ? Format::group2
                                        : Format::int4;
}

bool has_mark(const std::string& name, char mark) { return name.rfind("group", 0) == 0 && name.find(mark, 6) != std::string::npos; }
bool is_wide(const std::string& name) { return has_mark(name, 'w'); }
Grid grid_of(const std::string& name) {
  Grid grid;
  if (name == "fp8") grid.scale = Source::f32;
  if (has_mark(name, 'n')) grid.nested = true, grid.scale = has_mark(name, 'm') ? Source::f16 : Source::f32;
  if (has_mark(name, 'm')) grid.offset = Offset::minima, grid.levels = format_of(name) == Format::group8 ? Levels::centred : Levels::plain;
  if (has_mark(name, 'h')) grid.halves = true;
  if (has_mark(name, 't')) grid.levels = Levels::nf4;
  if (has_mark(name, 'e')) grid.levels = Levels::e2m1, grid.e8m0 = true;
  return grid;
}

// One measurement between two of the bandwidth: memory here changes speed within seconds.
struct Sample {
  double seconds, bytes_per_s, peak, of_limit;
};

Sample measure(ThreadPool& pool, const ModelShape& shape, const Model& model, const Buffers& buffers, Format format,
               double layer_bytes, double operations, int64_t layers, const PageBuffer& buffer) {
  const int64_t m = buffers.hidden.m;
  Sample sample;
  sample.peak = has_bf16_rows(format) ? measure_burst(pool, &CeilingLoops::bf16_burst)
                : bits_of(format) < 8 && !model.layers[0].qkv.shape.wide ? measure_codes_per_s(pool, 3)
                : measure_burst(pool, &CeilingLoops::int8_burst);
  const double before = measure_bandwidth(pool, buffer);
  sample.seconds = pass_s(pool, shape, model, buffers, m, layers, 2) / static_cast<double>(layers);
  sample.bytes_per_s = 0.5 * (before + measure_bandwidth(pool, buffer));
  sample.of_limit = std::max(layer_bytes / sample.bytes_per_s, operations / sample.peak) / sample.seconds;
  return sample;
}

void run_format(ThreadPool& pool, const ModelShape& shape, const std::string& name, const Options& options, const PageBuffer& buffer) {
  const Format format = format_of(name);
  const Model model = make_model(pool, shape, format, options.group, grid_of(name), is_wide(name), options.megabytes << 20);
  const double layer_bytes = static_cast<double>(model.bytes) / model.layers.size();
  const double layer_weights = static_cast<double>(model.weights) / model.layers.size();
  for (int64_t m : options.rows) {
    const Buffers buffers = make_buffers(shape, model.layers[0].qkv.shape, m);
    const double operations = 2.0 * static_cast<double>(m) * layer_weights;
    const int64_t wanted = std::max<int64_t>(1, static_cast<int64_t>(2.5e11 / operations));
    const int64_t layers = std::min<int64_t>(wanted, model.layers.size());
    std::vector<Sample> samples;
    for (int i = 0; i < options.repeats; ++i)
      samples.push_back(measure(pool, shape, model, buffers, format, layer_bytes, operations, layers, buffer));
    std::sort(samples.begin(), samples.end(), [](const Sample& a, const Sample& b) { return a.of_limit < b.of_limit; });
    const Sample& mid = samples[samples.size() / 2];
    std::printf("%-5s %-5s %5ld %10.1f %7.1f %5.1f%% %8.0f %5.1f%% %7.1f%%   [%.0f..%.0f]\n", shape.name, name.c_str(), m,
                mid.seconds * 1e6, layer_bytes / mid.seconds * 1e-9, 100 * layer_bytes / mid.seconds / mid.bytes_per_s,
                operations / mid.seconds * 1e-9, 100 * operations / mid.seconds / mid.peak, 100 * mid.of_limit,
                100 * samples.front().of_limit, 100 * samples.back().of_limit);
    std::fflush(stdout);
  }
}

void run_layers(ThreadPool& pool, const ModelShape& shape, const std::string& name, const Options& options) {
  const LayerShape layers[] = {{"qkv", shape.qkv, shape.hidden, false},
                               {"out", shape.hidden, shape.hidden, false},
                               {"gate_up", 2 * shape.ffn, shape.hidden, true},
                               {"down", shape.hidden, shape.ffn, false},
                               {"head", shape.vocabulary, shape.hidden, false}};
  for (const LayerShape& layer : layers) {
    if (std::find(options.layers.begin(), options.layers.end(), layer.name) == options.layers.end()) continue;
    const Copies copies = make_copies(pool, layer, format_of(name), options.group, grid_of(name), is_wide(name), options.megabytes << 20);
    std::vector<LayerBuffers> buffers;
    for (int64_t m : options.rows) buffers.push_back(make_layer_buffers(copies.views[0], m));
    std::vector<std::vector<double>> seconds(options.rows.size());
    for (int i = 0; i < options.repeats; ++i)
      for (size_t at = 0; at < buffers.size(); ++at) seconds[at].push_back(layer_s(pool, copies, buffers[at]));
    const double bytes = static_cast<double>(copies.model.bytes) / static_cast<double>(copies.views.size());
    std::printf("%-5s %-6s %-7s", shape.name, name.c_str(), layer.name);
    for (size_t at = 0; at < buffers.size(); ++at) {
      const double taken = median(seconds[at]);
      std::printf("  %ld: %.1f us %.1f GB/s %.3f", options.rows[at], taken * 1e6, bytes / taken * 1e-9, taken / median(seconds[0]));
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i], value = value_of(argc, argv, i);
    if (key == "--clock" && value == "cpu") cpu_threads = 1;  // with --threads 1
    else if (key == "--set") set = &kernel_set(value);
    else if (key == "--shape") options.shape = value;
    else if (key == "--threads") options.threads = std::atoi(value.c_str());
    else if (key == "--group") options.group = std::atoi(value.c_str());
    else if (key == "--megabytes") options.megabytes = std::atoi(value.c_str());
    else if (key == "--repeats") options.repeats = std::atoi(value.c_str());
    else if (key == "--formats") options.formats = split(value);
    else if (key == "--layers") options.layers = split(value);
    else if (key == "--rows") options.rows = whole_numbers(value);
    else refuse(key);
  }
  return options;
}

int main_(int argc, char** argv) {
  const Options options = parse(argc, argv);
  ThreadPool pool(options.threads);
  PageBuffer buffer(kBeyondCaches);
  std::memset(buffer.data(), 1, buffer.bytes());
  const Ceilings top = measure_ceilings(pool, buffer);
  std::printf("%s   threads %d, %.0f ns apart   read %.1f GB/s   bf16 %.0f Gop/s   int8 %.0f Gop/s\n", set->name, pool.size(),
              measure_signal_s(pool, 3) * 1e9, top.bytes_per_s * 1e-9, top.bf16_per_s * 1e-9, top.int8_per_s * 1e-9);
  std::printf("%-5s %-5s %5s %10s %7s %6s %8s %6s %8s\n", "shape", "fmt", "rows", "us/layer", "GB/s", "", "Gop/s", "", "of limit");
  for (const ModelShape& shape : kShapes)
    if (options.shape == shape.name)
      for (const std::string& format : options.formats)
        options.layers.empty() ? run_format(pool, shape, format, options, buffer) : run_layers(pool, shape, format, options);
  return 0;
}

}  // namespace
}  // namespace diptych

int main(int argc, char** argv) { return diptych::main_(argc, argv); }

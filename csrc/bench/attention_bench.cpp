// Attention alone: prefill against the bf16 peak, decode against the read ceiling, both measured in the same run.
//   attention_bench [--set NAME] [--threads N] [--case PART_OF_A_NAME] [--formats bf16,int8,fp8,bytes] [--repeats N] [--clock cpu]
// bytes: a cache of int8 met by queries and weights of 8 bits.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention/attention_plan.h"
#include "bench.h"
#include "sets/kernel_sets.h"
#include "threads/thread_pool.h"

namespace diptych {
namespace {

struct Case {
  const char* name;
  int64_t n_heads, n_kv_heads, head_dim, sequences, context, new_tokens;
};

const KernelSet* set = kernel_sets().front();

const char* const kFormats[] = {"bf16", "int8", "fp8", "bytes"};

const Case kCases[] = {
    {"0.5b prefill 512", 14, 2, 64, 1, 512, 512},   {"0.5b prefill 2048", 14, 2, 64, 1, 2048, 2048},
    {"1b prefill 2048", 32, 8, 64, 1, 2048, 2048},  {"d128 prefill 2048", 16, 8, 128, 1, 2048, 2048},
    {"0.5b decode 512", 14, 2, 64, 1, 512, 1},      {"1b decode 512", 32, 8, 64, 1, 512, 1},
    {"0.5b decode 16 x 200", 14, 2, 64, 16, 200, 1}, {"1b decode 16 x 200", 32, 8, 64, 16, 200, 1},
    {"0.5b decode 8k", 14, 2, 64, 1, 8192, 1},      {"1b decode 8k", 32, 8, 64, 1, 8192, 1},
    {"0.5b decode 32k", 14, 2, 64, 1, 32768, 1},    {"1b decode 32k", 32, 8, 64, 1, 32768, 1},
    {"0.5b prefill 32k", 14, 2, 64, 1, 32768, 2048}, {"0.5b decode cached", 14, 2, 64, 1, 1024, 1},
    {"1b decode cached", 32, 8, 64, 1, 512, 1},
    {"d128 decode 8k", 16, 8, 128, 1, 8192, 1},     {"d128 decode 32k", 16, 8, 128, 1, 32768, 1},
    {"0.5b chunk at 32k", 14, 2, 64, 1, 32768, 512}, {"d128 chunk at 32k", 16, 8, 128, 1, 32768, 512},
};

// Numbers of everyday size: products of denormals, which zeros with few bits set are, take some processors a hundred times as long.
void fill(const KvCache& kv) {
  const KvShape& shape = kv.shape();
  uint32_t random = 1;
  for (int64_t layer = 0; layer < shape.n_layers; ++layer)
    for (int64_t block = 0; block < shape.n_blocks; ++block)
      for (int64_t head = 0; head < shape.n_kv_heads; ++head) {
        const KvHead at = kv.layer(layer).head(block, head);
        const int64_t bytes = shape.key_bytes() + shape.value_bytes();
        for (int64_t i = 0; i < bytes; i += 2) {
          random = random * 1664525u + 1013904223u;
          uint16_t two = static_cast<uint16_t>(random >> 16);
          if (shape.format == KvFormat::fp8) two &= 0xbfbfu;  // below 2, no NaN
          if (shape.format == KvFormat::bf16) two = static_cast<uint16_t>((two & 0x81ffu) | 0x3e00u);  // +-[1/8, 1/2)
          std::memcpy(at.keys + i, &two, 2);
        }
        if (shape.format == KvFormat::bf16) continue;
        std::fill(at.key_scales, at.key_scales + 2 * shape.block_tokens, 0.004f);
      }
}

void run_case(ThreadPool& pool, const Case& c, const std::string& name, int repeats, double read, double peak) {
  const KvFormat format = name == "bf16" ? KvFormat::bf16 : name == "fp8" ? KvFormat::fp8 : KvFormat::int8;
  const int64_t blocks = (c.context + 31) / 32, tokens = c.sequences * c.new_tokens;
  KvShape kv_shape;
  kv_shape.n_blocks = blocks * c.sequences, kv_shape.block_tokens = 32, kv_shape.n_kv_heads = c.n_kv_heads;
  kv_shape.head_dim = kv_shape.v_head_dim = c.head_dim, kv_shape.format = format;
  // enough layers that a decode finds none of its keys in the last cache
  const double kv_bytes = static_cast<double>(kv_shape.n_blocks) * kv_shape.block_bytes();
  kv_shape.n_layers = c.new_tokens > 1 || std::strstr(c.name, "cached") ? 1 : std::max<int64_t>(1, std::min<int64_t>(400, static_cast<int64_t>(4e8 / kv_bytes)));
  KvCache kv(kv_shape);
  fill(kv);
  std::vector<int32_t> table(c.sequences * blocks), positions(tokens), starts(c.sequences + 1);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>((i * 7919) % table.size());
  for (int64_t t = 0; t < tokens; ++t) positions[t] = static_cast<int32_t>(c.context - c.new_tokens + t % c.new_tokens);
  for (int64_t s = 0; s <= c.sequences; ++s) starts[s] = static_cast<int32_t>(s * c.new_tokens);
  std::vector<uint16_t> q(tokens * c.n_heads * c.head_dim, 0x3c00), out(q.size());

  AttentionCall call;
  call.shape.n_heads = c.n_heads, call.shape.n_kv_heads = c.n_kv_heads, call.shape.head_dim = call.shape.v_head_dim = c.head_dim, call.shape.scale = 0.125f;
  call.shape.in_bytes = name == "bytes";
  call.q = q.data(), call.positions = positions.data(), call.block_table = table.data(), call.table_width = blocks;
  call.out_bf16 = out.data(), call.out_stride = c.n_heads * c.head_dim;
  AttentionPlan plan;
  plan_attention_tasks(call.shape, {starts.data(), positions.data(), c.sequences}, pool.size(), plan);
  std::vector<float> partials(plan.partial_floats + 64);
  call.partials = partials.data();
  const AttentionKernels& kernels = *set->attention;
  const int64_t stride = kernels.scratch_bytes(call.shape);
  PageBuffer scratch(stride * pool.size());

  double best = 1e9;
  for (int repeat = 0; repeat < (std::strstr(c.name, "cached") ? 30 * repeats : repeats); ++repeat) {
    std::vector<std::atomic<int32_t>> next(kv_shape.n_layers);
    const double begin = now_s();
    pool.run([&](int thread, int threads) {
      AttentionCall mine = call;
      for (int64_t layer = 0; layer < kv_shape.n_layers; ++layer) {
        mine.kv = kv.layer(layer);
        const int32_t n_tasks = static_cast<int32_t>(plan.tasks.size());
        for (int32_t i = next[layer]++; i < n_tasks; i = next[layer]++) {
          const int32_t following = i + threads;
          kernels.run(mine, plan.tasks[i], following < n_tasks ? &plan.tasks[following] : nullptr, scratch.data() + thread * stride);
        }
        pool.barrier();
        if (plan.combines.empty()) continue;
        for (const AttentionTask& task : plan.combines) {
          const Range rows = share(c.n_heads / c.n_kv_heads, thread, threads);
          kernels.combine(mine, task, rows.begin, rows.end, scratch.data() + thread * stride);
        }
        pool.barrier();
      }
    });
    best = std::min(best, (now_s() - begin) / kv_shape.n_layers);
  }
  if (c.new_tokens > 1) {
    const double keys = c.new_tokens * (static_cast<double>(c.context) - 0.5 * (c.new_tokens - 1));  // seen, over all rows of a head
    const double flops = 4.0 * c.sequences * keys * c.head_dim * c.n_heads;
    std::printf("%-22s %s %9.1f us  %6.0f Gop/s  %5.1f %% of peak\n", c.name, name.c_str(), best * 1e6, flops / best * 1e-9, 100 * flops / best / peak);
  } else {
    std::printf("%-22s %s %9.1f us  %6.1f GB/s   %5.1f %% of read\n", c.name, name.c_str(), best * 1e6, kv_bytes / best * 1e-9, 100 * kv_bytes / best / read);
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace diptych

int main(int argc, char** argv) {
  using namespace diptych;
  int threads = 0, repeats = 7;
  std::string part;
  std::vector<std::string> formats(std::begin(kFormats), std::end(kFormats));
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i], value = value_of(argc, argv, i);
    if (key == "--set") set = &kernel_set(value);
    else if (key == "--threads") threads = std::atoi(value.c_str());
    else if (key == "--case") part = value;
    else if (key == "--formats") formats = split(value);
    else if (key == "--repeats") repeats = std::atoi(value.c_str());
    else if (key == "--clock" && value == "cpu") cpu_threads = 1;  // with --threads 1
    else refuse(key);
  }
  for (const std::string& format : formats)
    if (std::find(std::begin(kFormats), std::end(kFormats), format) == std::end(kFormats)) refuse(format);
  ThreadPool pool(threads);
  for (const std::string& format : formats)
    for (const Case& c : kCases)
      if (std::strstr(c.name, part.c_str()))
        run_case(pool, c, format, repeats, measure_read_bytes_per_s(pool, kBeyondCaches, 3),
                 measure_ops_per_s(&CeilingLoops::bf16_burst, pool, 3));
  return 0;
}

// C entry points for tests/kernels: the linear layers without Python bindings, loaded with ctypes.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "gemm/gemm.h"
#include "sets/kernel_sets.h"
#include "threads/thread_pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace diptych;

LinearShape make_shape(const int64_t* v) {  // format, n, k, group, gated, has_bias, scale, offset, levels, wide, nested, e8m0, halves
  return {static_cast<Format>(v[0]), v[1], v[2], v[3], v[4] != 0, v[5] != 0,
          {static_cast<Source>(v[6]), static_cast<Offset>(v[7]), static_cast<Levels>(v[8]), v[10] != 0, false, v[11] != 0, v[12] != 0}, v[9] != 0};
}

}  // namespace

// A set to give to the functions below; null where this machine cannot run it.
EXPORT const void* kernels_find(const char* name) {
  for (const KernelSet* set : kernel_sets())
    if (std::strcmp(set->name, name) == 0) return set;
  return nullptr;
}
EXPORT int64_t kernels_packed_bytes(const int64_t* shape) { return packed_bytes(make_shape(shape)); }

// parts: n_parts times (address, source, rows, stride)
EXPORT void kernels_pack(const KernelSet* set, const int64_t* shape, const int64_t* parts, int64_t n_parts, const float* bias, void* blob, int threads) {
  std::vector<WeightPart> list;
  for (int64_t i = 0; i < n_parts; ++i) {
    const int64_t* p = parts + 4 * i;
    list.push_back({reinterpret_cast<const void*>(p[0]), static_cast<Source>(p[1]), p[2], p[3]});
  }
  ThreadPool pool(threads);
  pool.run([&](int thread, int count) { pack_linear(*set, make_shape(shape), list.data(), n_parts, bias, blob, thread, count); });
}

// parts: n_parts times (codes, scales, offsets, rows, factors)
EXPORT void kernels_pack_codes(const KernelSet* set, const int64_t* shape, const int64_t* parts, int64_t n_parts, const float* bias, void* blob, int threads) {
  std::vector<CodePart> list;
  for (int64_t i = 0; i < n_parts; ++i) {
    const int64_t* p = parts + 5 * i;
    list.push_back({reinterpret_cast<const uint8_t*>(p[0]), reinterpret_cast<const void*>(p[1]), reinterpret_cast<const void*>(p[2]), p[3], reinterpret_cast<const void*>(p[4])});
  }
  ThreadPool pool(threads);
  pool.run([&](int thread, int count) { pack_codes(*set, make_shape(shape), list.data(), n_parts, bias, blob, thread, count); });
}

EXPORT void kernels_unpack(const int64_t* shape, const void* blob, float* out) {
  const LinearShape wanted = make_shape(shape);
  unpack_rows(view_packed(wanted, blob), 0, wanted.n, out, wanted.k);
}

// x [x_rows_count, k] fp32 -> the raw values of the rows, int8 or bf16, and the scales of the int8 rows [m, groups]. low: the other
// halves of wide rows, else null. order [k] or null.
EXPORT void kernels_prepare(const KernelSet* set, int kind, int64_t m, int64_t k, const float* x, int8_t* q, int8_t* low, float* scales, const int32_t* order) {
  PageBuffer memory(rows_bytes(static_cast<RowsKind>(kind), m, k));
  Rows rows = view_rows(static_cast<RowsKind>(kind), m, k, memory.data());
  rows.order = order;
  prepare_rows(*set, rows, x, k, 0, m);
  for (int64_t row = 0; low != nullptr && row < m; ++row) std::memcpy(low + row * k, rows.data + row * rows.stride_bytes + rows.k_padded, k);
  const int64_t element = rows.kind == RowsKind::bf16 ? 2 : 1;
  for (int64_t row = 0; row < m; ++row) std::memcpy(q + row * k * element, rows.data + row * rows.stride_bytes, k * element);
  for (int64_t i = 0; rows.kind != RowsKind::bf16 && i < m * rows.groups; ++i)
    scales[i] = rows.scales[i / rows.groups] * (rows.powers == nullptr ? 1.0f : rows.powers[i]);
}

// out [., out_stride] is fp32 or bf16 as store says. row_ids, out_rows [m] and weights [m] may be null.
EXPORT void kernels_linear(const KernelSet* set, const int64_t* shape, const void* blob, const float* x, int64_t x_count,
                           const int32_t* row_ids, int64_t m, int store, int activation, void* out, int64_t out_stride, const int32_t* out_rows,
                           const float* weights, int threads) {
  const PackedLinear w = view_packed(make_shape(shape), blob);
  const RowsKind kind = rows_kind(w.shape);
  PageBuffer memory(rows_bytes(kind, x_count, w.shape.k));
  const Rows rows = view_rows(kind, x_count, w.shape.k, memory.data());
  const Epilogue epilogue{static_cast<Store>(store), static_cast<Activation>(activation), out, out_stride, out_rows, weights};
  ThreadPool pool(threads);
  pool.run([&](int thread, int count) {
    const Range mine = share(x_count, thread, count);
    prepare_rows(*set, rows, x, w.shape.k, mine.begin, mine.end);
    pool.barrier();
    linear(*set, w, rows, row_ids, m, epilogue, thread, count);
  });
}

// Adds 1 to counts[thread] `regions` times, with `barriers` meetings each; returns the number of order violations seen.
EXPORT int64_t kernels_pool_check(int threads, int64_t regions, int64_t barriers, int64_t* counts) {
  ThreadPool pool(threads);
  std::vector<int64_t> stage(threads * 8, 0);
  std::vector<int64_t> wrong(threads * 8, 0);
  for (int64_t region = 0; region < regions; ++region)
    pool.run([&](int thread, int count) {
      for (int64_t meeting = 0; meeting < barriers; ++meeting) {
        stage[thread * 8] += 1;
        pool.barrier();
        for (int other = 0; other < count; ++other) wrong[thread * 8] += stage[other * 8] != stage[thread * 8];
        pool.barrier();
      }
      counts[thread] += 1;
    });
  int64_t total = 0;
  for (int thread = 0; thread < threads; ++thread) total += wrong[thread * 8];
  return total;
}

// A pool used before a fork, in the child and in the parent after it; returns how many of the three regions reached every thread.
EXPORT int kernels_pool_fork_check(int threads) {
  ThreadPool pool(threads);
  const auto is_complete = [&] {
    std::vector<int> seen(threads, 0);
    pool.run([&](int thread, int) {
      pool.barrier();
      seen[thread] += 1;
    });
    for (int count : seen)
      if (count != 1) return 0;
    return 1;
  };
  int complete = is_complete();
  const pid_t child = fork();
  if (child == 0) _exit(is_complete());
  int status = 0;
  if (child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)) complete += WEXITSTATUS(status);
  return complete + is_complete();
}

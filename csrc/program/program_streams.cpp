// What a step of a Program does with streams beside each other, embeddings of layers, gates of which most is cut, and curves.
#include <algorithm>
#include <cstring>

#include "program/program_run.h"

namespace diptych {

void Program::Run::run(const WeighOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &out = buffer(op.out);
  float* row = reinterpret_cast<float*>(scratch(thread));
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    float* target = out.kind == BufferKind::rows ? row : out.f32() + t * out.width;
    kernels.weigh_row(x.f32() + t * x.width, vector(op.weight), x.width, target);
    if (out.kind == BufferKind::rows) prepare_row(set, out.rows, t, row);
  }
}

void Program::Run::run(const SparseGateOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &out = buffer(op.out);
  float* row = reinterpret_cast<float*>(scratch(thread));
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    float* target = out.kind == BufferKind::rows ? row : out.f32() + t * out.width;
    kernels.sparse_gate_row(x.f32() + t * x.width, x.width / 2, op.cutoff, op.activation, target);
    if (out.kind == BufferKind::rows) prepare_row(set, out.rows, t, row);
  }
}

void Program::Run::run(const BentGateOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &out = buffer(op.out);
  float* row = reinterpret_cast<float*>(scratch(thread));
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    float* target = out.kind == BufferKind::rows ? row : out.f32() + t * out.width;
    kernels.gate_row(x.f32() + t * x.width, x.width / 2, 1.0f, op.form, target);
    if (out.kind == BufferKind::rows) prepare_row(set, out.rows, t, row);
  }
}

void Program::Run::run(const CurveOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &out = buffer(op.out);
  float* row = reinterpret_cast<float*>(scratch(thread));
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    float* target = out.kind == BufferKind::rows ? row : out.f32() + t * out.width;
    kernels.curve_row(x.f32() + t * x.width, out.width, op.curve, op.numbers.data(), target);
    if (x.width > out.width) kernels.weigh_row(target, x.f32() + t * x.width + out.width, out.width, target);
    if (out.kind == BufferKind::rows) prepare_row(set, out.rows, t, row);
  }
}

void Program::Run::run(const BranchOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &out = buffer(op.out);
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t)
    kernels.embed_row(x.f32() + t * x.width, Source::f32, x.width, op.scale, out.f32() + t * x.width);
}

void Program::Run::run(const GateHeadsOp& op, size_t, int thread, int threads) const {
  const Buffer &gates = buffer(op.gates), &x = buffer(op.x);
  const int64_t n_heads = gates.width, width = x.width / n_heads;
  float* row = reinterpret_cast<float*>(scratch(thread));
  const Range part = part_of_rows(x, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    std::memcpy(row, gates.f32() + t * n_heads, static_cast<size_t>(n_heads) * 4);
    if (op.is_softplus) kernels.curve_row(row, n_heads, Curve::softplus, nullptr, row);
    else kernels.sigmoid_row(row, n_heads);
    float* head = x.f32() + t * x.width;
    if (n_heads == x.width) {
      kernels.weigh_row(head, row, n_heads, head);
      continue;
    }
    for (int64_t h = 0; h < n_heads; ++h, head += width) kernels.embed_row(head, Source::f32, width, row[h], head);
  }
}

void Program::Run::run(const MatchOp& op, size_t, int thread, int threads) const {
  const Buffer &y = buffer(op.y), &x = buffer(op.x), &out = buffer(op.out);
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t)
    kernels.match_row(y.f32() + t * x.width, x.f32() + t * x.width, x.width, op.least, out.f32() + t * x.width);
}

void Program::Run::run(const CopyColumnsOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &out = buffer(op.out);
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t)
    std::memcpy(out.f32() + t * out.width + op.column, x.f32() + t * x.width + op.first, static_cast<size_t>(op.n) * 4);
}

// Rows of W, as many as `n`, times tanh(scale * routed), each summed in one order.
void Program::Run::route_streams(int routed, int weight, float scale, int64_t token, int64_t n, float* out) const {
  const Buffer& from = buffer(routed);
  float modalities[kMostStreams];
  for (int64_t j = 0; j < from.width; ++j) modalities[j] = scale * from.f32()[token * from.width + j];
  kernels.softcap_row(modalities, from.width, 1.0f);
  const float* row = vector(weight);
  for (int64_t i = 0; i < n; ++i, row += from.width) {
    out[i] = 0.0f;
    for (int64_t j = 0; j < from.width; ++j) out[i] += row[j] * modalities[j];
  }
}

void Program::Run::run(const PredictOp& op, size_t, int thread, int threads) const {
  const int64_t n = static_cast<int64_t>(op.xs.size()), width = buffer(op.xs[0]).width;
  float coefficients[kMostStreams * kMostStreams], *rows[kMostStreams];
  const Range part = part_of_rows(buffer(op.xs[0]), step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    route_streams(op.routed, op.weight, op.scale, t, n * n, coefficients);
    for (int64_t i = 0; i < n; ++i) rows[i] = buffer(op.xs[i]).f32() + t * width;
    kernels.mix_rows(rows, n, width, coefficients);
  }
}

void Program::Run::run(const CorrectOp& op, size_t, int thread, int threads) const {
  const int64_t n = static_cast<int64_t>(op.xs.size()), width = buffer(op.y).width;
  float coefficients[kMostStreams], *news = reinterpret_cast<float*>(scratch(thread));
  const Range part = part_of_rows(buffer(op.xs[0]), step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    route_streams(op.routed, op.weight, op.scale, t, n, coefficients);
    std::memcpy(news, buffer(op.y).f32() + t * width, static_cast<size_t>(width) * 4);
    kernels.add_row(buffer(op.xs[op.active]).f32() + t * width, width, -1.0f, news);
    for (int64_t i = 0; i < n; ++i) kernels.add_row(news, width, coefficients[i] + 1.0f, buffer(op.xs[i]).f32() + t * width);
  }
}

// Output by output: each is a sum over the streams in their order, times the inverse length of all of them.
void Program::Run::run(const ConnectionsOp& op, size_t, int thread, int threads) const {
  const Buffer& out = buffer(op.out);
  const int64_t n = static_cast<int64_t>(op.xs.size()), width = buffer(op.xs[0]).width, last = program.vector_size(op.scale) - 1;
  const float *scale = vector(op.scale), *base = vector(op.base);
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    float squares = 0.0f;
    for (const int x : op.xs) squares += kernels.row_product(buffer(x).f32() + t * width, buffer(x).f32() + t * width, width);
    const float factor = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n * width) + op.eps), *row = vector(op.weight);
    for (int64_t i = 0; i < out.width; ++i) {
      float sum = 0.0f;
      for (const int x : op.xs) sum += kernels.row_product(buffer(x).f32() + t * width, row, width), row += width;
      out.f32()[t * out.width + i] = scale[std::min(i / n, last)] * (sum * factor) + base[i];
    }
  }
}

// What one part of the connections says of each stream: magnitude * sigmoid(c) + eps.
void Program::Run::connect(const Buffer& c, int64_t token, int64_t first, int64_t n, float magnitude, float eps, float* out) const {
  std::memcpy(out, c.f32() + token * c.width + first, static_cast<size_t>(n) * 4);
  kernels.sigmoid_row(out, n);
  for (int64_t i = 0; i < n; ++i) out[i] = magnitude * out[i] + eps;
}

void Program::Run::run(const GatherOp& op, size_t, int thread, int threads) const {
  const Buffer& out = buffer(op.out);
  float weights[kMostStreams];
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    float* row = out.f32() + t * out.width;
    connect(buffer(op.c), t, 0, static_cast<int64_t>(op.xs.size()), 1.0f, op.eps, weights);
    kernels.embed_row(buffer(op.xs[0]).f32() + t * out.width, Source::f32, out.width, weights[0], row);
    for (size_t i = 1; i < op.xs.size(); ++i) kernels.add_row(buffer(op.xs[i]).f32() + t * out.width, out.width, weights[i], row);
  }
}

void Program::Run::run(const SpreadOp& op, size_t, int thread, int threads) const {
  const Buffer& y = buffer(op.y);
  const int64_t n = static_cast<int64_t>(op.xs.size());
  float weights[kMostStreams];
  const Range part = part_of_rows(buffer(op.xs[0]), step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    connect(buffer(op.c), t, n, n, op.magnitude, op.eps, weights);
    for (int64_t i = 0; i < n; ++i) kernels.add_row(y.f32() + t * y.width, y.width, weights[i], buffer(op.xs[i]).f32() + t * y.width);
  }
}

// By what connections say of each pair of streams: rows through a softmax, then columns and rows in turn near to sums of 1.
static void mixing_matrix(const StepKernels& kernels, const float* given, int64_t n, int rounds, float eps, float* m) {
  std::memcpy(m, given, static_cast<size_t>(n * n) * 4);
  for (int64_t i = 0; i < n; ++i) kernels.softmax_row(m + i * n, n);
  for (int64_t i = 0; i < n * n; ++i) m[i] += eps;
  const auto divide = [&](int64_t step, int64_t next) {  // each line by its sum
    for (int64_t line = 0; line < n; ++line) {
      float sum = 0.0f;
      for (int64_t i = 0; i < n; ++i) sum += m[line * next + i * step];
      for (int64_t i = 0; i < n; ++i) m[line * next + i * step] /= sum + eps;
    }
  };
  divide(n, 1);
  for (int round = 1; round < rounds; ++round) divide(1, n), divide(n, 1);
}

void Program::Run::run(const MingleOp& op, size_t, int thread, int threads) const {
  const Buffer &y = buffer(op.y), &c = buffer(op.c);
  const int64_t n = static_cast<int64_t>(op.xs.size());
  float weights[kMostStreams], m[kMostStreams * kMostStreams], coefficients[kMostStreams * kMostStreams], *rows[kMostStreams];
  const Range part = part_of_rows(buffer(op.xs[0]), step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    connect(c, t, n, n, op.magnitude, 0.0f, weights);
    mixing_matrix(kernels, c.f32() + t * c.width + 2 * n, n, op.rounds, op.eps, m);
    for (int64_t i = 0; i < n; ++i) {
      rows[i] = buffer(op.xs[i]).f32() + t * y.width;
      for (int64_t j = 0; j < n; ++j) coefficients[i * n + j] = m[j * n + i] - (i == j ? 1.0f : 0.0f);
    }
    kernels.mix_rows(rows, n, y.width, coefficients);
    for (int64_t i = 0; i < n; ++i) kernels.add_row(y.f32() + t * y.width, y.width, weights[i], rows[i]);
  }
}

void Program::Run::run(const LayerInputsOp& op, size_t, int thread, int threads) const {
  const Buffer& x = buffer(op.x);
  const bool is_packed = op.packed != -1;
  const Table table = is_packed ? Table{nullptr, Source::f32, program.linears_[op.packed].n_outputs, x.width} : program.tables_[op.table];
  const int64_t width = static_cast<int64_t>(program.vectors_[op.norm].size()), element = table.source == Source::f32 ? 4 : 2;
  float* own = reinterpret_cast<float*>(scratch(thread));
  const Range part = part_of_rows(x, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    const int64_t token = step.token_ids[t] < table.rows ? step.token_ids[t] : 0;
    if (is_packed) read_group_row(program.linears_[op.packed], token, own);
    for (int64_t first = 0; first < x.width; first += width) {
      float *row = x.f32() + t * x.width + first, *part_of_table = own + (is_packed ? first : 0);
      kernels.rms_norm_row(row, vector(op.norm), width, op.eps, row);
      if (!is_packed) kernels.embed_row(table.data + (token * table.width + first) * element, table.source, width, 1.0f, own);
      kernels.add_row(part_of_table, width, op.table_scale, row);
      kernels.embed_row(row, Source::f32, width, op.scale, row);
    }
  }
}

}  // namespace diptych

// What a step of a Program does with streams that lie in one row, and with embeddings of n-grams.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "program/program_run.h"

namespace diptych {

namespace {

constexpr float kLeastMeeting = 1e-6f;  // of what a root is taken of

}  // namespace

void Program::Run::run(const FoldOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &out = buffer(op.out);
  const int64_t n = static_cast<int64_t>(op.weights.size());
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    float* row = out.f32() + t * out.width;
    const float* streams = x.f32() + t * x.width;
    kernels.embed_row(streams, Source::f32, out.width, op.weights[0], row);
    for (int64_t i = 1; i < n; ++i) kernels.add_row(streams + i * out.width, out.width, op.weights[i], row);
  }
}

void Program::Run::run(const InjectOp& op, size_t, int thread, int threads) const {
  const Buffer &x = buffer(op.x), &y = buffer(op.y), &c = buffer(op.c);
  float weights[kMostStreams];
  const Range part = part_of_rows(x, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    for (int64_t i = 0; i < c.width; ++i) weights[i] = op.scale * c.f32()[t * c.width + i];
    kernels.sigmoid_row(weights, c.width);
    for (int64_t i = 0; i < c.width; ++i) kernels.add_row(y.f32() + t * y.width, y.width, op.magnitude * weights[i], x.f32() + t * x.width + i * y.width);
  }
}

void Program::Run::run(const MeetKeysOp& op, size_t, int thread, int threads) const {
  const Buffer &keys = buffer(op.keys), &queries = buffer(op.queries), &values = buffer(op.values), &out = buffer(op.out);
  const int64_t width = values.width, n = out.width / width;
  const float length = std::sqrt(static_cast<float>(width));
  float weights[kMostStreams];
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    const float *key = keys.f32() + t * keys.width, *query = queries.f32() + t * queries.width;
    for (int64_t i = 0; i < n; ++i) {
      const float met = kernels.row_product(key + i * width, query + i * width, width) / length;
      const float root = std::sqrt(std::max(std::fabs(met), kLeastMeeting));
      weights[i] = met > 0.0f ? root : met < 0.0f ? -root : 0.0f;
    }
    kernels.sigmoid_row(weights, n);
    for (int64_t i = 0; i < n; ++i) kernels.embed_row(values.f32() + t * width, Source::f32, width, weights[i], out.f32() + t * out.width + i * width);
  }
}

void Program::Run::run(const IdsOp& op, size_t, int thread, int threads) const {
  const Buffer& out = buffer(op.out);
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) std::fill_n(out.f32() + t * out.width, out.width, static_cast<float>(step.token_ids[t] - op.shift));
}

void Program::Run::run(const NgramsOp& op, size_t, int thread, int threads) const {
  const Buffer &before = buffer(op.before), &out = buffer(op.out);
  const int64_t per_n = static_cast<int64_t>(op.heads.size()) / before.width, width = out.width / static_cast<int64_t>(op.heads.size());
  const Range part = part_of_rows(out, step.n_tokens, thread, threads);
  for (int64_t t = part.begin; t < part.end; ++t) {
    int64_t mixed = step.token_ids[t] * op.factors[0];
    bool has_ended = false;  // behind the token that ends a text stands, further back, that token alone
    float* row = out.f32() + t * out.width;
    for (int64_t i = 0, head = 0; i < before.width; ++i) {
      const int64_t away = has_ended ? 0 : static_cast<int64_t>(before.f32()[t * before.width + i]);
      has_ended = away == 0;
      mixed ^= (away + op.shift) * op.factors[i + 1];
      for (int64_t j = 0; j < per_n; ++j, ++head, row += width) {
        const int64_t at = (mixed & INT64_MAX) % op.heads[head][0] + op.heads[head][1];  // of ids that are there no number is below 0
        const Table& table = program.tables_[op.tables[at / op.table_rows]];
        const int64_t element = table.source == Source::f32 ? 4 : 2;
        kernels.embed_row(table.data + at % op.table_rows * width * element, table.source, width, 1.0f, row);
      }
    }
  }
}

}  // namespace diptych

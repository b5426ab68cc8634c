// What rounding to int4 takes from some inputs, later ones give back: see Feedback (gemm.h).
#include <cmath>

#include "gemm/gemm_kernels.h"

namespace diptych {
namespace {

// Of the mean square of an input's numbers in all directions: what a text has not shown counts as much as what it has (LAB.md).
constexpr double kUnseen = 1.0;

// The lower triangle L of a positive definite matrix = L L^T, both [n][n].
void factorise(const std::vector<double>& matrix, int64_t n, std::vector<double>& lower) {
  for (int64_t a = 0; a < n; ++a)
    for (int64_t b = 0; b <= a; ++b) {
      double sum = matrix[a * n + b];
      for (int64_t d = 0; d < b; ++d) sum -= lower[a * n + d] * lower[b * n + d];
      lower[a * n + b] = a == b ? std::sqrt(sum) : sum / lower[b * n + b];
    }
}

// L L^T Y = X, in place [n][columns].
void solve(const std::vector<double>& lower, int64_t n, int64_t columns, std::vector<double>& x) {
  const auto subtract = [&](int64_t from, int64_t other, double factor) {
    for (int64_t i = 0; i < columns; ++i) x[from * columns + i] -= factor * x[other * columns + i];
  };
  const auto divide = [&](int64_t row) {
    for (int64_t i = 0; i < columns; ++i) x[row * columns + i] /= lower[row * n + row];
  };
  for (int64_t a = 0; a < n; ++a) {
    for (int64_t d = 0; d < a; ++d) subtract(a, d, lower[a * n + d]);
    divide(a);
  }
  for (int64_t a = n - 1; a >= 0; --a) {
    for (int64_t d = a + 1; d < n; ++d) subtract(a, d, lower[d * n + a]);
    divide(a);
  }
}

}  // namespace

// With X [n][k] the directions, of which X_J are a group's inputs and X_>= those of it and all later groups, the least squares with a ridge
// give those inputs X_J^T (X_>= X_>=^T + l I)^-1 of what is left (GPTQ's update, arXiv 2210.17323, group by group).
Feedback make_feedback(const LinearShape& shape, const float* directions, int64_t n) {
  const int64_t k = padded_inputs(shape);
  Feedback made{n, std::vector<float>(k * n), std::vector<float>(k * n)};
  double squares = 0.0;
  for (int64_t d = 0; d < n; ++d)
    for (int64_t i = 0; i < shape.k; ++i) {
      const float value = directions[d * shape.k + i];
      made.give[i * n + d] = value, squares += static_cast<double>(value) * value;
    }
  if (!(squares > 0.0)) return {};
  const int64_t group = shape.group;
  std::vector<double> gram(n * n), lower(n * n), own(n * group);
  for (int64_t d = 0; d < n; ++d) gram[d * n + d] = kUnseen * squares / static_cast<double>(shape.k);
  for (int64_t first = k - group; first >= 0; first -= group) {
    for (int64_t i = 0; i < group; ++i) {
      const float* given = made.give.data() + (first + i) * n;
      for (int64_t a = 0; a < n; ++a) {
        own[a * group + i] = given[a];
        for (int64_t b = 0; b <= a; ++b) gram[a * n + b] += own[a * group + i] * given[b];
      }
    }
    factorise(gram, n, lower);
    solve(lower, n, group, own);
    for (int64_t i = 0; i < group; ++i)
      for (int64_t a = 0; a < n; ++a) made.take[(first + i) * n + a] = static_cast<float>(own[a * group + i]);
  }
  return made;
}

}  // namespace diptych

// Operations on streams beside each other, embeddings of layers, and gates of which most is cut.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "module/module.h"
#include "program/program.h"

namespace diptych {
namespace {

void require_streams(const Program& p, const std::vector<int>& xs, int routed, int weight, int64_t rows) {
  const int64_t n = static_cast<int64_t>(xs.size());
  if (n < 1 || n > kMostStreams) throw std::invalid_argument("there are from 1 to 8 streams");
  if (p.buffer_width(routed) != n || p.vector_size(weight) != rows * n) throw std::invalid_argument("what is routed, or its coefficients, are not of as many streams");
  for (const int x : xs)
    if (p.buffer_width(x) != p.buffer_width(xs[0])) throw std::invalid_argument("streams have one width");
}

// c: what their connections say, at least so many parts, each a number for each stream.
void require_connected(const Program& p, const std::vector<int>& xs, int c, int64_t parts) {
  const int64_t n = static_cast<int64_t>(xs.size());
  if (n < 1 || n > kMostStreams) throw std::invalid_argument("there are from 1 to 8 streams");
  if (p.buffer_width(c) < parts * n) throw std::invalid_argument("what is connected is not of as many streams");
  for (const int x : xs)
    if (p.buffer_width(x) != p.buffer_width(xs[0])) throw std::invalid_argument("streams have one width");
}

void require_equal(const Program& p, int x, int y) {
  if (p.buffer_width(x) != p.buffer_width(y)) throw std::invalid_argument("both buffers must have one width");
}

}  // namespace

Curve curve_of(const std::string& activation) {
  return named<Curve>("activation", activation, {{"silu", Curve::silu}, {"gelu_tanh", Curve::gelu_tanh}, {"gelu", Curve::gelu}, {"relu", Curve::relu},
                                                 {"squared_relu", Curve::squared_relu}, {"clip", Curve::clip}, {"xielu", Curve::xielu}, {"softplus", Curve::softplus}});
}

GateForm form_of(const std::array<float, 4>& numbers) { return {numbers[0], numbers[1], numbers[2], numbers[3]}; }

void bind_streams(nb::class_<Program>& program) {
  program
      .def("weigh", [](Program& p, int x, int weight, int out) {
        require_equal(p, x, out);
        if (p.vector_size(weight) != p.buffer_width(x)) throw std::invalid_argument("a weight is as long as a row");
        p.record(Category::norm, WeighOp{x, weight, out});
      }, nb::arg("x"), nb::arg("weight"), nb::arg("out"))
      .def("sparse_gate", [](Program& p, int x, int out, float cutoff, const std::string& activation) {
        if (p.buffer_width(x) != 2 * p.buffer_width(out)) throw std::invalid_argument("gate and up lie beside each other, each as wide as what they become");
        p.record(Category::gate_up, SparseGateOp{x, out, cutoff, named<Activation>("activation", activation, {{"silu", Activation::silu}, {"gelu_tanh", Activation::gelu_tanh}})});
      }, nb::arg("x"), nb::arg("out"), nb::arg("cutoff"), nb::arg("activation"))
      .def("bent_gate", [](Program& p, int x, int out, const std::array<float, 4>& form) {
        if (p.buffer_width(x) != 2 * p.buffer_width(out)) throw std::invalid_argument("gate and up lie beside each other, each as wide as what they become");
        p.record(Category::gate_up, BentGateOp{x, out, form_of(form)});
      }, nb::arg("x"), nb::arg("out"), nb::arg("form"))
      .def("curve", [](Program& p, int x, int out, const std::string& activation, std::array<float, kCurveNumbers> numbers) {
        const int64_t from = p.buffer_width(x), to = p.buffer_width(out);  // gate alone, or up behind it
        if (from != to && from != 2 * to) throw std::invalid_argument("a row becomes one as wide, or with what is multiplied by it beside it one half as wide");
        p.record(Category::gate_up, CurveOp{x, out, curve_of(activation), numbers});
      }, nb::arg("x"), nb::arg("out"), nb::arg("activation"), nb::arg("numbers") = std::array<float, kCurveNumbers>{})
      .def("branch", [](Program& p, int x, int out, float scale) {
        require_equal(p, x, out);
        p.record(Category::norm, BranchOp{x, out, scale});
      }, nb::arg("x"), nb::arg("out"), nb::arg("scale"))
      .def("gate_heads", [](Program& p, int gates, int x, const std::string& activation) {
        if (p.buffer_width(gates) < 1 || p.buffer_width(x) % p.buffer_width(gates) != 0) throw std::invalid_argument("a row has equal parts, one for each gate");
        p.record(Category::qkv, GateHeadsOp{gates, x, named<bool>("activation", activation, {{"sigmoid", false}, {"softplus", true}})});
      }, nb::arg("gates"), nb::arg("x"), nb::arg("activation") = "sigmoid")
      .def("match", [](Program& p, int y, int x, int out, float least) {
        require_equal(p, x, out), require_equal(p, y, out);
        p.record(Category::norm, MatchOp{y, x, out, least});
      }, nb::arg("y"), nb::arg("x"), nb::arg("out"), nb::arg("least"))
      .def("copy_columns", [](Program& p, int x, int out, int64_t first, int64_t column, std::optional<int64_t> n) {
        const int64_t from = p.buffer_width(x), to = p.buffer_width(out), copied = n.value_or(to);
        const bool are_there = first >= 0 && column >= 0 && copied >= 0 && first <= from && column <= to && copied <= std::min(from - first, to - column);
        if (!are_there) throw std::invalid_argument("columns beyond the row");
        p.record(Category::norm, CopyColumnsOp{x, out, first, column, copied});
      }, nb::kw_only(), nb::arg("x"), nb::arg("out"), nb::arg("first") = 0, nb::arg("column") = 0, nb::arg("n").none() = nb::none())
      .def("predict", [](Program& p, std::vector<int> xs, int routed, int weight, float scale) {
        require_streams(p, xs, routed, weight, static_cast<int64_t>(xs.size() * xs.size()));
        p.record(Category::norm, PredictOp{std::move(xs), routed, weight, scale});
      }, nb::arg("xs"), nb::arg("routed"), nb::arg("weight"), nb::arg("scale"))
      .def("correct", [](Program& p, std::vector<int> xs, int y, int routed, int weight, float scale, int active) {
        require_streams(p, xs, routed, weight, static_cast<int64_t>(xs.size()));
        if (active < 0 || active >= static_cast<int>(xs.size())) throw std::invalid_argument("the active stream is not there");
        require_equal(p, xs[0], y);
        p.record(Category::norm, CorrectOp{std::move(xs), y, routed, weight, active, scale});
      }, nb::arg("xs"), nb::arg("y"), nb::arg("routed"), nb::arg("weight"), nb::arg("scale"), nb::arg("active"))
      .def("connections", [](Program& p, std::vector<int> xs, int weight, int scale, int base, int out, float eps) {
        require_connected(p, xs, out, 1);
        const int64_t outputs = p.buffer_width(out), inputs = static_cast<int64_t>(xs.size()) * p.buffer_width(xs[0]);
        const bool is_whole = p.vector_size(weight) == outputs * inputs && p.vector_size(base) == outputs && p.vector_size(scale) >= 1;
        if (!is_whole) throw std::invalid_argument("a connection has a weight of all streams and a base for each output, and a scale at least");
        p.record(Category::norm, ConnectionsOp{std::move(xs), weight, scale, base, out, eps});
      }, nb::kw_only(), nb::arg("xs"), nb::arg("weight"), nb::arg("scale"), nb::arg("base"), nb::arg("out"), nb::arg("eps"))
      .def("gather", [](Program& p, std::vector<int> xs, int c, int out, float eps) {
        require_connected(p, xs, c, 1), require_equal(p, xs[0], out);
        if (std::find(xs.begin(), xs.end(), out) != xs.end()) throw std::invalid_argument("streams are gathered in a buffer beside them");
        p.record(Category::norm, GatherOp{std::move(xs), c, out, eps});
      }, nb::kw_only(), nb::arg("xs"), nb::arg("c"), nb::arg("out"), nb::arg("eps"))
      .def("spread", [](Program& p, std::vector<int> xs, int y, int c, float magnitude, float eps) {
        require_connected(p, xs, c, 2), require_equal(p, xs[0], y);
        if (std::find(xs.begin(), xs.end(), y) != xs.end()) throw std::invalid_argument("what is added to streams is none of them");
        p.record(Category::norm, SpreadOp{std::move(xs), y, c, magnitude, eps});
      }, nb::kw_only(), nb::arg("xs"), nb::arg("y"), nb::arg("c"), nb::arg("magnitude"), nb::arg("eps"))
      .def("mingle", [](Program& p, std::vector<int> xs, int y, int c, float magnitude, int rounds, float eps) {
        require_connected(p, xs, c, 2 + static_cast<int64_t>(xs.size())), require_equal(p, xs[0], y);
        if (rounds < 1) throw std::invalid_argument("a matrix is brought near to sums of 1 in one round at least");
        if (std::find(xs.begin(), xs.end(), y) != xs.end()) throw std::invalid_argument("what is added to streams is none of them");
        p.record(Category::norm, MingleOp{std::move(xs), y, c, rounds, magnitude, eps});
      }, nb::kw_only(), nb::arg("xs"), nb::arg("y"), nb::arg("c"), nb::arg("magnitude"), nb::arg("rounds"), nb::arg("eps"))
      .def("vector_size", &Program::vector_size, nb::arg("vector"))
      .def("fold", [](Program& p, int x, int out, std::vector<float> weights) {
        if (weights.empty() || p.buffer_width(x) != static_cast<int64_t>(weights.size()) * p.buffer_width(out)) throw std::invalid_argument("a row has a stream for each weight, at least one");
        p.record(Category::norm, FoldOp{x, out, std::move(weights)});
      }, nb::kw_only(), nb::arg("x"), nb::arg("out"), nb::arg("weights"))
      .def("inject", [](Program& p, int x, int y, int c, float magnitude, float scale) {
        const int64_t n = p.buffer_width(c);
        if (n > kMostStreams || p.buffer_width(x) != n * p.buffer_width(y)) throw std::invalid_argument("a row has a stream for each weight, 8 at most");
        p.record(Category::norm, InjectOp{x, y, c, magnitude, scale});
      }, nb::kw_only(), nb::arg("x"), nb::arg("y"), nb::arg("c"), nb::arg("magnitude"), nb::arg("scale"))
      .def("meet_keys", [](Program& p, int keys, int queries, int values, int out) {
        const int64_t width = p.buffer_width(values);
        require_equal(p, keys, out), require_equal(p, queries, out);
        if (p.buffer_width(out) % width != 0 || p.buffer_width(out) / width > kMostStreams) throw std::invalid_argument("a row has a whole number of streams, 8 at most");
        p.record(Category::norm, MeetKeysOp{keys, queries, values, out});
      }, nb::kw_only(), nb::arg("keys"), nb::arg("queries"), nb::arg("values"), nb::arg("out"))
      .def("ids", [](Program& p, int out, int32_t shift) { p.record(Category::embed, IdsOp{out, shift}); }, nb::kw_only(), nb::arg("out"), nb::arg("shift"))
      .def("ngrams", [](Program& p, int before, int out, std::vector<int> tables, int32_t shift, std::vector<int64_t> factors, std::vector<std::array<int64_t, 2>> heads) {
        const int64_t n = static_cast<int64_t>(heads.size()), width = n == 0 ? 0 : p.buffer_width(out) / n;
        if (n == 0 || tables.empty() || n % p.buffer_width(before) != 0 || p.buffer_width(out) != n * width || static_cast<int64_t>(factors.size()) != p.buffer_width(before) + 1)
          throw std::invalid_argument("n-grams have as many heads of each length, equal parts of a row, and a factor for each token");
        const int64_t table_rows = p.table_at(tables[0]).rows;
        int64_t rows = 0;
        for (const int table : tables) {
          if (p.table_at(table).width != width || table_rows < 1 || (rows % table_rows != 0)) throw std::invalid_argument("tables of n-grams are as wide as a head, and equally long but for the last");
          rows += p.table_at(table).rows;
        }
        for (const auto& [size, first] : heads)
          if (size < 1 || first < 0 || first + size > rows) throw std::invalid_argument("a head of n-grams has rows beyond its tables");
        p.record(Category::embed, NgramsOp{before, out, std::move(tables), table_rows, shift, std::move(factors), std::move(heads)});
      }, nb::kw_only(), nb::arg("before"), nb::arg("out"), nb::arg("tables"), nb::arg("shift"), nb::arg("factors"), nb::arg("heads"))
      .def("layer_inputs", [](Program& p, int x, int norm, float eps, float table_scale, float scale, int table, int packed) {
        const int64_t width = p.vector_size(norm);
        if (width < 1 || p.buffer_width(x) % width != 0) throw std::invalid_argument("a row has a whole number of layers' parts");
        if (packed != -1 && (!is_grouped(p.linear_at(packed).shape.format) || p.linear_at(packed).shape.gated)) throw std::invalid_argument("a packed table is a weight in groups");
        const int64_t table_width = packed != -1 ? p.linear_at(packed).shape.k : p.table_at(table).width;
        if (table_width != p.buffer_width(x) || (packed == -1 && p.table_at(table).rows < 1)) throw std::invalid_argument("the table is not as wide as a row");
        p.record(Category::embed, LayerInputsOp{x, norm, table, packed, eps, table_scale, scale});
      }, nb::arg("x"), nb::arg("norm"), nb::arg("eps"), nb::arg("table_scale"), nb::arg("scale"), nb::arg("table") = -1, nb::arg("packed") = -1);
}

}  // namespace diptych

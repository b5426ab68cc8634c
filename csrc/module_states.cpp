// Python bindings of the operations on states of sequences.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "module.h"
#include "program.h"

namespace diptych {
namespace {

DeltaShape delta_shape(int64_t n_key_heads, int64_t n_value_heads, int64_t key_dim, int64_t value_dim, int64_t n_taps, float scale, float norm_eps) {
  for (const int64_t size : {n_key_heads, n_value_heads, key_dim, value_dim, n_taps})
    if (size < 1) throw std::invalid_argument("heads of states, their widths and their taps are at least one each");
  if (n_value_heads % n_key_heads != 0) throw std::invalid_argument("value heads are shared evenly by key heads");
  return {n_key_heads, n_value_heads, key_dim, value_dim, n_taps, scale, norm_eps};
}

void record_delta(Program& p, int qkv, int rates, int out, int taps, int decay, int shift, int norm, int layer, const DeltaShape& shape, int64_t first_head, int64_t column) {
  const int64_t heads = shape.n_value_heads, width = heads * shape.value_dim;
  if (layer < 0 || first_head < 0 || column < 0) throw std::invalid_argument("a layer, a head or a column below 0");
  if (p.buffer_width(qkv) != shape.channels() || p.buffer_width(out) < column + width || p.buffer_width(rates) % 2 != 0 || p.buffer_width(rates) / 2 < first_head + heads)
    throw std::invalid_argument("rows of q, k and v, of rates or of outputs are not as wide as the heads");
  if (p.vector_size(taps) != shape.n_taps * shape.channels() || p.vector_size(decay) != heads || p.vector_size(shift) != heads || p.vector_size(norm) != shape.value_dim)
    throw std::invalid_argument("taps, decays, shifts or norms are not as many as the heads have");
  p.record(Category::attention, DeltaOp{qkv, rates, out, taps, decay, shift, norm, layer, shape, first_head, column});
}

}  // namespace

void bind_states(nb::module_& m, nb::class_<Program>& program) {
  nb::class_<DeltaShape>(m, "DeltaShape")
      .def("__init__", [](DeltaShape* self, int64_t n_key_heads, int64_t n_value_heads, int64_t key_dim, int64_t value_dim, int64_t n_taps, float scale, float norm_eps) {
        new (self) DeltaShape(delta_shape(n_key_heads, n_value_heads, key_dim, value_dim, n_taps, scale, norm_eps));
      }, nb::kw_only(), nb::arg("n_key_heads"), nb::arg("n_value_heads"), nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("n_taps"), nb::arg("scale") = 1.0f, nb::arg("norm_eps") = 0.0f)
      .def_prop_ro("floats", &DeltaShape::floats);
  program.def("delta", &record_delta, nb::kw_only(), nb::arg("qkv"), nb::arg("rates"), nb::arg("out"), nb::arg("taps"), nb::arg("decay"), nb::arg("shift"),
              nb::arg("norm"), nb::arg("layer"), nb::arg("shape"), nb::arg("first_head") = 0, nb::arg("column") = 0);
}

void add_states(Step& step, const States& states) {
  if (!states) return;
  const auto& [reads, writes, saves] = *states;
  if (static_cast<int64_t>(reads.shape(0)) != step.n_sequences || static_cast<int64_t>(writes.shape(0)) != step.n_sequences || saves.shape(1) != 3)
    throw std::invalid_argument("places of states must be [sequences], [sequences] and [saves, 3]");
  step.state_reads = reads.data(), step.state_writes = writes.data();
  step.state_saves = saves.data(), step.n_saves = static_cast<int64_t>(saves.shape(0));
}

}  // namespace diptych

// Python bindings of the operations on states of sequences.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <limits>
#include <string>

#include "module/module.h"
#include "program/program.h"

namespace diptych {
namespace {

StateRule rule_named(const std::string& name) {
  if (name == "delta") return StateRule::delta;
  if (name == "ssd") return StateRule::ssd;
  if (name == "convolution") return StateRule::convolution;
  if (name == "taps") return StateRule::taps;
  if (name == "bent_taps") return StateRule::bent_taps;
  if (name == "selective") return StateRule::selective;
  if (name == "rg_lru") return StateRule::rg_lru;
  throw std::invalid_argument("no rule for states is called " + name);
}

StateShape state_shape(const std::string& rule, int64_t n_key_heads, int64_t n_value_heads, int64_t key_dim, int64_t value_dim, int64_t n_taps, float scale, float norm_eps, float least_step, float most_step, float most_weight, float rate_scale, bool fades_by_key, float least_decay, bool is_steady) {
  const StateShape shape{n_key_heads, n_value_heads, key_dim, value_dim, n_taps, scale, norm_eps, rule_named(rule), least_step, most_step, most_weight, rate_scale, fades_by_key, least_decay, is_steady};
  for (const int64_t size : {n_key_heads, n_value_heads, value_dim, n_taps})
    if (size < 1) throw std::invalid_argument("heads of states, their widths and their taps are at least one each");
  if (shape.has_matrix() != (key_dim != 0) || key_dim < 0) throw std::invalid_argument("heads with a matrix have a key's width, a convolution has none");
  if (shape.is_by_channel() && n_taps != 1) throw std::invalid_argument("channels with decays of their own have no taps");
  if (shape.rule == StateRule::rg_lru && (key_dim != 1 || n_key_heads != 1)) throw std::invalid_argument("a channel of recurrent units has one number, and no key");
  if (fades_by_key && shape.rule != StateRule::delta) throw std::invalid_argument("only a delta rule's states fade by key");
  if (!(least_decay <= 0.0f) || (least_decay != 0.0f && !fades_by_key)) throw std::invalid_argument("what bounds a decay by key is below 0");
  if (is_steady && (shape.rule != StateRule::ssd || n_taps != 1)) throw std::invalid_argument("steps of 1 are those of a rule without taps whose decays are its heads'");
  if (n_value_heads % n_key_heads != 0) throw std::invalid_argument("value heads are shared evenly by key heads");
  return shape;
}

struct RuleVectors {  // by number; -1: the rule, or the layer, has none
  int taps, tap_bias, decay, shift, skip, norm;
};

void record_states(Program& p, int qkv, int rates, int decays, int out, const RuleVectors& given, int layer, const StateShape& shape, int64_t first_head, int64_t column, int64_t first_key_head) {
  const int64_t heads = shape.n_value_heads, width = heads * shape.value_dim, end = first_head + heads;
  const bool has_heads = shape.has_matrix(), is_delta = shape.rule == StateRule::delta, is_selective = shape.is_selective(), is_by_channel = shape.is_by_channel();
  const bool has_steps = has_heads && !shape.is_steady && shape.rule != StateRule::rg_lru;
  if (layer < 0 || first_head < 0 || column < 0 || first_key_head < 0) throw std::invalid_argument("a layer, a head or a column below 0");
  if ((shape.n_rates() != 0) == (rates == -1)) throw std::invalid_argument("heads have rates, a convolution and what is steady have none");
  const int64_t n_rates = is_selective ? 2 * shape.key_dim : shape.n_rates(), rated = is_selective ? first_key_head + shape.n_key_heads : end;
  const bool has_width = rates == -1 || (p.buffer_width(rates) % n_rates == 0 && p.buffer_width(rates) / n_rates >= rated);
  if ((decays != -1) != (shape.n_decays() != 0) || (decays != -1 && p.buffer_width(decays) < end * shape.n_decays()))
    throw std::invalid_argument("what fades by key has decays of all its heads' rows, what is selective steps of all its channels, and nothing else has");
  const bool has_inputs = is_by_channel ? p.buffer_width(qkv) >= end * shape.value_dim : p.buffer_width(qkv) == shape.inputs();
  if (!has_inputs || p.buffer_width(out) < column + width || !has_width)
    throw std::invalid_argument("rows of q, k and v, of rates or of outputs are not as wide as the heads");
  auto check = [&](int number, bool is_there, int64_t size) {
    if ((number != -1) != is_there || (is_there && p.vector_size(number) != size)) throw std::invalid_argument("taps, decays, shifts, skips or norms are not as many as the heads have");
  };
  check(given.taps, !is_by_channel && !shape.is_steady, shape.n_taps * shape.channels());
  check(given.tap_bias, given.tap_bias != -1 && !shape.is_steady, shape.channels());
  check(given.decay, has_heads, is_selective ? shape.heads_floats() : is_by_channel ? width : heads), check(given.shift, has_steps, heads * shape.n_shifts());
  check(given.skip, has_steps && !is_delta, is_selective ? width : heads), check(given.norm, is_delta, shape.value_dim);
  p.record(Category::attention, StateOp{qkv, rates, decays, out, given.taps, given.tap_bias, given.decay, given.shift, given.skip, given.norm, layer, shape, first_head, column, first_key_head});
}

}  // namespace

void bind_states(nb::module_& m, nb::class_<Program>& program) {
  nb::class_<StateShape>(m, "StateShape")
      .def("__init__", [](StateShape* self, const std::string& rule, int64_t n_key_heads, int64_t n_value_heads, int64_t key_dim, int64_t value_dim, int64_t n_taps, float scale, float norm_eps, float least_step, float most_step, float most_weight, float rate_scale, bool fades_by_key, float least_decay, bool is_steady) {
        new (self) StateShape(state_shape(rule, n_key_heads, n_value_heads, key_dim, value_dim, n_taps, scale, norm_eps, least_step, most_step, most_weight, rate_scale, fades_by_key, least_decay, is_steady));
      }, nb::kw_only(), nb::arg("rule"), nb::arg("n_key_heads"), nb::arg("n_value_heads"), nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("n_taps"), nb::arg("scale") = 1.0f, nb::arg("norm_eps") = 0.0f, nb::arg("least_step") = 0.0f, nb::arg("most_step") = std::numeric_limits<float>::infinity(), nb::arg("most_weight") = 1.0f, nb::arg("rate_scale") = 1.0f, nb::arg("fades_by_key") = false, nb::arg("least_decay") = 0.0f, nb::arg("is_steady") = false)
      .def_prop_ro("floats", &StateShape::floats);
  program.def("move_states", [](Program& p, int qkv, int rates, int decays, int out, int taps, int tap_bias, int decay, int shift, int skip, int norm, int layer, const StateShape& shape, int64_t first_head, int64_t column, int64_t first_key_head) {
        record_states(p, qkv, rates, decays, out, {taps, tap_bias, decay, shift, skip, norm}, layer, shape, first_head, column, first_key_head);
      }, nb::kw_only(), nb::arg("qkv"), nb::arg("rates"), nb::arg("decays") = -1, nb::arg("out"), nb::arg("taps") = -1, nb::arg("tap_bias") = -1, nb::arg("decay") = -1, nb::arg("shift") = -1, nb::arg("skip") = -1,
      nb::arg("norm") = -1, nb::arg("layer"), nb::arg("shape"), nb::arg("first_head") = 0, nb::arg("column") = 0, nb::arg("first_key_head") = 0);
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

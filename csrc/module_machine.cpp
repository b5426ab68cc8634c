// Python bindings of what is no model's: the processor's kernel sets and ceilings, and the team in which ranks meet.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "ceilings.h"
#include "kernel_sets.h"
#include "module.h"
#include "team.h"

namespace diptych {
namespace {

using BytesView = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

BytesView message_of(Team& team, int64_t bytes) {  // valid until a larger one is asked for
  return BytesView(team.message(bytes), {static_cast<size_t>(bytes)}, nb::find(team));
}

BytesView outputs_of(Team& team, int64_t bytes) {
  auto* held = new std::shared_ptr<SharedPages>(team.outputs(bytes));
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::shared_ptr<SharedPages>*>(p); });
  return BytesView((*held)->data(), {static_cast<size_t>(bytes)}, owner);
}

void bind_team(nb::module_& m) {
  nb::exception<TeamBroken>(m, "TeamBroken");
  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Team>(m, "Team")
      .def(nb::init<int, int, int, bool>(), nb::arg("fd"), nb::arg("rank"), nb::arg("size"), nb::arg("is_crowded"))
      .def_prop_ro("rank", &Team::rank)
      .def_prop_ro("size", &Team::size)
      .def_prop_ro("is_broken", &Team::is_broken)
      .def("meet", [](Team& team) {
        if (!team.meet()) throw TeamBroken("a rank is gone");
      }, NoGil())
      .def("break_up", &Team::break_up)
      .def("say_error", &Team::say_error)
      .def("error_of", &Team::error_of)
      .def("message", &message_of, nb::arg("bytes"))
      .def("give_back_message", &Team::give_back_message)
      .def("post", &Team::post, nb::arg("kind"), nb::arg("bytes"))
      .def("next", [](Team& team) {
        std::pair<int32_t, int64_t> message;
        if (!team.next(&message.first, &message.second)) throw TeamBroken("rank 0 has given the team up");
        return message;
      }, NoGil())
      .def("outputs", &outputs_of, nb::arg("bytes"))
      .def("give_back_outputs", &Team::give_back_outputs);
}

void bind_ceilings(nb::module_& m) {
  m.def("measure_read_bytes_per_s", [](int64_t bytes, int threads, std::vector<int> cpus, int repeats) {
    ThreadPool pool(threads, std::move(cpus));
    return measure_read_bytes_per_s(pool, bytes, repeats);
  }, nb::arg("bytes"), nb::arg("threads"), nb::arg("cpus"), nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>());
  m.def("measure_ops_per_s", [](const std::string& dtype, int threads, std::vector<int> cpus, int repeats) {
    ThreadPool pool(threads, std::move(cpus));
    if (dtype == "fp32") return measure_ops_per_s(&CeilingLoops::fp32_burst, pool, repeats);
    if (dtype == "bf16") return measure_ops_per_s(&CeilingLoops::bf16_burst, pool, repeats);
    if (dtype == "int8") return measure_ops_per_s(&CeilingLoops::int8_burst, pool, repeats);
    throw std::invalid_argument("no ceiling for " + dtype + "; there are fp32, bf16 and int8");
  }, nb::arg("dtype"), nb::arg("threads"), nb::arg("cpus"), nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>());
}

void bind_kernel_sets(nb::module_& m) {
  m.def("capabilities", [] {
    std::vector<std::string> names;
    for (int i = 0; i < static_cast<int>(Capability::count); ++i)
      if (const Capability one = static_cast<Capability>(i); cpu_capabilities().has(one)) names.push_back(capability_name(one));
    return names;
  });
  m.def("kernel_set_refusal", &kernel_set_refusal);
  m.def("kernel_sets", [] {  // best first
    std::vector<std::string> names;
    for (const KernelSet* set : kernel_sets()) names.push_back(set->name);
    return names;
  });
}

}  // namespace

void bind_machine(nb::module_& m) {
  bind_ceilings(m);
  bind_kernel_sets(m);
  bind_team(m);
}

}  // namespace diptych

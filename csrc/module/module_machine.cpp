// Python bindings of what is no model's: the processor's kernel sets and ceilings, and the team in which ranks meet.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "ceilings/ceilings.h"
#include "module/module.h"
#include "sets/kernel_sets.h"
#include "threads/team.h"

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

// A link in Python (compute.ops.linked), which raises nothing and answers False or None where a rank is gone.
class PythonLink final : public Link {
 public:
  explicit PythonLink(nb::object carrier) : carrier_(std::move(carrier)) {}

  bool gather(uint8_t* slots, int64_t ranks, int64_t bytes) override {
    const nb::gil_scoped_acquire acquire;
    if (bytes == 0) return nb::cast<bool>(carrier_.attr("meet")());
    const BytesSlots view(slots, {static_cast<size_t>(ranks), static_cast<size_t>(bytes)}, nb::handle());
    return nb::cast<bool>(carrier_.attr("gather")(nb::cast(view, nb::rv_policy::reference)));
  }
  bool post(int32_t kind, const uint8_t* data, int64_t bytes) override {
    const nb::gil_scoped_acquire acquire;
    return nb::cast<bool>(carrier_.attr("post")(kind, nb::bytes(data, static_cast<size_t>(bytes))));
  }
  bool next(int32_t* kind, std::vector<uint8_t>* data) override {
    const nb::gil_scoped_acquire acquire;
    const nb::object message = carrier_.attr("next")();
    if (message.is_none()) return false;
    *kind = nb::cast<int32_t>(message[0]);
    const nb::bytes text = nb::cast<nb::bytes>(message[1]);
    data->assign(reinterpret_cast<const uint8_t*>(text.data()), reinterpret_cast<const uint8_t*>(text.data()) + text.size());
    return true;
  }

 private:
  using BytesSlots = nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>;
  nb::object carrier_;
};

void bind_team(nb::module_& m) {
  nb::exception<TeamBroken>(m, "TeamBroken");
  using NoGil = nb::call_guard<Unlocked>;
  nb::class_<Team>(m, "Team")
      .def("__init__", [](Team* self, int fd, int rank, int size, bool is_crowded, nb::object link) {
        new (self) Team(fd, rank, size, is_crowded, link.is_none() ? nullptr : std::make_unique<PythonLink>(std::move(link)));
      }, nb::arg("fd"), nb::arg("rank"), nb::arg("size"), nb::arg("is_crowded"), nb::arg("link").none() = nb::none())
      .def_prop_ro("rank", &Team::rank)
      .def_prop_ro("size", &Team::size)
      .def_prop_ro("is_linked", &Team::is_linked)
      .def_prop_ro("is_broken", &Team::is_broken)
      .def("meet", [](Team& team) {
        if (!team.meet()) throw TeamBroken("a rank is gone");
      }, NoGil())
      .def("gather", [](Team& team, int64_t bytes) {  // slots [size, bytes] of the outputs
        const std::shared_ptr<SharedPages> slots = team.outputs(team.size() * bytes);
        if (!team.gather(slots->data(), bytes)) throw TeamBroken("a rank is gone");
      }, nb::arg("bytes"), NoGil())
      .def("break_up", &Team::break_up)
      .def("say_error", &Team::say_error)
      .def("error_of", &Team::error_of)
      .def("message", &message_of, nb::arg("bytes"))
      .def("give_back_message", &Team::give_back_message)
      .def("post", &Team::post, nb::arg("kind"), nb::arg("bytes"), NoGil())
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
  }, nb::arg("bytes"), nb::arg("threads"), nb::arg("cpus"), nb::arg("repeats"), nb::call_guard<Unlocked>());
  m.def("measure_signal_s", [](int threads, std::vector<int> cpus, int repeats) {
    ThreadPool pool(threads, std::move(cpus));
    return measure_signal_s(pool, repeats);
  }, nb::arg("threads"), nb::arg("cpus"), nb::arg("repeats"), nb::call_guard<Unlocked>());
  m.def("measure_ops_per_s", [](const std::string& dtype, int threads, std::vector<int> cpus, int repeats) {
    ThreadPool pool(threads, std::move(cpus));
    if (dtype == "fp32") return measure_ops_per_s(&CeilingLoops::fp32_burst, pool, repeats);
    if (dtype == "bf16") return measure_ops_per_s(&CeilingLoops::bf16_burst, pool, repeats);
    if (dtype == "int8") return measure_ops_per_s(&CeilingLoops::int8_burst, pool, repeats);
    if (dtype == "int4") return measure_codes_per_s(pool, repeats);
    throw std::invalid_argument("no ceiling for " + dtype + "; there are fp32, bf16, int8 and int4");
  }, nb::arg("dtype"), nb::arg("threads"), nb::arg("cpus"), nb::arg("repeats"), nb::call_guard<Unlocked>());
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

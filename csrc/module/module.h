// The parts that the Python bindings are bound in, and the arrays that they take.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace diptych {

using AnyArray = nb::ndarray<nb::ro, nb::device::cpu>;
using I32 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using I32Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using F32Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using F32VectorOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using F64Vector = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using F32Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using F32Out = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using F32Cube = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using F32CubeOut = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesTable = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The interpreter's lock, given back while native code runs. A thread that a program leaves running at its end gets it no more: up to
// Python 3.13 the interpreter unwinds such a thread, which a destructor turns into the abort of the whole process. Here it waits for the end
// of the process, as Python 3.14 has it wait.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

template <typename Kind>
Kind named(const char* what, const std::string& name, std::initializer_list<std::pair<const char*, Kind>> kinds) {
  for (const auto& [known, kind] : kinds)
    if (name == known) return kind;
  throw std::invalid_argument("unknown " + std::string(what) + " " + name);
}

enum class Curve : int32_t;
enum class Source : int32_t;
class Program;
struct Grid;
struct LinearShape;
struct GateForm;
struct Step;

// Places that the states of a step's sequences are read from and left in, and (sequence, rows, place) of what is left on the way.
using States = std::optional<std::tuple<I32, I32, I32Table>>;

// Codes [rows, k], scales and offsets [rows, groups] of one tensor; where they are nested, factors [rows, blocks], of f16 two for each.
using Coded = std::tuple<BytesTable, AnyArray, std::optional<AnyArray>, std::optional<AnyArray>>;

Source source_of(const AnyArray& array);  // module_codes.cpp
Grid grid_of(const std::string& format, const std::string& scale, const std::string& grid);
int add_coded_linear(Program& program, const LinearShape& shape, const std::vector<Coded>& arrays, std::optional<F32Vector> bias);
void bind_kv(nb::module_& m);       // module_kv.cpp
void bind_streams(nb::class_<Program>& program);  // module_streams.cpp
void bind_latents(nb::class_<Program>& program);  // module_latents.cpp
Curve curve_of(const std::string& activation);
GateForm form_of(const std::array<float, 4>& numbers);
void bind_states(nb::module_& m, nb::class_<Program>& program);  // module_states.cpp
void add_states(Step& step, const States& states);
void bind_machine(nb::module_& m);  // module_machine.cpp

}  // namespace diptych

// The parts that the Python bindings are bound in.
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace diptych {

void bind_machine(nb::module_& m);  // module_machine.cpp

}  // namespace diptych

// Each area of csrc registers its functions on the module in a bindings_<area>.cpp of its own. Only
// csrc/bindings*.cpp include pybind11, so everything else compiles and is tested without Python.
#pragma once

#include <pybind11/pybind11.h>

namespace manus_fast {

void register_ops(pybind11::module_& module);
void register_search(pybind11::module_& module);
void register_household(pybind11::module_& module);

}  // namespace manus_fast

#include "bindings.h"

namespace py = pybind11;

namespace manus_fast {

void register_household(py::module_& module) { (void)module; }

}  // namespace manus_fast

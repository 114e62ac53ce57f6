#include "bindings.h"

namespace py = pybind11;

namespace manus_fast {

void register_ops(py::module_& module) { (void)module; }

}  // namespace manus_fast

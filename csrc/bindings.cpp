#include "bindings.h"

#include "common/memory.h"
#include "common/parallel.h"

namespace py = pybind11;

#ifndef MF_BUILD_CUDA
#define MF_BUILD_CUDA 0
#endif
#ifndef MF_CUDA_ARCHS
#define MF_CUDA_ARCHS ""
#endif
#ifndef MF_COMPILER
#define MF_COMPILER ""
#endif

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ and CUDA core of manus_fast; import the Python packages instead of this module.";
  module.def("set_num_threads", &manus_fast::set_num_threads, py::arg("n"));
  module.def("quota_cores", &manus_fast::quota_cores, py::arg("cgroups") = "/proc/self/cgroup",
             py::arg("root") = "/sys/fs/cgroup");
  module.def("num_threads", &manus_fast::num_threads);
  module.def("run_inline", &manus_fast::run_inline, py::arg("on"));
  module.def("keep_freed_memory", &manus_fast::keep_freed_memory);
  py::dict build;
  build["cuda"] = bool(MF_BUILD_CUDA);
  build["cuda_archs"] = MF_CUDA_ARCHS;
  build["compiler"] = MF_COMPILER;
  module.attr("build") = build;
  manus_fast::register_ops(module);
  manus_fast::register_search(module);
  manus_fast::register_household(module);
}

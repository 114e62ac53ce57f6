// Argument checks for the C++ side. A failed check throws std::invalid_argument, which pybind11
// turns into ValueError; a CUDA failure throws std::runtime_error (RuntimeError) naming the kernel.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace manus_fast {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace manus_fast

// MF_CHECK(n >= 0, "n: expected a count >= 0, got ", n)
#define MF_CHECK(condition, ...)                                            \
  do {                                                                      \
    if (!(condition)) {                                                     \
      throw std::invalid_argument(::manus_fast::concat(__VA_ARGS__));       \
    }                                                                       \
  } while (0)

// MF_CUDA_CHECK("gae", cudaGetLastError()): only usable in .cu files.
#define MF_CUDA_CHECK(kernel, call)                                         \
  do {                                                                      \
    const cudaError_t mf_status = (call);                                   \
    if (mf_status != cudaSuccess) {                                         \
      throw std::runtime_error(::manus_fast::concat(                        \
          "CUDA kernel ", kernel, ": ", cudaGetErrorString(mf_status)));    \
    }                                                                       \
  } while (0)

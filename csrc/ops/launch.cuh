// Kernels that overlap: from compute capability 9.0 on, one may be launched so that it starts while the kernel before
// it in the stream still runs (programmatic dependent launch). A chain of short kernels then costs one launch.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/check.h"

namespace manus_fast::cuda {
namespace {

// In a kernel launched early: waits until the kernel before it has ended and what it wrote is there. A no-op elsewhere.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// In the kernel before: the next one, if launched early, may start once every block has said so.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether the code that runs on the current device is for Hopper or later. Not the same as the device's own capability:
// a binary that holds only older code has that compiled for the device when it is loaded, without what is above.
inline bool for_hopper(const char* op, const void* kernel) {
  cudaFuncAttributes attributes{};
  MF_CUDA_CHECK(op, cudaFuncGetAttributes(&attributes, kernel));
  return attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90;
}

// `early` only where `for_hopper`: the kernel must wait before it touches what the one before it reads or writes.
template <typename... Parameters, typename... Arguments>
void launch(const char* op, void (*kernel)(Parameters...), std::int64_t blocks, int threads, std::size_t shared,
            cudaStream_t stream, bool early, const Arguments&... arguments) {
  cudaLaunchAttribute serialization{};
  serialization.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  serialization.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &serialization;
  config.numAttrs = early ? 1 : 0;
  MF_CUDA_CHECK(op, cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

inline int multiprocessors(const char* op) {
  int device = 0, count = 0;
  MF_CUDA_CHECK(op, cudaGetDevice(&device));
  MF_CUDA_CHECK(op, cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace
}  // namespace manus_fast::cuda

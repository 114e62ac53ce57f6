// csrc/ops/launch.cuh where blocks are groups of std::threads: kernels run one after the other.
#pragma once

#include <cuda_runtime.h>

#include "common/check.h"
#include "ops/linear_logprob.h"

#define MF_EMULATED 1

namespace manus_fast::cuda {
namespace {

inline void await_previous_kernel() {}
inline void let_next_kernel_start() {}
inline bool for_hopper(const char*, const void*) { return true; }
inline int multiprocessors(const char*) { return 1; }  // then a kernel has at most kResident blocks that wait for another

template <typename... Parameters, typename... Arguments>
void launch(const char*, void (*kernel)(Parameters...), std::int64_t blocks, int threads, std::size_t shared,
            cudaStream_t, bool, const Arguments&... arguments) {
  gridDim.x = static_cast<unsigned>(blocks), blockDim.x = static_cast<unsigned>(threads);
  for (std::int64_t first = 0; first < blocks; first += emulated::kResident) {
    std::vector<std::unique_ptr<emulated::Block>> resident;
    std::vector<std::thread> all;
    for (int slot = 0; slot < emulated::kResident && first + slot < blocks; ++slot) {
      resident.push_back(std::make_unique<emulated::Block>(slot, threads, shared));
      for (int t = 0; t < threads; ++t) {
        all.emplace_back([&, t, block = resident.back().get(), index = static_cast<unsigned>(first + slot)] {
          threadIdx.x = static_cast<unsigned>(t), blockIdx.x = index, emulated::block = block;
          kernel(Parameters(arguments)...);
        });
      }
    }
    for (std::thread& thread : all) thread.join();
  }
}

}  // namespace

// Not emulated: the driver asks the device first, and runs these on Hopper only.
inline void logit_statistics(const LogitTileArgs&) { emulated::fail("logit_statistics is not emulated"); }
inline void logit_gradient(const LogitTileArgs&) { emulated::fail("logit_gradient is not emulated"); }
inline void merge_statistics(const MergeArgs&) { emulated::fail("merge_statistics is not emulated"); }

}  // namespace manus_fast::cuda

// As much of CUDA as csrc/ops/gae.cu and ppo_loss.cu need to run on a CPU, one std::thread for each thread of up to
// kResident blocks: barriers, warp shuffles and shared memory with their meaning, no timing. It tells whether indices,
// row ends and sums are right where there is no GPU; races and memory faults are compute-sanitizer's (make sanitize).
// tests/test_cuda_emulated.py puts this folder before the toolkit's and turns `__shared__` into block_memory.
#pragma once

#include <atomic>
#include <barrier>
#include <bit>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// The host's calls. A device pointer is a pointer.
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaDeviceProp {
  int major = 0, minor = 0;
};
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
template <typename T>
cudaError_t cudaMalloc(T** to, std::size_t bytes) {
  // Not cleared: 0x77 is a mask that is neither 0 nor 1, and a float of 5e33.
  *to = static_cast<T*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  std::memset(static_cast<void*>(*to), 0x77, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* to, int) {
  *to = {};
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return cudaSuccess;
}

namespace emulated {

constexpr int kResident = 3;

[[noreturn]] inline void fail(const char* what) {
  std::printf("-- wrong: %s\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}

struct Warp {
  std::barrier<> all{32};
  std::uint64_t words[32];
};

struct Block {
  Block(int slot_of_block, int threads, std::size_t dynamic_bytes) : slot(slot_of_block), all(threads) {
    for (int w = 0; w < threads / 32; ++w) warps.push_back(std::make_unique<Warp>());
    memory.assign(dynamic_bytes + 128, 0x77);
  }
  int slot;
  std::barrier<> all;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<unsigned char> memory;
};

inline thread_local Block* block;

// A kernel's shared array number `id`.
template <typename T, int id>
T& block_memory() {
  static T arrays[kResident];
  return arrays[block->slot];
}

inline unsigned char* dynamic_memory() {
  const auto address = reinterpret_cast<std::uintptr_t>(block->memory.data());
  return reinterpret_cast<unsigned char*>((address + 127) & ~std::uintptr_t{127});
}

template <typename T>
void require_aligned(const T* place) {
  if (reinterpret_cast<std::uintptr_t>(place) % sizeof(T)) fail("a wide access to an address that does not allow it");
}

}  // namespace emulated

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx;
inline Index gridDim, blockDim;

inline void __syncthreads() { emulated::block->all.arrive_and_wait(); }

// Every lane gives a word and reads others'; all 32 take part, as in the kernels.
template <typename T, typename Read>
auto exchange(T given, const Read& read) {
  static_assert(sizeof(T) <= 8);
  emulated::Warp& warp = *emulated::block->warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  warp.words[lane] = 0;
  std::memcpy(&warp.words[lane], &given, sizeof(T));
  warp.all.arrive_and_wait();
  const auto of = [&](int other) {
    T value;
    std::memcpy(&value, &warp.words[other], sizeof(T));
    return value;
  };
  const auto result = read(of, lane);
  warp.all.arrive_and_wait();
  return result;
}
template <typename T>
T __shfl_down_sync(unsigned, T x, int distance) {
  return exchange(x, [=](const auto& of, int lane) { return of(lane + distance < 32 ? lane + distance : lane); });
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int bits) {
  return exchange(x, [=](const auto& of, int lane) { return of(lane ^ bits); });
}
template <typename T>
T __shfl_sync(unsigned, T x, int source) {
  return exchange(x, [=](const auto& of, int) { return of(source); });
}
inline unsigned __ballot_sync(unsigned, int holds) {
  return exchange(holds, [](const auto& of, int) {
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= unsigned(of(lane) != 0) << lane;
    return all;
  });
}
inline int __reduce_add_sync(unsigned, int x) {
  return exchange(x, [](const auto& of, int) {
    int sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += of(lane);
    return sum;
  });
}

template <typename T>
T __ldcs(const T* from) {
  emulated::require_aligned(from);
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  emulated::require_aligned(to);
  *to = value;
}
inline unsigned atomicAdd(unsigned* to, unsigned x) { return std::atomic_ref<unsigned>(*to).fetch_add(x); }
inline unsigned atomicOr(unsigned* to, unsigned x) { return std::atomic_ref<unsigned>(*to).fetch_or(x); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
using std::isfinite;

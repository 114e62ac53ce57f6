// The barriers and bulk copies of csrc/ops/sm90.cuh: a copy is done when it is asked for. A barrier's low half counts
// bytes that are missing, bit 32 is the phase.
#pragma once

#include <cuda_runtime.h>

namespace manus_fast::sm90 {

inline std::atomic_ref<std::uint64_t> word(std::uint64_t* barrier) { return std::atomic_ref<std::uint64_t>(*barrier); }

inline void barrier_init(std::uint64_t* barrier, std::uint32_t) { word(barrier).store(0); }
inline void barrier_init_fence() {}
inline void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  if (static_cast<std::uint32_t>(word(barrier).load())) emulated::fail("a barrier expects bytes twice");
  word(barrier).fetch_add(bytes);
}
inline void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  while ((word(barrier).load() >> 32 & 1) == parity) std::this_thread::yield();
}
inline void copy_line(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  const auto bits = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes;
  if (bits % 16) emulated::fail("a bulk copy whose addresses or size are not multiples of 16");
  std::memcpy(to, from, bytes);
  const std::uint64_t left = word(barrier).load() - bytes;
  word(barrier).store(static_cast<std::uint32_t>(left) ? left : left ^ 1ull << 32);
}

}  // namespace manus_fast::sm90

// The conversions that csrc/tests/gpu/check_kernels.cpp needs to compile; nothing emulated computes in bf16.
#pragma once

#include <bit>
#include <cstdint>

struct __nv_bfloat16 {
  std::uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16(float x) {
  return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

// Sixteen numbers at a time in the compiler's vector types (GCC and Clang), for the CPU ops.
#pragma once

#include <cstdint>
#include <cstring>

// The helpers below are inlined; how vectors would be passed between object files does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace manus_fast::cpu {
namespace {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint8_t Bytes __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(128)));

#define MF_INLINE inline __attribute__((always_inline))

MF_INLINE Floats splat(float x) { return x - Floats{}; }
MF_INLINE Floats pick(Ints condition, Floats yes, Floats no) { return condition ? yes : no; }
MF_INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }
MF_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
MF_INLINE Floats clamp(Floats x, float low, float high) { return min(max(x, splat(low)), splat(high)); }

MF_INLINE Floats load(const float* p, int n) {
  Floats out{};
  if (n == kLanes) {
    std::memcpy(&out, p, sizeof(out));
  } else {
    std::memcpy(&out, p, sizeof(float) * static_cast<std::size_t>(n));
  }
  return out;
}

MF_INLINE void store(float* p, Floats x, int n) {
  if (n == kLanes) {
    std::memcpy(p, &x, sizeof(x));
  } else {
    std::memcpy(p, &x, sizeof(float) * static_cast<std::size_t>(n));
  }
}

MF_INLINE Ints load_mask(const std::uint8_t* p, int n) {
  Bytes out{};
  std::memcpy(&out, p, static_cast<std::size_t>(n));
  return __builtin_convertvector(out, Ints) != 0;
}

MF_INLINE Ints finite(Floats x) {
  Ints bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return (bits & 0x7f800000) != 0x7f800000;
}

struct Exponential {
  Floats exp;         // e^x
  Floats remainder;   // e^x - x - 1, without cancellation near 0
};

// -87 <= x <= 20. e^x = 2^n e^r with |r| <= ln(2) / 2 and a minimax polynomial for (e^r - r - 1) / r^2 (Moshier's Cephes).
MF_INLINE Exponential exponential(Floats x) {
  const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are round(x / ln 2)
  const Floats n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Floats tail = p * r * r;
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats power;
  std::memcpy(&power, &exponent, sizeof(power));
  Exponential out;
  out.exp = (tail + r + 1.0f) * power;
  out.remainder = pick(n == 0.0f, tail, out.exp - x - 1.0f);
  return out;
}

// e^x for x <= 0, also far below and at -inf; NaN stays NaN.
MF_INLINE Floats exp_below_zero(Floats x) {
  constexpr float kLowest = -87.0f;  // e^-87 is the last that is not denormal
  const Floats some = exponential(max(x, splat(kLowest))).exp;
  return pick(x < kLowest, Floats{}, pick(x == x, some, x));
}

}  // namespace
}  // namespace manus_fast::cpu

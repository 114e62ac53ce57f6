// As many numbers at a time as a register of the machine holds, in the compiler's vector types (GCC and Clang), for the CPU
// ops. No more: GCC takes comparisons and selections of a wider type apart, into one branch for each number.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/ops.h"

// The helpers below are inlined; how vectors would be passed between object files does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace manus_fast::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else  // SSE2, NEON
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef std::uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef std::uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));

#define MF_INLINE inline __attribute__((always_inline))

MF_INLINE Floats splat(float x) { return x - Floats{}; }
MF_INLINE Floats pick(Ints condition, Floats yes, Floats no) { return condition ? yes : no; }
// Of two numbers one of which is NaN, the second.
MF_INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }
MF_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
// NaN stays NaN.
MF_INLINE Floats clamp(Floats x, float low, float high) { return min(splat(high), max(splat(low), x)); }

// The first n numbers of a vector, the others 0; all of them by a copy of a length that the compiler knows.
template <typename Vector, typename Number>
MF_INLINE Vector copy_in(const Number* p, int n) {
  Vector out{};
  if (n == kLanes) {
    std::memcpy(&out, p, sizeof(out));
  } else {
    std::memcpy(&out, p, sizeof(Number) * static_cast<std::size_t>(n));
  }
  return out;
}

template <typename Vector, typename Number>
MF_INLINE void copy_out(Number* p, const Vector& x, int n) {
  if (n == kLanes) {
    std::memcpy(p, &x, sizeof(x));
  } else {
    std::memcpy(p, &x, sizeof(Number) * static_cast<std::size_t>(n));
  }
}

MF_INLINE Floats load(const float* p, int n) { return copy_in<Floats>(p, n); }
MF_INLINE void store(float* p, Floats x, int n) { copy_out(p, x, n); }

// bfloat16 is the upper half of a float.
MF_INLINE Floats load(const BFloat16* p, int n) {
  const Bits bits = __builtin_convertvector(copy_in<Shorts>(p, n), Bits) << 16;
  Floats out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

// Rounds to the nearest, ties to even.
MF_INLINE void store(BFloat16* p, Floats x, int n) {
  Bits bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  copy_out(p, __builtin_convertvector((x == x ? rounded : bits | 0x400000) >> 16, Shorts), n);
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

// -88 <= x <= 20, or NaN, which stays NaN. e^x = 2^n e^r with |r| <= ln(2) / 2 and a minimax polynomial for (e^r - r - 1) / r^2 (Moshier's Cephes).
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

// e^x for x <= 0, also far below and at -inf; NaN stays NaN. At -88 the power of two is 2^-127, whose bits are those of 0.
MF_INLINE Floats exp_below_zero(Floats x) { return exponential(max(splat(-88.0f), x)).exp; }

}  // namespace
}  // namespace manus_fast::cpu

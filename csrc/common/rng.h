// Counter-based random numbers: every draw is a pure function of (seed, stream, counter), so results
// do not depend on thread count or on the order of calls. The mixer is splitmix64's finaliser
// (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014); Python code
// can repeat it with integers modulo 2^64.
#pragma once

#include <cstdint>

namespace manus_fast {

inline std::uint64_t mix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline std::uint64_t counter_hash(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  return mix64(mix64(mix64(seed) ^ stream) ^ counter);
}

// A cursor over the draws of one (seed, stream).
class Rng {
 public:
  Rng(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter = 0)
      : key_(mix64(mix64(seed) ^ stream)), counter_(counter) {}

  std::uint64_t next() { return mix64(key_ ^ counter_++); }

  // Uniform in [0, 1) with 53 bits.
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

  // Uniform in [0, n); n > 0. Multiply-shift: bias below 2^-32 for n < 2^32.
  std::uint32_t below(std::uint32_t n) {
    return static_cast<std::uint32_t>(((next() >> 32) * static_cast<std::uint64_t>(n)) >> 32);
  }

  std::uint64_t counter() const { return counter_; }

 private:
  std::uint64_t key_;
  std::uint64_t counter_;
};

}  // namespace manus_fast

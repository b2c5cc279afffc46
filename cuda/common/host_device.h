// Code that host and device share: macros for functions that are compiled for both, and small integer
// arithmetic.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__CUDACC__)
#define PMOE_HD __host__ __device__ __forceinline__
#define PMOE_UNROLL _Pragma("unroll")
#else
#define PMOE_HD inline
#define PMOE_UNROLL
#endif

namespace pmoe {

template <class A, class B>
PMOE_HD constexpr int64_t ceil_div(A a, B b) {
  return (static_cast<int64_t>(a) + static_cast<int64_t>(b) - 1) / static_cast<int64_t>(b);
}

// Returns a / b rounded up, for a >= 0 and b > 0. It divides 32-bit numbers, because a device divides 64-bit
// numbers by a slow function call. Unsigned numbers have room for the sum of any a and b.
PMOE_HD constexpr int ceil_div(int a, int b) {
  return static_cast<int>((static_cast<uint32_t>(a) + static_cast<uint32_t>(b) - 1) /
                          static_cast<uint32_t>(b));
}

template <class T>
PMOE_HD constexpr T smaller(T a, T b) {
  return a < b ? a : b;
}

template <class T>
PMOE_HD constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

PMOE_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

PMOE_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

PMOE_HD int count_bits(uint32_t mask) {
#if defined(__CUDA_ARCH__)
  return __popc(mask);
#else
  return __builtin_popcount(mask);
#endif
}

// A number as a type, so that a function which gets such an argument can use the number as a constant at
// compile time.
template <int kIndex>
struct Index {
  static constexpr int value = kIndex;
};

template <class Each, int... kAll>
PMOE_HD void unrolled_over(const Each& each, std::integer_sequence<int, kAll...>) {
  (each(Index<kAll>{}), ...);
}

// Calls each(Index<i>{}) for i from 0 to kCount - 1. Unlike a loop with #pragma unroll, this is always
// unrolled: a compiler may ignore the pragma for a loop of thousands of instructions.
template <int kCount, class Each>
PMOE_HD void unrolled(const Each& each) {
  unrolled_over(each, std::make_integer_sequence<int, kCount>{});
}

// Divides numbers from 0 to 2^31 - 1 by a divisor that the host knows before the launch. The host computes
// `factor` and `shift`, so the device only multiplies and shifts:
//
//   x / by = (x * factor) >> shift,   shift = 31 + ceil(log2(by)),   factor = floor(2^shift / by) + 1
struct Divisor {
  uint32_t factor = (1u << 31) + 1;
  int shift = 31;

  Divisor() = default;
  explicit Divisor(int by) {
    int bits = 0;
    while ((int64_t{1} << bits) < by) ++bits;
    shift = 31 + bits;
    factor = static_cast<uint32_t>((uint64_t{1} << shift) / static_cast<uint64_t>(by) + 1);
  }

  PMOE_HD int32_t divide(int32_t x) const {
    return static_cast<int32_t>((static_cast<uint64_t>(static_cast<uint32_t>(x)) * factor) >> shift);
  }
};

// Data of 16 bytes, the most that one instruction of a thread loads or stores.
struct alignas(16) Words {
  uint32_t word[4];
};

// Data of 8 bytes, loaded or stored by one instruction.
struct alignas(8) Pair {
  uint32_t word[2];
};

}  // namespace pmoe

// What host and device code share: one spelling of "both", and small integer arithmetic.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define PMOE_HD __host__ __device__ __forceinline__
#define PMOE_UNROLL _Pragma("unroll")
#else
#define PMOE_HD inline
#define PMOE_UNROLL
#endif

namespace pmoe {

PMOE_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
PMOE_HD constexpr T smaller(T a, T b) {
  return a < b ? a : b;
}

template <class T>
PMOE_HD constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

// 16 bytes: what one thread loads or stores at a time.
struct alignas(16) Words {
  uint32_t word[4];
};

}  // namespace pmoe

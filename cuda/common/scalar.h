// The element types of rows (bf16, fp16, float). Rounding is to nearest, ties to even, and the same on host
// and device.
#pragma once
#include <type_traits>

#include "host_device.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <cstring>
#endif

namespace pmoe {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class T>
struct Scalar;

template <>
struct Scalar<float> {
  static constexpr const char* name = "fp32";
  PMOE_HD static float widen(float x) { return x; }
  PMOE_HD static float narrow(float x) { return x; }
};

#if defined(__CUDACC__)

template <>
struct Scalar<bf16> {
  static constexpr const char* name = "bf16";
  PMOE_HD static float widen(bf16 x) { return __bfloat162float(__nv_bfloat16_raw{x.bits}); }
  PMOE_HD static bf16 narrow(float x) { return {static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x)).x}; }
};

template <>
struct Scalar<fp16> {
  static constexpr const char* name = "fp16";
  PMOE_HD static float widen(fp16 x) { return __half2float(__half_raw{x.bits}); }
  PMOE_HD static fp16 narrow(float x) { return {static_cast<__half_raw>(__float2half_rn(x)).x}; }
};

#else

template <>
struct Scalar<bf16> {
  static constexpr const char* name = "bf16";
  static float widen(bf16 x) {
    uint32_t bits = uint32_t{x.bits} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  static bf16 narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {0x7FFF};
    return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
  }
};

template <>
struct Scalar<fp16> {
  static constexpr const char* name = "fp16";
  static float widen(fp16 x) {
    _Float16 value;
    std::memcpy(&value, &x.bits, 2);
    return static_cast<float>(value);
  }
  static fp16 narrow(float x) {
    _Float16 value = static_cast<_Float16>(x);
    fp16 found;
    std::memcpy(&found.bits, &value, 2);
    return found;
  }
};

#endif

template <class T>
PMOE_HD float widen(T x) {
  return Scalar<T>::widen(x);
}

template <class T>
PMOE_HD T narrow(float x) {
  return Scalar<T>::narrow(x);
}

// Rounds two neighbouring values to 16 bits each and packs them into one 32-bit word, the first in the low
// half. One instruction rounds both; without it the compiler would use two slower ones if the rounded values
// are read again.
template <class T>
PMOE_HD uint32_t pack2(float first, float second) {
  static_assert(sizeof(T) == 2, "two 16-bit values");
#if defined(__CUDA_ARCH__)
  uint32_t word;
  if constexpr (std::is_same_v<T, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
#else
  return uint32_t{narrow<T>(first).bits} | uint32_t{narrow<T>(second).bits} << 16;
#endif
}

template <class T>
PMOE_HD float low_half(uint32_t word) {
  return widen<T>(T{static_cast<uint16_t>(word)});
}

template <class T>
PMOE_HD float high_half(uint32_t word) {
  return widen<T>(T{static_cast<uint16_t>(word >> 16)});
}

}  // namespace pmoe

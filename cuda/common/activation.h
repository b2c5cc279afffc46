// The nonlinearities of an expert and their derivatives, computed in float.
//
// On the device, e^x and 1 / x are the hardware's approximations. Their error is a few units in the last
// place of a float, which is harmless, because every result is rounded to 16 bits afterwards.
#pragma once
#include <cmath>

#include "host_device.h"

// Wraps every value that the device only approximates. A test redefines this macro so that the host makes an
// error of the same size.
#if !defined(PMOE_APPROXIMATED)
#define PMOE_APPROXIMATED(value) (value)
#endif

namespace pmoe {

// The nonlinearity between an expert's two products. For kSwiglu the hidden columns are two halves, gate and
// up, and the activated hidden is silu(gate) * up (arXiv 2002.05202).
enum class Activation : int { kNone, kRelu, kGelu, kSilu, kSwiglu };

// Returns 2^x. On the device, results below 2^-126 become 0. exp2f() and __expf() would return them
// correctly, but take four more instructions.
PMOE_HD float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return PMOE_APPROXIMATED(exp2f(x));
#endif
}

constexpr float kLog2e = 1.4426950408889634f;  // e^x = 2^(x kLog2e)

// Returns 1 / x for x >= 1. If x is infinite, the result is 0. On the device it is 0 for any x above 2^126.
PMOE_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#else
  return PMOE_APPROXIMATED(1.0f / x);
#endif
}

// Returns 1 / (1 + e^-x). If e^-x overflows to infinity, the result is 0, which is the correct limit.
PMOE_HD float sigmoid(float x) { return reciprocal(1.0f + power_of_two(-kLog2e * x)); }

// Returns the standard normal distribution function at x, with a relative error of 2e-7:
//
//   z = |x| / sqrt(2),   t = 1 / (1 + z / 2),   erfc(z) = t exp(-z^2 + P(t))
//
// P is the polynomial of degree 9 of Press et al., Numerical Recipes, section 6.2 (erfcc). The library's
// erff() has a branch and twice as many instructions.
//
// x: the argument.
// density_times_root: e^(-x^2 / 2), which is the density at x times sqrt(2 pi). The caller computes it,
//     because the derivative needs this value, too.
PMOE_HD float normal_below(float x, float density_times_root) {
  const float z = fabsf(x) * 0.70710678118654752f;
  const float t = reciprocal(1.0f + 0.5f * z);
  float p = 0.17087277f * kLog2e;
  p = p * t - 0.82215223f * kLog2e;
  p = p * t + 1.48851587f * kLog2e;
  p = p * t - 1.13520398f * kLog2e;
  p = p * t + 0.27886807f * kLog2e;
  p = p * t - 0.18628806f * kLog2e;
  p = p * t + 0.09678418f * kLog2e;
  p = p * t + 0.37409196f * kLog2e;
  p = p * t + 1.00002368f * kLog2e;
  p = p * t - 1.26551223f * kLog2e;
  const float above = 0.5f * t * density_times_root * power_of_two(p);
  return x < 0.0f ? above : 1.0f - above;
}

struct Relu {
  static PMOE_HD float value(float x) { return x < 0.0f ? 0.0f : x; }  // comparing this way round keeps a NaN
  static PMOE_HD float derivative(float x) { return x > 0.0f ? 1.0f : 0.0f; }
};

// GELU: x times the standard normal distribution function at x. This is the exact form, not the tanh
// approximation.
struct Gelu {
  static PMOE_HD float value(float x) { return x * normal_below(x, bell(x)); }
  static PMOE_HD float derivative(float x) {
    const float density = bell(x);
    return normal_below(x, density) + 0.39894228040143268f * x * density;
  }

 private:
  static PMOE_HD float bell(float x) { return power_of_two(-0.5f * kLog2e * x * x); }  // e^(-x^2 / 2)
};

struct Silu {
  static PMOE_HD float value(float x) { return x * sigmoid(x); }
  static PMOE_HD float derivative(float x) {
    const float s = sigmoid(x);
    return s + x * s * (1.0f - s);
  }
};

// The nonlinearity of a single column. For kSwiglu it is silu, which applies to the gate's half; the caller
// multiplies the result by the other half.
template <Activation kActivation>
struct Function;
template <>
struct Function<Activation::kRelu> : Relu {};
template <>
struct Function<Activation::kGelu> : Gelu {};
template <>
struct Function<Activation::kSilu> : Silu {};
template <>
struct Function<Activation::kSwiglu> : Silu {};

}  // namespace pmoe

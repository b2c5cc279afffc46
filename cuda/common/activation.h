// The nonlinearities between an expert's two products, and their derivatives, in float.
//
// On the device e^x and 1 / x are the hardware's approximations, a few units in the last place of a float:
// all results are rounded to 16 bits afterwards.
#pragma once
#include <cmath>

#include "host_device.h"

// Around what the device approximates. A test makes it as wrong on the host.
#if !defined(PMOE_APPROXIMATED)
#define PMOE_APPROXIMATED(value) (value)
#endif

namespace pmoe {

// kSwiglu: hidden columns are in two halves, the gate's first: silu(gate) * other (arXiv 2002.05202).
enum class Activation : int { kNone, kRelu, kGelu, kSilu, kSwiglu };

// 2^x; 0 below 2^-126 on the device. exp2f() and __expf() take four more instructions for what lies there.
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

// 1 / x for x of at least 1; 0 for infinity and, on the device, beyond 2^126.
PMOE_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#else
  return PMOE_APPROXIMATED(1.0f / x);
#endif
}

// e^-x may overflow to infinity, which gives 0.
PMOE_HD float sigmoid(float x) { return reciprocal(1.0f + power_of_two(-kLog2e * x)); }

// The chance that a standard normal number is below x, to 2e-7 of itself: with z = |x| / sqrt(2),
// erfc(z) = t exp(-z^2 + P(t)), t = 1 / (1 + z / 2), and P the polynomial of degree 9 of Press et al.,
// Numerical Recipes, section 6.2 (erfcc). erff would take a branch and twice the instructions.
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
  static PMOE_HD float value(float x) { return x < 0.0f ? 0.0f : x; }  // keeps NaN
  static PMOE_HD float derivative(float x) { return x > 0.0f ? 1.0f : 0.0f; }
};

// x times the chance that a standard normal number is below x (not the tanh approximation).
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

template <Activation kActivation>
struct Function;  // of one column
template <>
struct Function<Activation::kRelu> : Relu {};
template <>
struct Function<Activation::kGelu> : Gelu {};
template <>
struct Function<Activation::kSilu> : Silu {};
template <>
struct Function<Activation::kSwiglu> : Silu {};

}  // namespace pmoe

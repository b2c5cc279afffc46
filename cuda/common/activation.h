// The nonlinearities between an expert's two products, and their derivatives, in float.
#pragma once
#include <cmath>

#include "host_device.h"

namespace pmoe {

enum class Activation : int { kNone = 0, kRelu = 1, kGelu = 2, kSilu = 3 };

// 1 / (1 + e^-x). e^-x may overflow to infinity, which gives 0.
PMOE_HD float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// x times the chance that a standard normal number is below x (not the tanh approximation).
PMOE_HD float gelu(float x) { return x * 0.5f * (1.0f + erff(x * 0.70710678118654752f)); }

PMOE_HD float gelu_derivative(float x) {
  const float below = 0.5f * (1.0f + erff(x * 0.70710678118654752f));
  const float density = 0.39894228040143268f * expf(-0.5f * x * x);
  return below + x * density;
}

PMOE_HD float silu(float x) { return x * sigmoid(x); }

PMOE_HD float silu_derivative(float x) {
  const float s = sigmoid(x);
  return s * (1.0f + x * (1.0f - s));
}

PMOE_HD float activate(Activation kind, float x) {
  switch (kind) {
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;  // keeps NaN
    case Activation::kGelu:
      return gelu(x);
    case Activation::kSilu:
      return silu(x);
    default:
      return x;
  }
}

PMOE_HD float activation_derivative(Activation kind, float x) {
  switch (kind) {
    case Activation::kRelu:
      return x > 0.0f ? 1.0f : 0.0f;
    case Activation::kGelu:
      return gelu_derivative(x);
    case Activation::kSilu:
      return silu_derivative(x);
    default:
      return 1.0f;
  }
}

}  // namespace pmoe

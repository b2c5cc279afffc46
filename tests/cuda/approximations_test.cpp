// The bounds of tests/gpu/grouped.py for what the hardware approximates, with its documented errors put in on
// the host: e^x and 1 / x as wrong as the PTX manual allows in every combination, and sums that are cut off.
// Prints the largest share of each bound.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

// ex2.approx.ftz.f32: 2^-22 of the result; rcp.approx.ftz.f32: one unit in the last place, which is less.
constexpr float kError = 1.0f / (1 << 22);
unsigned signs = 0;  // of the next calls' errors, a bit each
unsigned calls = 0;

float approximated(float value) {
  const float sign = signs >> (calls++ % 4) & 1 ? 1.0f : -1.0f;
  return value + value * sign * kError * PMOE_TIMES;
}

}  // namespace

#define PMOE_APPROXIMATED(value) approximated(value)
#include "common/activation.h"
#include "common/scalar.h"

namespace {

using namespace pmoe;

constexpr double kFunctions = 1.0 / (1 << 18), kSums = 1.0 / (1 << 17);  // FUNCTIONS and SUMS there

double chance_below(double x) { return 0.5 * std::erfc(-x * std::sqrt(0.5)); }
double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

struct Exact {
  double value, derivative;
};

Exact exact(Activation which, double x) {
  if (which == Activation::kGelu)
    return {x * chance_below(x), chance_below(x) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI)};
  const double s = sigmoid_of(x);
  return {x * s, s + x * s * (1 - s)};
}

// Over every bf16 number.
template <class F>
void test_function(Activation which, const char* name) {
  double value = 0, derivative = 0;
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const float x = widen(bf16{static_cast<uint16_t>(bits)});
    if (!(std::fabs(x) < 1e18) || std::fabs(x) < 1e-18) continue;  // beyond, x * x is no float
    const Exact expected = exact(which, x);
    for (unsigned pattern = 0; pattern < 16; ++pattern) {
      signs = pattern, calls = 0;
      const double v = F::value(x);
      calls = 0;
      const double d = F::derivative(x);
      value = std::max(value, std::fabs(v - expected.value) / (kFunctions * std::fabs(x)));
      derivative =
          std::max(derivative, std::fabs(d - expected.derivative) / (1.2 * kFunctions * (1 + std::fabs(x))));
    }
  }
  std::printf("%s %.4f\n%s_derivative %.4f\n", name, value, name, derivative);
}

// Cut off behind the bit that a float whose exponent is `exponent` ends with.
double cut(double x, int exponent) {
  return std::ldexp(std::trunc(std::ldexp(x, 23 - exponent)), exponent - 23);
}

// A dot product as matrix units may compute it: 16 products at a time, they and the sum so far lined up with
// the largest of them, and cut off there.
double matrix_sum(const std::vector<double>& terms) {
  double sum = 0;
  for (size_t first = 0; first < terms.size(); first += 16) {
    const size_t end = std::min(first + 16, terms.size());
    double largest = std::fabs(sum);
    for (size_t i = first; i < end; ++i) largest = std::max(largest, std::fabs(terms[i]));
    if (largest == 0) continue;
    int exponent;
    std::frexp(largest, &exponent);
    --exponent;
    double total = cut(sum, exponent);
    for (size_t i = first; i < end; ++i) total += cut(terms[i], exponent);
    if (total != 0) {
      std::frexp(total, &exponent);
      total = cut(total, exponent - 1);
    }
    sum = total;
  }
  return sum;
}

void test_sums() {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  double share = 0;
  for (int depth : {64, 200, 520})
    for (int i = 0; i < 20000; ++i) {
      std::vector<double> terms(static_cast<size_t>(depth));
      double expected = 0, size = 0;
      for (double& term : terms) {
        term = static_cast<double>(widen(narrow<bf16>(normal(random)))) * widen(narrow<bf16>(normal(random)));
        expected += term, size += std::fabs(term);
      }
      share = std::max(share, std::fabs(PMOE_TIMES * (matrix_sum(terms) - expected)) / (kSums * size));
    }
  std::printf("sums %.4f\n", share);
}

}  // namespace

int main() {
  test_function<Gelu>(Activation::kGelu, "gelu");
  test_function<Silu>(Activation::kSilu, "silu");
  test_sums();
}

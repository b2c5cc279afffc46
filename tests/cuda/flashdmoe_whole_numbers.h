// Experts whose sums are exact in any order: small whole numbers.
#pragma once
#include "common/scalar.h"

namespace whole_numbers {

using namespace pmoe;

constexpr int kModel = 16, kHidden = 6;

inline float first_weight(int expert, int from, int to) {
  return static_cast<float>((expert * 5 + from * 3 + to * 7) % 3);
}
inline float second_weight(int expert, int from, int to) {
  return static_cast<float>((expert + from * 5 + to) % 3);
}

template <class Row>
float hidden_value(int expert, const Row& row, int column) {
  float sum = 0;
  for (int k = 0; k < kModel; ++k) sum += row[k] * first_weight(expert, k, column);
  return sum;
}

template <class Hidden>
bf16 product_value(int expert, const Hidden& hidden, int column) {
  float sum = 0;
  for (int h = 0; h < kHidden; ++h) sum += hidden[h] * second_weight(expert, h, column);
  return narrow<bf16>(sum);
}

inline void read_row(const uint8_t* from, float (&x)[kModel]) {
  for (int v = 0; v < kModel / 8; ++v) {
    const Words words = load16(from + v * 16);
    for (int i = 0; i < 4; ++i)
      x[v * 8 + 2 * i] = low_half<bf16>(words.word[i]), x[v * 8 + 2 * i + 1] = high_half<bf16>(words.word[i]);
  }
}

template <class Value>
void write_columns(uint8_t* to, int column, const Value& value) {
  Words words;
  for (int i = 0; i < 4; ++i)
    words.word[i] = value(column * 8 + 2 * i).bits | uint32_t{value(column * 8 + 2 * i + 1).bits} << 16;
  store16(to + column * 16, words);
}

// Of <dY, w2>, which is not weighed.
inline float active_gradient(int expert, const float (&dy)[kModel], int h) {
  float sum = 0;
  for (int i = 0; i < kModel; ++i) sum += dy[i] * second_weight(expert, h, i);
  return sum;
}

template <class Hidden>
bf16 input_gradient(int expert, const Hidden& gradient, int column) {
  float sum = 0;
  for (int h = 0; h < kHidden; ++h) sum += gradient[h] * first_weight(expert, column, h);
  return narrow<bf16>(sum);
}

}  // namespace whole_numbers

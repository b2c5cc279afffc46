// Numbers of e4m3, a float8 type with 4 bits of exponent and 3 of mantissa. The type has no Inf; its largest
// number is 448. Rounding is to nearest, ties to even, and the same on host and device.
//
//   | sign | 4 bits of exponent, biased by 7 | 3 bits of mantissa |     NaN: all bits below the sign are 1
#pragma once
#include "host_device.h"
#include "scalar.h"

// 1 where the device converts e4m3 by instructions of its own: compute capability 8.9 and later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define PMOE_E4M3_CODE 1
#else
#define PMOE_E4M3_CODE 0
#endif

namespace pmoe {

constexpr float kLargestE4m3 = 448.0f;

// Rounds a float to e4m3, without the device's instruction. The float must be NaN, or its absolute value less
// than 464: larger numbers would be rounded to more than 448, the largest number of e4m3.
PMOE_HD uint32_t to_e4m3(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t size = bits & 0x7FFFFFFFu;
  uint32_t found;
  if (size > 0x7F800000u) {
    found = 0x7F;
  } else if (size < (121u << 23)) {
    // Below 2^-6, the numbers of e4m3 are the multiples of 2^-9, and their bits are the factor. The floats
    // just above 2^14 are multiples of 2^-9, too, and their bits grow by 1 from one multiple to the next. So
    // adding 2^14 rounds to a multiple, and the difference of the bits is its factor.
    found = bits_of(float_of(size) + 16384.0f) - bits_of(16384.0f);
  } else {
    // Subtracts 120 from the exponent, as e4m3 biases it by 7 and float by 127. Then adds half of a unit in
    // the last place of e4m3, and cuts off the 20 bits below. If the last bit that stays is 0, the addend is
    // smaller than half a unit by the float's last bit, so that ties go to even.
    found = (size - (120u << 23) + 0x7FFFFu + (size >> 20 & 1)) >> 20;
  }
  return found | (bits >> 24 & 0x80u);
}

// Returns the value of a number of e4m3, without the device's instruction.
PMOE_HD float of_e4m3(uint32_t number) {
  const uint32_t size = number & 0x7Fu;
  // Shifted by 20, exponent and mantissa of e4m3 are in the place of a float's. This float is 2^120 times too
  // small, because e4m3 biases the exponent by 7 and float by 127. For a number below 2^-6 it is a denormal.
  const float value = size == 0x7Fu ? float_of(0x7FFFFFFFu) : float_of(size << 20) * 0x1p120f;
  return float_of(bits_of(value) | (number & 0x80u) << 24);
}

// Rounds four floats to e4m3 and packs them into one word, the first in the lowest byte. Each float must be
// NaN, or its absolute value less than 464.
PMOE_HD uint32_t pack_e4m3(const float (&value)[4]) {
#if PMOE_E4M3_CODE
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(value[1]), "f"(value[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(value[3]), "f"(value[2]));
  return uint32_t{low} | uint32_t{high} << 16;
#else
  uint32_t word = 0;
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) word |= to_e4m3(value[i]) << 8 * i;
  return word;
#endif
}

// The inverse of pack_e4m3, without rounding: every number of e4m3 is a number of float and of fp16.
PMOE_HD void unpack_e4m3(uint32_t word, float (&value)[4]) {
#if PMOE_E4M3_CODE
  uint32_t low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"(static_cast<uint16_t>(word)));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"(static_cast<uint16_t>(word >> 16)));
  value[0] = low_half<fp16>(low), value[1] = high_half<fp16>(low);
  value[2] = low_half<fp16>(high), value[3] = high_half<fp16>(high);
#else
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) value[i] = of_e4m3(word >> 8 * i & 0xFFu);
#endif
}

}  // namespace pmoe

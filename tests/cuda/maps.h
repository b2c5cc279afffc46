// What the driver's encoder would make of operands, for the emulated tensor memory accelerator.
#pragma once
#include "common/device.cuh"

inline pmoe::TensorMap map_2d(const void* base, int64_t columns, int64_t rows, int64_t stride, int lines) {
  return {static_cast<const uint8_t*>(base), 2, {columns, rows, 1}, {2, stride * 2, 0}, {64, lines, 1}, 2};
}

inline pmoe::TensorMap map_3d(const void* base, int64_t columns, int64_t rows, int64_t experts, int lines) {
  return {static_cast<const uint8_t*>(base),
          3,
          {columns, rows, experts},
          {2, columns * 2, columns * rows * 2},
          {64, lines, 1},
          2};
}

// One grouped product: what is multiplied, for which rows, and what becomes of the result.
//
// N rows are sorted by expert; expert e owns rows ends[e - 1] to ends[e] (ends[-1] = 0). Group sizes are on
// the device and nowhere else. Rows of form kForward's A may be gathered: row r then stands in row slot[r] /
// top_k of what is given, as tokens do that are routed to top_k experts.
#pragma once
#include "common/activation.h"
#include "common/host_device.h"

namespace pmoe {

enum class Form : int {
  kForward,  // D (N, n) = A (N, k) B[e]^T, B (E, n, k)
  kInput,    // D (N, n) = A (N, k) B[e],   B (E, k, n)
  kWeight,   // D[e] (m, n) = A^T B over the rows of e, A (N, m), B (N, n)
};

enum class Epilogue : int {
  kPlain,           // D = (product + bias) * weight, or D += product
  kHidden,          // D = product + bias (T_M), active = act(D)
  kHiddenGradient,  // product: the gradient of the activated hidden; D: that of hidden (dT_M), times weight
  kWideOrPlain,     // kPlain; or D = product where Problem::wide is set
};

// Whether a tile holds matching columns of both halves of the hidden ones, which its epilogue joins.
PMOE_HD constexpr bool are_halves(Epilogue epilogue, Activation activation) {
  return epilogue == Epilogue::kHidden && activation == Activation::kSwiglu;
}

struct Problem {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;                                 // kHidden: may be null, T_M is then not written
  int64_t a_stride = 0, b_stride = 0, d_stride = 0;  // elements between rows; b's only where it has N rows

  const int32_t* ends = nullptr;
  const int32_t* slot = nullptr;  // (N), kForward: where rows are gathered or weights are by slot
  Divisor top_k;
  int experts = 0;
  int rows = 0;  // N; more than ends[E - 1] are left alone
  int m = 0, n = 0, k = 0;
  int a_gathered = 0;  // kForward

  const void* bias = nullptr;     // (E, n), of the operands' type
  const float* weight = nullptr;  // by slot where there are slots, else by row
  void* active = nullptr;         // (N, hidden): written, of the operands' type
  int64_t active_stride = 0;
  const void* hidden = nullptr;  // kHiddenGradient: T_M
  int64_t hidden_stride = 0;
  float* row_dots = nullptr;      // kHiddenGradient: (parts, N), <active, product> by parts of the columns
  int weighs_active = 0;          // kHiddenGradient: active is written times weight
  uint32_t* next_tile = nullptr;  // 0 at the launch: blocks take tiles from it as they come; null: in turn
  int beside = 1;                 // Hopper's, 1 or 2: blocks of a cluster whose tiles lie side by side
  int wide = 0;                   // kWeight, kWideOrPlain: D is float, n columns wide; n is even
  int accumulates = 0;            // kWeight: D += product; D is float
};

}  // namespace pmoe

// The arguments of one grouped product: its operands, its rows, and what its epilogue does with the result.
//
// The N rows are sorted by expert: expert e has the rows ends[e - 1] to ends[e] - 1, with ends[-1] = 0. Only
// the device knows the numbers in `ends`, the host does not. In form kForward the rows of A may be gathered,
// in form kWeight the rows of B. Row r is then read from row slot[r] / top_k of the operand: slot[r] is the
// (token, choice) slot of row r, and the operand has a row for each token.
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
  kHiddenGradient,  // product is the gradient of the activated hidden; D = weight * the gradient of T_M
  kWideOrPlain,     // as kPlain, or D = product in float if Problem::wide is set
};

// Returns whether a tile holds the same columns of both halves of the hidden columns, gate and up of SwiGLU.
// The epilogue can then compute silu(gate) * up.
PMOE_HD constexpr bool are_halves(Epilogue epilogue, Activation activation) {
  return epilogue == Epilogue::kHidden && activation == Activation::kSwiglu;
}

// All arguments of one product.
struct Problem {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;                                 // may be null for kHidden: T_M is then not written
  int64_t a_stride = 0, b_stride = 0, d_stride = 0;  // elements between rows; b's only if it has N rows

  const int32_t* ends = nullptr;
  // (N,), the (token, choice) slot of each row. Form kForward needs it if rows of A are gathered, or if
  // `weight` has a number for each slot. Form kWeight needs it if rows of B are gathered. Else it is null.
  const int32_t* slot = nullptr;
  Divisor top_k;
  int experts = 0;
  int rows = 0;  // N; rows from ends[E - 1] on are not written
  int m = 0, n = 0, k = 0;
  int a_gathered = 0;  // kForward: rows of A are gathered

  const void* bias = nullptr;     // (E, n), of the operands' type
  const float* weight = nullptr;  // routing weights, one for each slot if `slot` is set, else (N,)
  void* active = nullptr;         // (N, hidden), of the operands' type; written
  int64_t active_stride = 0;
  const void* hidden = nullptr;  // (N, hidden): T_M; kHiddenGradient
  int64_t hidden_stride = 0;
  float* row_dots = nullptr;  // (parts, N): <active, product> of each part of the columns; kHiddenGradient
  int weighs_active = 0;      // kHiddenGradient: active is stored multiplied by weight
  uint32_t* next_tile = nullptr;  // counter, 0 at launch, from which blocks take tiles; null: tiles in turn
  int blocks_across = 1;          // Hopper, 1 or 2: blocks of a cluster whose tiles lie side by side
  // (N,): row r of the result is stored as row place[r] of D. Only for epilogue kPlain in forms kForward and
  // kInput. If it is null, row r is stored as row r of D.
  const int32_t* place = nullptr;
  int wide = 0;         // kWeight, kWideOrPlain: D is float with n columns; n is even
  int accumulates = 0;  // kWeight: D += product; D is float
};

}  // namespace pmoe

// Functions that return the number of partial sums of the gradient of a row's routing weight. The gradient is
// an inner product over `columns` hidden columns. Each block (on sm_80 each warp) sums over some of the
// columns.
#pragma once
#include "common/host_device.h"

namespace pmoe {

PMOE_HD constexpr int hopper_row_dot_parts(int columns) { return ceil_div(columns, 256); }
PMOE_HD constexpr int turns_row_dot_parts(int columns) { return ceil_div(columns, 128); }
PMOE_HD constexpr int ampere_row_dot_parts(int columns) { return ceil_div(columns, 128) * 2; }

}  // namespace pmoe

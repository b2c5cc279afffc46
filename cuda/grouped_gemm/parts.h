// Number of parts into which each kernel splits the inner product of a row with its gradient, because several
// blocks or warps compute it.
#pragma once
#include "common/host_device.h"

namespace pmoe {

PMOE_HD constexpr int hopper_row_dot_parts(int columns) { return ceil_div(columns, 256); }
PMOE_HD constexpr int ampere_row_dot_parts(int columns) { return ceil_div(columns, 128) * 2; }

}  // namespace pmoe

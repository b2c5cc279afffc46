// Which products two warpgroups of a block compute in turns on Hopper (hopper_turns.cuh). Only bindings
// include it, so that a change of the rule compiles no kernel again.
#pragma once
#include "launch.h"

namespace pmoe {

// Which products are computed in turns:
//
// kNever: none.
// kByRule: those that is_faster_in_turns() names.
// kAlways: all for which there are kernels.
enum class Turns : int { kNever, kByRule, kAlways };

// Returns whether there is a kernel that computes a product in turns. Plain products of rows have one, and
// SwiGLU's hidden columns and their gradient.
//
// a_gathered: whether the rows of A are gathered; there is no such kernel.
inline bool can_take_turns(const GroupedGemm& which, bool a_gathered) {
  const bool is_plain = which.epilogue == Epilogue::kPlain && which.form != Form::kWeight;
  return (is_plain || which.activation == Activation::kSwiglu) && !a_gathered;
}

// Returns whether a product that can take turns is predicted to be faster in turns.
//
// In turns a tile's store costs no time, but each step along the reduction is predicted to take a quarter
// longer. So it depends on the number of steps. By the stored times of an H200, the store of a plain tile
// (4.2 us) is worth 24 steps, that of SwiGLU's hidden columns (7.0 us) 41, and that of their gradient
// (17.8 us) 104 (bench/bench_shapes.py). Not measured.
//
// k: the number of columns of A, over which the product sums.
inline bool is_faster_in_turns(const GroupedGemm& which, int k) {
  constexpr int kDepth = 64;
  const int most_steps = which.epilogue == Epilogue::kPlain    ? 24
                         : which.epilogue == Epilogue::kHidden ? 41
                                                               : 104;
  return ceil_div(k, kDepth) <= most_steps;
}

inline bool takes_turns(const GroupedGemm& which, int k, bool a_gathered, Turns turns) {
  if (turns == Turns::kNever || !can_take_turns(which, a_gathered)) return false;
  return turns == Turns::kAlways || is_faster_in_turns(which, k);
}

}  // namespace pmoe

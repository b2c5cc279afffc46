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

// Returns whether there is a kernel that computes a product in turns. There is one for plain products of
// rows, for SwiGLU's hidden columns, and for the gradient of these.
//
// a_gathered: whether the rows of A are gathered. If so, there is no kernel.
inline bool can_take_turns(const GroupedGemm& which, bool a_gathered) {
  const bool is_plain = which.epilogue == Epilogue::kPlain && which.form != Form::kWeight;
  return (is_plain || which.activation == Activation::kSwiglu) && !a_gathered;
}

// Returns whether a product that can take turns is predicted to be faster in turns.
//
// In turns a tile's store costs no time, but each step along the reduction is predicted to take a quarter of
// 0.68 us longer. Turns are faster if the steps of a tile together lose less time than its store takes. On an
// H200 a store takes 4.2 us (plain tile), 7.0 us (SwiGLU's hidden columns) or 17.8 us (their gradient). These
// are 24, 41 and 104 steps (bench/bench_shapes.py). Products in turns were not measured.
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

// Which products on Hopper are stored beside other products: computed by two warpgroups in turns
// (hopper_turns.cuh), or by both on one tile that is stored as boxes (hopper_boxes.cuh). Only bindings
// include it, so that a change of the rule compiles no kernel again.
#pragma once
#include "launch.h"

namespace pmoe {

// Which products are stored beside other products:
//
// kNever: none.
// kByRule: in turns those that is_faster_in_turns() names, as boxes the others; where there are kernels.
// kAlways: in turns all for which there are kernels, none as boxes.
// kBoxes: as boxes all for which there are kernels, none in turns.
enum class Turns : int { kNever, kByRule, kAlways, kBoxes };

// Returns whether there is a kernel that computes a product in turns. There is one for plain products of
// rows, for SwiGLU's hidden columns, and for the gradient of these.
//
// a_gathered: whether the rows of A are gathered. If so, there is no kernel.
inline bool can_take_turns(const GroupedGemm& which, bool a_gathered) {
  const bool is_plain = which.epilogue == Epilogue::kPlain && which.form != Form::kWeight;
  return (is_plain || which.activation == Activation::kSwiglu) && !a_gathered;
}

// Returns whether a product has a kernel in which both warpgroups compute one tile and store it as boxes.
// Plain products have such a kernel, and so has the product for SwiGLU's hidden columns. If two blocks share
// B, only weight gradients have one.
inline bool can_store_boxes(const GroupedGemm& which, Sharing sharing) {
  const bool is_hidden = which.epilogue == Epilogue::kHidden && which.activation == Activation::kSwiglu;
  return (which.epilogue == Epilogue::kPlain || is_hidden) &&
         (sharing != Sharing::kB || which.form == Form::kWeight);
}

// Returns whether a product that can take turns is predicted to be faster in turns.
//
// In turns a tile's store costs no time, but each step along the reduction is predicted to take a quarter of
// 0.68 us longer. If both warpgroups compute one tile, its store holds them for some time. So turns are
// faster if (steps of a tile) * 0.17 us is less than this time. On an H200 it is predicted to be 2.0 us for
// the boxes of a plain tile, and 3.6 us for those of SwiGLU's hidden columns. The gradient of SwiGLU has no
// kernel that stores boxes: its time is 17.8 us, as was measured. These are 11, 21 and 104 steps
// (bench/bench_shapes.py). Products in turns were not measured.
//
// k: the number of columns of A, over which the product sums.
inline bool is_faster_in_turns(const GroupedGemm& which, int k) {
  constexpr int kDepth = 64;
  const int most_steps = which.epilogue == Epilogue::kPlain    ? 11
                         : which.epilogue == Epilogue::kHidden ? 21
                                                               : 104;
  return ceil_div(k, kDepth) <= most_steps;
}

inline bool takes_turns(const GroupedGemm& which, int k, bool a_gathered, Turns turns) {
  if (turns == Turns::kNever || turns == Turns::kBoxes || !can_take_turns(which, a_gathered)) return false;
  return turns == Turns::kAlways || is_faster_in_turns(which, k);
}

// Sets which.in_turns and which.boxed for Hopper's path, before share() of sharing.h.
inline void choose_way(GroupedGemm& which, int k, bool a_gathered, Turns turns, Sharing sharing) {
  which.in_turns = takes_turns(which, k, a_gathered, turns);
  const bool wants_boxes = turns == Turns::kBoxes || turns == Turns::kByRule;
  which.boxed = wants_boxes && !which.in_turns && can_store_boxes(which, sharing);
}

}  // namespace pmoe

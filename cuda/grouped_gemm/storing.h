// The ways in which the tiles of a product are stored on Hopper, and the rule that chooses one of them. Only
// bindings include this header, so that a change of the rule compiles no kernel again.
//
//   way        what is multiplied while a tile is stored                          kernels
//   alone      nothing                                                            hopper.cuh
//   in turns   a tile of the other warpgroup: each warpgroup has its own tiles    hopper_turns.cuh
//   as boxes   the next tile: the tensor memory accelerator stores the last one   hopper_boxes.cuh
//
// Not every product has a kernel for each way, and not every product becomes faster in each way:
//
//   feature of a product                        in turns     as boxes
//   SwiGLU's hidden columns                     yes          yes
//   gradient of SwiGLU's hidden columns         yes          no kernel
//   other hidden columns, and their gradient    no kernel    no kernel
//   weight gradient                             no kernel    yes
//   rows of A are gathered                      no kernel    yes
//   rows of B are gathered (weight gradient)    no kernel    yes, and no other way has a kernel
//   two blocks share B                          refused      weight gradients only
//   rows are stored at places                   yes          no gain: threads store them
//   weight gradient in float                    no kernel    no gain: threads store it
#pragma once
#include <stdexcept>
#include <string>

#include "launch.h"

namespace pmoe {

// The way of storing that a caller asks for; the table above has the three ways. These are the values of
// `STORING` of pmoe/kernels/grouped_gemm/launch.py.
//
// kAlone: alone, for every product.
// kFastest: the way that is predicted to be the fastest for the product.
// kInTurns: in turns if there is a kernel for the product, else alone.
// kAsBoxes: as boxes if there is a kernel for the product, else alone.
enum class Storing : int { kAlone, kFastest, kInTurns, kAsBoxes };

// Returns the value of an argument `storing`. Throws std::invalid_argument for other numbers.
inline Storing storing_of(int number) {
  if (number < 0 || number > 3)
    throw std::invalid_argument("storing (" + std::to_string(number) +
                                ") must be 0 (alone), 1 (the fastest way), 2 (in turns) or 3 (as boxes)");
  return static_cast<Storing>(number);
}

// Returns whether there is a kernel that computes a product in turns.
inline bool can_take_turns(const GroupedGemm& which, const Problem& p) {
  const bool is_plain = which.epilogue == Epilogue::kPlain && which.form != Form::kWeight;
  return (is_plain || which.activation == Activation::kSwiglu) && !p.a_gathered;
}

// Returns whether there is a kernel that stores a product as boxes.
inline bool can_store_boxes(const GroupedGemm& which, Sharing sharing) {
  const bool is_hidden = which.epilogue == Epilogue::kHidden && which.activation == Activation::kSwiglu;
  return (which.epilogue == Epilogue::kPlain || is_hidden) &&
         (sharing != Sharing::kB || which.form == Form::kWeight);
}

// Returns whether the tensor memory accelerator stores the result of a kernel for boxes. Such a kernel can
// also compute results with rows at places, or in float. But its threads store these results, as in the
// kernels that store alone.
inline bool gains_by_boxes(const Problem& p) { return p.place == nullptr && !p.wide; }

// Returns whether a product that can take turns is predicted to be faster in turns than in any other way.
//
// In turns a tile's store costs no time, but each step along the reduction is predicted to take 0.17 us
// longer (a quarter of 0.68 us). In the other ways both warpgroups compute one tile, and they wait for some
// time while it is stored. So turns are faster if (steps of a tile) * 0.17 us is less than this time. The
// table has, for an H200, the time that is waited in the best other way, and the largest number of steps for
// which turns are faster (bench/bench_shapes.py; products in turns were not measured):
//
//   result                                          best other way     time in us       most steps
//   plain                                           as boxes           2.0, predicted   11
//   plain, rows stored at places                    alone              4.2, fitted      24
//   SwiGLU's hidden columns                         as boxes           3.6, predicted   21
//   gradient of SwiGLU's hidden columns             alone              17.8, fitted     104
inline bool is_fastest_in_turns(const GroupedGemm& which, const Problem& p) {
  constexpr int kDepth = 64;
  int most_steps = 104;
  if (which.epilogue == Epilogue::kPlain) most_steps = gains_by_boxes(p) ? 11 : 24;
  if (which.epilogue == Epilogue::kHidden) most_steps = 21;
  return ceil_div(p.k, kDepth) <= most_steps;
}

// Returns whether a product is computed in turns.
//
// p: the product. Only its members k, a_gathered, place and wide are read.
inline bool takes_turns(const GroupedGemm& which, const Problem& p, Storing storing) {
  if (!can_take_turns(which, p)) return false;
  return storing == Storing::kInTurns || (storing == Storing::kFastest && is_fastest_in_turns(which, p));
}

// Returns whether a product that does not take turns is stored as boxes.
inline bool takes_boxes(const GroupedGemm& which, const Problem& p, Storing storing, Sharing sharing) {
  if (!can_store_boxes(which, sharing)) return false;
  return storing == Storing::kAsBoxes || (storing == Storing::kFastest && gains_by_boxes(p));
}

// Sets which.in_turns and which.boxed for Hopper's path, before share() of sharing.h.
//
// Throws std::invalid_argument if which.b_gathered is set and the product is not stored as boxes: no other
// kernel gathers rows of B.
inline void choose_storing(GroupedGemm& which, const Problem& p, Storing storing, Sharing sharing) {
  which.in_turns = takes_turns(which, p, storing);
  which.boxed = !which.in_turns && takes_boxes(which, p, storing, sharing);
  if (which.b_gathered && (!which.boxed || sharing == Sharing::kB || p.wide))
    throw std::invalid_argument(
        "b_gathered (true) must be false for storing " + std::to_string(static_cast<int>(storing)) +
        ", sharing " + std::to_string(static_cast<int>(sharing)) + " and wide " + std::to_string(p.wide) +
        ": rows of B are gathered with storing 1 or 3, sharing 0, 1 or 3, and wide 0");
}

}  // namespace pmoe

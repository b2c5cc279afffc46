// Form::kWeight: the rows that a sum is over, in their order, by steps of kDepth. Whoever has them in several
// pieces gives another such type to the products.
#pragma once
#include "tiles.h"

namespace pmoe {

template <int kDepth>
struct OnePiece {
  // A step's lines are depth to depth + kDepth of `rows` rows, which begin at a_begin of A and b_begin of B.
  struct Step {
    int a_begin, b_begin, rows, depth;
  };
  PMOE_HD int steps(const Tile& tile) const { return ceil_div(tile.group_rows, kDepth); }
  // Steps are asked for one after the other.
  PMOE_HD Step step(const Tile& tile, int number) const {
    return {tile.group_begin, tile.group_begin, tile.group_rows, number * kDepth};
  }
};

}  // namespace pmoe

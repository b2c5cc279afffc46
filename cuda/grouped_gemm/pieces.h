// The rows over which form kWeight sums (the gradient of a weight), cut into steps of kDepth rows. OnePiece
// is for rows that are contiguous. A caller whose rows are in several pieces passes a type of its own with
// the same members.
#pragma once
#include "tiles.h"

namespace pmoe {

template <int kDepth>
struct OnePiece {
  // The rows of one step: rows `depth` to depth + kDepth - 1 of a contiguous piece of `rows` rows. The piece
  // begins at row a_begin of A and at row b_begin of B.
  struct Step {
    int a_begin, b_begin, rows, depth;
  };
  PMOE_HD int steps(const Tile& tile) const { return ceil_div(tile.group_rows, kDepth); }
  // Returns step `number`. Callers must ask for steps in their order.
  PMOE_HD Step step(const Tile& tile, int number) const {
    return {tile.group_begin, tile.group_begin, tile.group_rows, number * kDepth};
  }
};

}  // namespace pmoe

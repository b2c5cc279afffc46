// The rows that form kWeight sums over, cut into steps of kDepth rows. OnePiece is for rows that lie
// together; a caller whose rows are in several pieces passes a type of its own with the same members.
#pragma once
#include "tiles.h"

namespace pmoe {

template <int kDepth>
struct OnePiece {
  // The rows of one step: rows `depth` to depth + kDepth of a piece of `rows` rows. The piece begins at row
  // a_begin of A and at row b_begin of B.
  struct Step {
    int a_begin, b_begin, rows, depth;
  };
  PMOE_HD int steps(const Tile& tile) const { return ceil_div(tile.group_rows, kDepth); }
  // Returns a step. Steps must be asked for in their order.
  PMOE_HD Step step(const Tile& tile, int number) const {
    return {tile.group_begin, tile.group_begin, tile.group_rows, number * kDepth};
  }
};

}  // namespace pmoe

// The rows over which the gradient of a weight sums (form kWeight), cut into steps of kDepth rows. OnePiece
// is for an expert whose rows are contiguous. If an expert's rows are in several places of memory, the caller
// passes another type with the same members.
#pragma once
#include "tiles.h"

namespace pmoe {

template <int kDepth>
struct OnePiece {
  // The rows of one step: those with the indices `depth` to depth + kDepth - 1 in a contiguous range of
  // `rows` rows. The range begins at row a_begin of A and at row b_begin of B.
  struct Step {
    int a_begin, b_begin, rows, depth;
  };
  PMOE_HD int steps(const Tile& tile) const { return ceil_div(tile.group_rows, kDepth); }
  // Returns the step with the index `number`. Callers must ask for the steps in their order.
  PMOE_HD Step step(const Tile& tile, int number) const {
    return {tile.group_begin, tile.group_begin, tile.group_rows, number * kDepth};
  }
};

}  // namespace pmoe

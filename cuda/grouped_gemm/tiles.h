// The order of tiles: which tile of the result each block computes, and when.
//
// The grid is persistent, and all tiles of a launch are numbered from 0 on. Block b of G blocks computes the
// tiles b, b + G, b + 2G, ... If other kernels may occupy multiprocessors, each block takes the number of its
// next tile from a counter instead, so that no tile waits for a block that starts late. A tile's result does
// not depend on the block that computes it. All threads of a block get the same numbers, so they find the
// same tiles.
//
// Tiles are numbered by expert. The tiles of an expert are numbered by bands of kBand rows of tiles, and
// inside a band column by column. If a band had 2 rows, an expert of 3 x 4 tiles would be numbered:
//
//   0 2 4 6
//   1 3 5 7
//   8 9 10 11
//
// The tiles that are computed at the same time then form a rectangle of the result, and share rows and
// columns of the operands in the L2 cache.
#pragma once
#include "common/host_device.h"
#include "problem.h"

namespace pmoe {

constexpr int kBand = 16;

struct Tile {
  int expert;
  int group_begin, group_rows;  // index of the expert's first row, and number of the expert's rows
  int row;                      // first row of the tile, among the rows of the expert's result
  int rows;                     // number of the tile's rows that exist
  int column;                   // first column in the result (in each half, if columns are halved)
};

// Returns the number of the tile that a block or cluster computes in its turn `turn` (0, 1, ...). Numbers
// rise from turn to turn. A number beyond all tiles means that no tile is left.
//
// counter: a counter in memory from which the number is taken. If it is null, the number is
//     first + turn * step, where `first` is the index of the block or cluster, and `step` how many there are.
// add: add(counter, 1) adds 1 and returns the value before.
template <class Add>
PMOE_HD int tile_number(uint32_t* counter, const Add& add, int first, int step, int turn) {
  return counter != nullptr ? static_cast<int>(add(counter, 1u)) : first + turn * step;
}

struct TileShape {
  int rows, columns;  // rows and columns of the result in one tile
};

// A TileShape whose numbers are compile-time constants. Kernels then divide by these numbers by multiplying
// and shifting.
template <int kRows, int kColumns>
struct FixedShape {
  static constexpr int rows = kRows, columns = kColumns;
};

// Finds the position and size of a tile by the tile's number.
template <Form kForm, class Shape = TileShape>
class TileWalk {
 public:
  // ends: for each expert the number of rows of this and all earlier experts: where the expert's rows end.
  // experts: number of experts.
  // m: number of rows of each expert's result, if the results are weight gradients (Form::kWeight).
  // columns: number of columns of the result. For SwiGLU, whose result consists of two halves (gate and up),
  //     number of columns of one half: a tile then has the same columns of both halves.
  // shape: rows and columns of a tile.
  PMOE_HD TileWalk(const int32_t* ends, int experts, int m, int columns, Shape shape)
      : ends_(ends), experts_(experts), m_(m), shape_(shape), across_(ceil_div(columns, shape.columns)) {
    load_group();
  }

  // Finds the tile with the number `index`. Returns false if there is no such tile. The index must not be
  // lower than in the call before, because the search only goes forward. (2^31 tiles would be a result of 70
  // terabytes, so an int is large enough.)
  PMOE_HD bool find(int index, Tile& tile) {
    while (expert_ < experts_ && index - before_ >= down_ * across_) {
      before_ += down_ * across_;
      ++expert_;
      begin_ = end_;
      load_group();
    }
    if (expert_ >= experts_) return false;
    const int inside = index - before_;
    const int band = inside / (kBand * across_);
    const int first = band * kBand;
    const int height = smaller(kBand, down_ - first);
    const int rest = inside - band * kBand * across_;
    tile.expert = expert_;
    tile.group_begin = begin_;
    tile.group_rows = end_ - begin_;
    tile.row = (first + rest % height) * shape_.rows;
    tile.rows = smaller(shape_.rows, lines() - tile.row);
    tile.column = rest / height * shape_.columns;
    return true;
  }

 private:
  PMOE_HD int lines() const { return kForm == Form::kWeight ? m_ : end_ - begin_; }

  PMOE_HD void load_group() {
    if (expert_ < experts_) end_ = ends_[expert_];
    down_ = ceil_div(lines(), shape_.rows);
  }

  const int32_t* ends_;
  int experts_, m_;
  Shape shape_;
  int across_, down_ = 0;
  int expert_ = 0, begin_ = 0, end_ = 0;
  int before_ = 0;
};

}  // namespace pmoe

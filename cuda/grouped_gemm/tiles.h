// Which tile of the result each block computes, and when: group search and tile order.
//
// A persistent grid of G blocks: block b computes tiles b, b + G, b + 2G, ... of one numbering of all tiles;
// or, where something else may hold multiprocessors, each block takes the next number from a counter as it
// comes, so that a block that starts late has no tiles that wait for it. What a tile's sum is does not depend
// on who computes it. Every role of a block is told the numbers and finds the same tiles. Tiles are numbered
// by expert, inside an expert by bands of kBand row tiles, inside a band down the rows first: the tiles that
// are computed at one time then form a block of the result, and share rows and columns of the operands in the
// L2 cache.
#pragma once
#include "common/host_device.h"
#include "problem.h"

namespace pmoe {

constexpr int kBand = 16;

struct Tile {
  int expert;
  int group_begin, group_rows;  // all rows of the expert
  int row;                      // first row of the tile: of the group, or of the result where its rows are m
  int rows;                     // rows of the tile that exist
  int column;                   // first column of the result (of each half, where columns are halved)
};

// The number of a block's (or cluster's) tile `turn`: it ascends, and is beyond all in the end. counter:
// taken from where it is not null; add(counter, 1): what it was before.
template <class Add>
PMOE_HD int tile_number(uint32_t* counter, const Add& add, int first, int step, int turn) {
  return counter != nullptr ? static_cast<int>(add(counter, 1u)) : first + turn * step;
}

struct TileShape {
  int rows, columns;  // of the result, of one tile
};

// A TileShape that is no variable, so that kernels multiply and shift where they would divide.
template <int kRows, int kColumns>
struct FixedShape {
  static constexpr int rows = kRows, columns = kColumns;
};

template <Form kForm, class Shape = TileShape>
class TileWalk {
 public:
  // columns: of the result; of one half where columns are halved.
  PMOE_HD TileWalk(const int32_t* ends, int experts, int m, int columns, Shape shape)
      : ends_(ends), experts_(experts), m_(m), shape_(shape), across_(ceil_div(columns, shape.columns)) {
    load_group();
  }

  // Finds tile number `index`, no smaller than in the call before; false when there is none. (2^31 tiles
  // would be of results of 70 terabytes.)
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

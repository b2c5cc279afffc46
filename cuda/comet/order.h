// Orders of rows and tiles in COMET's kernels. Each block computes these orders by itself from the row
// counts:
//
//   ArrivalBoard   received rows by expert, then by source rank
//   SendTable      rows to send by target rank, then by expert
//   PieceWalk      runs of rows that are sent together
//   ArrivalWalk    tiles of the first product, by the arrival of their rows
//   ColumnWalk     tiles of the second product, by chunk of columns
//
// Letters: W ranks, E experts of a rank.
#pragma once
#include "comet/layout.h"
#include "common/host_device.h"
#include "grouped_gemm/tiles.h"

namespace pmoe::comet {

// The arrival board: a table that has, for each source rank and expert, the index in a rank's inbox of the
// first row from this source for this expert.
//
// The rows of an expert are sorted by source rank, this rank's own rows first (COMET, section 3.1.2). A
// source rank's position in this order is called its level. The rows of the source at level l for expert e
// are the rows first(l, e) to first(l + 1, e) - 1 of the inbox.
//
// Example with two ranks, and two experts on this rank. Expert 0 receives 2 rows from this rank and 3 from
// the other rank, expert 1 receives 1 row from this rank and 3 from the other rank. The table is:
//
//             expert 0   expert 1
//   level 0      0          5       this rank's own rows
//   level 1      2          6       rows of the other rank
//   ends         5          9
class ArrivalBoard {
 public:
  PMOE_HD ArrivalBoard(int32_t* memory, int ranks, int experts)
      : first_(memory), ranks_(ranks), experts_(experts) {}

  // Returns the size of the table in 32-bit words. The last line of the table has the ends of the experts'
  // rows.
  PMOE_HD static constexpr int words(int ranks, int experts) { return (ranks + 1) * experts; }

  PMOE_HD int first(int level, int expert) const { return first_[level * experts_ + expert]; }
  PMOE_HD int rows(int level, int expert) const { return first(level + 1, expert) - first(level, expert); }
  PMOE_HD int begin(int expert) const { return first(0, expert); }
  PMOE_HD int end(int expert) const { return first(ranks_, expert); }
  PMOE_HD const int32_t* ends() const { return first_ + ranks_ * experts_; }
  PMOE_HD int total() const { return end(experts_ - 1); }
  PMOE_HD int ranks() const { return ranks_; }
  PMOE_HD int experts() const { return experts_; }

  // Fills the table. `threads` threads call this function together.
  //
  // count(source, expert): returns the number of rows from a source rank for an expert.
  // sync(): a barrier of these threads.
  template <class Count, class Sync>
  PMOE_HD void fill(int rank, const Count& count, int thread, int threads, const Sync& sync) {
    for (int e = thread; e < experts_; e += threads) {
      int rows = 0;
      for (int l = 0; l < ranks_; ++l) {
        first_[l * experts_ + e] = rows;
        rows += count(source_at(l, rank, ranks_), e);
      }
      first_[ranks_ * experts_ + e] = rows;
    }
    sync();
    if (thread == 0) {
      int rows = 0;
      for (int e = 0; e < experts_; ++e) first_[ranks_ * experts_ + e] = rows += end(e);
    }
    sync();
    for (int e = thread; e < experts_; e += threads) {
      const int before = e ? end(e - 1) : 0;
      for (int l = 0; l < ranks_; ++l) first_[l * experts_ + e] += before;
    }
    sync();
  }

 private:
  int32_t* first_;
  int ranks_, experts_;
};

// The send table: for each target rank and expert, the index of the first row for this target and expert in
// the order in which a rank has sorted the rows that it sends.
class SendTable {
 public:
  PMOE_HD SendTable(int32_t* memory, int ranks, int experts)
      : first_(memory), ranks_(ranks), experts_(experts) {}

  PMOE_HD static constexpr int words(int ranks, int experts) { return ranks * experts + 1; }

  PMOE_HD int first(int target, int expert) const { return first_[target * experts_ + expert]; }
  PMOE_HD int rows(int target, int expert) const {
    return first_[target * experts_ + expert + 1] - first(target, expert);
  }
  PMOE_HD int rows(int target) const { return first_[(target + 1) * experts_] - first(target, 0); }
  PMOE_HD int total() const { return first_[ranks_ * experts_]; }
  PMOE_HD int ranks() const { return ranks_; }
  PMOE_HD int experts() const { return experts_; }

  // Fills the table. `threads` threads call this function together. It is a prefix sum in three steps: each
  // thread computes the prefix sums of a range of its own; one thread computes the prefix sums of the ranges'
  // totals; then each thread adds the total of all earlier ranges to its own sums.
  //
  // count(i): returns the number of rows for target rank i / E and its expert i % E.
  // sync(): a barrier of these threads.
  template <class Count, class Sync>
  PMOE_HD void fill(const Count& count, int thread, int threads, const Sync& sync) {
    const int all = ranks_ * experts_, each = ceil_div(all, threads);
    const int begin = smaller(thread * each, all), end = smaller(begin + each, all);
    int rows = 0;
    for (int i = begin; i < end; ++i) first_[i + 1] = rows += count(i);
    sync();
    if (thread == 0) {
      first_[0] = 0;
      for (int last = each, before = 0; last - each < all; last += each) {
        const int at = smaller(last, all);
        first_[at] = before += first_[at];
      }
    }
    sync();
    const int before = begin < all ? first_[begin] : 0;
    for (int i = begin; i + 1 < end; ++i) first_[i + 1] += before;
    sync();
  }

 private:
  int32_t* first_;
  int ranks_, experts_;
};

// A piece: a run of at most kPiece rows with the same expert and the same sending and receiving rank. Its
// rows are written together, and one flag says that they have arrived.
//
// step: the other rank, as its position in the fixed order in which a rank sends to all ranks (target_at of
//     layout.h) or receives from them (source_at).
struct Piece {
  int step, expert;
  int number;       // index of this piece among the pieces of its step and expert
  int begin, rows;  // index of its first row among the rows of its step and expert, and its number of rows
};

// Finds pieces of rows by their index. Pieces are numbered by step (the other rank), then by expert. Each
// call must ask for a higher index than the call before, because the search only goes forward.
class PieceWalk {
 public:
  PMOE_HD PieceWalk(int steps, int experts) : steps_(steps), experts_(experts) {}

  // Finds the piece with the number `index`. Returns false if there is no such piece.
  //
  // rows(step, expert): returns the number of rows of that step and expert.
  template <class Rows>
  PMOE_HD bool find(int index, const Rows& rows, Piece& piece) {
    while (step_ < steps_) {
      const int have = rows(step_, expert_), pieces = ceil_div(have, kPiece);
      if (index - before_ < pieces) {
        piece.step = step_;
        piece.expert = expert_;
        piece.number = index - before_;
        piece.begin = piece.number * kPiece;
        piece.rows = smaller(kPiece, have - piece.begin);
        return true;
      }
      before_ += pieces;
      if (++expert_ == experts_) {
        expert_ = 0;
        ++step_;
      }
    }
    return false;
  }

 private:
  int steps_, experts_;
  int step_ = 0, expert_ = 0, before_ = 0;
};

// Finds the place of the tile with the number `inside` in a rectangle of `height` x `across` tiles. Tiles are
// numbered by bands of kBand rows of tiles, and inside a band column by column, so that tiles that are
// computed at the same time share operands in the L2 cache (grouped_gemm/tiles.h).
//
// down, right: results: how many tiles lie above the tile, and how many to its left.
PMOE_HD void place_in_bands(int inside, int height, int across, int& down, int& right) {
  const int band = inside / (kBand * across), first = band * kBand;
  const int rows = smaller(kBand, height - first), rest = inside - band * kBand * across;
  down = first + rest % rows;
  right = rest / rows;
}

// Lists a block's tiles in the order in which their rows arrive (COMET, section 3.1.2, figure 5).
//
// First come the tiles whose rows are all from this rank itself, sorted by expert. Then come the tiles that
// are complete when the rows of the next source rank have arrived, sorted by expert, and so on.
template <class Shape>
class ArrivalWalk {
 public:
  PMOE_HD ArrivalWalk(const ArrivalBoard& board, int columns, Shape shape, int first, int step)
      : board_(board), shape_(shape), across_(ceil_div(columns, shape.columns)), index_(first), step_(step) {
    load_group();
  }

  PMOE_HD bool next(Tile& tile) {
    while (level_ < board_.ranks() && index_ - before_ >= height_ * across_) {
      before_ += height_ * across_;
      if (++expert_ == board_.experts()) {
        expert_ = 0;
        ++level_;
      }
      load_group();
    }
    if (level_ >= board_.ranks()) return false;
    int down, right;
    place_in_bands(index_ - before_, height_, across_, down, right);
    tile.expert = expert_;
    tile.group_begin = board_.begin(expert_);
    tile.group_rows = board_.end(expert_) - tile.group_begin;
    tile.row = (first_ + down) * shape_.rows;
    tile.rows = smaller(shape_.rows, tile.group_rows - tile.row);
    tile.column = right * shape_.columns;
    index_ += step_;
    return true;
  }

 private:
  // Returns how many row tiles (tiles one below the other) of the current expert are complete when the
  // sources of level 0 to `level` have sent their rows.
  //
  // The expert's last tile may have fewer rows than the others. It is complete when the last source that has
  // rows for this expert has sent them.
  PMOE_HD int complete(int level) const {
    if (level < 0) return 0;
    const int last = board_.first(level + 1, expert_), rows = last - board_.begin(expert_);
    return last == board_.end(expert_) ? ceil_div(rows, shape_.rows) : rows / shape_.rows;
  }

  PMOE_HD void load_group() {
    if (level_ >= board_.ranks()) return;
    first_ = complete(level_ - 1);
    height_ = complete(level_) - first_;
  }

  ArrivalBoard board_;
  Shape shape_;
  int across_, index_, step_;
  int level_ = 0, expert_ = 0, first_ = 0, height_ = 0;
  int before_ = 0;
};

// The chunks of columns into which the second product's result is cut. All ranks use the same sizes.
struct Chunks {
  int columns, chunk_columns;

  PMOE_HD int count() const { return ceil_div(columns, chunk_columns); }
  PMOE_HD int begin(int chunk) const { return chunk * chunk_columns; }
  PMOE_HD int width(int chunk) const { return smaller(chunk_columns, columns - begin(chunk)); }
};

// Returns the number of row tiles of all experts of this rank together. rows: number of rows of a tile.
PMOE_HD int row_tiles(const ArrivalBoard& board, int rows) {
  int tiles = 0;
  for (int e = 0; e < board.experts(); ++e) tiles += ceil_div(board.end(e) - board.begin(e), rows);
  return tiles;
}

// Lists a block's tiles by chunk of columns, and inside a chunk by expert (COMET, section 3.1.2, figure 6).
//
// A chunk is computed for all rows. Its results are sent while the next chunk is computed. chunk_columns must
// be a multiple of a tile's number of columns.
template <class Shape>
class ColumnWalk {
 public:
  PMOE_HD ColumnWalk(const ArrivalBoard& board, Chunks chunks, Shape shape, int first, int step)
      : board_(board),
        chunks_(chunks),
        shape_(shape),
        row_tiles_(row_tiles(board, shape.rows)),
        index_(first),
        step_(step) {
    enter(0);
  }

  PMOE_HD bool next(Tile& tile) {
    if (row_tiles_ == 0) return false;
    while (index_ - chunk_before_ >= row_tiles_ * across_) {
      if (chunk_ + 1 == chunks_.count()) return false;
      chunk_before_ += row_tiles_ * across_;
      enter(chunk_ + 1);
    }
    while (index_ - before_ >= height_ * across_) {
      before_ += height_ * across_;
      ++expert_;
      load_group();
    }
    int down, right;
    place_in_bands(index_ - before_, height_, across_, down, right);
    tile.expert = expert_;
    tile.group_begin = board_.begin(expert_);
    tile.group_rows = board_.end(expert_) - tile.group_begin;
    tile.row = down * shape_.rows;
    tile.rows = smaller(shape_.rows, tile.group_rows - tile.row);
    tile.column = chunks_.begin(chunk_) + right * shape_.columns;
    index_ += step_;
    return true;
  }

 private:
  PMOE_HD void enter(int chunk) {
    chunk_ = chunk;
    across_ = ceil_div(chunks_.width(chunk), shape_.columns);
    expert_ = 0;
    before_ = chunk_before_;
    load_group();
  }
  PMOE_HD void load_group() { height_ = ceil_div(board_.end(expert_) - board_.begin(expert_), shape_.rows); }

  ArrivalBoard board_;
  Chunks chunks_;
  Shape shape_;
  int row_tiles_, index_, step_;
  int chunk_ = 0, chunk_before_ = 0, across_ = 0;
  int expert_ = 0, before_ = 0, height_ = 0;
};

}  // namespace pmoe::comet

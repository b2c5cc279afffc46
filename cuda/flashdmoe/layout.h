// The symmetric tensor layout L of FlashDMoE (section 5.3) and the flags beside it: what lies where in a
// rank's heap, and which rank writes it.
//
//   L in R^(P x R x B x E x C x H): P ranks, R rounds (dispatch and combine), B staging buffers (what leaves
//   and what arrives), E experts of a rank, C rows of an expert's capacity, H columns of a row.
//
// Where a backward pass sends the layer's input again there is a third round, beside the gradients' dispatch.
//
// A cell (p, r, b, e) is C rows, whole tiles of them: where fewer have come, the tile's other rows are left
// as they are and never travel (in-place padding, section 5.4). A rank that every peer reaches by stores has
// nothing to stage: its L may have B = 1, the half of it.
//
//   region     at                  written by   what
//   granted    peer p              p            flag: p has begun the round, and its cells are free
//   announced  source s            s            flag: how many rows are to come stands in `counts`
//   counts     source s, expert e  s            rows
//   arrivals   (s, e, tile)        s            flag: the tile's rows are in L (s, dispatch, incoming, e)
//   returned   (p, e, tile)        p            flag: their products are in L (p, combine, incoming, e)
//   weights    source s, row       s            backward: the routing weights of the rows in a cell of L
//   dots       p, row              p            backward: the gradients of the weights of this rank's rows
//   L          (p, r, b, e, c)     p, or this rank where b is outgoing
#pragma once
#include "common/host_device.h"

namespace pmoe::flashdmoe {

constexpr int kRounds = 2;      // R: of a pass that sends nothing again
constexpr int kFlagBytes = 32;  // a flag that is waited for has a sector of its own

enum class Round : int { kDispatch, kCombine, kAgain };
enum class Staging : int { kOutgoing, kIncoming };

// Where a row stands in L.
struct Coordinates {
  int p;
  Round r;
  Staging b;
  int e, c;
};

// Definition 5.3.2: whether rank `source` may write there in the L of rank `target`. Between devices, and
// from a device to itself, only what arrives from `source`; what is staged, only at home.
PMOE_HD constexpr bool is_valid(int source, int target, const Coordinates& i) {
  return i.b == Staging::kIncoming ? i.p == source : source == target;
}

struct Layout {
  int32_t ranks, experts;  // P, E
  int32_t capacity;        // C: whole tiles
  int32_t tile_rows;       // bM
  int32_t buffers;         // B: 2, or 1 where nothing is staged
  int64_t row_bytes;       // H: a multiple of 16
  int32_t rounds = kRounds;

  // Every region begins on 1024 bytes.
  PMOE_HD static constexpr int64_t whole(int64_t bytes) { return ceil_div(bytes, 1024) * 1024; }

  PMOE_HD int cells() const { return ranks * experts; }
  PMOE_HD int cell(int rank, int e) const { return rank * experts + e; }
  PMOE_HD int cell_tiles() const { return capacity / tile_rows; }
  PMOE_HD int tiles(int rows) const { return ceil_div(rows, tile_rows); }

  PMOE_HD int64_t failed() const { return 0; }
  PMOE_HD int64_t granted(int peer) const { return 1024 + int64_t{peer} * kFlagBytes; }
  PMOE_HD int64_t announced(int source) const {
    return granted(0) + whole(int64_t{ranks} * kFlagBytes) + int64_t{source} * kFlagBytes;
  }
  PMOE_HD int64_t counts(int source) const {
    return announced(0) + whole(int64_t{ranks} * kFlagBytes) + int64_t{source} * experts * 4;
  }
  PMOE_HD int64_t arrival(int source, int e, int tile) const {
    return counts(0) + whole(int64_t{cells()} * 4) + flag(source, e, tile) * 4;
  }
  PMOE_HD int64_t returned(int peer, int e, int tile) const {
    return arrival(0, 0, 0) + whole(int64_t{cells()} * cell_tiles() * 4) + flag(peer, e, tile) * 4;
  }
  PMOE_HD int64_t weights(int source, int e) const {
    return returned(0, 0, 0) + whole(int64_t{cells()} * cell_tiles() * 4) + first_row(source, e) * 4;
  }
  PMOE_HD int64_t dots(int peer, int e) const {
    return weights(0, 0) + whole(first_row(ranks, 0) * 4) + first_row(peer, e) * 4;
  }
  PMOE_HD int64_t begin() const { return dots(0, 0) + whole(first_row(ranks, 0) * 4); }
  PMOE_HD int64_t at(const Coordinates& i) const { return begin() + row(i) * row_bytes; }
  // Among all rows of L.
  PMOE_HD int64_t row(const Coordinates& i) const {
    const int64_t slab =
        (int64_t{i.p} * rounds + static_cast<int>(i.r)) * buffers + (static_cast<int>(i.b) - (2 - buffers));
    return (slab * experts + i.e) * capacity + i.c;
  }
  // Size(L), in bytes.
  PMOE_HD int64_t size() const { return int64_t{cells()} * rounds * buffers * capacity * row_bytes; }
  // Of a cell among all cells' rows, where a rank keeps such for itself; and in L, from a rank to the next.
  PMOE_HD int64_t first_row(int rank, int e) const { return int64_t{cell(rank, e)} * capacity; }
  PMOE_HD int64_t rows_of_rank() const { return int64_t{rounds} * buffers * experts * capacity; }
  PMOE_HD int64_t bytes() const { return begin() + whole(size()); }

  // The coordinates of the row that holds a byte of L.
  PMOE_HD Coordinates of_byte(int64_t offset) const {
    int64_t row = (offset - begin()) / row_bytes;
    Coordinates i;
    i.c = static_cast<int>(row % capacity), row /= capacity;
    i.e = static_cast<int>(row % experts), row /= experts;
    i.b = static_cast<Staging>(row % buffers + (2 - buffers)), row /= buffers;
    i.r = static_cast<Round>(row % rounds);
    i.p = static_cast<int>(row / rounds);
    return i;
  }

 private:
  PMOE_HD int64_t flag(int rank, int e, int tile) const {
    return int64_t{cell(rank, e)} * cell_tiles() + tile;
  }
};

}  // namespace pmoe::flashdmoe

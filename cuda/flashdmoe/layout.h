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
// Without a capacity the cells of a round share one pool of C rows, in L(r, b, c): each begins at the offset
// that its rank has granted, on a whole tile. What comes home lies in a pool likewise, at offsets that the
// rows' source has told. See places.cuh.
//
//   region     at                  written by   what
//   granted    peer p              p            flag: p has begun the round, and its cells are free
//   announced  source s            s            flag: how many rows are to come stands in `counts`
//   counts     source s, expert e  s            rows
//   homes      source s, expert e  s            pool: the offset at which their products come home
//   known      source s            this rank    pool, flag: the offsets of s's rows are chosen
//   placed     peer p              p            pool, flag: those of this rank's rows stand in `offsets`
//   offsets    peer p, expert e    p            pool: granted by p
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

// Where a row stands in L. c: of its cell, or of the pool.
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
  int32_t capacity;        // C: whole tiles, of a cell or of the pool
  int32_t tile_rows;       // bM
  int32_t buffers;         // B: 2, or 1 where nothing is staged
  int64_t row_bytes;       // H: a multiple of 16
  int32_t rounds = kRounds;
  bool is_pool = false;

  // Every region begins on 1024 bytes.
  PMOE_HD static constexpr int64_t whole(int64_t bytes) { return ceil_div(bytes, 1024) * 1024; }

  PMOE_HD int cells() const { return ranks * experts; }
  PMOE_HD int cell(int rank, int e) const { return rank * experts + e; }
  PMOE_HD int all_rows() const { return is_pool ? capacity : cells() * capacity; }  // of a round
  PMOE_HD int all_tiles() const { return all_rows() / tile_rows; }
  PMOE_HD int tiles(int rows) const { return ceil_div(rows, tile_rows); }

  PMOE_HD int64_t failed() const { return 0; }
  PMOE_HD int64_t granted(int peer) const { return 1024 + int64_t{peer} * kFlagBytes; }
  PMOE_HD int64_t announced(int source) const {
    return granted(0) + whole(int64_t{ranks} * kFlagBytes) + int64_t{source} * kFlagBytes;
  }
  PMOE_HD int64_t counts(int source) const {
    return announced(0) + whole(int64_t{ranks} * kFlagBytes) + int64_t{source} * experts * 4;
  }
  PMOE_HD int64_t homes(int source) const {
    return counts(0) + whole(int64_t{cells()} * 4) + int64_t{source} * experts * 4;
  }
  PMOE_HD int64_t known(int source) const {
    return homes(0) + whole(int64_t{cells()} * 4) + int64_t{source} * kFlagBytes;
  }
  PMOE_HD int64_t placed(int peer) const {
    return known(0) + whole(int64_t{ranks} * kFlagBytes) + int64_t{peer} * kFlagBytes;
  }
  PMOE_HD int64_t offsets(int peer) const {
    return placed(0) + whole(int64_t{ranks} * kFlagBytes) + int64_t{peer} * experts * 4;
  }
  // tile: of its cell, or of the pool, as `c` of a row.
  PMOE_HD int64_t arrival(int source, int e, int tile) const {
    return offsets(0) + whole(int64_t{cells()} * 4) + (first_row(source, e) / tile_rows + tile) * 4;
  }
  PMOE_HD int64_t returned(int peer, int e, int tile) const {
    return arrival(0, 0, 0) + whole(int64_t{all_tiles()} * 4) + (first_row(peer, e) / tile_rows + tile) * 4;
  }
  PMOE_HD int64_t weights(int source, int e) const {
    return returned(0, 0, 0) + whole(int64_t{all_tiles()} * 4) + first_row(source, e) * 4;
  }
  PMOE_HD int64_t dots(int peer, int e) const {
    return weights(0, 0) + whole(int64_t{all_rows()} * 4) + first_row(peer, e) * 4;
  }
  PMOE_HD int64_t begin() const { return dots(0, 0) + whole(int64_t{all_rows()} * 4); }
  PMOE_HD int64_t at(const Coordinates& i) const { return begin() + row(i) * row_bytes; }
  // Among all rows of L.
  PMOE_HD int64_t row(const Coordinates& i) const {
    const int64_t p = is_pool ? 0 : i.p;
    const int64_t slab =
        (p * rounds + static_cast<int>(i.r)) * buffers + (static_cast<int>(i.b) - (2 - buffers));
    return is_pool ? slab * capacity + i.c : (slab * experts + i.e) * capacity + i.c;
  }
  PMOE_HD int64_t rows() const { return int64_t{all_rows()} * rounds * buffers; }
  // Size(L), in bytes.
  PMOE_HD int64_t size() const { return rows() * row_bytes; }
  // Row 0 of a cell among all cells' rows, where a rank keeps such for itself, and in L, from a rank to the
  // next. In a pool row 0 is everybody's.
  PMOE_HD int64_t first_row(int rank, int e) const { return is_pool ? 0 : int64_t{cell(rank, e)} * capacity; }
  PMOE_HD int64_t rows_of_rank() const {
    return is_pool ? 0 : int64_t{rounds} * buffers * experts * capacity;
  }
  PMOE_HD int64_t bytes() const { return begin() + whole(size()); }

  // The coordinates of the row that holds a byte of L; not of a pool's.
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
};

}  // namespace pmoe::flashdmoe

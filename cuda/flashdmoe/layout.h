// The symmetric tensor layout L of FlashDMoE (section 5.3), and the flags beside it: which data lies where in
// a rank's heap, and which rank writes the data. A heap is device memory that all ranks can write: directly,
// by stores, or by NVSHMEM's puts.
//
//   L in R^(P x R x B x E x C x H): P ranks, R rounds (dispatch and combine), B staging buffers (outgoing
//   and incoming rows), E experts of a rank, C rows of an expert's capacity, H columns of a row.
//
// A third round is added if a backward pass dispatches the layer's input again, beside the output's gradient.
//
// A cell (p, r, b, e) has room for the rows that one rank sends to one expert: C rows, a whole number of
// tiles. If fewer rows arrive, the other rows of the last tile keep old values and are never sent (in-place
// padding, section 5.4).
//
// If every rank can write to every heap directly, no rows are staged, and L has B = 1 and half the size. If
// some rank needs puts for some heap, L has B = 2 on all ranks, because a put copies from the outgoing part
// of the rank's own heap. All regions before L then have two parts as well, for incoming and for outgoing
// data: the outgoing part begins `outgoing()` bytes behind the incoming part. packets.cuh uses both parts.
//
// Without a capacity, all cells of a round share one pool of C rows, L(r, b, c). The receiving rank chooses
// an offset in its pool for each cell, at the beginning of a tile. The results come back into a pool of the
// sending rank, at offsets that the sending rank has chosen. places.cuh chooses and sends these offsets.
//
//   region     a part for each     written by   content
//   granted    rank p              p            flag: p has begun the launch, and its cells are free
//   announced  source s            s            flag: s has written its row counts into `counts`
//   counts     source s, expert e  s            number of rows
//   homes      source s, expert e  s            pool: the offset in s's pool for these rows' results
//   known      source s            this rank    pool, flag: this rank has chosen the offsets of s's rows
//   placed     rank p              p            pool, flag: p has written `offsets`
//   offsets    rank p, expert e    p            pool: where this rank's rows for e begin in p's pool
//   arrivals   (s, e, tile)        s            flag: the tile's rows are in L (s, dispatch, incoming, e)
//   returned   (p, e, tile)        p            flag: the results of this rank's tile for expert e of p are
//                                               in L (p, combine, incoming, e)
//   weights    source s, row       s            backward: the routing weights of the rows in a cell of L
//   dots       p, row              p            backward: the gradients of the weights of this rank's rows
//   L          (p, r, b, e, c)     p, or this rank if b is outgoing
//
// "pool" marks what is only used if cells share a pool, "backward" what only the backward pass uses.
//
// A launch, as a sending rank s (the source) and the rank t of an expert see it. The lines with * are only
// needed with a pool:
//
//   source s                               rank t
//                                     <--  raises granted
//   writes counts, homes*,
//   raises announced                  -->  * chooses offsets
//                                     <--  * writes offsets, raises known and placed
//   writes a tile's rows,
//   raises its arrival                -->  multiplies the tile
//                                     <--  writes the results, raises returned
//   adds the results of each token
#pragma once
#include "common/host_device.h"
#include "peers/sizes.h"

namespace pmoe::flashdmoe {

using peers::align_region;
using peers::kFlagBytes;

constexpr int kRounds = 2;         // R of a pass that sends nothing again
constexpr int kTileFlagBytes = 8;  // size of a tile's flag: a put writes 8 bytes (peers/puts.cuh)

enum class Round : int { kDispatch, kCombine, kAgain };
enum class Staging : int { kOutgoing, kIncoming };

// The position of a row in the tensor L, by rank p, round r, buffer b, expert e and row c. c is the index of
// the row in its cell (the rows of one rank for one expert) or, if cells share a pool, in the pool.
struct Coordinates {
  int p;
  Round r;
  Staging b;
  int e, c;
};

// Returns whether rank `source` may write the row at position i in the heap of rank `target` (definition
// 5.3.2).
//
// In another rank's heap, a rank may write only the part for the incoming rows that it sends itself. It may
// write outgoing (staged) rows only in its own heap. So no two ranks write the same memory.
PMOE_HD constexpr bool is_valid(int source, int target, const Coordinates& i) {
  return i.b == Staging::kIncoming ? i.p == source : source == target;
}

// Sizes of a heap, and functions that return the byte offsets of its regions. Every region begins at a
// multiple of 1024 bytes.
struct Layout {
  int32_t ranks, experts;  // P, E
  int32_t capacity;        // C: a multiple of tile_rows; of a cell, or of the pool
  int32_t tile_rows;       // bM: rows of a tile
  int32_t buffers;         // B: 2, or 1 if nothing is staged
  int64_t row_bytes;       // bytes of the H columns: a multiple of 16
  int32_t rounds = kRounds;
  bool is_pool = false;

  PMOE_HD int cells() const { return ranks * experts; }
  PMOE_HD int cell(int rank, int e) const { return rank * experts + e; }
  PMOE_HD int all_rows() const { return is_pool ? capacity : cells() * capacity; }  // of a round
  PMOE_HD int all_tiles() const { return all_rows() / tile_rows; }
  PMOE_HD int tiles(int rows) const { return ceil_div(rows, tile_rows); }

  PMOE_HD int64_t failed() const { return 0; }
  PMOE_HD int64_t granted(int peer) const { return 1024 + int64_t{peer} * kFlagBytes; }
  PMOE_HD int64_t announced(int source) const {
    return granted(0) + align_region(int64_t{ranks} * kFlagBytes) + int64_t{source} * kFlagBytes;
  }
  PMOE_HD int64_t counts(int source) const {
    return announced(0) + align_region(int64_t{ranks} * kFlagBytes) + int64_t{source} * experts * 4;
  }
  PMOE_HD int64_t homes(int source) const {
    return counts(0) + align_region(int64_t{cells()} * 4) + int64_t{source} * experts * 4;
  }
  PMOE_HD int64_t known(int source) const {
    return homes(0) + align_region(int64_t{cells()} * 4) + int64_t{source} * kFlagBytes;
  }
  PMOE_HD int64_t placed(int peer) const {
    return known(0) + align_region(int64_t{ranks} * kFlagBytes) + int64_t{peer} * kFlagBytes;
  }
  PMOE_HD int64_t offsets(int peer) const {
    return placed(0) + align_region(int64_t{ranks} * kFlagBytes) + int64_t{peer} * experts * 4;
  }
  // Returns the byte offset in the heap of the flag which says that a tile of rows has arrived.
  //
  // source, e: the rank that sends the rows, and this rank's expert for which it sends them.
  // tile: index of the tile in its cell (the rows of one rank for one expert) or, if cells share a pool, in
  //     the pool.
  PMOE_HD int64_t arrival(int source, int e, int tile) const {
    return offsets(0) + align_region(int64_t{cells()} * 4) +
           (first_row(source, e) / tile_rows + tile) * kTileFlagBytes;
  }
  PMOE_HD int64_t returned(int peer, int e, int tile) const {
    return arrival(0, 0, 0) + align_region(int64_t{all_tiles()} * kTileFlagBytes) +
           (first_row(peer, e) / tile_rows + tile) * kTileFlagBytes;
  }
  PMOE_HD int64_t weights(int source, int e) const {
    return returned(0, 0, 0) + align_region(int64_t{all_tiles()} * kTileFlagBytes) + first_row(source, e) * 4;
  }
  PMOE_HD int64_t dots(int peer, int e) const {
    return weights(0, 0) + align_region(int64_t{all_rows()} * 4) + first_row(peer, e) * 4;
  }
  // Returns the distance in bytes from a region for incoming data to the region for outgoing data of the same
  // kind, which lies behind it. The heap has regions for outgoing data only if B = 2.
  PMOE_HD int64_t outgoing() const { return dots(0, 0) + align_region(int64_t{all_rows()} * 4); }
  PMOE_HD int64_t begin() const { return buffers * outgoing(); }
  PMOE_HD int64_t at(const Coordinates& i) const { return begin() + row(i) * row_bytes; }
  // Returns the index of the row at position i among all rows of the tensor L. The rows are stored one behind
  // another, and row 0 begins at begin().
  PMOE_HD int64_t row(const Coordinates& i) const {
    const int64_t p = is_pool ? 0 : i.p;
    const int64_t slab =
        (p * rounds + static_cast<int>(i.r)) * buffers + (static_cast<int>(i.b) - (2 - buffers));
    return is_pool ? slab * capacity + i.c : (slab * experts + i.e) * capacity + i.c;
  }
  PMOE_HD int64_t rows() const { return int64_t{all_rows()} * rounds * buffers; }
  // Returns the size of the tensor L in bytes.
  PMOE_HD int64_t size() const { return rows() * row_bytes; }
  // first_row() returns the index of the first row of a cell (the rows of one rank for one expert) in a
  // tensor that has the rows of all cells of one round. rows_of_rank() returns how many rows of the heap's
  // tensor L belong to one rank p (in all rounds, buffers and experts); the rows of rank p + 1 begin this
  // many rows behind those of rank p. If cells share a pool, both functions return 0.
  PMOE_HD int64_t first_row(int rank, int e) const { return is_pool ? 0 : int64_t{cell(rank, e)} * capacity; }
  PMOE_HD int64_t rows_of_rank() const {
    return is_pool ? 0 : int64_t{rounds} * buffers * experts * capacity;
  }
  PMOE_HD int64_t bytes() const { return begin() + align_region(size()); }

  // Returns the position of the row that contains the byte at `offset` of the heap. It cannot be used if
  // cells share a pool, because then the index of a row does not determine its rank and expert.
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

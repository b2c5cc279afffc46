// A rank's symmetric heap: which region lies where, and which rank writes it. The host sizes the heap by it,
// the kernels address the heap by it.
//
// No byte is written by two ranks (FlashDMoE, theorem 5.3.1). Regions that belong to one peer are indexed by
// that peer's number. Rows lie at exact offsets, which the receiving rank grants. Nothing is padded to a
// capacity.
//
//   region    at        written by       content
//   grants    peer p    p                where this rank's rows for each of p's experts begin in p's inbox
//   granted   peer p    p                flag: the grants are written, and p's inbox is free
//   inbox     row r     the row's source rows that have arrived, later the products of this rank's experts
//   weights   row r     the row's source routing weights
//   links     row r     the row's source see `Link`
//   arrivals  source s  s                flags by piece: its rows, weights and links are written
//   home      row i     the rank where   sums of a token's rows on one rank, at the place of the first of
//                       row i went       these rows in the order in which this rank sent them
//   dots      row i     the same rank    gradients of routing weights, for every row
//   returned  peer p    p                flags by column chunk: p has written its rows of `home`
//   counters            this rank        counters shared by its own blocks
//
// In the dispatching kernel:
//
//   target rank t                           source rank s
//   writes grants and raises granted   -->  waits for granted
//   waits for arrival                  <--  writes rows, weights, links, and raises the piece's arrival
//   multiplies the tile
//
// In the combining kernel:
//
//   target rank t                           source rank s
//   writes sums of a column chunk,
//   raises returned                    -->  waits for returned, adds up its tokens
//
// Letters: W ranks, E experts of a rank.
#pragma once
#include "common/host_device.h"
#include "peers/sizes.h"

namespace pmoe::comet {

using peers::align_region;
using peers::kFlagBytes;

constexpr int kMostRanks = 64;
constexpr int kMostExperts = 1024;  // of all ranks together
constexpr int kPiece = 16;          // rows that are written and announced together
constexpr int kMostChunks = 64;     // chunks of columns

// Says what to do with a row's product. The row's source writes it beside the row.
struct alignas(16) Link {
  int32_t home;    // the row's place in the order in which its source sent it
  int32_t next;    // the row of the same token's next choice on this rank, or -1
  int32_t source;  // the rank that sent the row
  int32_t first;   // 1 if it is its token's first row on this rank, else 0
};

// Counters that the blocks of one rank share.
struct Counters {
  uint32_t failed;             // nonzero after a wait has timed out: no more waits, no more flags
  uint32_t done[kMostChunks];  // tiles of each column chunk that are computed
  uint32_t sent[kMostChunks];  // warps that have sent their part of each column chunk
};

// Byte offsets of the regions. Every region begins at a multiple of 1024 bytes.
struct Layout {
  int32_t ranks, experts;  // W, E
  int64_t rows;            // rows that may arrive
  int64_t home_rows;       // rows that may be sent, and so come home
  int64_t row_bytes;       // a multiple of 16

  PMOE_HD int64_t most_pieces() const { return ceil_div(rows, kPiece) + experts; }

  PMOE_HD int64_t counters() const { return 0; }
  PMOE_HD int64_t granted(int peer) const {
    return counters() + align_region(sizeof(Counters)) + peer * kFlagBytes;
  }
  PMOE_HD int64_t grants(int peer) const {
    return granted(0) + align_region(int64_t{ranks} * kFlagBytes) + peer * 4 * int64_t{experts};
  }
  PMOE_HD int64_t returned(int peer, int chunk) const {
    return grants(0) + align_region(4 * int64_t{ranks} * experts) +
           (int64_t{peer} * kMostChunks + chunk) * kFlagBytes;
  }
  PMOE_HD int64_t arrivals(int source) const {
    return returned(0, 0) + align_region(int64_t{ranks} * kMostChunks * kFlagBytes) +
           4 * source * most_pieces();
  }
  PMOE_HD int64_t weights() const { return arrivals(0) + align_region(4 * ranks * most_pieces()); }
  PMOE_HD int64_t links() const { return weights() + align_region(4 * rows); }
  PMOE_HD int64_t dots() const { return links() + align_region(rows * int64_t{sizeof(Link)}); }
  PMOE_HD int64_t inbox() const { return dots() + align_region(4 * home_rows); }
  PMOE_HD int64_t home() const { return inbox() + align_region(rows * row_bytes); }
  PMOE_HD int64_t bytes() const { return home() + align_region(home_rows * row_bytes); }

  // Returns the number of a piece's flag among those of its source.
  //
  // From one expert to the next, first_row grows at least by the number of the source's rows there. Adding
  // `expert` makes up for the rounding. So no two pieces share a flag.
  //
  // first_row: where the source's rows for the expert begin in the inbox.
  PMOE_HD int64_t piece(int expert, int64_t first_row, int number) const {
    return first_row / kPiece + expert + number;
  }
  PMOE_HD int64_t arrival(int source, int expert, int64_t first_row, int number) const {
    return arrivals(source) + 4 * piece(expert, first_row, number);
  }
};

// The order in which a rank goes through sources: itself first, then upwards around. source_at() is the
// inverse of level_of().
PMOE_HD constexpr int level_of(int source, int rank, int ranks) { return (source - rank + ranks) % ranks; }
PMOE_HD constexpr int source_at(int level, int rank, int ranks) { return (rank + level) % ranks; }
// Returns to whom a rank sends at a step. At step l a rank sends to the one for which it is the source at
// level l, so every rank receives from its sources in its own order.
PMOE_HD constexpr int target_at(int step, int rank, int ranks) { return (rank - step + ranks) % ranks; }

}  // namespace pmoe::comet

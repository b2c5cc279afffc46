// The layout of a rank's symmetric heap: device memory that all ranks can write. From the layout, the host
// computes the heap's size, and the kernels compute addresses.
//
// No byte is written by two ranks (FlashDMoE, theorem 5.3.1): a region that other ranks write has a part for
// each of them. Rows are not padded to a capacity. Instead the receiving rank computes from the row counts
// where each sender's rows begin, and writes these offsets (grants) into the sender's heap.
//
// Each rank has two roles. It computes the rows that it receives, for its experts, and it sends the rows of
// its own tokens, whose results return to it. Received rows are numbered r = 0, 1, ... in the order of the
// inbox, sent rows i = 0, 1, ... in the order in which this rank sorted them.
//
//   for the rows that this rank receives:
//
//   region    part for        written by      content
//   inbox     received row r  r's sender      the row; later the product of this rank's expert
//   weights   received row r  r's sender      routing weight
//   links     received row r  r's sender      where the result of the row goes (struct Link)
//   arrivals  sender s        s               a flag for each piece (up to kPiece rows): its rows, weights
//                                             and links are written
//
//   for the rows that this rank sends:
//
//   grants    rank p          p               where this rank's rows for each of p's experts begin in p's
//                                             inbox
//   granted   rank p          p               flag: the grants are written, and p's inbox is free
//   home      sent row i      i's receiver p  if i is the first row of its token that went to p: the sum of
//                                             the results of all rows of this token on p; else unused
//   dots      sent row i      i's receiver    gradient of the row's routing weight
//   returned  rank p          p               a flag for each chunk of columns: p has written all its sums
//
//   counters                  this rank       counters that its own blocks share
//
// In the dispatching kernel (first product):
//
//   receiving rank                          sending rank
//   writes grants and raises granted   -->  waits for granted
//   waits for arrival                  <--  writes rows, weights, links, and raises the piece's arrival
//   multiplies the tile
//
// In the combining kernel (second product):
//
//   receiving rank                          sending rank
//   writes sums of a chunk of columns,
//   raises returned                    -->  waits for returned, adds the sums of each token
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

// A record for each received row, which says where the result of the row goes. The rank that sends the row
// writes the record, too.
struct alignas(16) Link {
  int32_t home;    // index of the row among the rows that its source sent, and in the source's `home`
  int32_t next;    // index in this inbox of the row of the same token's next choice, or -1
  int32_t source;  // the rank that sent the row
  int32_t first;   // 1 if it is its token's first row on this rank, else 0
};

// Counters that the blocks of one rank share, in the rank's own heap.
struct Counters {
  uint32_t failed;             // nonzero after a wait has timed out: no more waits, no more flags
  uint32_t done[kMostChunks];  // number of tiles of each column chunk that are computed
  uint32_t sent[kMostChunks];  // number of warps that have sent their part of each column chunk
};

// Sizes of a heap, and functions that return the byte offsets of its regions. Every region begins at a
// multiple of 1024 bytes.
struct Layout {
  int32_t ranks, experts;  // W, E
  int64_t rows;            // largest number of rows that may arrive
  int64_t home_rows;       // largest number of rows that this rank may send: size of `home` and `dots`
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

  // Returns the index of a piece's arrival flag among the flags of its sending rank. A piece is a run of at
  // most kPiece rows of one expert.
  //
  // No two pieces of a sender have the same flag. From an expert to the next one, first_row grows at least by
  // the number of the sender's rows for the first of the two. `expert` is added because first_row / kPiece is
  // rounded down.
  //
  // first_row: index in the inbox of the sender's first row for this expert.
  // number: index of the piece among the pieces of this sender for this expert.
  PMOE_HD int64_t piece(int expert, int64_t first_row, int number) const {
    return first_row / kPiece + expert + number;
  }
  PMOE_HD int64_t arrival(int source, int expert, int64_t first_row, int number) const {
    return arrivals(source) + 4 * piece(expert, first_row, number);
  }
};

// level_of() returns the level of a source rank, source_at() the source rank of a level. The level of a
// source is its position in the order in which `rank` receives rows: `rank` itself has level 0, rank + 1 has
// level 1, and so on. The highest rank is followed by rank 0.
PMOE_HD constexpr int level_of(int source, int rank, int ranks) { return (source - rank + ranks) % ranks; }
PMOE_HD constexpr int source_at(int level, int rank, int ranks) { return (rank + level) % ranks; }
// Returns the rank to which `rank` sends at a step. At step 0 a rank sends to itself, at step 1 to the rank
// before it, and so on. So at step s every rank receives from its source of level s, and rows arrive in the
// order of levels if all ranks go through their steps at the same speed.
PMOE_HD constexpr int target_at(int step, int rank, int ranks) { return (rank - step + ranks) % ranks; }

}  // namespace pmoe::comet

// A rank's symmetric heap: what lies where, and which rank writes it. The host sizes the heap by it, the
// kernels address it by it.
//
// Nothing is written by two ranks (FlashDMoE, theorem 5.3.1): what belongs to one peer alone has a place by
// that peer's number; rows have places by exact offsets, which the rank that receives them grants. Nothing is
// padded to a capacity.
//
//   region    at        written by       what
//   grants    peer p    p                where this rank's rows for each of p's experts begin in p's inbox
//   granted   peer p    p                flag: the grant is there, and p's inbox is free
//   inbox     row r     the row's source rows that have arrived, later the products of this rank's experts
//   weights   row r     the row's source routing weights
//   links     row r     the row's source see `Link`
//   arrivals  source s  s                flags by piece: its rows, weights and links are there
//   home      row i     whose experts    sums of the rows of one token on one rank, where the first of them
//                       row i went to    stood as this rank sent it
//   dots      row i     likewise         gradients of routing weights, of every row
//   returned  peer p    p                flags by column chunk: p has written its rows of `home`
//   counters            this rank        between its own blocks
//
// Letters: W ranks, E experts of a rank.
#pragma once
#include "common/host_device.h"

namespace pmoe::comet {

constexpr int kMostRanks = 64;
constexpr int kMostExperts = 1024;  // of all ranks
constexpr int kPiece = 16;          // rows that are written, and signalled, at a time
constexpr int kMostChunks = 64;     // of columns
constexpr int kFlagBytes = 32;      // a flag that is waited for has a sector of its own

// What becomes of a row's product. Its source writes it beside the row.
struct alignas(16) Link {
  int32_t home;    // where the row stood as its source sent it
  int32_t next;    // the row of the same token's next choice on the same rank, or -1
  int32_t source;  // the rank it came from
  int32_t first;   // whether it is its token's first one on this rank
};

struct Counters {
  uint32_t failed;             // somebody has waited too long: nobody waits any more, nobody signals
  uint32_t done[kMostChunks];  // tiles of a column chunk that are computed
  uint32_t sent[kMostChunks];  // warps that have sent their part of it
};

struct Layout {
  int32_t ranks, experts;  // W, E
  int64_t rows;            // that may arrive
  int64_t home_rows;       // that may be sent, and so come home
  int64_t row_bytes;       // a multiple of 16

  PMOE_HD int64_t most_pieces() const { return ceil_div(rows, kPiece) + experts; }

  // Every region begins on 1024 bytes.
  PMOE_HD static constexpr int64_t whole(int64_t bytes) { return ceil_div(bytes, 1024) * 1024; }

  PMOE_HD int64_t counters() const { return 0; }
  PMOE_HD int64_t granted(int peer) const { return counters() + whole(sizeof(Counters)) + peer * kFlagBytes; }
  PMOE_HD int64_t grants(int peer) const {
    return granted(0) + whole(int64_t{ranks} * kFlagBytes) + peer * 4 * int64_t{experts};
  }
  PMOE_HD int64_t returned(int peer, int chunk) const {
    return grants(0) + whole(4 * int64_t{ranks} * experts) +
           (int64_t{peer} * kMostChunks + chunk) * kFlagBytes;
  }
  PMOE_HD int64_t arrivals(int source) const {
    return returned(0, 0) + whole(int64_t{ranks} * kMostChunks * kFlagBytes) + 4 * source * most_pieces();
  }
  PMOE_HD int64_t weights() const { return arrivals(0) + whole(4 * ranks * most_pieces()); }
  PMOE_HD int64_t links() const { return weights() + whole(4 * rows); }
  PMOE_HD int64_t dots() const { return links() + whole(rows * int64_t{sizeof(Link)}); }
  PMOE_HD int64_t inbox() const { return dots() + whole(4 * home_rows); }
  PMOE_HD int64_t home() const { return inbox() + whole(rows * row_bytes); }
  PMOE_HD int64_t bytes() const { return home() + whole(home_rows * row_bytes); }

  // The flag of a source's piece. first_row: of the source's rows for the expert, in the inbox; it ascends
  // with the expert by at least as many rows as there are, so no two pieces have one flag.
  PMOE_HD int64_t piece(int expert, int64_t first_row, int number) const {
    return first_row / kPiece + expert + number;
  }
  PMOE_HD int64_t arrival(int source, int expert, int64_t first_row, int number) const {
    return arrivals(source) + 4 * piece(expert, first_row, number);
  }
};

// Where a source stands in another rank's order: the rank itself first, then upwards around.
PMOE_HD constexpr int level_of(int source, int rank, int ranks) { return (source - rank + ranks) % ranks; }
PMOE_HD constexpr int source_at(int level, int rank, int ranks) { return (rank + level) % ranks; }
// To whom a rank sends at a step: each receives from its sources in its own order.
PMOE_HD constexpr int target_at(int step, int rank, int ranks) { return (rank - step + ranks) % ranks; }

}  // namespace pmoe::comet

// The work of communicating warps in COMET's dispatching kernel, which sends rows to their experts and
// computes the first product.
//
// A heap is device memory that all ranks can write. First, these warps tell each other rank where it may put
// its rows in this rank's heap: they write these places, the grants, into the heap of the other rank. Then
// they copy this rank's rows into the heaps of the other ranks, and raise flags there when the rows are
// written.
#pragma once
#include "comet/rank.h"
#include "common/device.cuh"
#include "peers/protocol.h"
#include "peers/rows.cuh"

namespace pmoe::comet {

using peers::WarpTeam;

// Copies runs of rows to another rank, through registers. (BulkCopies in bulk.cuh copies through shared
// memory instead.)
//
// begin(r, to, from, rows, team): starts to copy `rows` of this rank's sorted rows, from row `from` on, to
//     the address `to`. Between begin() and finish(), the caller computes other data of these rows.
// finish(r, team): ends the copies. When it returns in a lane, all data that this lane copies are written.
class LaneCopies {
 public:
  __device__ __forceinline__ void begin(const Rank& r, uint8_t* to, int from, int rows, const WarpTeam&) {
    to_ = to, rows_ = rows;
    PMOE_UNROLL
    for (int row = 0; row < kPiece; ++row)
      token_[row] = row < rows ? r.by_choices.divide(read(r.slot + from + row)) : 0;
  }

  __device__ __forceinline__ void finish(const Rank& r, const WarpTeam& team) {
    const int64_t row_bytes = r.layout.row_bytes;
    PMOE_UNROLL
    for (int row = 0; row < kPiece; ++row)
      if (row < rows_)
        peers::copy_row(to_ + row * row_bytes, r.source + token_[row] * r.source_stride, row_bytes, team);
  }

 private:
  uint8_t* to_;
  int rows_, token_[kPiece];
};

// Fills the arrival board: for each source rank and expert, the index in this rank's inbox of the first row
// from this source for this expert. The table is computed from the numbers of rows that this rank receives.
//
// All threads of a block call this function. sync() is their barrier.
template <class Sync>
__device__ __forceinline__ void fill_board(const Rank& r, ArrivalBoard& board, int thread, int threads,
                                           const Sync& sync) {
  board.fill(
      r.rank, [&](int source, int e) { return read(r.recv_counts + source * r.recv_stride + e); }, thread,
      threads, sync);
}

// Fills the send table: for each target rank and expert, the index, among the rows that this rank sends, of
// the first row for this target and expert. The table is computed from the numbers of rows that this rank
// sends.
//
// All threads of a block call this function. sync() is their barrier.
template <class Sync>
__device__ __forceinline__ void fill_send_table(const Rank& r, SendTable& send_table, int thread, int threads,
                                                const Sync& sync) {
  send_table.fill([&](int i) { return read(r.send_counts + i); }, thread, threads, sync);
}

// Writes the grants into every rank's heap: where the rows of that rank begin in this rank's inbox. Then
// raises a flag in that heap, which says that the grants are written and the inbox is free. It is free
// because this kernel starts after all launches that have read it.
//
// This function also resets two kinds of counters: of finished tiles, and of warps that have sent their part.
//
// If a wait of this rank has timed out, this function writes no grants, because a late rank may still read
// the grants of the round before.
//
// All threads of one block call this function. sync() is their barrier.
template <class Sync>
__device__ __forceinline__ void grant(const Rank& r, const ArrivalBoard& board, int thread, int threads,
                                      const Sync& sync) {
  peers::test_delay(r.watch, 6000 + r.rank);
  const int experts = r.experts(), all = peers::has_failed(r.watch) ? 0 : r.ranks() * experts;
  for (int i = thread; i < all; i += threads) {
    const int peer = i / experts, e = i % experts;
    auto* const grants = reinterpret_cast<int32_t*>(r.heap(peer) + r.layout.grants(r.rank));
    write(grants + e, board.first(level_of(peer, r.rank, r.ranks()), e));
  }
  for (int i = thread; i < kMostChunks; i += threads) {
    write(&r.counters()->done[i], 0u);
    write(&r.counters()->sent[i], 0u);
  }
  sync();
  for (int peer = thread; peer < r.ranks(); peer += threads)
    peers::signal(r.watch, r.heap(peer) + r.layout.granted(r.rank));
}

// Returns the link of a row that this rank sends to `target` (Link in layout.h). The link leads to the index
// at which the row's result returns, and to the row that the same token's next choice has on the target.
//
// slot: index of the row's (token, choice) pair.
// grants: for each expert of the target, where this rank's rows begin in the target's inbox.
__device__ __forceinline__ Link link_of(const Rank& r, const SendTable& send_table, const int32_t* grants,
                                        int target, int slot) {
  const int experts = r.experts(), token = r.by_choices.divide(slot), choice = slot - token * r.choices;
  Link link = {read(r.position + slot) - r.first_row, -1, r.rank, 1};
  for (int k = 0; k < r.choices; ++k) {
    if (k == choice) continue;
    const int other = token * r.choices + k, expert = read(r.expert + other);
    if (expert / experts != target) continue;
    const int position = read(r.position + other);
    if (position < 0) continue;
    if (k < choice) {
      link.first = 0;
    } else {
      const int e = expert - target * experts;
      link.next = read(grants + e) + position - r.first_row - send_table.first(target, e);
      break;
    }
  }
  return link;
}

// Writes all rows of this rank into the inboxes of the ranks that compute them. The rows are cut into runs of
// at most kPiece rows, called pieces. Warp w of the n communicating warps sends pieces w, w + n, w + 2 n, ...
template <class Copies>
__device__ __forceinline__ void send_rows(const Rank& r, const SendTable& send_table, const WarpTeam& team,
                                          Copies& copies) {
  PieceWalk walk(r.ranks(), r.experts());
  const auto rows = [&](int step, int e) { return send_table.rows(target_at(step, r.rank, r.ranks()), e); };
  Piece piece;
  int granted_by = -1;
  for (int i = team.number; walk.find(i, rows, piece); i += team.count) {
    const int target = target_at(piece.step, r.rank, r.ranks());
    uint8_t* const heap = r.heap(target);
    const auto* const grants = reinterpret_cast<const int32_t*>(r.own() + r.layout.grants(target));
    if (granted_by != target) {
      granted_by = target;
      if (team.lane == 0)
        peers::await(r.watch, r.own() + r.layout.granted(target), Wait::kGrant, target, 0, 0);
      sync_warp();
    }
    if (ballot(peers::has_failed(r.watch))) return;  // without a grant it is unknown where to write
    peers::test_delay(r.watch, team.number);
    const int first = read(grants + piece.expert), to = first + piece.begin;
    const int from = r.first_row + send_table.first(target, piece.expert) + piece.begin;
    auto* const weights = reinterpret_cast<float*>(heap + r.layout.weights()) + to;
    auto* const links = reinterpret_cast<Link*>(heap + r.layout.links()) + to;
    // Computing a link takes up to five reads, each of which depends on the read before. The copies in flight
    // hide the latency of these reads.
    copies.begin(r, r.inbox(target, to), from, piece.rows, team);
    for (int row = team.lane; row < piece.rows; row += team.lanes) {
      const int slot = read(r.slot + from + row);
      write(weights + row, read(r.weight + slot));
      const Link link = link_of(r, send_table, grants, target, slot);
      Words words = {{static_cast<uint32_t>(link.home), static_cast<uint32_t>(link.next),
                      static_cast<uint32_t>(link.source), static_cast<uint32_t>(link.first)}};
      store16(links + row, words);
    }
    copies.finish(r, team);
    sync_warp();
    peers::test_delay(r.watch, team.number + 1000);
    if (team.lane == 0)
      peers::signal(r.watch, heap + r.layout.arrival(r.rank, piece.expert, first, piece.number));
  }
}

// Waits until the rows [begin, end) of this rank's inbox have arrived. They belong to one expert and may come
// from several ranks.
//
// Rows arrive in pieces of at most kPiece rows, each with a flag. Each of the `lanes` calling lanes waits for
// every lanes-th piece, so all lanes together wait for all pieces.
__device__ __forceinline__ void await_rows(const Rank& r, const ArrivalBoard& board, int expert, int begin,
                                           int end, int lane, int lanes) {
  int turn = 0;
  for (int level = 0; level < r.ranks(); ++level) {
    const int first = board.first(level, expert), last = board.first(level + 1, expert);
    const int from = larger(first, begin), to = smaller(last, end);
    if (from >= to) continue;
    const int source = source_at(level, r.rank, r.ranks());
    const int lowest = (from - first) / kPiece, highest = (to - 1 - first) / kPiece;
    // `turn` is the number of pieces of the levels before. The lanes go on where they stopped in the level
    // before, so that they share the pieces of all source ranks evenly.
    for (int number = lowest + (lane - turn % lanes + lanes) % lanes; number <= highest; number += lanes)
      peers::await(r.watch, r.own() + r.layout.arrival(source, expert, first, number), Wait::kArrival, source,
                   expert, number);
    turn += highest - lowest + 1;
  }
}

// Waits until every row has arrived. A launch that only sends rows and computes no product calls this
// function.
__device__ __forceinline__ void await_all(const Rank& r, const ArrivalBoard& board, const WarpTeam& team) {
  PieceWalk walk(r.ranks(), r.experts());
  const auto rows = [&](int level, int e) { return board.rows(level, e); };
  Piece piece;
  for (int i = team.number; walk.find(i, rows, piece); i += team.count) {
    const int source = source_at(piece.step, r.rank, r.ranks());
    const int first = board.first(piece.step, piece.expert);
    if (team.lane == 0)
      peers::await(r.watch, r.own() + r.layout.arrival(source, piece.expert, first, piece.number),
                   Wait::kArrival, source, piece.expert, piece.number);
  }
  sync_warp();
}

}  // namespace pmoe::comet

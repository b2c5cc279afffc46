// What communicating warps do in the dispatching kernel: grant, write rows into peers' heaps, signal.
#pragma once
#include "comet/protocol.h"
#include "comet/rank.h"
#include "common/device.cuh"

namespace pmoe::comet {

// Rows loaded by a lane before the first is stored, in vectors of 16 bytes.
constexpr int kInFlight = 8;

__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, int64_t bytes, const Team& team) {
  const int vectors = static_cast<int>(bytes / 16);
  for (int first = team.lane; first < vectors; first += kInFlight * team.lanes) {
    // Zeros: of what only some paths set the compiler keeps the registers through all else that a block does.
    Words held[kInFlight] = {};
    PMOE_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + i * team.lanes;
      if (at < vectors) held[i] = load16(from + int64_t{at} * 16);
    }
    PMOE_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + i * team.lanes;
      if (at < vectors) store16(to + int64_t{at} * 16, held[i]);
    }
  }
}

// A piece's rows on their way: `from` of this rank's order, to `to` and behind it. begin() is called before
// the rows' links are worked out, finish() behind it; when that returns to a lane, what it has copied is
// written. In these, rows go through registers; in bulk.cuh through shared memory.
class LaneCopies {
 public:
  __device__ __forceinline__ void begin(const Rank& r, uint8_t* to, int from, int rows, const Team&) {
    to_ = to, rows_ = rows;
    PMOE_UNROLL
    for (int row = 0; row < kPiece; ++row)
      token_[row] = row < rows ? r.by_choices.divide(read(r.slot + from + row)) : 0;
  }

  __device__ __forceinline__ void finish(const Rank& r, const Team& team) {
    const int64_t row_bytes = r.layout.row_bytes;
    PMOE_UNROLL
    for (int row = 0; row < kPiece; ++row)
      if (row < rows_)
        copy_row(to_ + row * row_bytes, r.source + token_[row] * r.source_stride, row_bytes, team);
  }

 private:
  uint8_t* to_;
  int rows_, token_[kPiece];
};

template <class Meet>
__device__ __forceinline__ void fill_board(const Rank& r, Board& board, int thread, int threads,
                                           const Meet& meet) {
  board.fill(
      r.rank, [&](int source, int e) { return read(r.recv_counts + source * r.recv_stride + e); }, thread,
      threads, meet);
}

template <class Meet>
__device__ __forceinline__ void fill_sends(const Rank& r, Sends& sends, int thread, int threads,
                                           const Meet& meet) {
  sends.fill([&](int i) { return read(r.send_counts + i); }, thread, threads, meet);
}

// Tells each peer where its rows begin here, and that the inbox is free: nothing of the round before is read
// any more when this kernel runs. A rank that has failed tells nothing: who is late still reads what it was
// told before, for this rank has not waited for it. By the threads of one block; meet() is its barrier.
template <class Meet>
__device__ __forceinline__ void grant(const Rank& r, const Board& board, int thread, int threads,
                                      const Meet& meet) {
  nap(r.watch, 6000 + r.rank);
  const int experts = r.experts(), all = has_failed(r.watch) ? 0 : r.ranks() * experts;
  for (int i = thread; i < all; i += threads) {
    const int peer = i / experts, e = i % experts;
    auto* const told = reinterpret_cast<int32_t*>(r.heap(peer) + r.layout.grants(r.rank));
    write(told + e, board.first(level_of(peer, r.rank, r.ranks()), e));
  }
  for (int i = thread; i < kMostChunks; i += threads) {
    write(&r.counters()->done[i], 0u);
    write(&r.counters()->sent[i], 0u);
  }
  meet();
  for (int peer = thread; peer < r.ranks(); peer += threads)
    signal(r.watch, r.heap(peer) + r.layout.granted(r.rank));
}

// The row of a slot's token at its target, and the links by which the target sums the token's rows.
__device__ __forceinline__ Link link_of(const Rank& r, const Sends& sends, const int32_t* grants, int target,
                                        int slot) {
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
      link.next = read(grants + e) + position - r.first_row - sends.first(target, e);
      break;
    }
  }
  return link;
}

// Writes all rows of this rank to where they are computed. Pieces are dealt out to the warps in turn.
template <class Copies>
__device__ __forceinline__ void send_rows(const Rank& r, const Sends& sends, const Team& team,
                                          Copies& copies) {
  PieceWalk walk(r.ranks(), r.experts());
  const auto rows = [&](int step, int e) { return sends.rows(target_at(step, r.rank, r.ranks()), e); };
  Piece piece;
  int granted_by = -1;
  for (int i = team.number; walk.find(i, rows, piece); i += team.count) {
    const int target = target_at(piece.step, r.rank, r.ranks());
    uint8_t* const heap = r.heap(target);
    const auto* const grants = reinterpret_cast<const int32_t*>(r.own() + r.layout.grants(target));
    if (granted_by != target) {
      granted_by = target;
      if (team.lane == 0) await(r.watch, r.own() + r.layout.granted(target), Wait::kGrant, target, 0, 0);
      sync_warp();
    }
    if (ballot(has_failed(r.watch))) return;  // a grant that never came would say where to write
    nap(r.watch, team.number);
    const int first = read(grants + piece.expert), to = first + piece.begin;
    const int from = r.first_row + sends.first(target, piece.expert) + piece.begin;
    auto* const weights = reinterpret_cast<float*>(heap + r.layout.weights()) + to;
    auto* const links = reinterpret_cast<Link*>(heap + r.layout.links()) + to;
    // On their way while links are worked out, which takes up to five reads one behind the other.
    copies.begin(r, r.inbox(target, to), from, piece.rows, team);
    for (int row = team.lane; row < piece.rows; row += team.lanes) {
      const int slot = read(r.slot + from + row);
      write(weights + row, read(r.weight + slot));
      const Link link = link_of(r, sends, grants, target, slot);
      Words words = {{static_cast<uint32_t>(link.home), static_cast<uint32_t>(link.next),
                      static_cast<uint32_t>(link.source), static_cast<uint32_t>(link.first)}};
      store16(links + row, words);
    }
    copies.finish(r, team);
    sync_warp();
    nap(r.watch, team.number + 1000);
    if (team.lane == 0) signal(r.watch, heap + r.layout.arrival(r.rank, piece.expert, first, piece.number));
  }
}

// The pieces of one source's rows that lie in rows [begin, end) of an expert: pieces `lane`, `lane +
// lanes`... of all levels are waited for by each caller.
__device__ __forceinline__ void await_rows(const Rank& r, const Board& board, int expert, int begin, int end,
                                           int lane, int lanes) {
  int turn = 0;
  for (int level = 0; level < r.ranks(); ++level) {
    const int first = board.first(level, expert), last = board.first(level + 1, expert);
    const int from = larger(first, begin), to = smaller(last, end);
    if (from >= to) continue;
    const int source = source_at(level, r.rank, r.ranks());
    const int lowest = (from - first) / kPiece, highest = (to - 1 - first) / kPiece;
    // Numbered across levels, so that every lane has its share.
    for (int number = lowest + (lane - turn % lanes + lanes) % lanes; number <= highest; number += lanes)
      await(r.watch, r.own() + r.layout.arrival(source, expert, first, number), Wait::kArrival, source,
            expert, number);
    turn += highest - lowest + 1;
  }
}

// For a launch that multiplies nothing: until every row has arrived.
__device__ __forceinline__ void await_all(const Rank& r, const Board& board, const Team& team) {
  PieceWalk walk(r.ranks(), r.experts());
  const auto rows = [&](int level, int e) { return board.rows(level, e); };
  Piece piece;
  for (int i = team.number; walk.find(i, rows, piece); i += team.count) {
    const int source = source_at(piece.step, r.rank, r.ranks());
    const int first = board.first(piece.step, piece.expert);
    if (team.lane == 0)
      await(r.watch, r.own() + r.layout.arrival(source, piece.expert, first, piece.number), Wait::kArrival,
            source, piece.expert, piece.number);
  }
  sync_warp();
}

}  // namespace pmoe::comet

// The work of communicating warps in COMET's combining kernel (COMET, section 3.2.1), which computes the
// second product and sends results back.
//
// The result's columns are cut into chunks. As soon as a chunk is computed, these warps take each token that
// has rows on this rank. They sum the token's rows, and write the sum into the heap of the rank that owns the
// token. (A heap is device memory that all ranks can write.) The owner then adds the sums of all ranks,
// always in the order of the token's choices, so that the result is the same in every run.
#pragma once
#include "comet/rank.h"
#include "common/device.cuh"
#include "peers/protocol.h"
#include "peers/rows.cuh"

namespace pmoe::comet {

using peers::WarpTeam;

constexpr int kAtOnce = 4;  // number of tokens that a warp sums at the same time
constexpr int kAcross = 2;  // number of vectors of a token that a lane adds at the same time in sum_tokens()

// Returns the address of this rank's links. The link of a received row says where the row's result goes, and
// which other row on this rank belongs to the same token.
//
// Callers call this function before their loops. Inside a loop, the compiler would compute the address again
// after every store, which takes a hundred instructions.
__device__ __forceinline__ const Link* own_links(const Rank& r) {
  return reinterpret_cast<const Link*>(r.own() + r.layout.links());
}

__device__ __forceinline__ Link read_link(const Link* link) {
  const Words w = load16(link);
  return {static_cast<int32_t>(w.word[0]), static_cast<int32_t>(w.word[1]), static_cast<int32_t>(w.word[2]),
          static_cast<int32_t>(w.word[3])};
}

// Sends the summed results of a run of received rows to the ranks of their tokens, for one chunk of columns.
//
// A token may have several rows on this rank. Its first row starts the sum; the link of each row leads to the
// next row, which is added. The sum is written into the heap of the rank that sent the token, at the index
// that the token's first row has in the region `home` (layout.h).
//
// first_row, rows: the run begins at row first_row of this rank's inbox, and has `rows` rows.
// chunk: index of the chunk of columns.
template <class T>
__device__ __forceinline__ void send_sums(const Rank& r, int first_row, int rows, int chunk,
                                          const WarpTeam& team) {
  const int vectors = static_cast<int>(r.chunks.width(chunk) * int64_t{sizeof(T)} / 16);
  const int64_t begin = r.chunks.begin(chunk) * int64_t{sizeof(T)}, row_bytes = r.layout.row_bytes;
  const uint8_t* const inbox = r.inbox(r.rank, 0) + begin;
  const Link* const links = own_links(r);
  const int64_t home = r.layout.home() + begin;
  for (int base = 0; base < rows; base += kAtOnce) {
    int row[kAtOnce];
    uint8_t* to[kAtOnce];
    Link link[kAtOnce];
    PMOE_UNROLL
    for (int b = 0; b < kAtOnce; ++b) {
      row[b] = -1;
      if (base + b < rows) link[b] = read_link(links + first_row + base + b);
    }
    unrolled<kAtOnce>([&](auto index) {
      constexpr int b = decltype(index)::value;
      to[b] = nullptr;
      if (base + b >= rows || !link[b].first) return;
      row[b] = first_row + base + b;
      to[b] = r.heap(link[b].source) + home + link[b].home * row_bytes;
    });
    for (int v = team.lane; v < vectors; v += team.lanes) {
      float sum[kAtOnce][8] = {};
      int at[kAtOnce], next[kAtOnce];
      bool more = false;
      PMOE_UNROLL
      for (int b = 0; b < kAtOnce; ++b) {
        at[b] = row[b];
        next[b] = row[b] < 0 ? -1 : link[b].next;
        more |= at[b] >= 0;
      }
      // Follows the links of kAtOnce tokens at the same time. A link is loaded one iteration before it is
      // needed, to hide the latency.
      while (more) {
        Words loaded[kAtOnce];
        int after_next[kAtOnce];
        PMOE_UNROLL
        for (int b = 0; b < kAtOnce; ++b) {
          loaded[b] = {{0, 0, 0, 0}};
          if (at[b] >= 0) loaded[b] = load16(inbox + at[b] * row_bytes + int64_t{v} * 16);
          after_next[b] = next[b] < 0 ? -1 : read(&links[next[b]].next);
        }
        more = false;
        PMOE_UNROLL
        for (int b = 0; b < kAtOnce; ++b) {
          peers::add_vector<T>(sum[b], loaded[b]);
          at[b] = next[b];
          next[b] = after_next[b];
          more |= at[b] >= 0;
        }
      }
      unrolled<kAtOnce>([&](auto index) {
        constexpr int b = decltype(index)::value;
        if (row[b] >= 0) store16(to[b] + int64_t{v} * 16, peers::round_vector<T>(sum[b]));
      });
    }
  }
}

// Sends the gradients of the routing weights of a run of received rows to the ranks that sent these rows.
//
// A gradient is the sum of several partial inner products. They are added in a fixed order, so that the
// gradient is the same in every run.
__device__ __forceinline__ void send_dots(const Rank& r, int first_row, int rows, const WarpTeam& team) {
  const Link* const links = own_links(r) + first_row;
  for (int i = team.lane; i < rows; i += team.lanes) {
    const Link link = read_link(links + i);
    float dot = 0.0f;
    for (int part = 0; part < r.dot_parts; ++part)
      dot += read(r.row_dots + part * r.dot_rows + first_row + i);
    write(reinterpret_cast<float*>(r.heap(link.source) + r.layout.dots()) + link.home, dot);
  }
}

// Waits until this rank's computing blocks have stored all `tiles` tiles of a chunk of columns.
__device__ __forceinline__ void await_done(const Rank& r, int chunk, uint32_t tiles) {
  peers::wait_until_reached(
      r.watch, [&] { return load_acquire(&r.counters()->done[chunk]); }, tiles, Wait::kDone, r.rank, 0,
      chunk);
}

// Counts one tile of a chunk of columns as stored. A computing block calls this after its threads have
// synchronized.
__device__ __forceinline__ void tile_done(const Rank& r, int chunk) {
  add_acq_rel(&r.counters()->done[chunk], 1);
}

// Counts one warp that has sent its part of a chunk of columns. The last warp of this rank to do so raises a
// flag in every rank's heap. The flag says that all sums of the chunk from this rank have been written.
__device__ __forceinline__ void chunk_sent(const Rank& r, int chunk, const WarpTeam& team) {
  sync_warp();
  peers::test_delay(r.watch, team.number + 2000);
  if (team.lane != 0) return;
  if (add_acq_rel(&r.counters()->sent[chunk], 1) + 1 != static_cast<uint32_t>(team.count)) return;
  for (int peer = 0; peer < r.ranks(); ++peer)
    peers::signal(r.watch, r.heap(peer) + r.layout.returned(r.rank, chunk));
}

// Waits until the sums of a chunk of columns have come back from every rank to which this rank sent rows.
//
// This rank also returns sums to itself, and they are awaited last. They may be late only because another
// rank is late, and after a timeout the report must name the rank that is really late.
__device__ __forceinline__ void await_returns(const Rank& r, const SendTable& send_table, int chunk,
                                              const WarpTeam& team) {
#pragma unroll 1
  for (int own = 0; own < 2; ++own) {
    for (int peer = team.lane; peer < r.ranks(); peer += team.lanes)
      if ((peer == r.rank) == (own != 0) && send_table.rows(peer) > 0)
        peers::await(r.watch, r.own() + r.layout.returned(peer, chunk), Wait::kReturn, peer, 0, chunk);
    sync_warp();
  }
}

// Returns the index in the region `home` of the sum that one choice of a token adds to the token's result, or
// -1 if the choice adds no sum.
//
// A rank that has the experts of several choices of a token returns one sum for all of these choices. The sum
// belongs to the first of them. For the others this function returns -1, so that no sum is added twice. For
// dropped choices it also returns -1.
//
// slot: index of the token's first (token, choice) pair.
// choice: index of the choice among the token's choices.
__device__ __forceinline__ int home_row(const Rank& r, int64_t slot, int choice) {
  const int position = read(r.position + slot + choice);
  if (position < 0) return -1;
  const int target = r.by_experts.divide(read(r.expert + slot + choice));
  for (int i = 0; i < choice; ++i)
    if (read(r.position + slot + i) >= 0 && r.by_experts.divide(read(r.expert + slot + i)) == target)
      return -1;
  return position - r.first_row;
}

// Adds, for each token of this rank, the sums that all ranks have returned for one chunk of columns, and
// stores the results.
template <class T>
__device__ __forceinline__ void sum_tokens(const Rank& r, int chunk, const WarpTeam& team) {
  const int vectors = static_cast<int>(r.chunks.width(chunk) * int64_t{sizeof(T)} / 16);
  const int64_t begin = r.chunks.begin(chunk) * int64_t{sizeof(T)}, row_bytes = r.layout.row_bytes;
  const uint8_t* const home = r.own() + r.layout.home() + begin;
  const auto* const dots = reinterpret_cast<const float*>(r.own() + r.layout.dots());
  for (int base = team.number * kAtOnce; base < r.tokens; base += team.count * kAtOnce) {
    const int token = r.first_token + base, tokens = smaller(kAtOnce, r.tokens - base);
    const int64_t slot = int64_t{token} * r.choices;
    uint8_t* const to = r.result + token * r.result_stride + begin;
    for (int v = team.lane; v < vectors; v += kAcross * team.lanes) {
      float sum[kAtOnce][kAcross][8] = {};
      for (int k = 0; k < r.choices; ++k) {
        int row[kAtOnce];
        Words loaded[kAtOnce][kAcross];
        PMOE_UNROLL
        for (int b = 0; b < kAtOnce; ++b) row[b] = b < tokens ? home_row(r, slot + b * r.choices, k) : -1;
        PMOE_UNROLL
        for (int b = 0; b < kAtOnce; ++b) PMOE_UNROLL
        for (int a = 0; a < kAcross; ++a) {
          const int at = v + a * team.lanes;
          loaded[b][a] = {{0, 0, 0, 0}};
          if (row[b] >= 0 && at < vectors)
            loaded[b][a] = load16(home + row[b] * row_bytes + int64_t{at} * 16);
        }
        PMOE_UNROLL
        for (int b = 0; b < kAtOnce; ++b) PMOE_UNROLL
        for (int a = 0; a < kAcross; ++a) peers::add_vector<T>(sum[b][a], loaded[b][a]);
      }
      PMOE_UNROLL
      for (int b = 0; b < kAtOnce; ++b) PMOE_UNROLL
      for (int a = 0; a < kAcross; ++a) {
        const int at = v + a * team.lanes;
        if (b < tokens && at < vectors)
          store16(to + b * r.result_stride + int64_t{at} * 16, peers::round_vector<T>(sum[b][a]));
      }
    }
    if (r.weight_gradient != nullptr && chunk == 0) {
      for (int i = team.lane; i < tokens * r.choices; i += team.lanes) {
        const int position = read(r.position + slot + i);
        write(r.weight_gradient + slot + i, position < 0 ? 0.0f : read(dots + (position - r.first_row)));
      }
    }
  }
}

// Waits until a chunk of columns is computed, sums each token's received rows, and sends the sums to the
// tokens' ranks.
//
// tiles: number of tiles in the chunk.
template <class T>
__device__ __forceinline__ void send_chunk(const Rank& r, const ArrivalBoard& board, int chunk, int tiles,
                                           const WarpTeam& team) {
  const auto rows = [&](int level, int e) { return board.rows(level, e); };
  if (team.lane == 0) await_done(r, chunk, static_cast<uint32_t>(tiles));
  sync_warp();
  peers::test_delay(r.watch, team.number + 3000);
  PieceWalk walk(r.ranks(), r.experts());
  Piece piece;
  for (int i = team.number; walk.find(i, rows, piece); i += team.count) {
    if (peers::has_failed(r.watch)) break;  // links may not have arrived, so it is unknown where to write
    const int first = board.first(piece.step, piece.expert) + piece.begin;
    if (r.row_dots != nullptr && chunk == 0) send_dots(r, first, piece.rows, team);
    send_sums<T>(r, first, piece.rows, chunk, team);
  }
  chunk_sent(r, chunk, team);
}

// Waits until all ranks have returned their sums for a chunk of columns, and adds them for each token of this
// rank.
template <class T>
__device__ __forceinline__ void sum_chunk(const Rank& r, const SendTable& send_table, int chunk,
                                          const WarpTeam& team) {
  await_returns(r, send_table, chunk, team);
  sum_tokens<T>(r, chunk, team);
}

// The division of the second product's result into tiles. The result has a row for each received row, and
// d_model columns.
//
// row_tiles: number of tiles that lie one below the other.
// columns: number of columns of each tile.
//
// of_chunk returns the number of tiles of one chunk of columns, for which a communicating warp must wait
// before it sends the chunk.
struct Tiling {
  int row_tiles, columns;

  PMOE_HD int of_chunk(const Chunks& chunks, int chunk) const {
    return row_tiles * ceil_div(chunks.width(chunk), columns);
  }
};

// Runs a communicating warp: sends sums for one chunk of columns after the other. After each chunk, it adds
// up what all ranks have returned for the chunk before, for this rank's own tokens:
//
//   step                           0    1    2   ...  last     last + 1
//   send sums of received rows     c0   c1   c2       c_last
//   add returned sums by token          c0   c1       ...      c_last
//
// helpers: number of computing warps that help with the last chunk, because they have nothing left to
// compute.
template <class T>
__device__ __forceinline__ void combine(const Rank& r, const ArrivalBoard& board, const SendTable& send_table,
                                        Tiling tiling, const WarpTeam& team, int helpers) {
  const int last = r.chunks.count() - 1;
  const auto of = [&](int chunk) -> WarpTeam {
    return {team.lane, team.lanes, team.number, team.count + (chunk < last ? 0 : helpers)};
  };
  for (int chunk = 0; chunk <= last + 1; ++chunk) {
    if (chunk <= last) send_chunk<T>(r, board, chunk, tiling.of_chunk(r.chunks, chunk), of(chunk));
    if (chunk > 0) sum_chunk<T>(r, send_table, chunk - 1, of(chunk - 1));
  }
}

// Runs a computing warp after its last tile: it helps to send and to sum the last chunk of columns.
//
// all: the index of this warp among all warps of this rank that work on the last chunk, and the number of
//     these warps. Communicating warps have the lowest indices.
template <class T>
__device__ __forceinline__ void combine_last_chunk(const Rank& r, const ArrivalBoard& board,
                                                   const SendTable& send_table, Tiling tiling,
                                                   const WarpTeam& all) {
  const int last = r.chunks.count() - 1;
  send_chunk<T>(r, board, last, tiling.of_chunk(r.chunks, last), all);
  sum_chunk<T>(r, send_table, last, all);
}

}  // namespace pmoe::comet

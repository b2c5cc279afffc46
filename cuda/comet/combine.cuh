// What communicating warps do in the combining kernel: as soon as a chunk of columns is computed, the rows of
// each token that are on this rank are summed and written into the heap of the token's owner (COMET, section
// 3.2.1); the owner sums what the ranks have sent, always in the order of the token's choices.
#pragma once
#include "comet/protocol.h"
#include "comet/rank.h"
#include "common/device.cuh"
#include "common/scalar.h"

namespace pmoe::comet {

constexpr int kAtOnce = 4;  // tokens that a warp sums side by side

// Eight values of 16 bits, as floats.
template <class T>
__device__ __forceinline__ void add_vector(float (&sum)[8], const Words& v) {
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += low_half<T>(v.word[i]);
    sum[2 * i + 1] += high_half<T>(v.word[i]);
  }
}

template <class T>
__device__ __forceinline__ Words round_vector(const float (&sum)[8]) {
  Words v;
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) v.word[i] = pack2<T>(sum[2 * i], sum[2 * i + 1]);
  return v;
}

__device__ __forceinline__ Link read_link(const Rank& r, int row) {
  const Words w = load16(r.own() + r.layout.links() + int64_t{row} * int64_t{sizeof(Link)});
  return {static_cast<int32_t>(w.word[0]), static_cast<int32_t>(w.word[1]), static_cast<int32_t>(w.word[2]),
          static_cast<int32_t>(w.word[3])};
}

// A piece's rows that are their tokens' first ones here: each with those it is linked to, in that order, the
// columns of one chunk, to where the owner expects the sum.
template <class T>
__device__ __forceinline__ void send_sums(const Rank& r, int first_row, int rows, int chunk,
                                          const Team& team) {
  const int vectors = static_cast<int>(r.chunks.width(chunk) * int64_t{sizeof(T)} / 16);
  const int64_t begin = r.chunks.begin(chunk) * int64_t{sizeof(T)};
  for (int base = 0; base < rows; base += kAtOnce) {
    int row[kAtOnce];
    uint8_t* to[kAtOnce];
    Link link[kAtOnce];
    PMOE_UNROLL
    for (int b = 0; b < kAtOnce; ++b) {
      row[b] = -1;
      if (base + b < rows) link[b] = read_link(r, first_row + base + b);
    }
    PMOE_UNROLL
    for (int b = 0; b < kAtOnce; ++b) {
      if (base + b >= rows || !link[b].first) continue;
      row[b] = first_row + base + b;
      to[b] = r.heap(link[b].source) + r.layout.home() + link[b].home * r.layout.row_bytes + begin;
    }
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
      while (more) {
        Words held[kAtOnce];
        more = false;
        PMOE_UNROLL
        for (int b = 0; b < kAtOnce; ++b)
          if (at[b] >= 0) held[b] = load16(r.inbox(r.rank, at[b]) + begin + int64_t{v} * 16);
        PMOE_UNROLL
        for (int b = 0; b < kAtOnce; ++b) {
          if (at[b] < 0) continue;
          add_vector<T>(sum[b], held[b]);
          at[b] = next[b];
          if (at[b] < 0) continue;
          next[b] = read_link(r, at[b]).next;
          more = true;
        }
      }
      PMOE_UNROLL
      for (int b = 0; b < kAtOnce; ++b)
        if (row[b] >= 0) store16(to[b] + int64_t{v} * 16, round_vector<T>(sum[b]));
    }
  }
}

// The gradients of a piece's routing weights, to the rows' source: parts are summed in their order.
__device__ __forceinline__ void send_dots(const Rank& r, int first_row, int rows, const Team& team) {
  for (int i = team.lane; i < rows; i += team.lanes) {
    const Link link = read_link(r, first_row + i);
    float dot = 0.0f;
    for (int part = 0; part < r.dot_parts; ++part)
      dot += read(r.row_dots + part * r.dot_rows + first_row + i);
    write(reinterpret_cast<float*>(r.heap(link.source) + r.layout.dots()) + link.home, dot);
  }
}

// Until a chunk is computed, by every tile of it.
__device__ __forceinline__ void await_done(const Rank& r, int chunk, uint32_t tiles) {
  wait_until_reached(
      r.watch, [&] { return load_acquire(&r.counters()->done[chunk]); }, tiles, Wait::kDone, r.rank, 0,
      chunk);
}

// A computing block has stored a tile; its threads have met.
__device__ __forceinline__ void tile_done(const Rank& r, int chunk) {
  add_acq_rel(&r.counters()->done[chunk], 1);
}

// All of this rank's warps have sent their part of a chunk: the last one tells the sources.
__device__ __forceinline__ void chunk_sent(const Rank& r, int chunk, const Team& team) {
  sync_warp();
  nap(r.watch, team.number + 2000);
  if (team.lane != 0) return;
  if (add_acq_rel(&r.counters()->sent[chunk], 1) + 1 != static_cast<uint32_t>(team.count)) return;
  for (int peer = 0; peer < r.ranks(); ++peer)
    signal(r.watch, r.heap(peer) + r.layout.returned(r.rank, chunk));
}

// Until the chunk has come home from every rank that has rows of this one.
__device__ __forceinline__ void await_returns(const Rank& r, const Sends& sends, int chunk,
                                              const Team& team) {
  for (int peer = team.lane; peer < r.ranks(); peer += team.lanes)
    if (sends.rows(peer) > 0)
      await(r.watch, r.own() + r.layout.returned(peer, chunk), Wait::kReturn, peer, 0, chunk);
  sync_warp();
}

// Tokens of a chunk, summed over the ranks. A token has one sum for each rank that it has rows on, where the
// first of those rows stood.
template <class T>
__device__ __forceinline__ void sum_tokens(const Rank& r, int chunk, const Team& team) {
  const int vectors = static_cast<int>(r.chunks.width(chunk) * int64_t{sizeof(T)} / 16);
  const int64_t begin = r.chunks.begin(chunk) * int64_t{sizeof(T)};
  const uint8_t* const home = r.own() + r.layout.home() + begin;
  for (int t = team.number; t < r.tokens; t += team.count) {
    const int token = r.first_token + t;
    const int64_t slot = int64_t{token} * r.choices;
    for (int v = team.lane; v < vectors; v += team.lanes) {
      float sum[8] = {};
      for (int k = 0; k < r.choices; ++k) {
        const int position = read(r.position + slot + k);
        if (position < 0) continue;
        const int target = read(r.expert + slot + k) / r.experts();
        bool first = true;
        for (int j = 0; j < k; ++j)
          first &= read(r.position + slot + j) < 0 || read(r.expert + slot + j) / r.experts() != target;
        if (first) add_vector<T>(sum, load16(home + (position - r.first_row) * r.layout.row_bytes + v * 16));
      }
      store16(r.result + token * r.result_stride + begin + int64_t{v} * 16, round_vector<T>(sum));
    }
    if (r.weight_gradient != nullptr && chunk == 0) {
      const auto* const dots = reinterpret_cast<const float*>(r.own() + r.layout.dots());
      for (int k = team.lane; k < r.choices; k += team.lanes) {
        const int position = read(r.position + slot + k);
        write(r.weight_gradient + slot + k, position < 0 ? 0.0f : read(dots + (position - r.first_row)));
      }
    }
  }
}

// Chunk after chunk: sent as it is done; the one before is summed at home meanwhile. row_tiles: of the
// product, `across` columns wide each.
template <class T>
__device__ __forceinline__ void combine(const Rank& r, const Board& board, const Sends& sends, int row_tiles,
                                        int tile_columns, const Team& team) {
  const auto rows = [&](int level, int e) { return board.rows(level, e); };
  const int chunks = r.chunks.count();
  for (int chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      const auto across = static_cast<int>(ceil_div(r.chunks.width(chunk), tile_columns));
      if (team.lane == 0) await_done(r, chunk, static_cast<uint32_t>(row_tiles * across));
      sync_warp();
      nap(r.watch, team.number + 3000);
      PieceWalk walk(r.ranks(), r.experts());
      Piece piece;
      for (int i = team.number; walk.find(i, rows, piece); i += team.count) {
        if (has_failed(r.watch)) break;  // links may be missing, and would say where to write
        const int first = board.first(piece.step, piece.expert) + piece.begin;
        if (r.row_dots != nullptr && chunk == 0) send_dots(r, first, piece.rows, team);
        send_sums<T>(r, first, piece.rows, chunk, team);
      }
      chunk_sent(r, chunk, team);
    }
    if (chunk > 0) {
      await_returns(r, sends, chunk - 1, team);
      sum_tokens<T>(r, chunk - 1, team);
    }
  }
}

}  // namespace pmoe::comet

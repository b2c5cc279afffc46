// COMET's two kernels with the instructions of sm_80: one sends rows to their experts and computes the first
// product, the other computes the second product and sends the results back. hopper.cuh explains them.
#pragma once
#include "comet/combine.cuh"
#include "comet/dispatch.cuh"
#include "comet/fused.h"
#include "grouped_gemm/ampere.cuh"

namespace pmoe::comet {

// Size in 32-bit words of the shared memory for an ArrivalBoard, a table by source rank and expert (order.h).
// With this size a block needs at most 99 KiB of shared memory, which devices of compute capability 8.6 and
// 8.9 have.
constexpr int kSmallBoardWords = 768;

struct AmpereShared {
  ampere::Shared gemm;
  int32_t board[kSmallBoardWords];
};
static_assert(sizeof(AmpereShared) <= 99 * 1024, "more shared memory than a block of 8.6 has");
static_assert(sizeof(ampere::Shared) >= 4 * kSendTableWords, "the send table must fit into the stages");

template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation>
__global__ void __launch_bounds__(ampere::kThreads, 1)
    dispatch_gemm_sm80(const __grid_constant__ Launch launch) {
  constexpr bool kHalves = are_halves(kEpilogue, kActivation);
  AmpereShared& shared = *reinterpret_cast<AmpereShared*>(shared_memory());
  const Fused& f = launch.fused[blockIdx.x / launch.blocks];
  const Rank& r = f.rank;
  const int block = static_cast<int>(blockIdx.x) % launch.blocks, thread = static_cast<int>(threadIdx.x);
  const auto sync = [] { sync_block(); };
  ArrivalBoard board(shared.board, r.ranks(), r.experts());
  fill_board(r, board, thread, ampere::kThreads, sync);
  if (block < r.communicating) {
    SendTable send_table(reinterpret_cast<int32_t*>(shared.gemm.a), r.ranks(), r.experts());
    fill_send_table(r, send_table, thread, ampere::kThreads, sync);
    if (block == 0) grant(r, board, thread, ampere::kThreads, sync);
    const WarpTeam team = {thread % 32, 32, block + thread / 32 * r.communicating,
                           ampere::kThreads / 32 * r.communicating};
    LaneCopies copies;
    send_rows(r, send_table, team, copies);
    if (!r.computes) await_all(r, board, team);
    return;
  }
  const int columns = kHalves ? f.problem.n / 2 : f.problem.n;
  const FixedShape<ampere::kRows, ampere::tile_columns(kHalves)> shape;
  const ArrivalWalk walk(board, columns, shape, block - r.communicating, r.blocks - r.communicating);
  ampere::compute<T, kForm, kEpilogue, kActivation>(
      f.problem, shared.gemm, walk,
      [&](const Tile& tile) {
        const int begin = tile.group_begin + tile.row;
        if (thread < 32) await_rows(r, board, tile.expert, begin, begin + tile.rows, thread, 32);
        if (thread == 0) peers::test_delay(r.watch, blockIdx.x + 4000);
        sync_block();
      },
      [](const Tile&) {});
}

template <class T, Form kForm>
__global__ void __launch_bounds__(ampere::kThreads, 1)
    gemm_combine_sm80(const __grid_constant__ Launch launch) {
  AmpereShared& shared = *reinterpret_cast<AmpereShared*>(shared_memory());
  const Fused& f = launch.fused[blockIdx.x / launch.blocks];
  const Rank& r = f.rank;
  const int block = static_cast<int>(blockIdx.x) % launch.blocks, thread = static_cast<int>(threadIdx.x);
  const auto sync = [] { sync_block(); };
  ArrivalBoard board(shared.board, r.ranks(), r.experts());
  fill_board(r, board, thread, ampere::kThreads, sync);
  if (block < r.communicating) {
    SendTable send_table(reinterpret_cast<int32_t*>(shared.gemm.a), r.ranks(), r.experts());
    fill_send_table(r, send_table, thread, ampere::kThreads, sync);
    const WarpTeam team = {thread % 32, 32, block + thread / 32 * r.communicating,
                           ampere::kThreads / 32 * r.communicating};
    combine<T>(r, board, send_table, {row_tiles(board, ampere::kRows), ampere::kColumns}, team,
               ampere::kThreads / 32 * (r.blocks - r.communicating));
    return;
  }
  const FixedShape<ampere::kRows, ampere::kColumns> shape;
  const ColumnWalk walk(board, r.chunks, shape, block - r.communicating, r.blocks - r.communicating);
  ampere::compute<T, kForm, Epilogue::kPlain, Activation::kNone>(
      f.problem, shared.gemm, walk, [](const Tile&) {},
      // compute() calls this after all threads of the block have stored their part of a tile, and have
      // synchronized.
      [&](const Tile& tile) {
        if (thread != 0) return;
        peers::test_delay(r.watch, blockIdx.x + 5000);
        tile_done(r, tile.column / r.chunks.chunk_columns);
      });
  // All products are computed, and no operands will be loaded any more, so the send table can use the memory
  // of the operands.
  SendTable send_table(reinterpret_cast<int32_t*>(shared.gemm.a), r.ranks(), r.experts());
  sync_block();
  fill_send_table(r, send_table, thread, ampere::kThreads, sync);
  constexpr int kWarps = ampere::kThreads / 32;
  const int first = kWarps * r.communicating, computing = r.blocks - r.communicating;
  const WarpTeam all = {thread % 32, 32, first + block - r.communicating + thread / 32 * computing,
                        first + kWarps * computing};
  combine_last_chunk<T>(r, board, send_table, {row_tiles(board, ampere::kRows), ampere::kColumns}, all);
}

}  // namespace pmoe::comet

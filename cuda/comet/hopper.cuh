// COMET's two kernels on Hopper (COMET, section 3.2.1: thread block specialisation).
//
// Some blocks of a rank only communicate. The others compute a grouped product as in grouped_gemm/hopper.cuh,
// but with another order of tiles, and with waits and signals:
//
//   kernel          communicating blocks               computing blocks
//   dispatch_gemm   say where rows go, send rows       wait for a tile's rows, then multiply them
//   gemm_combine    send sums of column chunks, add    multiply, count the finished tiles of each chunk,
//                   the sums that come back            then help with the last chunk
#pragma once
#include "comet/bulk.cuh"
#include "comet/combine.cuh"
#include "comet/dispatch.cuh"
#include "comet/fused.h"
#include "grouped_gemm/hopper.cuh"

namespace pmoe::comet {

constexpr int kWalkBytes = 128;

// The columns of a block's tile. Two blocks may form a pair that computes two tiles side by side.
struct PairTile {
  int first;                   // where this block's tile begins in the pair: 0, or the columns of a tile
  int chunk_columns, columns;  // of the result; no tile crosses the end of a chunk
};

struct HopperShared {
  hopper::Shared gemm;
  int32_t board[kBoardWords];
  PairTile pair_tile;
  alignas(16) uint8_t walk[hopper::kThreads / 32][kWalkBytes];
};
static_assert(sizeof(HopperShared) <= 232448 - 1024, "more shared memory than a block of Hopper has");
static_assert(sizeof(hopper::Shared::a) >= 4 * kSendTableWords, "the send table must fit into the stages");

// The shared memory of a communicating block in the dispatching kernel. The block multiplies nothing, so it
// uses the memory in which a computing block keeps its operands.
struct DispatchShared {
  BulkRing ring[hopper::kThreads / 32];
  int32_t send_table[kSendTableWords];
};
static_assert(sizeof(DispatchShared) <= sizeof(hopper::Shared));

#if PMOE_HOPPER_CODE

// Lists the tiles that a warp's block computes. Its state is in shared memory, because warps that hold
// accumulators or load operands have no registers left.
//
// Walk: the order of the tiles: ArrivalWalk or ColumnWalk of order.h, or a PairWalk of one of them.
//
// One block of a pair may get a tile beyond the last column. next() gives this tile 0 rows, so that nothing
// of it is stored.
template <class Walk>
class WarpWalk {
 public:
  __device__ __forceinline__ explicit WarpWalk(const Walk& walk) {
    if (thread_again() % 32 == 0) kept().walk = walk;
  }

  __device__ __forceinline__ bool next(Tile& tile) {
    if (thread_again() % 32 == 0) {
      kept().more = kept().walk.next(kept().tile);
      if (Walk::is_beyond(kept().tile)) kept().tile.rows = 0;
    }
    sync_warp();
    tile = kept().tile;
    const bool more = kept().more;
    sync_warp();
    return more;
  }

 private:
  struct Kept {
    Walk walk;
    Tile tile;
    int more;
  };
  static_assert(sizeof(Kept) <= kWalkBytes);

  __device__ __forceinline__ static Kept& kept() {
    auto& shared = *reinterpret_cast<HopperShared*>(shared_memory());
    return *reinterpret_cast<Kept*>(shared.walk[thread_again() / 32]);
  }
};

// Lists a block's tiles. If two blocks form a cluster and share operand A, the cluster computes two tiles
// side by side: the first block takes the left tile, the second block the right tile.
//
// walk: lists the pairs of tiles. It is made for half of the result's columns, so each of its tiles stands
//     for a pair. Without clusters, it lists the tiles themselves.
template <class Walk>
class PairWalk {
 public:
  __device__ __forceinline__ explicit PairWalk(const Walk& walk) : walk_(walk) {}

  __device__ __forceinline__ bool next(Tile& tile) {
    const bool more = walk_.next(tile);
    tile.column = tile.column * block().gemm.cluster + block().pair_tile.first;
    return more;
  }

  // Returns whether a tile lies beyond the last column of its chunk of columns.
  __device__ __forceinline__ static bool is_beyond(const Tile& tile) {
    const PairTile& own = block().pair_tile;
    const int begin = (tile.column - own.first) / own.chunk_columns * own.chunk_columns;
    return tile.column >= smaller(begin + own.chunk_columns, own.columns);
  }

 private:
  Walk walk_;

  __device__ __forceinline__ static const HopperShared& block() {
    return *reinterpret_cast<const HopperShared*>(shared_memory());
  }
};

// Initialises the barriers and pair_tile of a computing block, before its first tile.
__device__ __forceinline__ void begin_tiles(const Problem& p, HopperShared& shared, int tile_columns,
                                            const Chunks& chunks) {
  if (threadIdx.x == 0) {
    shared.pair_tile = {hopper::rank_in_cluster() * tile_columns, chunks.chunk_columns, chunks.columns};
    hopper::init_barriers(shared.gemm, 1, p.blocks_across, 1);
  }
  hopper::sync_before(p.blocks_across);
}

// Loads the operands of all tiles of a block, each tile as soon as its rows have arrived. The first warp of
// the block runs it.
template <Form kForm, bool kHalves, class Walk>
__device__ __forceinline__ void load_as_rows_arrive(const Fused& f, const ArrivalBoard& board,
                                                    HopperShared& shared, Walk walk) {
  const hopper::Loader<kForm, kHalves, 1> loader{f.a_map, f.b_map, f.problem, hopper::rank_in_cluster()};
  const int lane = static_cast<int>(threadIdx.x);
  Ring<hopper::kStages> ring;
  Tile tile;
  while (walk.next(tile)) {
    // A block whose tile lies beyond the last column waits and loads, too: the two blocks of a pair share the
    // rows, and each block loads half of them for both.
    const int begin = tile.group_begin + tile.row;
    const int rows = smaller(hopper::kRows, tile.group_rows - tile.row);
    await_rows(f.rank, board, tile.expert, begin, begin + rows, lane, 32);
    if constexpr (peers::kPlant != peers::Plant::kNoProxyFence) fence_proxy_async_global();
    sync_warp();
    if (lane == 0) {
      peers::test_delay(f.rank.watch, blockIdx.x + 4000);
      // The flags that the lanes have read say that other ranks have written the rows. This fence makes the
      // bulk loads below come after those writes.
      if constexpr (peers::kPlant != peers::Plant::kNoProxyFence) fence_proxy_async_global();
      hopper::load_tile(loader, shared.gemm, tile, ring);
    }
    // One lane starts the loads. Without this barrier the other lanes would already poll for the next tile's
    // rows, and would take issue slots from that lane.
    sync_warp();
  }
}

template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation>
__global__ void __launch_bounds__(hopper::kThreads, 1) dispatch_gemm(const __grid_constant__ Launch launch) {
  constexpr bool kHalves = are_halves(kEpilogue, kActivation);
  HopperShared& shared = *reinterpret_cast<HopperShared*>(shared_memory());
  const Fused& f = launch.fused[blockIdx.x / launch.blocks];
  const Rank& r = f.rank;
  const int block = static_cast<int>(blockIdx.x) % launch.blocks, thread = static_cast<int>(threadIdx.x);
  const auto sync = [] { sync_block(); };
  ArrivalBoard board(shared.board, r.ranks(), r.experts());
  fill_board(r, board, thread, hopper::kThreads, sync);
  if (block < r.communicating) {
    auto& sending = reinterpret_cast<DispatchShared&>(shared.gemm);
    SendTable send_table(sending.send_table, r.ranks(), r.experts());
    fill_send_table(r, send_table, thread, hopper::kThreads, sync);
    if (block == 0) grant(r, board, thread, hopper::kThreads, sync);
    const WarpTeam team = {thread % 32, 32, block + thread / 32 * r.communicating,
                           hopper::kThreads / 32 * r.communicating};
    HopperCopies copies(sending.ring[thread / 32], team);
    send_rows(r, send_table, team, copies);
    if (!r.computes) await_all(r, board, team);
    return;
  }
  using Shape = FixedShape<hopper::kRows, hopper::tile_columns(kHalves)>;
  const int blocks_across = f.problem.blocks_across, columns = kHalves ? f.problem.n / 2 : f.problem.n;
  begin_tiles(f.problem, shared, Shape::columns, {columns, larger(columns, 1)});
  const PairWalk walk(ArrivalWalk(board, ceil_div(columns, blocks_across), Shape(),
                                  (block - r.communicating) / blocks_across,
                                  (r.blocks - r.communicating) / blocks_across));
  if (thread < hopper::kLoaders) {
    fewer_registers<hopper::kLoaderRegisters>();
    if (thread < 32) load_as_rows_arrive<kForm, kHalves>(f, board, shared, WarpWalk(walk));
  } else {
    more_registers<hopper::kMultiplierRegisters>();
    hopper::multiply<T, kForm, kEpilogue, kActivation, 1>(f.problem, shared.gemm, WarpWalk(walk),
                                                          [](const Tile&) {});
  }
  hopper::sync_after(shared.gemm.cluster);
}

template <class T, Form kForm>
__global__ void __launch_bounds__(hopper::kThreads, 1) gemm_combine(const __grid_constant__ Launch launch) {
  HopperShared& shared = *reinterpret_cast<HopperShared*>(shared_memory());
  const Fused& f = launch.fused[blockIdx.x / launch.blocks];
  const Rank& r = f.rank;
  const int block = static_cast<int>(blockIdx.x) % launch.blocks, thread = static_cast<int>(threadIdx.x);
  const auto sync = [] { sync_block(); };
  ArrivalBoard board(shared.board, r.ranks(), r.experts());
  fill_board(r, board, thread, hopper::kThreads, sync);
  if (block < r.communicating) {
    SendTable send_table(reinterpret_cast<int32_t*>(shared.gemm.a), r.ranks(), r.experts());
    fill_send_table(r, send_table, thread, hopper::kThreads, sync);
    const WarpTeam team = {thread % 32, 32, block + thread / 32 * r.communicating,
                           hopper::kThreads / 32 * r.communicating};
    combine<T>(r, board, send_table, {row_tiles(board, hopper::kRows), hopper::kColumns}, team,
               hopper::kMultiplierWarps * (r.blocks - r.communicating));
    return;
  }
  using Shape = FixedShape<hopper::kRows, hopper::kColumns>;
  const int blocks_across = f.problem.blocks_across;
  begin_tiles(f.problem, shared, Shape::columns, r.chunks);
  const Chunks of_pairs = {ceil_div(r.chunks.columns, blocks_across), r.chunks.chunk_columns / blocks_across};
  const PairWalk walk(ColumnWalk(board, of_pairs, Shape(), (block - r.communicating) / blocks_across,
                                 (r.blocks - r.communicating) / blocks_across));
  if (thread < hopper::kLoaders) {
    fewer_registers<hopper::kLoaderRegisters>();
    const hopper::Loader<kForm, false, 1> loader{f.a_map, f.b_map, f.problem, hopper::rank_in_cluster()};
    Ring<hopper::kStages> ring;
    Tile tile;
    if (thread == 0)
      for (auto tiles = walk; tiles.next(tile);) hopper::load_tile(loader, shared.gemm, tile, ring);
  } else {
    more_registers<hopper::kMultiplierRegisters>();
    hopper::multiply<T, kForm, Epilogue::kPlain, Activation::kNone, 1>(
        f.problem, shared.gemm, WarpWalk(walk), [&](const Tile& tile) {
          sync_named(2, hopper::kMultipliers);
          if (thread_again() != hopper::kLoaders || tile.rows == 0) return;
          peers::test_delay(r.watch, blockIdx.x + 5000);
          tile_done(r, tile.column / r.chunks.chunk_columns);
        });
    // All products are computed, and no operands will be loaded any more, so the send table can use the
    // memory of the operands.
    const int self = thread_again() - hopper::kLoaders;
    const auto together = [] { sync_named(2, hopper::kMultipliers); };
    together();
    SendTable send_table(reinterpret_cast<int32_t*>(shared.gemm.a), r.ranks(), r.experts());
    fill_send_table(r, send_table, self, hopper::kMultipliers, together);
    const int first = hopper::kThreads / 32 * r.communicating, computing = r.blocks - r.communicating;
    const WarpTeam all = {self % 32, 32, first + block - r.communicating + self / 32 * computing,
                          first + hopper::kMultiplierWarps * computing};
    combine_last_chunk<T>(r, board, send_table, {row_tiles(board, hopper::kRows), hopper::kColumns}, all);
  }
  hopper::sync_after(shared.gemm.cluster);
}

#else

template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation>
__global__ void __launch_bounds__(hopper::kThreads, 1) dispatch_gemm(const __grid_constant__ Launch) {}
template <class T, Form kForm>
__global__ void __launch_bounds__(hopper::kThreads, 1) gemm_combine(const __grid_constant__ Launch) {}

#endif  // PMOE_HOPPER_CODE

}  // namespace pmoe::comet

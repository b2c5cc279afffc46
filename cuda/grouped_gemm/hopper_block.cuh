// One block of Hopper's grouped product: its sizes, its shared memory, and the tiles that it computes.
#pragma once
#include "box.h"
#include "common/device.cuh"
#include "exchange.cuh"
#include "pieces.h"
#include "problem.h"
#include "tiles.h"

namespace pmoe::hopper {

constexpr int kRows = 128, kColumns = 256, kDepth = 64;  // of a tile, and of the reduction in a stage
constexpr int kStages = 4;
constexpr int kTilesAhead = 2;  // places of the tile ring; loading may be 2 tiles ahead of multiplying
// A stage of gathered rows is signalled as full after the copies of this many later stages have begun.
constexpr int kLag = 2;
constexpr int kLoaders = 128, kMultipliers = 256;
constexpr int kThreads = kLoaders + kMultipliers;
constexpr int kMultiplierWarps = kMultipliers / 32;
static_assert(kLag < kStages, "the ring must not wait for itself");

constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;

// A ring in shared memory that passes tiles to all threads of a cluster that load or multiply them. The first
// thread of the cluster's first block finds the tiles.
//
// kPlaces: number of places for tiles.
template <int kPlaces>
struct TileRing {
  struct alignas(16) Place {
    Tile tile;
    int more;     // 0: no tile here, and none will follow
    int columns;  // number of columns of the result, or of one of its halves
  };
  Place place[kPlaces];
  uint64_t full[kPlaces], empty[kPlaces];
  // The state of the TileWalk with which the first thread finds tiles. It is in shared memory, because the
  // thread's registers hold the indices of gathered rows.
  alignas(16) uint8_t walk[64];
};

// The dynamic shared memory of a block whose tiles have kTileColumns columns.
//
// kRingStages, kRingTiles: number of stages of the ring of operands, and of places of the ring of tiles.
// kBoxes: number of boxes of a warp, through which its results pass.
template <int kTileColumns, int kRingStages, int kRingTiles, int kBoxes = 1>
struct BlockMemory {
  static constexpr int kColumns = kTileColumns, kStages = kRingStages, kTilesAhead = kRingTiles;
  static constexpr int kBytesB = kColumns * kDepth * 2;

  alignas(1024) uint8_t a[kStages][kBytesA];
  alignas(1024) uint8_t b[kStages][kBytesB];
  alignas(1024) uint8_t exchange[kMultiplierWarps][kBoxes * kExchangeBytes];
  uint64_t full[kStages], empty[kStages];
  TileRing<kTilesAhead> tiles;
  int cluster;  // number of blocks in the cluster; kept here because there is no register for it
};

using Shared = BlockMemory<kColumns, kStages, kTilesAhead>;

constexpr int kSharedBytes = sizeof(Shared);

// Registers of a thread. setmaxnreg takes multiples of 8, and a multiprocessor has 65,536.
constexpr int kLoaderRegisters = 40, kMultiplierRegisters = 232;

// Returns the number of result columns in a tile.
//
// halves: true if a tile holds the same columns of both halves of the hidden columns (SwiGLU). The result is
//     then the number of columns in each half.
PMOE_HD constexpr int tile_columns(bool halves) { return halves ? kColumns / 2 : kColumns; }

// Returns the number of rows in a box of B in form kForward.
//
// halves: true if a tile holds the same columns of both halves of the hidden columns (SwiGLU).
// columns: number of columns of a tile, those of both halves together.
PMOE_HD constexpr int forward_lines(bool halves, int columns) { return halves ? columns / 2 : 128; }

using OnePiece = pmoe::OnePiece<kDepth>;

// Returns the number of steps along the reduction of a tile.
template <Form kForm, class Pieces = OnePiece>
PMOE_HD int steps(const Problem& p, const Tile& tile, const Pieces& pieces = {}) {
  if constexpr (kForm == Form::kWeight)
    return pieces.steps(tile);
  else
    return ceil_div(p.k, kDepth);
}

#if PMOE_HOPPER_CODE

// Returns the rank of this block in its cluster; 0 without clusters.
__device__ __forceinline__ int rank_in_cluster() { return static_cast<int>(cluster_rank()); }

// Returns the number of columns for a walk over tiles. If two blocks have tiles side by side, the walk counts
// each pair of tiles as one, so it gets half of the columns, and a tile's column is doubled later.
__device__ __forceinline__ int columns_of_walk(const Problem& p, bool halves) {
  return ceil_div(halves ? p.n / 2 : p.n, p.blocks_across);
}

// Lists the tiles of one block. The cluster's first block publishes tiles in a ring (TileRing). A published
// tile is for the whole cluster, and each block takes its own rows or columns of it.
//
// Memory: the block's BlockMemory.
template <Form kForm, bool kHalves, int kCluster, class Memory = Shared>
class BlockWalk {
 public:
  static constexpr int kTileColumns = kHalves ? Memory::kColumns / 2 : Memory::kColumns;
  static constexpr int kTilesAhead = Memory::kTilesAhead;
  using Shape = FixedShape<kRows * kCluster, kTileColumns>;
  using Walk = TileWalk<kForm, Shape>;
  using Tiles = TileRing<kTilesAhead>;
  using Place = typename Tiles::Place;

  // num_read: how many tiles next() has read, if the walk goes on where another one ended.
  __device__ __forceinline__ explicit BlockWalk(uint32_t num_read = 0) : turn_(static_cast<int>(num_read)) {}

  // Starts the walk over tiles. The first thread of every block calls this before its first publish_tile().
  __device__ __forceinline__ static void begin(const Problem& p) {
    static_assert(sizeof(Walk) <= sizeof(Tiles::walk));
    kept() = Walk(p.ends, p.experts, p.m, columns_of_walk(p, kHalves), Shape());
  }

  // Finds the next tile for all blocks of a cluster. The first thread of every block calls this before each
  // next(). Each of these threads tells the barrier of its block's ring how many bytes to expect. Then the
  // thread of the cluster's first block finds the tile, and stores it into the rings of all blocks.
  //
  // Taking a tile's index from a counter in memory lasts about a microsecond. Meanwhile, the multiplying
  // warps are busy with stages that have been loaded.
  __device__ __forceinline__ void publish_tile(const Problem& p) const {
    const int at = turn_ % kTilesAhead;
    mbarrier_arrive_expect(&ring().full[at], sizeof(Place));
    if (rank_in_cluster() != 0) return;
    const int blocks = kCluster * p.blocks_across;
    mbarrier_wait(&ring().empty[at], (turn_ / kTilesAhead % 2) ^ 1);
    const auto add = [](uint32_t* counter, uint32_t one) { return atomicAdd(counter, one); };
    const int number = tile_number(p.next_tile, add, blockIdx.x / blocks, gridDim.x / blocks, turn_);
    Walk walk = kept();
    Tile tile = {};
    const uint32_t more = walk.find(number, tile);
    kept() = walk;
    const auto word = [](int value) { return static_cast<uint32_t>(value); };
    const Words words[2] = {
        {{word(tile.expert), word(tile.group_begin), word(tile.group_rows), word(tile.row)}},
        {{word(tile.rows), word(tile.column * p.blocks_across), more, word(kHalves ? p.n / 2 : p.n)}}};
    auto* const place = reinterpret_cast<Words*>(&ring().place[at]);
    for (int rank = 0; rank < blocks; ++rank)
      for (int i = 0; i < 2; ++i) store_async(place + i, words[i], &ring().full[at], rank);
  }

  // Reads the next tile from the ring. Returns false after the last tile.
  //
  // If two blocks form a cluster, the tile of one block may lie outside the result while the other block's
  // tile lies inside. The outer tile has no rows (rows <= 0): it is computed, but not stored.
  //
  // alone: true if a single thread calls this, false if a whole warp does.
  __device__ __forceinline__ bool next(Tile& tile, bool alone = false) {
    const int at = turn_ % kTilesAhead;
    mbarrier_wait(&ring().full[at], turn_ / kTilesAhead % 2);
    const Place found = read(&ring().place[at]);
    if (!alone) sync_warp();
    if (alone || thread_again() % 32 == 0) mbarrier_arrive_at(&ring().empty[at], 0);
    ++turn_;
    tile = found.tile;
    if constexpr (kCluster > 1) {
      const int before = rank_in_cluster() * kRows;
      tile.row += before;
      tile.rows = smaller(tile.rows - before, kRows);
    } else {
      tile.column += rank_in_cluster() * kTileColumns;
      if (tile.column >= found.columns) tile.rows = 0;
    }
    return found.more;
  }

  // Returns how many tiles next() has read.
  __device__ __forceinline__ uint32_t num_read() const { return static_cast<uint32_t>(turn_); }

 private:
  __device__ __forceinline__ static Tiles& ring() {
    return reinterpret_cast<Memory*>(shared_memory())->tiles;
  }
  __device__ __forceinline__ static Walk& kept() { return *reinterpret_cast<Walk*>(ring().walk); }

  int turn_;
};

#endif  // PMOE_HOPPER_CODE

}  // namespace pmoe::hopper

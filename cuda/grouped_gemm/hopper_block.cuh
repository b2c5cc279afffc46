// A block of Hopper's grouped products: its sizes, its shared memory, and the tiles that it computes.
#pragma once
#include "box.h"
#include "common/device.cuh"
#include "exchange.cuh"
#include "pieces.h"
#include "problem.h"
#include "tiles.h"

namespace pmoe::hopper {

constexpr int kRows = 128, kColumns = 256, kDepth = 64;  // of a tile, and of a stage's reduction
constexpr int kStages = 4;
constexpr int kTilesAhead = 2;  // tiles that loading may be ahead of multiplying
constexpr int kLag = 2;         // stages that gathered rows may be behind their announcement
constexpr int kLoaders = 128, kMultipliers = 256;
constexpr int kThreads = kLoaders + kMultipliers;
constexpr int kMultiplierWarps = kMultipliers / 32;
static_assert(kLag < kStages, "the ring must not wait for itself");

constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;

// Tiles on their way from the thread that finds them, the first of a cluster, to all who load or multiply
// them.
struct TileRing {
  struct alignas(16) Place {
    Tile tile;
    int more;     // 0: there is none, and no further one
    int columns;  // of the result, or of its half
  };
  Place place[kTilesAhead];
  uint64_t full[kTilesAhead], empty[kTilesAhead];
  alignas(16) uint8_t walk[64];  // of that thread: beside the sources of gathered rows it has no registers
};

struct Shared {
  alignas(1024) uint8_t a[kStages][kBytesA];
  alignas(1024) uint8_t b[kStages][kBytesB];
  alignas(1024) uint8_t exchange[kMultiplierWarps][kExchangeBytes];
  uint64_t full[kStages], empty[kStages];
  TileRing tiles;
  int cluster;  // blocks of it; here it takes no register
};

constexpr int kSharedBytes = sizeof(Shared);

// A thread; 65536 in all, given by eights.
constexpr int kLoaderRegisters = 40, kMultiplierRegisters = 232;

// Columns of the result a tile has; of each half where a tile holds matching columns of both.
PMOE_HD constexpr int tile_columns(bool halves) { return halves ? kColumns / 2 : kColumns; }

using OnePiece = pmoe::OnePiece<kDepth>;

template <Form kForm, class Pieces = OnePiece>
PMOE_HD int steps(const Problem& p, const Tile& tile, const Pieces& pieces = {}) {
  if constexpr (kForm == Form::kWeight)
    return pieces.steps(tile);
  else
    return ceil_div(p.k, kDepth);
}

#if PMOE_HOPPER_CODE

// 0 where blocks are alone.
__device__ __forceinline__ int rank_in_cluster() { return static_cast<int>(cluster_rank()); }

// Of tiles side by side a walk finds the first: it goes over half of the columns, which are then doubled.
__device__ __forceinline__ int columns_of_walk(const Problem& p, bool halves) {
  return ceil_div(halves ? p.n / 2 : p.n, p.beside);
}

// The tiles of one block, as they are handed on: those of its cluster's walk, the rows or columns of the
// block's rank.
template <Form kForm, bool kHalves, int kCluster>
class BlockWalk {
 public:
  using Shape = FixedShape<kRows * kCluster, tile_columns(kHalves)>;
  using Walk = TileWalk<kForm, Shape>;
  using Place = TileRing::Place;

  // By the first thread of every block, before it hands on.
  __device__ __forceinline__ static void begin(const Problem& p) {
    static_assert(sizeof(Walk) <= sizeof(TileRing::walk));
    kept() = Walk(p.ends, p.experts, p.m, columns_of_walk(p, kHalves), Shape());
  }

  // By that thread, before each next(): the tile for all blocks of a cluster, which the first of them finds.
  // (A counter's answer takes a microsecond; the stages that are full last longer.)
  __device__ __forceinline__ void hand_on(const Problem& p) const {
    const int at = turn_ % kTilesAhead;
    mbarrier_arrive_expect(&ring().full[at], sizeof(Place));
    if (rank_in_cluster() != 0) return;
    const int blocks = kCluster * p.beside;
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
        {{word(tile.rows), word(tile.column * p.beside), more, word(kHalves ? p.n / 2 : p.n)}}};
    auto* const place = reinterpret_cast<Words*>(&ring().place[at]);
    for (int rank = 0; rank < blocks; ++rank)
      for (int i = 0; i < 2; ++i) store_async(place + i, words[i], &ring().full[at], rank);
  }

  // alone: a single thread walks, else a whole warp. A tile may be without rows (or columns: then it says
  // that it has no rows) where its cluster's other one has some: it is computed, but not stored.
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
      tile.column += rank_in_cluster() * tile_columns(kHalves);
      if (tile.column >= found.columns) tile.rows = 0;
    }
    return found.more;
  }

 private:
  __device__ __forceinline__ static TileRing& ring() {
    return reinterpret_cast<Shared*>(shared_memory())->tiles;
  }
  __device__ __forceinline__ static Walk& kept() { return *reinterpret_cast<Walk*>(ring().walk); }

  int turn_ = 0;
};

#endif  // PMOE_HOPPER_CODE

}  // namespace pmoe::hopper

// The grouped product (one matrix product for each expert's rows) with the instructions of sm_80. It runs on
// devices that cannot run the kernels for Hopper, compiled by nvcc or, on newer devices, by the driver from
// PTX.
//
// Three instructions do the work: cp.async copies operands into a ring of stages in shared memory, ldmatrix
// loads fragments from a stage into registers, and mma.sync multiplies them.
#pragma once
#include "box.h"
#include "common/device.cuh"
#include "epilogue.h"
#include "gather.cuh"
#include "pieces.h"
#include "problem.h"
#include "ring.h"
#include "tiles.h"

namespace pmoe::ampere {

constexpr int kRows = 128, kColumns = 128, kDepth = 64;
constexpr int kStages = 3;
constexpr int kThreads = 256;
constexpr int kWarpRows = 4,
              kWarpColumns = 2;  // number of warps down and across a tile; a warp has 32 rows x 64 columns
constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;
constexpr int kWarpWidth = kColumns / kWarpColumns;

struct Shared {
  alignas(1024) uint8_t a[kStages][kBytesA];
  alignas(1024) uint8_t b[kStages][kBytesB];
};

struct NumberedShared {
  Shared gemm;
  int tile[2];  // indices of this tile and of the next, in alternating places (see BlockWalk)
};

constexpr int kSharedBytes = sizeof(NumberedShared);

PMOE_HD constexpr int tile_columns(bool halves) { return halves ? kColumns / 2 : kColumns; }

using OnePiece = pmoe::OnePiece<kDepth>;

// Copies the operands of one step of the reduction into one stage of shared memory. A line is a row of an
// operand in the order in which it lies in memory, even if the product takes the transposed operand.
//
// tall: copies 128 lines of 64 columns. flat: copies kDepth lines of 64 columns.
template <class T, Form kForm, bool kHalves>
struct Loader {
  const Problem& p;
  BoxCopy<kThreads, 128> tall;
  BoxCopy<kThreads, kDepth> flat;
  using Tall = int32_t[BoxCopy<kThreads, 128>::kPerThread];
  using Flat = int32_t[BoxCopy<kThreads, kDepth>::kPerThread];

  __device__ __forceinline__ Loader(const Problem& problem, int thread)
      : p(problem), tall(thread), flat(thread) {}

  // Finds the rows of memory from which the lines of A are copied, once for all steps of a tile.
  //
  // It is not used for form kWeight. In that form the steps go along the rows, so each step has other rows,
  // which load() finds.
  __device__ __forceinline__ void find_rows(const Tile& tile, Tall& source) const {
    find_sources(
        kForm == Form::kForward && p.a_gathered ? p.slot : nullptr, p.top_k, tile.group_begin,
        tile.group_rows, [&](int i) { return tile.row + tall.line(i); }, source);
  }

  template <class Pieces>
  __device__ __forceinline__ void load(uint8_t* a, uint8_t* b, const Tile& tile, const Tall& rows, int step,
                                       Pieces& pieces) const {
    const int depth = step * kDepth;
    if constexpr (kForm == Form::kWeight) {
      Flat of_a, of_b;
      const auto own = pieces.step(tile, step);
      PMOE_UNROLL
      for (int i = 0; i < BoxCopy<kThreads, kDepth>::kPerThread; ++i) {
        const int line = own.depth + flat.line(i);
        of_a[i] = line < own.rows ? own.a_begin + line : -1;
        of_b[i] = line < own.rows ? own.b_begin + line : -1;
      }
      for (int i = 0; i < 2; ++i) {
        const int offset = i * box_bytes(kDepth), columns = i * kBoxColumns;
        flat.template copy<T>(a + offset, p.a, p.a_stride, of_a, tile.row + columns, p.m);
        flat.template copy<T>(b + offset, p.b, p.b_stride, of_b, tile.column + columns, p.n);
      }
      return;
    }
    tall.template copy<T>(a, p.a, p.a_stride, rows, depth, p.k);
    if constexpr (kForm == Form::kForward) {
      const T* weights = static_cast<const T*>(p.b) + int64_t{tile.expert} * p.n * p.k;
      const int columns = kHalves ? p.n / 2 : p.n;
      Tall source;
      PMOE_UNROLL
      for (int i = 0; i < BoxCopy<kThreads, 128>::kPerThread; ++i) {
        // For SwiGLU, a warp gets 32 lines of the gate's half of the weights, and the 32 lines at the same
        // positions in the other half, because the epilogue multiplies the results of both.
        const int line = tall.line(i);
        const int column = tile.column + (kHalves ? line / kWarpWidth * 32 + line % 32 : line);
        source[i] = column < columns ? column + (kHalves && line % kWarpWidth >= 32 ? columns : 0) : -1;
      }
      tall.template copy<T>(b, weights, p.k, source, depth, p.k);
    } else {
      const T* weights = static_cast<const T*>(p.b) + int64_t{tile.expert} * p.k * p.n;
      Flat source;
      PMOE_UNROLL
      for (int i = 0; i < BoxCopy<kThreads, kDepth>::kPerThread; ++i) {
        const int line = depth + flat.line(i);
        source[i] = line < p.k ? line : -1;
      }
      for (int i = 0; i < 2; ++i)
        flat.template copy<T>(b + i * box_bytes(kDepth), weights, p.n, source, tile.column + i * kBoxColumns,
                              p.n);
    }
  }
};

// Returns the address of 16 bytes (a chunk) of a line. ldmatrix loads four 8 x 8 matrices; lane l must pass
// the address of line l % 8 of matrix l / 8.
__device__ __forceinline__ const uint8_t* place(const uint8_t* box, int line, int chunk) {
  return box + chunk_offset(line, chunk);
}

// Loads a warp's fragment of A: the 16 rows from `row` on, and the i-th 16 numbers of the reduction.
template <bool kTranspose>
__device__ __forceinline__ void load_fragment_a(uint32_t (&r)[4], const uint8_t* a, int row, int i,
                                                int lane) {
  const int matrix = lane / 8, inside = lane % 8;
  if constexpr (kTranspose) {
    const int line = i * 16 + matrix / 2 * 8 + inside, column = row + matrix % 2 * 8;
    ldmatrix_x4_trans(r, place(a + column / kBoxColumns * box_bytes(kDepth), line, column % kBoxColumns / 8));
  } else {
    ldmatrix_x4(r, place(a, row + matrix % 2 * 8 + inside, i * 2 + matrix / 2));
  }
}

// Loads a warp's fragments of B: the 16 columns from `column` on, and the i-th 16 numbers of the reduction.
// r[0] and r[1] hold the first 8 columns, r[2] and r[3] the others.
template <bool kTranspose>
__device__ __forceinline__ void load_fragment_b(uint32_t (&r)[4], const uint8_t* b, int column, int i,
                                                int lane) {
  const int matrix = lane / 8, inside = lane % 8;
  if constexpr (kTranspose) {
    const int line = i * 16 + matrix % 2 * 8 + inside, own = column + matrix / 2 * 8;
    ldmatrix_x4_trans(r, place(b + own / kBoxColumns * box_bytes(kDepth), line, own % kBoxColumns / 8));
  } else {
    ldmatrix_x4(r, place(b, column + matrix / 2 * 8 + inside, i * 2 + matrix % 2));
  }
}

// Multiplies the operands of one stage, and adds the result to this warp's accumulators d. The warp's rows
// begin at 32 * down in the tile, and its columns at kWarpWidth * across.
template <class T, Form kForm>
__device__ __forceinline__ void multiply_stage(const uint8_t* a, const uint8_t* b, float (&d)[2][2][16],
                                               int down, int across, int lane) {
  constexpr bool kTransposeA = kForm == Form::kWeight, kTransposeB = kForm != Form::kForward;
  PMOE_UNROLL
  for (int i = 0; i < kDepth / 16; ++i) {
    uint32_t of_a[2][4];
    PMOE_UNROLL
    for (int m = 0; m < 2; ++m) load_fragment_a<kTransposeA>(of_a[m], a, down * 32 + m * 16, i, lane);
    PMOE_UNROLL
    for (int half = 0; half < 2; ++half) PMOE_UNROLL
    for (int j = 0; j < 2; ++j) {
      uint32_t of_b[4];
      load_fragment_b<kTransposeB>(of_b, b, across * kWarpWidth + half * 32 + j * 16, i, lane);
      PMOE_UNROLL
      for (int m = 0; m < 2; ++m) {
        mma_m16n8k16<T>(&d[m][half][j * 8], of_a[m], of_b[0], of_b[1]);
        mma_m16n8k16<T>(&d[m][half][j * 8 + 4], of_a[m], of_b[2], of_b[3]);
      }
    }
  }
}

// Computes all tiles of a block. All threads of the block call it.
//
// walk: the block's tiles; next(tile) returns false after the last.
// ready(tile): a function that all threads call before any row of the tile is loaded, for example to wait for
//     rows from other ranks.
// stored(tile): a function that all threads call when the whole tile is stored.
// pieces: for form kWeight, the runs of rows that are summed over, cut into steps of kDepth rows.
template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation, class Walk, class Ready,
          class Stored, class Pieces = OnePiece>
__device__ __forceinline__ void compute(const Problem& p, Shared& shared, Walk walk, const Ready& ready,
                                        const Stored& stored, Pieces pieces = {}) {
  constexpr bool kHalves = are_halves(kEpilogue, kActivation);
  const int thread = thread_again(), lane = thread % 32;
  const int down = thread / 32 / kWarpColumns, across = thread / 32 % kWarpColumns;
  const Loader<T, kForm, kHalves> loader(p, thread);
  Tile tile;
  while (walk.next(tile)) {
    ready(tile);
    float d[2][2][16];
    PMOE_UNROLL
    for (int i = 0; i < 64; ++i) d[i / 32][i / 16 % 2][i % 16] = 0.0f;
    typename Loader<T, kForm, kHalves>::Tall rows;
    if constexpr (kForm != Form::kWeight) loader.find_rows(tile, rows);
    const int end = kForm == Form::kWeight ? pieces.steps(tile) : ceil_div(p.k, kDepth);
    for (int step = 0; step < kStages - 1; ++step) {
      if (step < end) loader.load(shared.a[step], shared.b[step], tile, rows, step, pieces);
      cp_async_commit();
    }
    Ring<kStages> ring, filled;
    for (int i = 0; i < kStages - 1; ++i) filled.advance();
    for (int step = 0; step < end; ++step, ring.advance(), filled.advance()) {
      cp_async_wait<kStages - 2>();
      // After this barrier, the copies of all threads for this stage are complete, and no thread reads the
      // stage that is filled next any more.
      sync_block();
      const int next = step + kStages - 1;
      if (next < end) loader.load(shared.a[filled.stage], shared.b[filled.stage], tile, rows, next, pieces);
      cp_async_commit();
      multiply_stage<T, kForm>(shared.a[ring.stage], shared.b[ring.stage], d, down, across, lane);
    }
    cp_async_wait<0>();
    // From here on no thread reads operands of this tile, so warps may use the memory of the stages to
    // exchange results.
    sync_block();
    using Stores = Store<T, kForm, kEpilogue, kActivation, Exchange<false>>;
    PMOE_UNROLL
    for (int m = 0; m < 2; ++m) {
      const Exchange<false> exchange(shared.a[0] + thread / 32 * kExchangeBytes, lane);
      Stores store(p, tile, down * 32 + m * 16, lane, exchange);
      const int column = tile.column + across * (kHalves ? 32 : kWarpWidth);
      // One call of the epilogue takes both groups of 32 accumulated columns. Only for the gradient of the
      // hidden activation (kHiddenGradient) it takes one group, so there are two calls.
      constexpr int kBlocks = kHalves ? 1 : kWarpWidth / Stores::kBlockColumns;
      PMOE_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        typename Stores::Ahead ahead;
        store.fetch(column + i * Stores::kBlockColumns, ahead);
        store.block(d[m][i], d[m][1], column + i * Stores::kBlockColumns, ahead, [] {});
      }
      store.finish(tile.column / kColumns * kWarpColumns + across);
    }
    // The next tile's operands are about to be loaded into the stages, so every warp must have ended its
    // exchange, which uses the same memory.
    sync_block();
    stored(tile);
  }
}

// The tiles of one block, in the order in which it computes them.
//
// The first thread finds the index of the next tile, and passes it to all threads through shared memory. The
// indices of successive tiles are written to two words in turn. So a thread that is late still reads the
// right index: its word is written again only after the next sync_block(), which the late thread must reach
// first.
template <Form kForm, bool kHalves>
class BlockWalk {
 public:
  __device__ __forceinline__ BlockWalk(const Problem& p, NumberedShared& shared)
      : walk_(p.ends, p.experts, p.m, kHalves ? p.n / 2 : p.n, {}),
        counter_(p.next_tile),
        place_(shared.tile) {}

  __device__ __forceinline__ bool next(Tile& tile) {
    const auto add = [](uint32_t* counter, uint32_t one) { return atomicAdd(counter, one); };
    int* const place = place_ + turn_ % 2;
    if (threadIdx.x == 0) write(place, tile_number(counter_, add, blockIdx.x, gridDim.x, turn_));
    sync_block();
    ++turn_;
    return walk_.find(read(place), tile);
  }

 private:
  TileWalk<kForm, FixedShape<kRows, tile_columns(kHalves)>> walk_;
  uint32_t* counter_;
  int* place_;
  int turn_ = 0;
};

template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation>
__global__ void __launch_bounds__(kThreads, 1) grouped_gemm(const Problem p) {
  auto& shared = *reinterpret_cast<NumberedShared*>(shared_memory());
  const BlockWalk<kForm, are_halves(kEpilogue, kActivation)> walk(p, shared);
  const auto nothing = [](const Tile&) {};
  compute<T, kForm, kEpilogue, kActivation>(p, shared.gemm, walk, nothing, nothing);
}

}  // namespace pmoe::ampere

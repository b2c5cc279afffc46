// The grouped product (one matrix product for each expert's rows) on Hopper. In each block one warpgroup
// loads operands, and two warpgroups multiply them.
//
// The tensor memory accelerator loads operands into a ring of stages in shared memory, from which warpgroup
// products read them. (An operand whose rows are gathered is loaded by cp.async.) The grid is persistent:
// while the multiplying warpgroups store a tile, the loading warpgroup fills the ring for the next tile.
//
// Two blocks may form a cluster and share an operand; each block loads half of that operand into both blocks:
//
//   tiles of the two blocks    share   selected by                   loads from the L2 cache
//   one below the other        B       kCluster == 2                 a third less
//   side by side               A       Problem::blocks_across == 2   a sixth less
//
// In a cluster, a stage is empty when the multiplying warps of both blocks have released it, and full when
// the loads of both blocks have arrived.
#pragma once
#include "epilogue.h"
#include "gather.cuh"
#include "hopper_block.cuh"
#include "ring.h"

namespace pmoe::hopper {

#if PMOE_HOPPER_CODE

// Loads both operands of one stage by the tensor memory accelerator, in boxes of 64 columns. A line of a box
// is a part of a row of the operand as it lies in memory. The boxes of one stage (the shapes of A and B are
// in problem.h):
//
//   form      A                            B
//   forward   1 box, 128 rows x 64 of k    2 boxes, 128 rows x 64 of k each
//   input     1 box, 128 rows x 64 of k    4 boxes, 64 of k x 64 columns each
//   weight    2 boxes, 64 rows x 64 of m   4 boxes, 64 rows x 64 columns each
//
// In form forward, the two boxes of B are neighbours, or with SwiGLU the same rows of both halves, gate and
// up.
//
// In turns (hopper_turns.cuh) a tile has half as many columns. Form forward then has one box of B, or with
// SwiGLU two boxes of 64 rows. Form input has two boxes of B.
//
// Memory: the block's BlockMemory.
template <Form kForm, bool kHalves, int kCluster, class Memory = Shared>
struct Loader {
  const TensorMap& a_map;
  const TensorMap& b_map;
  const Problem& p;
  int rank;  // rank of the block in its cluster

  // Starts loading a block's part of operand A for one step along the reduction.
  //
  // a: where the operand is stored in shared memory.
  // full: the barrier that counts the bytes that have arrived.
  // begin: the first row of A that belongs to this tile's expert; for form kWeight, the first row of the run
  //     of rows that this step sums over.
  // depth: position of the step along the reduction, counted from `begin` for form kWeight.
  __device__ __forceinline__ void load_a(uint8_t* a, uint64_t* full, const Tile& tile, int begin,
                                         int depth) const {
    if (kCluster == 1 && p.blocks_across > 1) {
      uint8_t* half = a + rank * (kBytesA / 2);
      if constexpr (kForm == Form::kWeight)
        tma_load_2d_to(half, &a_map, full, tile.row + rank * kBoxColumns, begin + depth, 3);
      else
        tma_load_2d_to(half, &a_map, full, depth, begin + tile.row + rank * (kRows / 2), 3);
    } else if constexpr (kForm == Form::kWeight) {
      for (int i = 0; i < 2; ++i)
        tma_load_2d(a + i * box_bytes(kDepth), &a_map, full, tile.row + i * kBoxColumns, begin + depth);
    } else {
      tma_load_2d(a, &a_map, full, depth, begin + tile.row);
    }
  }

  __device__ __forceinline__ void load_b(uint8_t* b, uint64_t* full, const Tile& tile, int begin,
                                         int depth) const {
    constexpr int kLines = forward_lines(kHalves, Memory::kColumns);
    constexpr int kBoxes = Memory::kColumns / (kForm == Form::kForward ? kLines : kBoxColumns);
    constexpr int kOwn = kBoxes / kCluster;
    const int first = kCluster > 1 ? rank * kOwn : 0;
    for (int i = first; i < first + kOwn; ++i) {
      uint8_t* box = b + i * (Memory::kBytesB / kBoxes);
      if constexpr (kForm == Form::kForward) {
        const int apart = kHalves ? p.n / 2 : kLines;
        load_3d(box, full, depth, tile.column + i * apart, tile.expert);
      } else if constexpr (kForm == Form::kInput) {
        load_3d(box, full, tile.column + i * kBoxColumns, depth, tile.expert);
      } else {
        load_2d(box, full, tile.column + i * kBoxColumns, begin + depth);
      }
    }
  }

 private:
  static constexpr uint16_t kAll = (1 << kCluster) - 1;

  __device__ __forceinline__ void load_2d(uint8_t* box, uint64_t* full, int x, int y) const {
    if constexpr (kCluster > 1)
      tma_load_2d_to(box, &b_map, full, x, y, kAll);
    else
      tma_load_2d(box, &b_map, full, x, y);
  }

  __device__ __forceinline__ void load_3d(uint8_t* box, uint64_t* full, int x, int y, int z) const {
    if constexpr (kCluster > 1)
      tma_load_3d_to(box, &b_map, full, x, y, z, kAll);
    else
      tma_load_3d(box, &b_map, full, x, y, z);
  }
};

// Loads the operands of one tile, in all steps along the reduction. A single thread runs it.
template <Form kForm, bool kHalves, int kCluster, class Memory, class Pieces = OnePiece>
__device__ __forceinline__ void load_tile(const Loader<kForm, kHalves, kCluster, Memory>& loader,
                                          Memory& shared, const Tile& tile, Ring<Memory::kStages>& ring,
                                          Pieces pieces = {}) {
  for (int step = 0, end = steps<kForm>(loader.p, tile, pieces); step < end; ++step, ring.advance()) {
    const auto own = pieces.step(tile, step);
    uint64_t* full = &shared.full[ring.stage];
    mbarrier_wait(&shared.empty[ring.stage], ring.empty_parity());
    mbarrier_arrive_expect(full, kBytesA + Memory::kBytesB);
    loader.load_a(shared.a[ring.stage], full, tile, own.a_begin, own.depth);
    loader.load_b(shared.b[ring.stage], full, tile, own.b_begin, own.depth);
  }
}

// Loads the operands of all tiles of a block by the tensor memory accelerator. A single thread runs it.
template <Form kForm, bool kHalves, int kCluster, class Memory>
__device__ __forceinline__ void load_by_tma(const Loader<kForm, kHalves, kCluster, Memory>& loader,
                                            Memory& shared,
                                            BlockWalk<kForm, kHalves, kCluster, Memory> walk) {
  Ring<Memory::kStages> ring;
  const auto next = [&](Tile& tile) {
    walk.publish_tile(loader.p);
    return walk.next(tile, true);
  };
  for (Tile tile; next(tile);) load_tile(loader, shared, tile, ring);
}

// Loads the operands of all tiles of a block whose rows of A are gathered.
//
// All loading threads copy rows of A by cp.async; the first thread also starts the loads of B. When the
// copies of kLag later stages have been started, a thread waits until its own copies of a stage have arrived,
// and makes them visible to warpgroup products. Its warp then arrives at the stage's full barrier: it
// announces the stage.
template <class T, bool kHalves, int kCluster, class Memory>
__device__ __forceinline__ void load_by_copies(
    const Loader<Form::kForward, kHalves, kCluster, Memory>& loader, Memory& shared,
    BlockWalk<Form::kForward, kHalves, kCluster, Memory> walk) {
  const Problem& p = loader.p;
  const int thread = static_cast<int>(threadIdx.x);
  const BoxCopy<kLoaders, kRows> boxes(thread);
  // issued: number of stages, since the start, whose copies have been started. announced: number of stages
  // whose full barrier has been signalled. A stage's index and its parity are computed from these numbers,
  // because there are no registers for a Ring.
  uint32_t issued = 0, announced = 0;
  const auto announce_but = [&](uint32_t left) {
#pragma unroll 1
    for (; announced + left < issued; ++announced) {
      fence_proxy_async();
      sync_warp();
      if (thread % 32 == 0) mbarrier_arrive(&shared.full[announced % kStages]);
    }
  };
  const auto next = [&](Tile& found) {
    if (thread == 0) walk.publish_tile(p);
    sync_warp();
    return walk.next(found);
  };
  Tile tile;
  while (next(tile)) {
    int32_t source[BoxCopy<kLoaders, kRows>::kPerThread];
    find_sources(
        p.slot, p.top_k, tile.group_begin, tile.group_rows, [&](int i) { return tile.row + boxes.line(i); },
        source);
    for (int step = 0, end = steps<Form::kForward>(p, tile); step < end; ++step) {
      const uint32_t stage = issued % kStages;
      uint64_t* full = &shared.full[stage];
      mbarrier_wait(&shared.empty[stage], (issued / kStages % 2) ^ 1);
      if (thread == 0) {
        mbarrier_arrive_expect(full, kBytesB);
        loader.load_b(shared.b[stage], full, tile, tile.group_begin, step * kDepth);
      }
      boxes.template copy<T>(shared.a[stage], p.a, p.a_stride, source, step * kDepth, p.k);
      cp_async_commit();
      ++issued;
      cp_async_wait<kLag>();
      announce_but(kLag);
    }
  }
  cp_async_wait<0>();
  announce_but(0);
}

// Loads the operands of all tiles of a block of weight gradients whose rows of B are gathered.
//
// It works as load_by_copies() above, with A and B exchanged: all loading threads copy rows of B, and the
// first thread also starts the loads of A. Here each step has other rows, because the product sums over rows.
// So a thread finds the rows of the next step while its copies for the present step are on their way.
template <class T, class Memory>
__device__ __forceinline__ void load_rows_of_b_by_copies(
    const Loader<Form::kWeight, false, 1, Memory>& loader, Memory& shared,
    BlockWalk<Form::kWeight, false, 1, Memory> walk) {
  const Problem& p = loader.p;
  const int thread = static_cast<int>(threadIdx.x);
  const BoxCopy<kLoaders, kDepth> boxes(thread);
  // The counters, announce_but() and next() are those of load_by_copies(). They are written twice, because a
  // common function changes the machine code of the kernels that call load_by_copies().
  uint32_t issued = 0, announced = 0;
  const auto announce_but = [&](uint32_t left) {
#pragma unroll 1
    for (; announced + left < issued; ++announced) {
      fence_proxy_async();
      sync_warp();
      if (thread % 32 == 0) mbarrier_arrive(&shared.full[announced % kStages]);
    }
  };
  const auto next = [&](Tile& found) {
    if (thread == 0) walk.publish_tile(p);
    sync_warp();
    return walk.next(found);
  };
  Tile tile;
  while (next(tile)) {
    const int end = steps<Form::kWeight>(p, tile);
    int32_t source[BoxCopy<kLoaders, kDepth>::kPerThread];
    const auto find = [&](int step) {
      find_sources(
          p.slot, p.top_k, tile.group_begin, tile.group_rows,
          [&](int i) { return step * kDepth + boxes.line(i); }, source);
    };
    if (end == 0) {
      // An expert without rows: this tile has no step. If the last stages were only announced when the next
      // stage is loaded, many such tiles could come before. The multiplying warps would wait for these
      // stages, and the loading warps for a free place in the ring of tiles: a deadlock. (In other products
      // each tile has at least one step. The ring of tiles has two places, so kLag = 2 later stages are
      // always loaded.)
      cp_async_wait<0>();
      announce_but(0);
      continue;
    }
    find(0);
    for (int step = 0; step < end; ++step) {
      const uint32_t stage = issued % kStages;
      uint64_t* full = &shared.full[stage];
      mbarrier_wait(&shared.empty[stage], (issued / kStages % 2) ^ 1);
      if (thread == 0) {
        mbarrier_arrive_expect(full, kBytesA);
        loader.load_a(shared.a[stage], full, tile, tile.group_begin, step * kDepth);
      }
      PMOE_UNROLL
      for (int i = 0; i < kColumns / kBoxColumns; ++i)
        boxes.template copy<T>(shared.b[stage] + i * box_bytes(kDepth), p.b, p.b_stride, source,
                               tile.column + i * kBoxColumns, p.n);
      cp_async_commit();
      ++issued;
      if (step + 1 < end) find(step + 1);
      cp_async_wait<kLag>();
      announce_but(kLag);
    }
  }
  cp_async_wait<0>();
  announce_but(0);
}

// Returns the matrix descriptor of an operand in shared memory (PTX ISA, "matrix descriptor"). It says that
// the operand has a 128-byte swizzle, and 1024 bytes between groups of 8 lines. For a transposed operand it
// also says that the next 64 columns lie one box later.
//
// The shuffle makes the value equal in all lanes, so that the compiler computes it once for a warp, in
// uniform registers, where wgmma needs it.
__device__ __forceinline__ uint64_t descriptor(const void* p, bool transposed) {
  const uint32_t leading = transposed ? box_bytes(kDepth) / 16 : 1;
  const uint32_t low = shfl((shared_address(p) & 0x3FFFFu) >> 4 | leading << 16, 0);
  return low | (1024ull / 16) << 32 | 1ull << 62;
}

// Sets the lines of a stage beyond the expert's rows to zero, because they belong to the next expert. Both
// operands are cleared, because zero times infinity is not zero.
//
// first: the first line to clear.
template <class Memory>
__device__ __forceinline__ void clear_lines(Memory& shared, int stage, int first, int thread) {
  constexpr int kBoxes = (kBytesA + kBytesB) / box_bytes(kDepth);
  constexpr int kBoxesOfA = kBytesA / box_bytes(kDepth);
  const int chunks = (kDepth - first) * kChunks;
  for (int i = thread; i < kBoxes * chunks; i += kMultipliers) {
    const int box = i / chunks;
    uint8_t* base = box < kBoxesOfA ? shared.a[stage] + box * box_bytes(kDepth)
                                    : shared.b[stage] + (box - kBoxesOfA) * box_bytes(kDepth);
    store16_shared(base + first * kLineBytes + i % chunks * 16, Words{{0, 0, 0, 0}});
  }
  fence_proxy_async();
  sync_named(1, kMultipliers);
}

// Releases a stage to every block that loads into it: lane i of a warp arrives at the stage's empty barrier
// in block i of the cluster. An object takes one register.
class Release {
 public:
  template <class Memory>
  __device__ __forceinline__ explicit Release(Memory& shared) {
    const int lane = thread_again() & 31;
    if (lane < read(&shared.cluster)) empty_ = cluster_address(shared.empty, lane);
  }

  __device__ __forceinline__ void operator()(int stage) const {
    if (empty_ != 0) mbarrier_arrive_remote(empty_ + stage * sizeof(uint64_t));
  }

 private:
  uint32_t empty_ = 0;
};

// Stores all columns of a warp's 16 rows of a tile.
//
// kTileColumns: number of the tile's columns, or of its columns in each half of the hidden columns (SwiGLU).
// store: a Store that has been prepared for these rows.
// d: this thread's accumulators of these rows.
// column: the first column of the tile.
// ahead: the values that Store::fetch() has loaded for the first block; a gated store fetches them here.
template <int kTileColumns, class Stores>
__device__ __forceinline__ void store_blocks(Stores& store, const float* d, int column,
                                             typename Stores::Ahead& ahead) {
  // kApart: distance, in floats, between the two groups of accumulators that one call of block() takes. With
  // kHalves they are the same columns of gate and of up, half of this thread's accumulators apart. Otherwise
  // they are neighbouring groups of 32 columns, 16 floats apart. A gradient takes one group, and kApart is 0.
  constexpr int kStep = Stores::kBlockColumns, kBlocks = kTileColumns / kStep;
  constexpr int kApart = Stores::kHalves ? kTileColumns / 2 : kStep == 64 ? 16 : 0;
  unrolled<kBlocks>([&](auto index) {
    constexpr int i = decltype(index)::value;
    const int own = column + i * kStep;
    if constexpr (Stores::kGated && i == 0) store.fetch(own, ahead);
    const float* first = d + i * kStep / 2;
    store.block(first, first + kApart, own, ahead, [&] {
      if constexpr (i + 1 < kBlocks) store.fetch(own + kStep, ahead);
    });
  });
}

// A function object that makes the Buffer of a Store (epilogue.h), for results that pass through registers.
struct ThroughRegisters {
  __device__ __forceinline__ Exchange<true> operator()(void* buffer, int lane) const {
    return {buffer, lane};
  }
};

// Multiplies and stores all tiles of a block. All multiplying threads call it.
//
// walk: the block's tiles; next(tile) returns false after the last tile.
// stored(tile): a function that each multiplying thread calls when it has stored its part of the tile.
// ring: position in the ring of stages at which the first tile's operands arrive.
// pieces: for form kWeight, the runs of rows that are summed over, cut into steps of at most 64 rows.
// buffer_of(buffer, lane): a function that makes the Buffer of a Store in a warp's part of shared memory.
template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation, int kCluster, class Memory,
          class Walk, class Stored, class Pieces = OnePiece, class BufferOf = ThroughRegisters>
__device__ __forceinline__ void multiply(const Problem& p, Memory& shared, Walk walk, const Stored& stored,
                                         Ring<kStages> ring = {}, Pieces pieces = {},
                                         const BufferOf& buffer_of = {}) {
  constexpr bool kTransposeA = kForm == Form::kWeight, kTransposeB = kForm != Form::kForward;
  // Bytes by which an operand's address in shared memory advances from one wgmma instruction to the next.
  // Each instruction multiplies 16 rows or columns along the reduction (K in PTX): 32 bytes of a line, or 16
  // lines if the operand is stored transposed.
  constexpr int kForwardA = kTransposeA ? 16 * kLineBytes : 32;
  constexpr int kForwardB = kTransposeB ? 16 * kLineBytes : 32;
  constexpr bool kHalves = are_halves(kEpilogue, kActivation);
  const int thread = static_cast<int>(threadIdx.x) - kLoaders;
  const int half = thread / 128;
  Tile tile;
  while (walk.next(tile)) {
    float d[128];
    const int end = steps<kForm>(p, tile, pieces);
    if (end == 0) {
      PMOE_UNROLL
      for (int i = 0; i < 128; ++i) d[i] = 0.0f;
    }
    if constexpr (kEpilogue == Epilogue::kHiddenGradient && kActivation == Activation::kSwiglu) {
      const int self = thread_again() - kLoaders;
      prefetch_halves<T>(p, tile, self / 32 * 16, self % 32, kColumns);
    }
    const Release release(shared);
    int previous = 0;
    for (int step = 0; step < end; ++step, ring.advance()) {
      // Each half of the tile's rows is 8 KiB of A, transposed or not.
      const uint64_t a = descriptor(shared.a[ring.stage] + half * (kBytesA / 2), kTransposeA);
      const uint64_t b = descriptor(shared.b[ring.stage], kTransposeB);
      mbarrier_wait(&shared.full[ring.stage], ring.full_parity());
      if constexpr (kForm == Form::kWeight) {
        const auto own = pieces.step(tile, step);
        const int left = own.rows - own.depth;
        if (left < kDepth) clear_lines(shared, ring.stage, left, thread);
      }
      wgmma_fence();
      PMOE_UNROLL
      for (int i = 0; i < kDepth / 16; ++i)
        wgmma_m64n256k16<T, kTransposeA, kTransposeB>(d, a + i * (kForwardA / 16), b + i * (kForwardB / 16),
                                                      step + i > 0);
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        release(previous);
      }
      previous = ring.stage;
    }
    // The epilogue's first reads from memory are started before the last products are finished, to hide their
    // latency.
    const int self = thread_again() - kLoaders;
    const auto buffer = buffer_of(shared.exchange[self / 32], self % 32);
    using Stores = Store<T, kForm, kEpilogue, kActivation, std::remove_const_t<decltype(buffer)>>;
    Stores store(p, tile, self / 32 * 16, self % 32, buffer);
    typename Stores::Ahead ahead;
    if constexpr (!Stores::kGated) store.fetch(tile.column, ahead);
    // This wait is needed even if no step was computed: with a wait on some paths only, the compiler would
    // insert waits of its own.
    wgmma_wait<0>();
    pin_accumulators(d);
    if (end > 0) release(previous);
    store_blocks<tile_columns(kHalves)>(store, d, tile.column, ahead);
    store.finish(tile.column / kColumns);
    stored(tile);
  }
}

// Initialises all barriers of a block. One thread calls it.
//
// full_arrivals: how many arrivals complete the full barrier of a stage, besides the bytes that the tensor
//     memory accelerator must have written.
// cluster: number of blocks in the cluster.
// walking_loaders: how many loading warps of a block read tiles from the tile ring, and so arrive at the
//     ring's empty barriers; 1 if a single thread reads them.
// releasing_warps: how many warps of a block multiply the operands of a stage, and so release it.
template <class Memory>
__device__ __forceinline__ void init_barriers(Memory& shared, int full_arrivals, int cluster,
                                              int walking_loaders, int releasing_warps = kMultiplierWarps) {
  shared.cluster = cluster;
  for (int i = 0; i < Memory::kStages; ++i) {
    mbarrier_init(&shared.full[i], full_arrivals);
    mbarrier_init(&shared.empty[i], releasing_warps * cluster);
  }
  for (int i = 0; i < Memory::kTilesAhead; ++i) {
    mbarrier_init(&shared.tiles.full[i], 1);
    mbarrier_init(&shared.tiles.empty[i], (kMultiplierWarps + walking_loaders) * cluster);
  }
  fence_mbarrier_init();
}

// Waits until the barriers of all blocks of the cluster are initialised. Before this, no thread may arrive at
// a barrier.
//
// blocks: number of blocks in the cluster.
__device__ __forceinline__ void sync_before(int blocks) {
  if (blocks > 1)
    sync_cluster();
  else
    sync_block();
}

// Waits until the other block of the cluster is done. Until then the other block may load into this block's
// shared memory, or arrive at its barriers, so this block must not end.
__device__ __forceinline__ void sync_after(int blocks) {
  if (blocks > 1) sync_cluster();
}

// Computes all tiles of a block. All its threads call it.
//
// Memory: the block's BlockMemory.
// buffer_of: as for multiply().
// kGathersB: whether the rows of B are gathered; only for form kWeight.
template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation, int kCluster, class Memory,
          bool kGathersB = false, class BufferOf>
__device__ __forceinline__ void compute_block(const TensorMap& a_map, const TensorMap& b_map,
                                              const Problem& p, const BufferOf& buffer_of) {
  constexpr bool kHalves = are_halves(kEpilogue, kActivation);
  Memory& shared = *reinterpret_cast<Memory*>(shared_memory());
  static_assert(!kGathersB || (kForm == Form::kWeight && kCluster == 1), "no other product gathers B");
  const bool copies = kGathersB || (kForm == Form::kForward && p.a_gathered);
  if (threadIdx.x == 0) {
    if (kGathersB || !copies) tma_prefetch(&a_map);
    if (!kGathersB) tma_prefetch(&b_map);
    init_barriers(shared, copies ? 1 + kLoaders / 32 : 1, kCluster * p.blocks_across,
                  copies ? kLoaders / 32 : 1);
  }
  sync_before(kCluster * p.blocks_across);
  // Values that both branches need are computed in each branch, and not here, because a thread has few
  // registers at this point.
  using Walk = BlockWalk<kForm, kHalves, kCluster, Memory>;
  if (threadIdx.x < kLoaders) {
    fewer_registers<kLoaderRegisters>();
    if (threadIdx.x == 0) Walk::begin(p);
    const Loader<kForm, kHalves, kCluster, Memory> loader{a_map, b_map, p, rank_in_cluster()};
    if constexpr (kGathersB) {
      load_rows_of_b_by_copies<T>(loader, shared, Walk());
    } else if (!copies) {
      if (threadIdx.x == 0) load_by_tma(loader, shared, Walk());
    } else if constexpr (kForm == Form::kForward) {
      load_by_copies<T>(loader, shared, Walk());
    }
  } else {
    more_registers<kMultiplierRegisters>();
    multiply<T, kForm, kEpilogue, kActivation, kCluster>(
        p, shared, Walk(), [](const Tile&) {}, {}, OnePiece{}, buffer_of);
  }
  sync_after(kCluster * p.blocks_across);
}

#endif  // PMOE_HOPPER_CODE

template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation, int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                 const Problem p) {
#if PMOE_HOPPER_CODE
  compute_block<T, kForm, kEpilogue, kActivation, kCluster, Shared>(a_map, b_map, p, ThroughRegisters{});
#endif
}

}  // namespace pmoe::hopper

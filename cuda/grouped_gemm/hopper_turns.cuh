// The grouped product on Hopper with two multiplying warpgroups that take turns: while one warpgroup stores
// its tile, the other multiplies the next tile. The tensor memory accelerator stores the results (boxes.cuh),
// so a warpgroup does not wait for memory before it goes on to its next tile. Only the gradient of SwiGLU is
// stored through registers, because that kernel also reads T_M through the same shared memory.
//
// In hopper.cuh both warpgroups multiply the same tile of 128 x 256, so the tensor cores are idle while the
// tile is stored. Here each tile has 128 columns, and one warpgroup has all 128 rows of it. The loading
// warpgroup fills one ring of stages with the operands of all tiles, in the order of the tiles:
//
//   stages of            tile 0      tile 1      tile 2      tile 3
//   first warpgroup      multiplies  stores      multiplies  stores
//   second warpgroup                 multiplies  stores      multiplies
//
// Each warpgroup goes past the stages of the other's tiles. It begins a tile only when all operands of the
// tile before have arrived, which the other warpgroup signals (Shared::loaded). The reason is that a wait at
// a barrier names only the parity of a phase. After the signal, the full barrier of each stage is in the
// phase whose end the tile awaits, or in the next one, and these two have different parities. Without the
// signal, the barrier could be in an earlier phase, which has the same parity as the next one. The wait would
// then end at once, and the tile would multiply operands that have not arrived:
//
//   tiles of 6 steps, kStages = 6    stage 0 is still being loaded for tile 0: its full barrier is in phase 0
//                                    tile 1 awaits the end of phase 1. The phase before phase 0 has the same
//                                    parity and counts as ended, so tile 1 does not wait
//
// The tensor cores stay busy while a warpgroup waits for the signal: the other warpgroup multiplies its tile.
//
// A step of a smaller tile loads more bytes for each multiplication: 32 KiB, where a step of hopper.cuh loads
// 48 KiB for twice as many multiplications. So the two blocks of a cluster should share operand A, with tiles
// side by side. Then each block loads 24 KiB a step.
#pragma once
#include "hopper.cuh"

namespace pmoe::hopper {

namespace turns {

constexpr int kColumns = 128, kStages = 6;
// A warpgroup reads the tile of the other warpgroup from the ring of tiles only after it has stored its own
// tile. The ring has four places, so that loading does not wait for this.
constexpr int kTilesAhead = 4;
constexpr int kWarps = kMultiplierWarps / 2;  // of a warpgroup

// Values that a warp needs again during its store and after it. They are in shared memory, because the store
// leaves no registers for them.
struct Kept {
  uint32_t num_read;  // the warp's position in its walk
  int column;         // the first column of its tile
};

struct Shared : BlockMemory<kColumns, kStages, kTilesAhead, kBoxesOfWarp> {
  Kept kept[kMultiplierWarps];
  // Phase t / 2 of loaded[t % 2] ends when the operands of tile t have arrived. Each warp that multiplies the
  // tile arrives once.
  uint64_t loaded[2];
};
constexpr int kSharedBytes = sizeof(Shared);

#if PMOE_HOPPER_CODE

// Returns the buffer through which a warp's results pass.
template <Epilogue kEpilogue>
__device__ __forceinline__ auto buffer_of(const StoreMaps& maps, void* buffer, int lane) {
  if constexpr (kEpilogue == Epilogue::kHiddenGradient)
    return Exchange<true>(buffer, lane);
  else
    return Boxes(maps, buffer, lane);
}

// Multiplies and stores every second tile of a block. All multiplying threads call it.
//
// maps: the tensor maps of the results.
// walk: the block's tiles; next(tile) returns false after the last tile.
template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation, class Walk>
__device__ __forceinline__ void multiply(const Problem& p, const StoreMaps& maps, Shared& shared, Walk walk) {
  static_assert(kForm != Form::kWeight, "not computed in turns");
  constexpr bool kTransposeB = kForm == Form::kInput;
  constexpr int kForwardA = 32, kForwardB = kTransposeB ? 16 * kLineBytes : 32;
  constexpr int kHalfRows = kRows / 2;  // rows of one wgmma instruction
  constexpr int kTileColumns = are_halves(kEpilogue, kActivation) ? kColumns / 2 : kColumns;
  constexpr int kBufferBytes = sizeof(shared.exchange[0]);
  Tile tile;
  // The second warpgroup goes past the first tile.
  if (threadIdx.x >= kLoaders + kMultipliers / 2 && !walk.next(tile)) return;
  while (walk.next(tile)) {
    if (const uint32_t t = walk.num_read() - 1)  // the tile's number
      mbarrier_wait(&shared.loaded[(t - 1) % 2], (t - 1) / 2 % 2);
    // The position in the ring of stages is computed once more for each tile, because the store leaves no
    // register for it. All tiles have the same number of steps.
    const int end = steps<kForm>(p, tile);
    auto ring = Ring<kStages>::after((walk.num_read() - 1) * static_cast<uint32_t>(end));
    float d[2][64];
    if (end == 0) {
      PMOE_UNROLL
      for (int i = 0; i < 64; ++i) d[0][i] = d[1][i] = 0.0f;
    }
    if constexpr (kEpilogue == Epilogue::kHiddenGradient) {
      const int self = thread_again() % 128;
      for (int half = 0; half < 2; ++half)
        prefetch_halves<T>(p, tile, half * kHalfRows + self / 32 * 16, self % 32, kColumns);
    }
    const Release release(shared);
    int previous = 0;
    for (int step = 0; step < end; ++step, ring.advance()) {
      const uint64_t a = descriptor(shared.a[ring.stage], false);
      const uint64_t b = descriptor(shared.b[ring.stage], kTransposeB);
      mbarrier_wait(&shared.full[ring.stage], ring.full_parity());
      wgmma_fence();
      PMOE_UNROLL
      for (int i = 0; i < kDepth / 16; ++i) {
        PMOE_UNROLL
        for (int half = 0; half < 2; ++half)
          wgmma_m64n128k16<T, false, kTransposeB>(d[half],
                                                  a + half * (kBytesA / 2 / 16) + i * (kForwardA / 16),
                                                  b + i * (kForwardB / 16), step + i > 0);
      }
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        release(previous);
      }
      previous = ring.stage;
    }
    // The warp's lanes have come here together, because wgmma is an instruction of the whole warp.
    if (thread_again() % 32 == 0) mbarrier_arrive(&shared.loaded[(walk.num_read() - 1) % 2]);
    wgmma_wait<0>();
    pin_accumulators(d[0]);
    pin_accumulators(d[1]);
    if (end > 0) release(previous);
    const int self = thread_again() - kLoaders;
    // All lanes write the same values, and each reads what it wrote.
    write(&shared.kept[self / 32].num_read, walk.num_read());
    write(&shared.kept[self / 32].column, tile.column);
    // From here on, the warp's index is computed from `offset`, so that only this one value stays in a
    // register.
    int offset = self / 32 * kBufferBytes;
    make_opaque(offset);
    const auto kept = [&]() -> const Kept& { return shared.kept[offset / kBufferBytes]; };
    const auto buffer = buffer_of<kEpilogue>(maps, shared.exchange[0] + offset, self % 32);
    using Stores = Store<T, kForm, kEpilogue, kActivation, std::remove_const_t<decltype(buffer)>>;
    Stores store(p, tile, self / 32 % kWarps * 16, self % 32, buffer);
    unrolled<2>([&](auto half) {
      constexpr int kHalf = decltype(half)::value;
      if constexpr (kHalf) store.move_down(kHalfRows);
      const int column = kHalf ? read(&kept().column) : tile.column;
      typename Stores::Ahead ahead;
      store_blocks<kTileColumns>(store, d[kHalf], column, ahead);
      store.finish(column / kColumns);
    });
    walk = Walk(read(&kept().num_read));
    if (!walk.next(tile)) return;  // a tile of the other warpgroup
  }
}

#endif  // PMOE_HOPPER_CODE

}  // namespace turns

template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_in_turns(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                          const __grid_constant__ StoreMaps maps, const Problem p) {
#if PMOE_HOPPER_CODE
  turns::Shared& shared = *reinterpret_cast<turns::Shared*>(shared_memory());
  if (threadIdx.x == 0) {
    tma_prefetch(&a_map);
    tma_prefetch(&b_map);
    for (uint64_t& loaded : shared.loaded) mbarrier_init(&loaded, turns::kWarps);
    init_barriers(shared, 1, p.blocks_across, 1, turns::kWarps);
  }
  sync_before(p.blocks_across);
  constexpr bool kHalves = are_halves(kEpilogue, kActivation);
  using Walk = BlockWalk<kForm, kHalves, 1, turns::Shared>;
  if (threadIdx.x < kLoaders) {
    fewer_registers<kLoaderRegisters>();
    if (threadIdx.x == 0) {
      Walk::begin(p);
      load_by_tma(Loader<kForm, kHalves, 1, turns::Shared>{a_map, b_map, p, rank_in_cluster()}, shared,
                  Walk());
    }
  } else {
    more_registers<kMultiplierRegisters>();
    turns::multiply<T, kForm, kEpilogue, kActivation>(p, maps, shared, Walk());
    Boxes::wait_for_stores();
  }
  sync_after(p.blocks_across);
#endif
}

}  // namespace pmoe::hopper

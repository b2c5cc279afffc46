// The grouped product of hopper.cuh, with results that the tensor memory accelerator stores (boxes.cuh).
//
// Both warpgroups multiply the same tile of 128 x 256. In hopper.cuh they begin the next tile when the rows
// of this tile are on their way to memory. Here they begin it earlier, when these rows are in shared memory:
//
//   registers        multiplies tile 0   to boxes   multiplies tile 1   to boxes
//   shared memory                        box, box   box, box
//   memory                                 stores of tile 0             stores of tile 1
//
// A warp stores its rows of a plain tile as four boxes, and has shared memory for two. The third and the
// fourth box wait until the first and the second have been read. The first two boxes of the next tile wait
// until the third and the fourth have been read. There is no shared memory for more boxes: stages take 192
// KiB, boxes 32 KiB.
//
// For weight gradients there is also a kernel that gathers the rows of B from tokens while it loads them.
// Then no other kernel has to copy the tokens into sorted rows first.
#pragma once
#include "hopper.cuh"

namespace pmoe::hopper {

using BoxedShared = BlockMemory<kColumns, kStages, kTilesAhead, kBoxesOfWarp>;

constexpr int kBoxedSharedBytes = sizeof(BoxedShared);

// kGathersB: whether the rows of B are gathered (weight gradients only).
template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation, int kCluster,
          bool kGathersB = false>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_by_boxes(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                          const __grid_constant__ StoreMaps maps, const Problem p) {
#if PMOE_HOPPER_CODE
  const auto boxes = [&](void* buffer, int lane) { return Boxes(maps, buffer, lane); };
  compute_block<T, kForm, kEpilogue, kActivation, kCluster, BoxedShared, kGathersB>(a_map, b_map, p, boxes);
  Boxes::wait_for_stores();
#endif
}

}  // namespace pmoe::hopper

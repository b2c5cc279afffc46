// Routing in one launch. Phase 1: every block chooses its tokens' experts and counts them. The grid meets
// once. Phase 2: every block finds where its rows begin from the counts of its chunk's blocks, and gives its
// slots their places in token order; one more block, which owns no tokens, adds up the counts and the loss.
// Nothing is added in an order that could differ from launch to launch: atomics count, they do not sum floats
// or hand out places.
//
// See layout.h for the cut and the letters. The grid is G + 1 blocks, all of them resident.
#pragma once
#include "route/choose.cuh"
#include "route/place.cuh"

namespace pmoe::route {

// One block a multiprocessor: more blocks would make each read more counts.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) forward_kernel(const __grid_constant__ Forward a) {
  const Place<S> at;
  const Shared<S> shared(a.sizes.num_experts);
  const bool adds_up = static_cast<int>(blockIdx.x) == a.sizes.blocks();
  if (!adds_up) {
    Sums<S> sums;
    sums.clear();
    choose_tokens<S>(a, at, shared, sums);
    tell<S>(a, at, shared, sums);
  }
  meet_grid(a.workspace.barrier, gridDim.x);
  if (adds_up)
    add_up<S>(a, at, shared);
  else
    place_rows<S>(a, at, shared);
}

}  // namespace pmoe::route

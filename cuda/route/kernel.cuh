// Routing in two launches on one stream. The first: every block chooses its tokens' experts and counts them.
// The second: every block finds where its rows begin from the counts of its chunk's blocks, and gives its
// slots their places in token order; one more block, which owns no tokens, adds up the counts and the loss.
// No block waits for another one, so the kernels run beside whatever else is on the device, on as few
// multiprocessors as are free. Nothing is added in an order that could differ from launch to launch: atomics
// count, they do not sum floats or hand out places.
//
// See layout.h for the cut and the letters: G blocks, and G + 1.
#pragma once
#include "route/choose.cuh"
#include "route/place.cuh"

namespace pmoe::route {

// One block a multiprocessor: more blocks would make each read more counts.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) choose_kernel(const __grid_constant__ Forward a) {
  const Place<S> at;
  const Shared<S> shared(a.sizes.num_experts);
  Sums<S> sums;
  sums.clear();
  choose_tokens<S>(a, at, shared, sums);
  tell<S>(a, at, shared, sums);
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) place_kernel(const __grid_constant__ Forward a) {
  const Place<S> at;
  const Shared<S> shared(a.sizes.num_experts);
  if (static_cast<int>(blockIdx.x) == a.sizes.blocks())
    add_up<S>(a, at, shared);
  else
    place_rows<S>(a, at, shared);
}

}  // namespace pmoe::route

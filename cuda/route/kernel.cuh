// Routing in two kernels, launched one after the other on one stream.
//
// choose_kernel: every block chooses the experts of its tokens, and counts its slots for each expert.
// place_kernel: every block computes, from the counts of all blocks of its chunk, where its rows for each
//     expert begin, and gives its slots their positions in token order. One more block, which has no tokens,
//     adds up the counts and the loss, and writes the messages of row counts.
//
// No block waits for another block. So the kernels can run beside other work on the device, even if only one
// multiprocessor is free. Results are the same in every launch: atomics are only used to count. Floats are
// summed, and positions assigned, in a fixed order.
//
// layout.h explains how tokens are divided among blocks, and the letters. The grid of choose_kernel has G
// blocks, that of place_kernel G + 1.
#pragma once
#include "route/choose.cuh"
#include "route/place.cuh"

namespace pmoe::route {

// There are no more blocks than multiprocessors, or only one for each chunk (sizes_of in launch.cu). With
// more blocks, each block of place_kernel would have to read more counts.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) choose_kernel(const __grid_constant__ Forward a) {
  const Place<S> at;
  const Shared<S> shared(a.sizes.num_experts);
  Sums<S> sums;
  sums.clear();
  choose_tokens<S>(a, at, shared, sums);
  write_sums<S>(a, at, shared, sums);
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

// The arguments and the shared memory of the two forward kernels of the routing.
#pragma once
#include "counts/layout.h"
#include "route/tokens.cuh"

namespace pmoe::route {

// The arguments of the two forward kernels: T tokens, E experts, K choices, N = T*K slots, n chunks.
//
// fault: receives not_finite if a logit is infinite or NaN, else 0.
// pack: the messages of row counts, in which chunks are the bins. No messages are written if pack.sent is
// null.
struct Forward {
  Sizes sizes;
  Rows rows;
  const float* logits_TE;
  bool normalize;
  float balance_scale;  // E / (N * T)
  float z_scale;        // weight of the z-loss divided by T; 0 leaves the z-loss out
  float* weight_TK;
  int32_t* expert_TK;
  int32_t* position_TK;
  int32_t* slot_N;
  int32_t* counts_nE;
  int32_t* ends_nE;
  float* l_aux;
  Workspace workspace;
  int64_t* fault;
  int32_t not_finite;
  counts::Pack pack;
};

// Pointers to the parts of a block's shared memory in the forward kernels. ForwardShared (layout.h) has the
// offsets.
template <class S>
struct Shared {
  int32_t* rows_WE;  // number of rows of each warp by expert; in place_rows(), of the warps before it
  float* sum_W;      // a partial sum of each warp
  uint32_t* area;    // scratch memory

  __device__ explicit Shared(int num_experts) {
    auto* const words = reinterpret_cast<uint32_t*>(shared_memory());
    rows_WE = reinterpret_cast<int32_t*>(words);
    sum_W = reinterpret_cast<float*>(words + ForwardShared<S>::sums(num_experts));
    area = words + ForwardShared<S>::area(num_experts);
  }

  __device__ float* floats(int word) const { return reinterpret_cast<float*>(area + word); }
  __device__ int32_t* ints(int word) const { return reinterpret_cast<int32_t*>(area + word); }
};

}  // namespace pmoe::route

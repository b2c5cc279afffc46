// The kernel that computes the gradient of the logits, from the gradients of the routing weights and of the
// loss l_aux.
//
// For one token, x_e are its logits and p_e its softmax, which is computed once more. c_k are its chosen
// experts, w_k their weights, and g_k the gradients of these weights. a is the gradient of l_aux, and load_e
// the number of all tokens' slots for expert e. Then
//
//   h_k = g_k, or (g_k - sum_j g_j w_j) / sum_j p_cj if weights are normalised
//
//   dp_e = a * balance_scale * load_e + (h_k if e = c_k)
//
//   dx_e = p_e * (dp_e - sum_f p_f dp_f + a * z_scale * 2 * logsumexp(x))
//
// layout.h says which lane has which experts, and explains the letters. The gradient of a routing weight may
// be given as P partial sums, which this kernel adds up.
#pragma once
#include "route/tokens.cuh"

namespace pmoe::route {

// The kernel's arguments.
struct Backward {
  Rows rows;
  int32_t top_k;
  int32_t num_chunks;
  const float* logits_TE;
  const int32_t* expert_TK;
  const float* weight_TK;
  const int32_t* counts_nE;
  bool normalize;
  float balance_scale;
  float z_scale;
  const float* grad_weight_TK;  // or null
  const float* partial_PN;      // partial sums for each sorted row; used if grad_weight_TK is null
  const int32_t* position_TK;   // needed with partial_PN
  int32_t num_partials;
  const float* grad_l_aux;  // a single number, or null
  float* grad_logits_TE;
};

// Returns the gradient of a slot's routing weight: the number in grad_weight_TK, or the sum of P partial
// sums. If the caller gave neither, it is 0.
__device__ __forceinline__ float weight_gradient(const Backward& a, int64_t slot) {
  if (a.grad_weight_TK != nullptr) return a.grad_weight_TK[slot];
  if (a.partial_PN == nullptr) return 0.0f;
  const int64_t num_slots = a.rows.num_tokens * a.top_k;
  const float* partial = a.partial_PN + a.position_TK[slot];
  float sum = 0.0f;
  for (int p = 0; p < a.num_partials; ++p, partial += num_slots) sum += *partial;
  return sum;
}

// The choices of a warp's tokens, in shared memory: for each choice, the gradient of its routing weight, the
// weight, and the expert.
struct Choices {
  float* gradient;
  float* weight;
  int32_t* expert;

  template <class S>
  __device__ static Choices of_warp(int warp, int top_k) {
    const int staged = S::kTokens * top_k;
    auto* const words = reinterpret_cast<float*>(shared_memory()) + 3 * staged * warp;
    return {words, words + staged, reinterpret_cast<int32_t*>(words + 2 * staged)};
  }

  __device__ Choices from(int i) const { return {gradient + i, weight + i, expert + i}; }
};

// Copies the choices of a warp's tokens to shared memory.
//
// first_slot, count: the tokens' (token, choice) slots: `count` slots from first_slot on.
__device__ __forceinline__ void stage_choices(const Backward& a, int64_t first_slot, int count, int lane,
                                              const Choices& staged) {
  PMOE_ROLLED
  for (int i = lane; i < count; i += 32) {
    staged.gradient[i] = weight_gradient(a, first_slot + i);
    staged.weight[i] = a.weight_TK[first_slot + i];
    staged.expert[i] = a.expert_TK[first_slot + i];
  }
}

// Computes dp, the gradient of the probabilities, for the experts of this lane. The part that comes from the
// balance loss is not included.
template <class S>
__device__ __forceinline__ void probability_gradient(const Choices& chosen_K, int choices, bool normalize,
                                                     int of_token, const float (&p)[S::kPer],
                                                     float (&dp)[S::kPer]) {
  uint32_t mine = 0;
  float inner = 0.0f;
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) dp[j] = 0.0f;
  PMOE_ROLLED
  for (int k = 0; k < choices; ++k) {
    const float gradient = chosen_K.gradient[k];
    inner += gradient * chosen_K.weight[k];
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) {
      if (S::expert(of_token, j) != chosen_K.expert[k]) continue;
      dp[j] = gradient;
      mine |= 1u << j;
    }
  }
  if (!normalize) return;
  float chosen = 0.0f;
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) chosen += mine >> j & 1 ? p[j] : 0.0f;
  const float inverse = 1.0f / token_sum<S>(chosen);
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j)
    if (mine >> j & 1) dp[j] = (dp[j] - inner) * inverse;
}

// Computes dx, the gradient of the logits, for the experts of this lane.
//
// z: the term of the z-loss: a * z_scale * 2 * logsumexp(x).
template <class S>
__device__ __forceinline__ void softmax_gradient(const float (&p)[S::kPer], const float (&dp)[S::kPer],
                                                 float z, float (&dx)[S::kPer]) {
  float inner = 0.0f;
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) inner += p[j] * dp[j];
  inner = token_sum<S>(inner);
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) dx[j] = p[j] * (dp[j] - inner + z);
}

// Computes the part of dp (the gradient of the probabilities) that comes from the balance loss, for each
// expert of this lane: grad_l_aux * balance_scale * load_e.
template <class S>
__device__ __forceinline__ void balance_gradient(const Backward& a, float grad_l_aux, int of_token,
                                                 float (&added)[S::kPer]) {
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) {
    const int e = S::expert(of_token, j);
    int32_t load = 0;
    if (e < a.rows.num_experts && a.grad_l_aux != nullptr) PMOE_ROLLED
    for (int chunk = 0; chunk < a.num_chunks; ++chunk) load += a.counts_nE[chunk * a.rows.num_experts + e];
    added[j] = a.grad_l_aux == nullptr ? 0.0f : grad_l_aux * a.balance_scale * static_cast<float>(load);
  }
}

// Computes the gradient of all logits. Each warp takes a contiguous range of tokens.
template <class S>
__global__ void __launch_bounds__(S::kThreads) backward_kernel(const __grid_constant__ Backward a) {
  const Place<S> at;
  const int top_k = a.top_k;
  const Choices staged = Choices::of_warp<S>(at.warp, top_k);
  const Choices of_token = staged.from(at.token * top_k);
  const float grad_l_aux = a.grad_l_aux == nullptr ? 0.0f : *a.grad_l_aux;
  float added[S::kPer];
  balance_gradient<S>(a, grad_l_aux, at.of_token, added);

  const int64_t part = int64_t{blockIdx.x} * S::kWarps + at.warp, parts = int64_t{gridDim.x} * S::kWarps;
  const int64_t end = bound(a.rows.num_tokens, part + 1, parts);
  PMOE_ROLLED
  for (int64_t first = bound(a.rows.num_tokens, part, parts); first < end; first += S::kTokens) {
    const int64_t token = first + at.token;
    const bool valid = token < end;
    float x[S::kPer], p[S::kPer], dp[S::kPer];
    load_row<S>(a.logits_TE, a.rows, token, valid, at.of_token, x);
    stage_choices(a, first * top_k, static_cast<int>(smaller(int64_t{S::kTokens}, end - first)) * top_k,
                  at.lane, staged);
    sync_warp();
    const Softmax found = softmax<S>(x, p);
    const float inverse = 1.0f / found.sum;
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) p[j] *= inverse;
    probability_gradient<S>(of_token, valid ? top_k : 0, a.normalize, at.of_token, p, dp);
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) dp[j] += added[j];
    const float z = a.z_scale == 0.0f ? 0.0f : grad_l_aux * a.z_scale * 2.0f * found.log_sum();
    softmax_gradient<S>(p, dp, z, x);
    if (valid) store_row<S>(a.grad_logits_TE, a.rows, token, at.of_token, x);
    sync_warp();
  }
}

}  // namespace pmoe::route

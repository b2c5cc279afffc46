// The first of the two forward kernels (kernel.cuh): chooses experts and weights for a block's tokens, and
// sums the numbers that the losses need.
#pragma once
#include "route/block.cuh"
#include "route/merge.cuh"
#include "route/whole_warp.cuh"

namespace pmoe::route {

// The best expert that is still free to be a token's next choice, among those of one lane, or of all lanes
// that share the token. Key 0 means that no expert is left.
struct Candidate {
  uint32_t key;
  int32_t expert;

  __device__ bool beats(const Candidate& other) const {
    return key > other.key || (key == other.key && expert < other.expert);
  }
};

// Returns the best candidate of all lanes of a token.
template <class S>
__device__ __forceinline__ Candidate best_of_token(Candidate best) {
  PMOE_UNROLL
  for (int mask = 1; mask < S::kLanes; mask *= 2) {
    const Candidate other{shfl_xor(best.key, mask), shfl_xor(best.expert, mask)};
    if (other.beats(best)) best = other;
  }
  return best;
}

// Chooses experts as choose() does. For each choice, it takes the maximum over the scores of all experts that
// are not chosen yet.
template <class S>
__device__ __forceinline__ void choose_by_maxima(const float (&x)[S::kPer], const float (&numerator)[S::kPer],
                                                 float sum, int num_experts, int top_k, int of_token,
                                                 float* probability_K, int32_t* expert_K) {
  uint32_t key[S::kPer];
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) key[j] = S::expert(of_token, j) < num_experts ? order_key(x[j]) : 0;
  PMOE_ROLLED
  for (int k = 0; k < top_k; ++k) {
    Candidate mine{0, S::kExperts};
    float value = 0.0f;
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) {
      if (key[j] <= mine.key) continue;  // of equal scores the first expert wins
      mine = {key[j], S::expert(of_token, j)};
      value = numerator[j];
    }
    const int32_t chosen = best_of_token<S>(mine).expert;
    if (chosen != mine.expert) continue;
    probability_K[k] = value / sum;
    expert_K[k] = chosen;
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j)
      if (S::expert(of_token, j) == chosen) key[j] = 0;
  }
}

// Chooses the token's top_k experts, best first.
//
// x: scores of this lane's experts.
// numerator, sum: the softmax; a probability is numerator / sum.
// at: the position of this thread.
// exists: whether the token exists. If not, the results have no meaning.
// probability_K, expert_K: results, in the shared memory for this token's choices.
template <class S>
__device__ __forceinline__ void choose(const float (&x)[S::kPer], const float (&numerator)[S::kPer],
                                       float sum, int num_experts, int top_k, const Place<S>& at, bool exists,
                                       float* probability_K, int32_t* expert_K) {
  if constexpr (S::kMerges) {
    const auto merged = [&](auto best) {
      return choose_by_merging<S, decltype(best)::value>(x, numerator, sum, top_k, at, exists, probability_K,
                                                         expert_K);
    };
    if (top_k <= 4) {
      if (merged(Index<4>{})) return;
    } else if (top_k <= 8) {
      if (merged(Index<8>{})) return;
    } else if constexpr (S::kLanes >= 16) {
      if (top_k <= kMostMerged && merged(Index<kMostMerged>{})) return;
    }
  }
  if constexpr (S::kSortsLanes)
    choose_by_warp<S>(x, numerator, sum, num_experts, top_k, at.of_token, probability_K, expert_K);
  else
    choose_by_maxima<S>(x, numerator, sum, num_experts, top_k, at.of_token, probability_K, expert_K);
}

// Sums that a lane collects over its warp's tokens, for the losses; and whether a logit is infinite or NaN.
template <class S>
struct Sums {
  float probability[S::kPer];
  float z;  // squared logsumexp; the same in all lanes of a token
  bool is_strange;

  __device__ void clear() {
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) probability[j] = 0.0f;
    z = 0.0f;
    is_strange = false;
  }

  // Sets is_strange if a logit is infinite or NaN. Logits of experts that do not exist are -inf and do not
  // count.
  __device__ void note(const float (&x)[S::kPer], int num_experts, int of_token) {
    constexpr uint32_t kInfinite = 0x7F800000u;
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j)
      is_strange |= (bits_of(x[j]) & kInfinite) == kInfinite && S::expert(of_token, j) < num_experts;
  }

  __device__ void add(const float (&numerator)[S::kPer], const Softmax& found) {
    const float inverse = 1.0f / found.sum;
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) probability[j] += numerator[j] * inverse;
    const float log_sum = found.log_sum();
    z += log_sum * log_sum;
  }
};

// Writes the choices of a warp's tokens from shared to global memory, and counts the choices of each expert.
//
// first: the first of the tokens.
// choices: number of choices of these tokens together.
// rows_E: the warp's counts by expert, to which the choices are added.
__device__ __forceinline__ void write_choices(const Forward& a, int64_t first, int choices, int lane,
                                              const float* probability, const int32_t* expert,
                                              int32_t* rows_E) {
  const int top_k = a.sizes.top_k;
  PMOE_ROLLED
  for (int i = lane; i < choices; i += 32) {
    float weight = probability[i];
    if (a.normalize) {
      const int begin = i / top_k * top_k;
      float total = 0.0f;
      PMOE_ROLLED
      for (int k = 0; k < top_k; ++k) total += probability[begin + k];
      weight = weight / total;
    }
    a.weight_TK[first * top_k + i] = weight;
    a.expert_TK[first * top_k + i] = expert[i];
    atomicAdd(rows_E + expert[i], 1);
  }
}

// Chooses experts and weights for all tokens of one warp.
//
// shared: rows_WE receives the warp's counts by expert.
// sums: receives the probabilities and the squared logsumexp that this lane has summed, for the losses.
template <class S>
__device__ __forceinline__ void choose_tokens(const Forward& a, const Place<S>& at, const Shared<S>& shared,
                                              Sums<S>& sums) {
  const int num_experts = a.sizes.num_experts, top_k = a.sizes.top_k;
  const int staged = ForwardShared<S>::staged(top_k);
  float* const probability = shared.floats(at.warp * staged);
  int32_t* const expert = shared.ints((S::kWarps + at.warp) * staged);
  int32_t* const rows_E = shared.rows_WE + at.warp * num_experts;
  PMOE_ROLLED
  for (int e = at.lane; e < num_experts; e += 32) rows_E[e] = 0;

  const int64_t part = int64_t{at.block} * S::kWarps + at.warp;
  const int64_t end = a.sizes.first_token(part + 1, S::kWarps);
  int64_t first = a.sizes.first_token(part, S::kWarps);
  float x[S::kPer];
  load_row<S>(a.logits_TE, a.rows, first + at.token, first + at.token < end, at.of_token, x);
  PMOE_ROLLED
  for (; first < end; first += S::kTokens) {
    // The logits of the next tokens are loaded while the present tokens are processed.
    float next[S::kPer];
    const int64_t later = first + S::kTokens + at.token;
    load_row<S>(a.logits_TE, a.rows, later, later < end, at.of_token, next);
    float numerator[S::kPer];
    const Softmax found = softmax<S>(x, numerator);
    if (first + at.token < end) sums.add(numerator, found);
    if constexpr (S::kChecksFinite) sums.note(x, num_experts, at.of_token);
    const int of_token = at.token * top_k;
    sync_warp();  // all lanes have copied the earlier tokens' choices out of shared memory
    choose<S>(x, numerator, found.sum, num_experts, top_k, at, first + at.token < end, probability + of_token,
              expert + of_token);
    sync_warp();
    const int choices = static_cast<int>(smaller(int64_t{S::kTokens}, end - first)) * top_k;
    write_choices(a, first, choices, at.lane, probability, expert, rows_E);
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) x[j] = next[j];
  }
}

// Writes the block's results into the workspace, for the second kernel: number of rows and summed
// probabilities by expert, the sum for the z-loss, and whether a logit is infinite or NaN.
template <class S>
__device__ __forceinline__ void write_sums(const Forward& a, const Place<S>& at, const Shared<S>& shared,
                                           Sums<S>& sums) {
  const int num_experts = a.sizes.num_experts;
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) {
    PMOE_UNROLL
    for (int mask = S::kLanes; mask < 32; mask *= 2)
      sums.probability[j] += shfl_xor(sums.probability[j], mask);
  }
  PMOE_UNROLL
  for (int mask = S::kLanes; mask < 32; mask *= 2) sums.z += shfl_xor(sums.z, mask);
  sync<S>();  // before, the area held staged choices
  float* const probability_WE = shared.floats(0);
  int32_t* const strange_W = shared.ints(S::kWarps * num_experts);
  if constexpr (S::kChecksFinite) {
    const uint32_t strange = ballot(sums.is_strange);
    if (at.lane == 0) strange_W[at.warp] = strange != 0;
  }
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) {
    const int e = S::expert(at.of_token, j);
    if (at.token == 0 && e < num_experts) probability_WE[at.warp * num_experts + e] = sums.probability[j];
  }
  if (at.lane == 0) shared.sum_W[at.warp] = sums.z;
  sync<S>();
  const int64_t mine = int64_t{at.block} * num_experts;
  PMOE_ROLLED
  for (int e = own_thread<S>(); e < num_experts; e += S::kThreads) {
    int32_t rows = 0;
    float probability = 0.0f;
    for (int w = 0; w < S::kWarps; ++w) {
      rows += shared.rows_WE[w * num_experts + e];
      probability += probability_WE[w * num_experts + e];
    }
    a.workspace.rows_GE[mine + e] = rows;
    a.workspace.probability_GE[mine + e] = probability;
  }
  if (own_thread<S>() == 0) {
    float z = 0.0f;
    PMOE_ROLLED
    for (int w = 0; w < S::kWarps; ++w) z += shared.sum_W[w];
    a.workspace.z_G[at.block] = z;
    if constexpr (S::kChecksFinite) {
      int32_t strange = 0;
      PMOE_ROLLED
      for (int w = 0; w < S::kWarps; ++w) strange |= strange_W[w];
      a.workspace.strange_G[at.block] = strange;
    }
  }
}

}  // namespace pmoe::route

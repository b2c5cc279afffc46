// The choice of a token's experts by a whole warp: for 129 to 512 experts, and for 65 to 128 experts with
// more than 16 choices. (Up to 256 experts and 16 choices, merge.cuh is tried first.)
//
// Each lane sorts its own scores once. Then each round finds one choice. The best score that is left in a
// lane is always the lane's first, so a round takes no maximum over a lane's scores. Two instructions, which
// reduce over the warp, find the best expert. Its lane then moves its scores up by one. With three lanes, and
// three scores in each:
//
//   lane       0       1       2
//   sorted     9 4 1   8 7 2   8 3 0     round 1: 9, of lane 0
//              4 1     8 7 2   8 3 0     round 2: 8, of lane 1, whose expert has the lower index
//              4 1     7 2     8 3 0     round 3: 8, of lane 2
#pragma once
#include "route/tokens.cuh"

namespace pmoe::route {

// Returns the rank of an expert: a number by which experts are sorted, and no rank of a process group. The
// rank has the expert's key in the upper bits. The better of two experts has the larger rank; if their keys
// are equal, this is the expert with the lower index. Rank 0 stands for no expert.
PMOE_HD uint64_t rank_of(uint32_t key, int32_t expert) {
  return uint64_t{key} << 32 | (key == 0 ? 0 : ~static_cast<uint32_t>(expert));
}

PMOE_HD constexpr int log2_of(int power_of_2) { return power_of_2 == 1 ? 0 : 1 + log2_of(power_of_2 / 2); }

// Sorts the ranks of kCount experts (rank_of), the largest first. kCount is a power of 2. The method is
// Batcher's odd-even merging: it merges sorted runs of 1, 2, 4, ... ranks. The places that a step compares
// are compile-time constants, so all ranks stay in registers.
template <class Rank, int kCount>
__device__ __forceinline__ void sort_ranks(Rank (&rank)[kCount]) {
  unrolled<log2_of(kCount)>([&](auto merge) {
    constexpr int kLog = decltype(merge)::value, kRun = 1 << kLog;
    unrolled<kLog + 1>([&](auto step) {
      constexpr int kApart = kRun >> decltype(step)::value, kFirst = kApart % kRun;
      unrolled<kCount - kApart>([&](auto place) {
        constexpr int i = decltype(place)::value;
        constexpr bool kCompared = i >= kFirst && (i - kFirst) / kApart % 2 == 0;
        if constexpr (kCompared && i / (2 * kRun) == (i + kApart) / (2 * kRun)) {
          const Rank first = rank[i], second = rank[i + kApart];
          rank[i] = larger(first, second);
          rank[i + kApart] = smaller(first, second);
        }
      });
    });
  });
}

// Chooses the token's top_k experts, best first, as choose() does.
//
// Lane k keeps the k-th choice, so all weights are divided and written at once, after the last round.
template <class S>
__device__ __forceinline__ void choose_by_warp(const float (&x)[S::kPer], const float (&numerator)[S::kPer],
                                               float sum, int num_experts, int top_k, int lane,
                                               float* probability_K, int32_t* expert_K) {
  static_assert(kMostChoices <= 32, "a lane for each choice");
  uint64_t rank[S::kPer];
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) {
    const int32_t expert = S::expert(lane, j);
    rank[j] = rank_of(expert < num_experts ? order_key(x[j]) : 0, expert);
  }
  sort_ranks(rank);
  int32_t own = 0;
  PMOE_ROLLED
  for (int k = 0; k < top_k; ++k) {
    const auto key = static_cast<uint32_t>(rank[0] >> 32), index = static_cast<uint32_t>(rank[0]);
    const uint32_t chosen = reduce_max(key == reduce_max(key) ? index : 0);
    if (lane == k) own = static_cast<int32_t>(~chosen);
    if (index != chosen) continue;
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) rank[j] = j + 1 < S::kPer ? rank[j + 1] : 0;
  }
  float value = 0.0f;
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) {
    const float other = shfl(numerator[j], S::owner(own));
    if (S::expert(S::owner(own), j) == own) value = other;
  }
  if (lane >= top_k) return;
  probability_K[lane] = value / sum;
  expert_K[lane] = own;
}

}  // namespace pmoe::route

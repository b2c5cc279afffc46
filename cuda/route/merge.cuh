// The choice of a token's experts by merging sorted lists, for 33 to 256 experts and up to 16 choices (8 for
// up to 64 experts).
//
// To compare two experts takes one instruction, because a score and its expert share one 32-bit number, which
// is called a rank: the upper bits of the score's key, and the expert in place of the lower bits. The better
// of two experts has the larger rank.
//
// Each lane sorts the ranks of its own experts. Then two neighbouring lanes merge their lists into one, which
// the two lanes hold together. Then two pairs of lanes merge their lists, and so on. A list keeps at most the
// best kBest ranks (4, 8 or 16). When a list has kBest ranks, the next merging doubles its lanes but not its
// ranks, so each lane holds half as many ranks as before; in the end each lane holds one. With kBest = 4, and
// two ranks in each of eight lanes:
//
//   lane          0    1    2    3    4    5    6    7
//   sorted        9 4  8 7  8 3  6 5  2 1  2 2  1 1  3 0
//   by 2 lanes    9 8  7 4  5 3  8 6  2 2  2 1  1 0  3 1    lanes of odd pairs are in reverse order
//   by 4 lanes    9    8    8    7    2    2    2    3
//   by 8 lanes    9    8    8    7    9    8    8    7      two copies, since four lanes are enough
//
// (The ranks of a list are not always in the order of its lanes: `Merging::bit`.)
//
// In some cases the upper bits of scores do not decide: two of the chosen scores agree in these bits, or the
// last chosen score and one that is not chosen. Then this file chooses nothing, and the warp chooses in
// another way. Only scores that differ by less than 2^-15 of their value can agree in their upper bits.
#pragma once
#include "route/whole_warp.cuh"

namespace pmoe::route {

constexpr int kMostMerged = 16;  // the most choices for which lists are merged

// How a list of kBest ranks is divided among a token's lanes, and how many ranks each level of merging keeps.
//
// Level t merges two lists, whose lanes differ in bit t of their index (of_token). The list of the lanes with
// a 0 in this bit has its best rank in the first lane, the list of the lanes with a 1 in the last lane.
// Inside a lane, the best rank comes first.
template <class S, int kBest>
struct Merging {
  static constexpr int kLevels = log2_of(S::kLanes);
  static constexpr int kFirst = smaller(S::kPer, kBest);  // ranks that a lane keeps before the first level
  static constexpr int kWhole = log2_of(kBest / kFirst);  // number of the first levels, which keep all ranks
  static constexpr int kBits = log2_of(kBest);            // a list has 2^kBits lanes after the last level
  static_assert(kBest <= S::kLanes);

  // Returns how many ranks each lane has when a level begins. The first levels keep all ranks, until a list
  // has kBest of them. Each later level halves the number in a lane, down to 1.
  PMOE_HD static constexpr int ranks(int level) {
    const int halvings = level < kWhole ? 0 : level - kWhole;
    return halvings >= log2_of(kFirst) ? 1 : kFirst >> halvings;
  }

  // The place in the list of a lane's rank is made of kBits bits of the lane's index. Returns which bit of
  // the lane's index is the i-th bit of the place, counted from the highest bit.
  PMOE_HD static constexpr int bit(int i) { return i < kWhole ? kWhole - 1 - i : i; }

  // Returns the place in the list of the rank that a lane keeps after the last level. Place 0 has the best
  // rank.
  PMOE_HD static constexpr int place(int of_token) {
    int place = 0;
    PMOE_UNROLL
    for (int i = 0; i < kBits; ++i) place = 2 * place + (of_token >> bit(i) & 1);
    return place;
  }

  // Returns the first of the token's lanes that keep the rank at this place: the inverse function of place().
  PMOE_HD static constexpr int lane(int place) {
    int lane = 0;
    PMOE_UNROLL
    for (int i = 0; i < kBits; ++i) lane |= (place >> (kBits - 1 - i) & 1) << bit(i);
    return lane;
  }
};

// Compares the first kCount ranks of this lane with those of the lane whose index differs in the bit `mask`.
// A lane compares its rank with one rank of the other lane at a time, and keeps either the larger or the
// smaller.
//
// kReversed: whether rank i of this lane is compared with rank kCount - 1 - i of the other lane. If not, it
//     is compared with rank i of the other lane.
template <int kCount, bool kReversed, int kPer>
__device__ __forceinline__ void compare_lanes(uint32_t (&rank)[kPer], int mask, bool keeps_larger) {
  uint32_t other[kCount];
  PMOE_UNROLL
  for (int i = 0; i < kCount; ++i) other[i] = shfl_xor(rank[kReversed ? kCount - 1 - i : i], mask);
  PMOE_UNROLL
  for (int i = 0; i < kCount; ++i)
    rank[i] = keeps_larger ? larger(rank[i], other[i]) : smaller(rank[i], other[i]);
}

// Sorts a lane's first kCount ranks, the largest first, if they rise and then fall, or fall and then rise.
template <int kCount, int kPer>
__device__ __forceinline__ void sort_rising_and_falling(uint32_t (&rank)[kPer]) {
  PMOE_UNROLL
  for (int apart = kCount / 2; apart > 0; apart /= 2) {
    PMOE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (i & apart) continue;
      const uint32_t first = rank[i], second = rank[i + apart];
      rank[i] = larger(first, second);
      rank[i + apart] = smaller(first, second);
    }
  }
}

// Merges two lists, whose lanes differ in bit kLevel of their index, and keeps at most the best kBest ranks.
template <class S, int kBest, int kLevel>
__device__ __forceinline__ void merge_level(uint32_t (&rank)[S::kPer], int of_token) {
  using M = Merging<S, kBest>;
  constexpr int kBefore = M::ranks(kLevel), kAfter = M::ranks(kLevel + 1);
  constexpr bool kKeepsAll = kLevel < M::kWhole;
  // Lanes whose index has a 1 in the next bit sort their list in reverse: the first lane gets the worst rank.
  const int turned = of_token >> (kLevel + 1) & 1 ? ~of_token : of_token;
  const auto keeps_larger = [&](int bit) { return (turned & 1 << bit) == 0; };
  if constexpr (kKeepsAll) {
    compare_lanes<kBefore, true>(rank, 1 << kLevel, keeps_larger(kLevel));
    unrolled<kLevel>([&](auto i) {
      constexpr int kBit = kLevel - 1 - decltype(i)::value;
      compare_lanes<kAfter, false>(rank, 1 << kBit, keeps_larger(kBit));
    });
  } else {
    uint32_t other[kAfter];
    PMOE_UNROLL
    for (int i = 0; i < kAfter; ++i) other[i] = shfl_xor(rank[kBefore - 1 - i], 1 << kLevel);
    PMOE_UNROLL
    for (int i = 0; i < kAfter; ++i) rank[i] = larger(rank[i], other[i]);
    unrolled<smaller(kLevel, M::kBits)>([&](auto i) {
      constexpr int kBit = M::bit(decltype(i)::value);
      compare_lanes<kAfter, false>(rank, 1 << kBit, keeps_larger(kBit));
    });
    if constexpr (kAfter < kBefore) compare_lanes<kAfter, true>(rank, 1 << kLevel, keeps_larger(kLevel));
  }
  sort_rising_and_falling<kAfter>(rank);
}

// Chooses the token's top_k experts, best first, as choose() does, and returns true. If the upper bits of the
// scores do not decide for one of the warp's tokens, it returns false in all lanes of the warp. All lanes of
// a warp must call this function.
//
// exists: whether the token exists.
template <class S, int kBest>
__device__ __forceinline__ bool choose_by_merging(const float (&x)[S::kPer],
                                                  const float (&numerator)[S::kPer], float sum, int top_k,
                                                  const Place<S>& at, bool exists, float* probability_K,
                                                  int32_t* expert_K) {
  using M = Merging<S, kBest>;
  constexpr uint32_t kLower = S::kExperts - 1;  // the bits that hold an expert
  static_assert((S::kExperts & kLower) == 0, "a power of 2");
  uint32_t all[S::kPer], rank[S::kPer];
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) {
    // If two scores are equal, the expert with the lower number gets the larger rank. Experts that do not
    // exist have the score -inf (load_row) and the highest numbers, so all others come before them.
    const auto expert = static_cast<uint32_t>(S::expert(at.of_token, j));
    all[j] = (order_key(x[j]) & ~kLower) | (kLower - expert);
    rank[j] = all[j];
  }
  sort_ranks(rank);
  int of_token = at.of_token;
  make_opaque(of_token);  // else all comparisons' conditions would be kept in registers between tokens
  unrolled<M::kLevels>([&](auto level) { merge_level<S, kBest, decltype(level)::value>(rank, of_token); });

  const int first_lane = at.lane - at.of_token;
  const int place = M::place(at.of_token);
  const uint32_t mine = rank[0];
  const uint32_t next = shfl(mine, first_lane + M::lane((place + 1) % kBest));
  const uint32_t last = shfl(mine, first_lane + M::lane(top_k - 1));
  bool is_unclear = place + 1 < top_k && (mine ^ next) <= kLower;
  // An expert that was not chosen agrees with the last chosen one in the upper bits if its rank is from
  // `lowest` to last - 1.
  const uint32_t lowest = last & ~kLower;
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) is_unclear |= all[j] - lowest < last - lowest;
  if (ballot(is_unclear && exists) != 0) return false;

  const auto own = static_cast<int32_t>(kLower - (mine & kLower));
  float value = 0.0f;
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) {
    const float other = shfl(numerator[j], first_lane + S::owner(own));
    if (S::number(own) == j) value = other;
  }
  if (at.of_token < kBest && place < top_k) {
    probability_K[place] = value / sum;
    expert_K[place] = own;
  }
  return true;
}

}  // namespace pmoe::route

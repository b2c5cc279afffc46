// The division of tokens among blocks and warps, and the layout of memory. The host computes sizes with the
// functions of this file, and the kernels compute addresses. None of them needs a device.
//
// Tokens are divided into chunks, the tokens of a chunk among blocks, those of a block among warps. If T
// tokens are divided into `parts` parts, part i begins at token
//
//   floor(i * T / parts)
//
// as in pmoe.ordering.sorted.chunk_bounds. The number of blocks, and of warps of all blocks, is a multiple of
// the number of chunks n. So no block and no warp has tokens of two chunks. Slots ((token, choice) pairs) are
// sorted by chunk, then by expert. Inside a block, the chunk is the same, so only the experts decide the
// order.
//
// Letters: T tokens, E experts, K choices, N = T*K slots, n chunks, B blocks of a chunk, G = n*B blocks that
// have tokens, W warps of a block.
#pragma once
#include <cfloat>
#include <cmath>

#include "common/host_device.h"

namespace pmoe::route {

constexpr int kMostExperts = 1024;
constexpr int kMostChoices = 32;
constexpr int kMostChunks = 256;                        // MAX_BINS of pmoe/comm/counts.py
constexpr int64_t kMostSlots = (int64_t{1} << 31) - 1;  // positions are int32

// Returns the first token of part i, if the tokens are divided into `parts` parts.
PMOE_HD constexpr int64_t bound(int64_t num_tokens, int64_t i, int64_t parts) {
  return i * num_tokens / parts;
}

// The division of the logits among the lanes of a warp. kLanes neighbouring lanes share a token. Each of
// these lanes has the logits of kPer experts, in runs of four. A block has kWarps warps. With kLanes = 2 and
// kPer = 8:
//
//   expert   0..3   4..7   8..11   12..15
//   lane      0      1       0       1
template <int kLanes_, int kPer_, int kWarps_>
struct Shape {
  static constexpr int kLanes = kLanes_;
  static constexpr int kPer = kPer_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTokens = 32 / kLanes;  // number of tokens that a warp works on at the same time
  static constexpr int kExperts = kLanes * kPer;
  // Index of the first thread that routes, and the named barrier of the threads that route. In a kernel where
  // only some threads of a block route, a struct derived from Shape sets both. Barrier 0 is the barrier of
  // the whole block.
  static constexpr int kFirstThread = 0, kBarrier = 0;
  // Whether a whole warp has one token, and each lane has few enough scores to sort them (whole_warp.cuh). To
  // sort 8 scores takes as long as to choose 2 experts by maxima, to sort 16 as long as to choose 4.
  static constexpr bool kSortsLanes = kLanes == 32 && kPer <= 16;
  // Whether a token's lanes merge sorted lists, for up to 16 choices (merge.cuh). If fewer lanes share a
  // token, a warp has more tokens at a time, and a maximum for each choice costs little.
  static constexpr bool kMerges = kLanes >= 8 && kPer == 8;
  static constexpr bool kChecksFinite = true;  // whether kernels find logits that are not finite
  static_assert(kPer % 4 == 0 && 32 % kLanes == 0);

  // expert() returns the j-th of a lane's experts, in rising order. owner() returns which of the kLanes lanes
  // of a token has an expert, and number() returns the j of that expert in its lane.
  PMOE_HD static constexpr int expert(int lane, int j) { return j / 4 * (4 * kLanes) + 4 * lane + j % 4; }
  PMOE_HD static constexpr int owner(int expert) { return expert / 4 % kLanes; }
  PMOE_HD static constexpr int number(int expert) { return expert / (4 * kLanes) * 4 + expert % 4; }
};

// The shapes for which pmoe compiles kernels. For more than 256 experts a block has 8 warps instead of 16,
// because a thread needs more registers and a warp needs more shared memory.
template <int kLanes, int kPer>
using Kept = Shape<kLanes, kPer, (kPer > 8 ? 8 : 16)>;

// ---- the order of scores

// Maps a score to an integer that sorts as pmoe.kernels.route.top_indices does: NaN is above everything, both
// zeros are equal, and negative infinity equals the lowest finite number. The result is never 0, because 0
// marks an expert that is taken already or does not exist.
PMOE_HD uint32_t order_key(float score) {
  if (score != score) return 0xFFFFFFFFu;
  const uint32_t bits = bits_of(larger(score, -FLT_MAX) + 0.0f);  // -0 + 0 is +0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// ---- sizes

// Factors of the losses: balance_scale() is E / (N * T); z_scale() is the z-loss's weight divided by T, where
// 0 leaves the z-loss out.
inline float balance_scale(int64_t num_tokens, int64_t num_experts, int64_t top_k) {
  const double tokens = static_cast<double>(larger(num_tokens, int64_t{1}));
  return static_cast<float>(static_cast<double>(num_experts) /
                            (tokens * static_cast<double>(top_k) * tokens));
}
inline float z_scale(double z_loss_weight, int64_t num_tokens) {
  return static_cast<float>(z_loss_weight / static_cast<double>(larger(num_tokens, int64_t{1})));
}

// The sizes of a forward launch, and the order of the sorted rows.
//
// Rows are counted by chunk. They may be sorted by groups of chunks: with sorted_chunks = 2, the rows of
// chunks 0 and 1 are sorted by expert as if both were one chunk. Within such a group, the rows of the
// num_last experts from first_last on come after those of all other experts.
struct Sizes {
  int64_t num_tokens;
  int32_t num_experts;
  int32_t top_k;
  int32_t num_chunks;
  int32_t chunk_blocks;       // B
  int32_t sorted_chunks = 1;  // divides num_chunks
  int32_t first_last = 0;
  int32_t num_last = 0;

  // Returns the expert whose rows are the i-th of a sorted group.
  PMOE_HD int32_t expert_at(int32_t i) const {
    if (i < first_last) return i;
    const int32_t num_others = num_experts - num_last;
    return i < num_others ? i + num_last : first_last + (i - num_others);
  }

  PMOE_HD int32_t blocks() const { return num_chunks * chunk_blocks; }  // G
  PMOE_HD int64_t first_token(int64_t warp, int warps) const {
    return bound(num_tokens, warp, int64_t{blocks()} * warps);
  }
  // Returns the number of rows of all chunks before `chunk`. No slot is dropped, so this number is known
  // before rows are counted. It is bound() * top_k, computed with 32-bit divisions, because a device divides
  // 64-bit numbers by a slow function call.
  PMOE_HD int64_t first_row(int32_t chunk) const {
    const auto tokens = static_cast<uint32_t>(num_tokens), chunks = static_cast<uint32_t>(num_chunks);
    const auto at = static_cast<uint32_t>(chunk);
    return (int64_t{at} * (tokens / chunks) + at * (tokens % chunks) / chunks) * top_k;
  }
};

// Returns B, the number of blocks of a chunk: so many that each warp needs only one iteration for its tokens,
// but at most most_blocks blocks for all chunks together. It is at least 1.
//
// block_tokens: number of tokens that a block works on at the same time.
inline int32_t chunk_blocks(int64_t num_tokens, int32_t num_chunks, int64_t block_tokens,
                            int64_t most_blocks) {
  const int64_t enough = ceil_div(ceil_div(num_tokens, block_tokens), num_chunks);
  return static_cast<int32_t>(larger(int64_t{1}, smaller(enough, most_blocks / num_chunks)));
}

// Arrays in which each of the G blocks of the first forward kernel stores sums for the second kernel.
struct Workspace {
  int32_t* rows_GE;       // rows by expert
  float* probability_GE;  // probabilities summed over the block's tokens
  float* z_G;             // squared logsumexp summed over the block's tokens
  int32_t* strange_G;     // 1 if a logit of the block's tokens is infinite or NaN, else 0

  static int64_t bytes(int64_t blocks, int64_t num_experts) { return 4 * blocks * (2 * num_experts + 2); }

  static Workspace at(void* base, int64_t blocks, int64_t num_experts) {
    Workspace found{};
    found.rows_GE = static_cast<int32_t*>(base);
    found.probability_GE = static_cast<float*>(base) + blocks * num_experts;
    found.z_G = found.probability_GE + blocks * num_experts;
    found.strange_G = reinterpret_cast<int32_t*>(found.z_G + blocks);
    return found;
  }
};

// Sizes and offsets in the shared memory of a block of a forward kernel, in 4-byte words:
//
//   rows_WE (W * E)   number of rows by warp and expert
//   sum_W (W)         one partial sum of each warp
//   area              scratch memory, which the steps of the kernels use one after the other
template <class S>
struct ForwardShared {
  PMOE_HD static constexpr int staged(int top_k) {
    return S::kTokens * top_k;
  }  // choices of a warp at a time

  PMOE_HD static constexpr int sums(int num_experts) { return S::kWarps * num_experts; }
  PMOE_HD static constexpr int area(int num_experts) { return sums(num_experts) + S::kWarps; }

  PMOE_HD static constexpr int words(int num_experts, int top_k) {
    const int choosing = 2 * S::kWarps * staged(top_k);  // weights and experts
    const int telling =
        S::kWarps * (num_experts + (S::kChecksFinite ? 1 : 0));  // probabilities, strange logits
    const int placing = 2 * num_experts;                         // counts before and within the chunk
    const int adding = placing + num_experts + larger(S::kThreads, num_experts);  // and load, partial sums
    return area(num_experts) + larger(larger(choosing, telling), adding);
  }
};

// Size of the shared memory of a block of the backward kernel, in 4-byte words: the gradient, weight and
// expert of each choice of its warps' tokens.
template <class S>
PMOE_HD constexpr int backward_words(int top_k) {
  return 3 * S::kWarps * S::kTokens * top_k;
}

}  // namespace pmoe::route

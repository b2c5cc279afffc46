// Who routes which tokens, and where numbers lie: the host sizes by it, the kernels address by it. Knows no
// device.
//
// Tokens are cut into chunks, chunks into blocks, blocks into warps, always at floor(i * T / parts), which is
// pmoe.ordering.sorted.chunk_bounds: a multiple of n parts refines n chunks, so each block and each warp
// works in one chunk, and an expert's number is all of a slot's key that varies there.
//
// Letters: T tokens, E experts, K choices, N = T*K slots, n chunks, B blocks a chunk, G = n*B blocks that own
// tokens, W warps of a block.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstring>

#include "common/host_device.h"

namespace pmoe::route {

constexpr int kMostExperts = 1024;
constexpr int kMostChoices = 32;
constexpr int kMostChunks = 64;
constexpr int64_t kMostSlots = (int64_t{1} << 31) - 1;  // positions are int32

// The first token of part i.
PMOE_HD constexpr int64_t bound(int64_t num_tokens, int64_t i, int64_t parts) {
  return i * num_tokens / parts;
}

// How a warp reads rows of logits: kLanes neighbouring lanes share a token, and each holds kPer experts of
// it, in fours that lie side by side. kWarps of them are a block.
template <int kLanes_, int kPer_, int kWarps_>
struct Shape {
  static constexpr int kLanes = kLanes_;
  static constexpr int kPer = kPer_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTokens = 32 / kLanes;  // that a warp has at a time
  static constexpr int kExperts = kLanes * kPer;
  // Where only some of a block's threads route: the first of them, and their barrier; 0: the block's.
  static constexpr int kFirstThread = 0, kBarrier = 0;
  static_assert(kPer % 4 == 0 && 32 % kLanes == 0);

  // The j-th expert of a token's lane; ascends with j. Expert e is lane owner(e)'s.
  PMOE_HD static constexpr int expert(int lane, int j) { return j / 4 * (4 * kLanes) + 4 * lane + j % 4; }
  PMOE_HD static constexpr int owner(int expert) { return expert / 4 % kLanes; }
};

// The product's shapes. More than 256 experts take more registers a thread and more shared memory a warp.
template <int kLanes, int kPer>
using Kept = Shape<kLanes, kPer, (kPer > 8 ? 8 : 16)>;

// ---- the order of scores

PMOE_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

PMOE_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// Orders scores as pmoe.kernels.route.top_indices does: NaN above all, both zeros equal, negative infinity as
// the lowest finite number. Never 0, which stands for an expert that is taken or that there is not.
PMOE_HD uint32_t order_key(float score) {
  if (score != score) return 0xFFFFFFFFu;
  const uint32_t bits = bits_of(larger(score, -FLT_MAX) + 0.0f);  // -0 + 0 is +0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// ---- sizes

// Of the losses: E / (N * T), and the z-loss's weight over T, which leaves it out where it is 0.
inline float balance_scale(int64_t num_tokens, int64_t num_experts, int64_t top_k) {
  const double tokens = static_cast<double>(larger(num_tokens, int64_t{1}));
  return static_cast<float>(static_cast<double>(num_experts) /
                            (tokens * static_cast<double>(top_k) * tokens));
}
inline float z_scale(double z_loss_weight, int64_t num_tokens) {
  return static_cast<float>(z_loss_weight / static_cast<double>(larger(num_tokens, int64_t{1})));
}

struct Sizes {
  int64_t num_tokens;
  int32_t num_experts;
  int32_t top_k;
  int32_t num_chunks;
  int32_t chunk_blocks;  // B

  PMOE_HD int32_t blocks() const { return num_chunks * chunk_blocks; }  // G
  PMOE_HD int64_t first_token(int64_t warp, int warps) const {
    return bound(num_tokens, warp, int64_t{blocks()} * warps);
  }
  // Rows of all earlier chunks: nothing is dropped, so they are known before anything is counted.
  // As bound() has it, by divisions of 32 bits: a device divides 64 bits by a call.
  PMOE_HD int64_t first_row(int32_t chunk) const {
    const auto tokens = static_cast<uint32_t>(num_tokens), chunks = static_cast<uint32_t>(num_chunks);
    const auto at = static_cast<uint32_t>(chunk);
    return (int64_t{at} * (tokens / chunks) + at * (tokens % chunks) / chunks) * top_k;
  }
};

// B: enough for a warp's worth of tokens in each warp, within most_blocks where the chunks leave a choice.
inline int32_t chunk_blocks(int64_t num_tokens, int32_t num_chunks, int64_t block_tokens,
                            int64_t most_blocks) {
  const int64_t enough = ceil_div(ceil_div(num_tokens, block_tokens), num_chunks);
  return static_cast<int32_t>(larger(int64_t{1}, smaller(enough, most_blocks / num_chunks)));
}

// What the first forward kernel's blocks leave to the second's.
struct Workspace {
  int32_t* rows_GE;       // of each expert
  float* probability_GE;  // summed over the block's tokens
  float* z_G;             // squared logsumexp, summed likewise

  static int64_t bytes(int64_t blocks, int64_t num_experts) { return 4 * blocks * (2 * num_experts + 1); }

  static Workspace at(void* base, int64_t blocks, int64_t num_experts) {
    Workspace found{};
    found.rows_GE = static_cast<int32_t*>(base);
    found.probability_GE = static_cast<float*>(base) + blocks * num_experts;
    found.z_G = found.probability_GE + blocks * num_experts;
    return found;
  }
};

// Shared memory of a forward block, in 4-byte words: rows_WE, one word a warp for sums, then an area that
// serves one phase after the other.
template <class S>
struct ForwardShared {
  PMOE_HD static constexpr int staged(int top_k) {
    return S::kTokens * top_k;
  }  // choices of a warp at a time

  PMOE_HD static constexpr int sums(int num_experts) { return S::kWarps * num_experts; }
  PMOE_HD static constexpr int area(int num_experts) { return sums(num_experts) + S::kWarps; }

  PMOE_HD static constexpr int words(int num_experts, int top_k) {
    const int choosing = 2 * S::kWarps * staged(top_k);  // weight and expert
    const int telling = S::kWarps * num_experts;         // probabilities by warp
    const int placing = 2 * num_experts;                 // before and within the chunk
    const int adding = placing + num_experts + larger(S::kThreads, num_experts);  // the load, partial sums
    return area(num_experts) + larger(larger(choosing, telling), adding);
  }
};

// Shared memory of a backward block, in words: gradient, weight and expert of each warp's choices.
template <class S>
PMOE_HD constexpr int backward_words(int top_k) {
  return 3 * S::kWarps * S::kTokens * top_k;
}

}  // namespace pmoe::route

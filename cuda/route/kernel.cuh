// Routing in one launch. Phase 1: every block chooses its tokens' experts and counts them. The grid meets
// once. Phase 2: every block finds where its rows begin from the counts of its chunk's blocks, and gives its
// slots their places in token order; one more block, which owns no tokens, adds up the counts and the loss.
// Nothing is added in an order that could differ from launch to launch: atomics count, they do not sum floats
// or hand out places.
//
// See layout.h for the cut and the letters. The grid is G + 1 blocks, all of them resident.
#pragma once
#include "route/tokens.cuh"

namespace pmoe::route {

struct Forward {
  Sizes sizes;
  Rows rows;
  const float* logits_TE;
  bool normalize;
  float balance_scale;  // E / (N * T)
  float z_scale;        // the z-loss's weight over T; 0 leaves it out
  float* weight_TK;
  int32_t* expert_TK;
  int32_t* position_TK;
  int32_t* slot_N;
  int32_t* counts_nE;
  int32_t* ends_nE;
  float* l_aux;
  Workspace workspace;
};

constexpr uint64_t kLongestWait = 10ull * 1000 * 1000 * 1000;  // nanoseconds

// Until all blocks of the grid are here; what they wrote before is then seen by all. barrier: arrivals, which
// are back at zero afterwards, and a generation.
__device__ __forceinline__ void meet_grid(uint32_t* barrier, uint32_t blocks) {
  sync_block();
  if (threadIdx.x == 0) {
    const uint32_t generation = load_acquire(barrier + 1);  // cannot change before this block arrives
    if (add_acq_rel(barrier, 1) == blocks - 1) {
      barrier[0] = 0;
      add_acq_rel(barrier + 1, 1);
    } else {
      const uint64_t begin = nanoseconds();
      while (load_acquire(barrier + 1) == generation) {
        if (nanoseconds() - begin > kLongestWait) fail();
        pause();
      }
    }
  }
  sync_block();
}

__device__ __forceinline__ int count_bits(uint32_t mask) {
#if defined(__CUDACC__)
  return __popc(mask);
#else
  return __builtin_popcount(mask);
#endif
}

// A block's shared memory; see ForwardShared.
template <class S>
struct Shared {
  int32_t* rows_WE;  // first each warp's rows, after tell() those of the warps before it
  float* sum_W;
  uint32_t* area;

  __device__ explicit Shared(int num_experts) {
    auto* const words = reinterpret_cast<uint32_t*>(shared_memory());
    rows_WE = reinterpret_cast<int32_t*>(words);
    sum_W = reinterpret_cast<float*>(words + ForwardShared<S>::sums(num_experts));
    area = words + ForwardShared<S>::area(num_experts);
  }

  __device__ float* floats(int word) const { return reinterpret_cast<float*>(area + word); }
  __device__ int32_t* ints(int word) const { return reinterpret_cast<int32_t*>(area + word); }
};

// ---- phase 1

// The candidate of one lane, then of all lanes of a token. No candidate has key 0.
struct Candidate {
  uint32_t key;
  int32_t expert;

  __device__ bool beats(const Candidate& other) const {
    return key > other.key || (key == other.key && expert < other.expert);
  }
};

template <class S>
__device__ __forceinline__ Candidate best_of_token(Candidate best) {
  PMOE_UNROLL
  for (int mask = 1; mask < S::kLanes; mask *= 2) {
    const Candidate other{shfl_xor(best.key, mask), shfl_xor(best.expert, mask)};
    if (other.beats(best)) best = other;
  }
  return best;
}

// The token's top_k experts, best first, and their probabilities, into staged memory of this token.
template <class S>
__device__ __forceinline__ void choose(const float (&x)[S::kPer], const float (&numerator)[S::kPer],
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
      if (key[j] <= mine.key) continue;  // of equal ones the first stays
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

// What a lane adds up over its warp's tokens.
template <class S>
struct Sums {
  float probability[S::kPer];
  float z;  // the same in all lanes of a token

  __device__ void clear() {
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) probability[j] = 0.0f;
    z = 0.0f;
  }

  __device__ void add(const float (&numerator)[S::kPer], const Softmax& found) {
    const float inverse = 1.0f / found.sum;
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) probability[j] += numerator[j] * inverse;
    const float log_sum = found.log_sum();
    z += log_sum * log_sum;
  }
};

// Writes the staged choices of a warp's tokens from `first` on, neighbours side by side, and counts them.
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

// Phase 1 of one warp: experts and weights of its tokens; rows_E, its counts; and its lanes' sums.
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

  const int64_t part = int64_t{blockIdx.x} * S::kWarps + at.warp;
  const int64_t end = a.sizes.first_token(part + 1, S::kWarps);
  int64_t first = a.sizes.first_token(part, S::kWarps);
  float x[S::kPer];
  load_row<S>(a.logits_TE, a.rows, first + at.token, first + at.token < end, at.of_token, x);
  PMOE_ROLLED
  for (; first < end; first += S::kTokens) {
    // The next rows are on their way while these are worked on.
    float next[S::kPer];
    const int64_t later = first + S::kTokens + at.token;
    load_row<S>(a.logits_TE, a.rows, later, later < end, at.of_token, next);
    float numerator[S::kPer];
    const Softmax found = softmax<S>(x, numerator);
    if (first + at.token < end) sums.add(numerator, found);
    const int of_token = at.token * top_k;
    sync_warp();  // the last choices have been written
    choose<S>(x, numerator, found.sum, num_experts, top_k, at.of_token, probability + of_token,
              expert + of_token);
    sync_warp();
    const int choices = static_cast<int>(smaller(int64_t{S::kTokens}, end - first)) * top_k;
    write_choices(a, first, choices, at.lane, probability, expert, rows_E);
    PMOE_UNROLL
    for (int j = 0; j < S::kPer; ++j) x[j] = next[j];
  }
}

// What the other blocks need of this one, into the workspace; rows_WE become the rows of the warps before.
template <class S>
__device__ __forceinline__ void tell(const Forward& a, const Place<S>& at, const Shared<S>& shared,
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
  sync_block();  // the area held staged choices
  float* const probability_WE = shared.floats(0);
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) {
    const int e = S::expert(at.of_token, j);
    if (at.token == 0 && e < num_experts) probability_WE[at.warp * num_experts + e] = sums.probability[j];
  }
  if (at.lane == 0) shared.sum_W[at.warp] = sums.z;
  sync_block();
  const int64_t mine = int64_t{blockIdx.x} * num_experts;
  PMOE_ROLLED
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += S::kThreads) {
    int32_t rows = 0;
    float probability = 0.0f;
    for (int w = 0; w < S::kWarps; ++w) {
      int32_t& of_warp = shared.rows_WE[w * num_experts + e];
      const int32_t before = rows;
      rows += of_warp;
      of_warp = before;
      probability += probability_WE[w * num_experts + e];
    }
    a.workspace.rows_GE[mine + e] = rows;
    a.workspace.probability_GE[mine + e] = probability;
  }
  if (threadIdx.x == 0) {
    float z = 0.0f;
    PMOE_ROLLED
    for (int w = 0; w < S::kWarps; ++w) z += shared.sum_W[w];
    a.workspace.z_G[blockIdx.x] = z;
  }
}

// ---- phase 2

struct ChunkCounts {  // in the area
  int32_t* before_E;
  int32_t* total_E;
};

// A chunk's rows by expert, of all of its blocks and of the first `blocks_before`.
template <class S>
__device__ __forceinline__ ChunkCounts count_chunk(const Forward& a, const Shared<S>& shared, int chunk,
                                                   int blocks_before) {
  const int num_experts = a.sizes.num_experts, blocks = a.sizes.chunk_blocks;
  const int thread = static_cast<int>(threadIdx.x);
  const ChunkCounts found{shared.ints(0), shared.ints(num_experts)};
  sync_block();  // the area served something else
  PMOE_ROLLED
  for (int i = thread; i < 2 * num_experts; i += S::kThreads) found.before_E[i] = 0;
  sync_block();
  const int32_t* const rows_BE = a.workspace.rows_GE + int64_t{chunk} * blocks * num_experts;
  const int parts = larger(S::kThreads / num_experts, 1);
  PMOE_ROLLED
  for (int i = thread; i < parts * num_experts; i += S::kThreads) {
    const int e = i % num_experts;
    int32_t before = 0, total = 0;
    for (int b = i / num_experts; b < blocks; b += parts) {
      const int32_t rows = rows_BE[b * num_experts + e];
      total += rows;
      before += b < blocks_before ? rows : 0;
    }
    atomicAdd(found.before_E + e, before);
    atomicAdd(found.total_E + e, total);
  }
  sync_block();
  return found;
}

// One warp's walk over n values with a running sum: visit(i, sum of all before, value).
template <class Visit>
__device__ __forceinline__ void scan(const int32_t* value, int n, int lane, int32_t sum, Visit visit) {
  PMOE_ROLLED
  for (int begin = 0; begin < n; begin += 32) {
    const int i = begin + lane;
    const int32_t mine = i < n ? value[i] : 0;
    int32_t up_to = mine;
    PMOE_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t left = shfl_up(up_to, distance);
      if (lane >= distance) up_to += left;
    }
    if (i < n) visit(i, sum + up_to - mine, mine);
    sum += shfl(up_to, 31);
  }
}

// The lanes whose slots have this lane's expert, this one included; 0 for a lane without a slot.
__device__ __forceinline__ uint32_t same_expert(int32_t expert, bool valid, int num_experts) {
  uint32_t same = ballot(valid);
  PMOE_ROLLED
  for (int bit = 1; bit < num_experts; bit *= 2) {
    const bool set = (expert & bit) != 0;
    const uint32_t with = ballot(set);
    same &= set ? with : ~with;
  }
  return valid ? same : 0;
}

// Phase 2 of a block that owns tokens: where each of its slots' rows stands.
template <class S>
__device__ __forceinline__ void place_rows(const Forward& a, const Place<S>& at, const Shared<S>& shared) {
  const int num_experts = a.sizes.num_experts, blocks = a.sizes.chunk_blocks;
  const int chunk = static_cast<int>(blockIdx.x) / blocks;
  const ChunkCounts counts = count_chunk<S>(a, shared, chunk, static_cast<int>(blockIdx.x) % blocks);
  int32_t* const first_E = counts.before_E;
  if (at.warp == 0)
    scan(counts.total_E, num_experts, at.lane, static_cast<int32_t>(a.sizes.first_row(chunk)),
         [&](int e, int32_t first, int32_t) { first_E[e] += first; });
  sync_block();
  // Placed so far, by this warp or one before.
  int32_t* const rows_E = shared.rows_WE + at.warp * num_experts;
  const int64_t part = int64_t{blockIdx.x} * S::kWarps + at.warp;
  const int64_t end = a.sizes.first_token(part + 1, S::kWarps) * a.sizes.top_k;
  PMOE_ROLLED
  for (int64_t begin = a.sizes.first_token(part, S::kWarps) * a.sizes.top_k; begin < end; begin += 32) {
    const int64_t slot = begin + at.lane;
    const bool valid = slot < end;
    const int32_t expert = valid ? a.expert_TK[slot] : 0;
    const uint32_t same = same_expert(expert, valid, num_experts);
    const uint32_t earlier = same & ((1u << at.lane) - 1);
    const int32_t placed = rows_E[expert];
    sync_warp();
    if (valid) {
      const int32_t position = first_E[expert] + placed + count_bits(earlier);
      if (same >> at.lane == 1) rows_E[expert] = placed + count_bits(same);  // the last of them
      a.position_TK[slot] = position;
      a.slot_N[position] = static_cast<int32_t>(slot);
    }
    sync_warp();
  }
}

// The sum of all threads' values, in thread 0.
template <class S>
__device__ __forceinline__ float block_sum(const Place<S>& at, const Shared<S>& shared, float value) {
  const float of_warp = warp_sum(value);
  sync_block();
  if (at.lane == 0) shared.sum_W[at.warp] = of_warp;
  sync_block();
  float sum = 0.0f;
  if (threadIdx.x == 0) {
    PMOE_ROLLED
    for (int w = 0; w < S::kWarps; ++w) sum += shared.sum_W[w];
  }
  return sum;
}

// Counts and ends of all chunks; load_E, the rows of each expert in all of them.
template <class S>
__device__ __forceinline__ void add_counts(const Forward& a, const Place<S>& at, const Shared<S>& shared,
                                           int32_t* load_E) {
  const int num_experts = a.sizes.num_experts;
  PMOE_ROLLED
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += S::kThreads) load_E[e] = 0;
  PMOE_ROLLED
  for (int chunk = 0; chunk < a.sizes.num_chunks; ++chunk) {
    const ChunkCounts counts = count_chunk<S>(a, shared, chunk, 0);
    if (at.warp) continue;
    scan(counts.total_E, num_experts, at.lane, static_cast<int32_t>(a.sizes.first_row(chunk)),
         [&](int e, int32_t first, int32_t rows) {
           load_E[e] += rows;
           a.counts_nE[chunk * num_experts + e] = rows;
           a.ends_nE[chunk * num_experts + e] = first + rows;
         });
  }
  sync_block();
}

// sum_e load_e * (the sum over tokens of e's probability), in thread 0. partial: of max(threads, E).
template <class S>
__device__ __forceinline__ float balance(const Forward& a, const Place<S>& at, const Shared<S>& shared,
                                         const int32_t* load_E, float* partial) {
  const int num_experts = a.sizes.num_experts, blocks = a.sizes.blocks();
  const int thread = static_cast<int>(threadIdx.x);
  const int parts = larger(S::kThreads / num_experts, 1);
  PMOE_ROLLED
  for (int i = thread; i < parts * num_experts; i += S::kThreads) {
    const int e = i % num_experts;
    float sum = 0.0f;
    for (int b = i / num_experts; b < blocks; b += parts)
      sum += a.workspace.probability_GE[int64_t{b} * num_experts + e];
    partial[i] = sum;
  }
  sync_block();
  float mine = 0.0f;
  PMOE_ROLLED
  for (int e = thread; e < num_experts; e += S::kThreads) {
    float probability = 0.0f;
    PMOE_ROLLED
    for (int p = 0; p < parts; ++p) probability += partial[p * num_experts + e];
    mine += probability * static_cast<float>(load_E[e]);
  }
  return block_sum(at, shared, mine);
}

// Phase 2 of the block that owns no tokens: what concerns all of them.
template <class S>
__device__ __forceinline__ void add_up(const Forward& a, const Place<S>& at, const Shared<S>& shared) {
  int32_t* const load_E = shared.ints(2 * a.sizes.num_experts);
  float* const partial = shared.floats(3 * a.sizes.num_experts);
  add_counts<S>(a, at, shared, load_E);
  const float balanced = balance<S>(a, at, shared, load_E, partial);
  float z = 0.0f;
  PMOE_ROLLED
  for (int b = static_cast<int>(threadIdx.x); b < a.sizes.blocks(); b += S::kThreads) z += a.workspace.z_G[b];
  z = block_sum(at, shared, z);
  if (threadIdx.x == 0) *a.l_aux = a.balance_scale * balanced + (a.z_scale == 0.0f ? 0.0f : a.z_scale * z);
}

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

// The second forward kernel (kernel.cuh): places of rows, counts of chunks, the balance loss.
#pragma once
#include "route/block.cuh"

namespace pmoe::route {

struct ChunkCounts {  // in the area
  int32_t* before_E;
  int32_t* total_E;
};

// A chunk's rows by expert, of all of its blocks and of the first `blocks_before`.
template <class S>
__device__ __forceinline__ ChunkCounts count_chunk(const Forward& a, const Shared<S>& shared, int chunk,
                                                   int blocks_before) {
  const int num_experts = a.sizes.num_experts, blocks = a.sizes.chunk_blocks;
  const int thread = own_thread<S>();
  const ChunkCounts found{shared.ints(0), shared.ints(num_experts)};
  meet<S>();  // the area served something else
  PMOE_ROLLED
  for (int i = thread; i < 2 * num_experts; i += S::kThreads) found.before_E[i] = 0;
  meet<S>();
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
  meet<S>();
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

struct Slots {
  int64_t begin, end;
};

template <class S>
__device__ __forceinline__ Slots slots_of_warp(const Sizes& sizes, const Place<S>& at) {
  const int64_t part = int64_t{at.block} * S::kWarps + at.warp;
  return {sizes.first_token(part, S::kWarps) * sizes.top_k,
          sizes.first_token(part + 1, S::kWarps) * sizes.top_k};
}

// rows_WE: rows by expert of each of the block's warps. choice(slot): its expert, or -1 where it has no row.
template <class S, class Choice>
__device__ __forceinline__ void count_slots(const Place<S>& at, const Shared<S>& shared, int num_experts,
                                            const Slots& slots, const Choice& choice) {
  int32_t* const rows_E = shared.rows_WE + at.warp * num_experts;
  PMOE_ROLLED
  for (int e = at.lane; e < num_experts; e += 32) rows_E[e] = 0;
  sync_warp();
  PMOE_ROLLED
  for (int64_t slot = slots.begin + at.lane; slot < slots.end; slot += 32) {
    const int32_t expert = choice(slot);
    if (expert >= 0) atomicAdd(rows_E + expert, 1);
  }
  meet<S>();
}

// rows_WE: now rows of the block's warps before each. found(expert, rows of all of them), by one thread.
template <class S, class Found>
__device__ __forceinline__ void add_warps(const Shared<S>& shared, int num_experts, const Found& found) {
  PMOE_ROLLED
  for (int e = own_thread<S>(); e < num_experts; e += S::kThreads) {
    int32_t rows = 0;
    for (int w = 0; w < S::kWarps; ++w) {
      int32_t& of_warp = shared.rows_WE[w * num_experts + e];
      const int32_t before = rows;
      rows += of_warp;
      of_warp = before;
    }
    found(e, rows);
  }
}

// A warp's slots in their order: put(slot, expert, rows of that expert before it, in the warps before and in
// this one); none is counted where the expert is -1.
template <class S, class Choice, class Put>
__device__ __forceinline__ void place_slots(const Place<S>& at, const Shared<S>& shared, int num_experts,
                                            const Slots& slots, const Choice& choice, const Put& put) {
  // Placed so far, by this warp or one before.
  int32_t* const rows_E = shared.rows_WE + at.warp * num_experts;
  PMOE_ROLLED
  for (int64_t begin = slots.begin; begin < slots.end; begin += 32) {
    const int64_t slot = begin + at.lane;
    const bool is_slot = slot < slots.end;
    const int32_t expert = is_slot ? choice(slot) : -1;
    const uint32_t same = same_expert(expert, expert >= 0, num_experts);
    const uint32_t earlier = same & ((1u << at.lane) - 1);
    const int32_t placed = expert >= 0 ? rows_E[expert] : 0;
    sync_warp();
    if (same >> at.lane == 1) rows_E[expert] = placed + count_bits(same);  // the last of them
    if (is_slot) put(slot, expert, placed + count_bits(earlier));
    sync_warp();
  }
}

// A block that owns tokens: where each of its slots' rows stands.
template <class S>
__device__ __forceinline__ void place_rows(const Forward& a, const Place<S>& at, const Shared<S>& shared) {
  const int num_experts = a.sizes.num_experts, blocks = a.sizes.chunk_blocks;
  const int chunk = at.block / blocks;
  const Slots slots = slots_of_warp<S>(a.sizes, at);
  const auto choice = [&](int64_t slot) { return a.expert_TK[slot]; };
  // Counted again: what the first kernel's warps counted went with their shared memory, and their choices are
  // near.
  count_slots<S>(at, shared, num_experts, slots, choice);
  add_warps<S>(shared, num_experts, [](int, int32_t) {});
  const ChunkCounts counts = count_chunk<S>(a, shared, chunk, at.block % blocks);
  int32_t* const first_E = counts.before_E;
  if (at.warp == 0)
    scan(counts.total_E, num_experts, at.lane, static_cast<int32_t>(a.sizes.first_row(chunk)),
         [&](int e, int32_t first, int32_t) { first_E[e] += first; });
  sync_block();
  place_slots<S>(at, shared, num_experts, slots, choice, [&](int64_t slot, int32_t expert, int32_t placed) {
    const int32_t position = first_E[expert] + placed;
    a.position_TK[slot] = position;
    a.slot_N[position] = static_cast<int32_t>(slot);
  });
}

// The sum of all threads' values, in thread 0.
template <class S>
__device__ __forceinline__ float block_sum(const Place<S>& at, const Shared<S>& shared, float value) {
  const float of_warp = warp_sum(value);
  meet<S>();
  if (at.lane == 0) shared.sum_W[at.warp] = of_warp;
  meet<S>();
  float sum = 0.0f;
  if (own_thread<S>() == 0) {
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
  const int thread = own_thread<S>();
  const int parts = larger(S::kThreads / num_experts, 1);
  PMOE_ROLLED
  for (int i = thread; i < parts * num_experts; i += S::kThreads) {
    const int e = i % num_experts;
    float sum = 0.0f;
    for (int b = i / num_experts; b < blocks; b += parts)
      sum += a.workspace.probability_GE[int64_t{b} * num_experts + e];
    partial[i] = sum;
  }
  meet<S>();
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

// l_aux. load_E, partial: as balance() takes them.
template <class S>
__device__ __forceinline__ void write_loss(const Forward& a, const Place<S>& at, const Shared<S>& shared,
                                           const int32_t* load_E, float* partial) {
  const float balanced = balance<S>(a, at, shared, load_E, partial);
  float z = 0.0f;
  PMOE_ROLLED
  for (int b = own_thread<S>(); b < a.sizes.blocks(); b += S::kThreads) z += a.workspace.z_G[b];
  z = block_sum(at, shared, z);
  if (own_thread<S>() == 0)
    *a.l_aux = a.balance_scale * balanced + (a.z_scale == 0.0f ? 0.0f : a.z_scale * z);
}

// The block that owns no tokens: what concerns all of them.
template <class S>
__device__ __forceinline__ void add_up(const Forward& a, const Place<S>& at, const Shared<S>& shared) {
  int32_t* const load_E = shared.ints(2 * a.sizes.num_experts);
  add_counts<S>(a, at, shared, load_E);
  write_loss<S>(a, at, shared, load_E, shared.floats(3 * a.sizes.num_experts));
}

}  // namespace pmoe::route

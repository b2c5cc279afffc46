// The second of the two forward kernels (kernel.cuh): computes the positions of rows, the counts of chunks,
// and the losses.
#pragma once
#include "counts/messages.cuh"
#include "route/block.cuh"

namespace pmoe::route {

// Numbers of rows of a chunk by expert, in shared memory: of the chunk's blocks before this block (before_E),
// and of all blocks of the chunk (total_E).
struct ChunkCounts {
  int32_t* before_E;
  int32_t* total_E;
};

// Adds the row counts of the blocks of a chunk by expert: of all blocks into total_E, and of the first
// `blocks_before` blocks into before_E.
//
// chunk: index of the chunk. It may also be the index of a group of chunks, which then counts as one chunk.
// blocks: number of blocks of the chunk or group.
template <class S>
__device__ __forceinline__ ChunkCounts count_chunk(const Forward& a, const Shared<S>& shared, int chunk,
                                                   int blocks_before, int blocks) {
  const int num_experts = a.sizes.num_experts;
  const int thread = own_thread<S>();
  const ChunkCounts found{shared.ints(0), shared.ints(num_experts)};
  sync<S>();  // before this, the area held other data
  PMOE_ROLLED
  for (int i = thread; i < 2 * num_experts; i += S::kThreads) found.before_E[i] = 0;
  sync<S>();
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
  sync<S>();
  return found;
}

// Computes the prefix sums of the n values value(0), value(1), ... All lanes of one warp call this function.
// For each i it calls visit(i, sum of all values before value(i), value(i)).
//
// sum: a number that is added to all prefix sums.
template <class Value, class Visit>
__device__ __forceinline__ void scan_values(const Value& value, int n, int lane, int32_t sum,
                                            const Visit& visit) {
  PMOE_ROLLED
  for (int begin = 0; begin < n; begin += 32) {
    const int i = begin + lane;
    const int32_t mine = i < n ? value(i) : 0;
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

template <class Visit>
__device__ __forceinline__ void scan(const int32_t* value, int n, int lane, int32_t sum, const Visit& visit) {
  scan_values([&](int i) { return value[i]; }, n, lane, sum, visit);
}

// Returns a bit mask of the lanes of the warp whose slots have the same expert as this lane's slot, this lane
// included; 0 if this lane has no slot. It takes one ballot for each bit of an expert's index.
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

// A range of (token, choice) slots.
struct Slots {
  int64_t begin, end;
};

template <class S>
__device__ __forceinline__ Slots slots_of_warp(const Sizes& sizes, const Place<S>& at) {
  const int64_t part = int64_t{at.block} * S::kWarps + at.warp;
  return {sizes.first_token(part, S::kWarps) * sizes.top_k,
          sizes.first_token(part + 1, S::kWarps) * sizes.top_k};
}

// Counts rows by expert for each warp of the block, into rows_WE.
//
// choice(slot): returns the slot's expert, or -1 if the slot is dropped.
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
  sync<S>();
}

// Replaces each warp's counts in rows_WE by the number of rows of the block's warps before it.
//
// found(expert, rows): called once for each expert, with the rows of all warps.
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

// Goes through a warp's slots in their order, and calls put(slot, expert, placed) for each. `placed` is the
// number of rows of that expert before this slot in the block. A slot whose expert is -1 is not counted.
template <class S, class Choice, class Put>
__device__ __forceinline__ void place_slots(const Place<S>& at, const Shared<S>& shared, int num_experts,
                                            const Slots& slots, const Choice& choice, const Put& put) {
  // For each expert, the number of rows placed so far by this warp and by the block's warps before it.
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
    if (same >> at.lane == 1) rows_E[expert] = placed + count_bits(same);  // by the expert's last lane
    if (is_slot) put(slot, expert, placed + count_bits(earlier));
    sync_warp();
  }
}

// Computes the position of each row of a block's tokens in the order sorted by group of chunks and expert.
template <class S>
__device__ __forceinline__ void place_rows(const Forward& a, const Place<S>& at, const Shared<S>& shared) {
  const int num_experts = a.sizes.num_experts, blocks = a.sizes.chunk_blocks * a.sizes.sorted_chunks;
  const int group = at.block / blocks;
  const Slots slots = slots_of_warp<S>(a.sizes, at);
  const auto choice = [&](int64_t slot) { return a.expert_TK[slot]; };
  // The rows of each warp are counted once more, because the first kernel has stored only the counts of whole
  // blocks. The choices are still in the cache.
  count_slots<S>(at, shared, num_experts, slots, choice);
  add_warps<S>(shared, num_experts, [](int, int32_t) {});
  const ChunkCounts counts = count_chunk<S>(a, shared, group, at.block % blocks, blocks);
  int32_t* const first_E = counts.before_E;
  if (at.warp == 0)
    scan_values([&](int i) { return counts.total_E[a.sizes.expert_at(i)]; }, num_experts, at.lane,
                static_cast<int32_t>(a.sizes.first_row(group * a.sizes.sorted_chunks)),
                [&](int i, int32_t first, int32_t) { first_E[a.sizes.expert_at(i)] += first; });
  sync_block();
  place_slots<S>(at, shared, num_experts, slots, choice, [&](int64_t slot, int32_t expert, int32_t placed) {
    const int32_t position = first_E[expert] + placed;
    a.position_TK[slot] = position;
    a.slot_N[position] = static_cast<int32_t>(slot);
  });
}

// Returns the sum of all threads' values; only thread 0 has it.
template <class S>
__device__ __forceinline__ float block_sum(const Place<S>& at, const Shared<S>& shared, float value) {
  const float of_warp = warp_sum(value);
  sync<S>();
  if (at.lane == 0) shared.sum_W[at.warp] = of_warp;
  sync<S>();
  float sum = 0.0f;
  if (own_thread<S>() == 0) {
    PMOE_ROLLED
    for (int w = 0; w < S::kWarps; ++w) sum += shared.sum_W[w];
  }
  return sum;
}

// Writes the counts of rows of all chunks, and where each expert's rows end.
//
// load_E: receives the number of rows of each expert in all chunks.
template <class S>
__device__ __forceinline__ void add_counts(const Forward& a, const Place<S>& at, const Shared<S>& shared,
                                           int32_t* load_E) {
  const int num_experts = a.sizes.num_experts;
  PMOE_ROLLED
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += S::kThreads) load_E[e] = 0;
  PMOE_ROLLED
  for (int chunk = 0; chunk < a.sizes.num_chunks; ++chunk) {
    const ChunkCounts counts = count_chunk<S>(a, shared, chunk, 0, a.sizes.chunk_blocks);
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

// Returns the balance loss without its factor: the sum over experts e of load_e * (probability of e, summed
// over tokens). Only thread 0 has the result.
//
// load_E: number of rows of each expert.
// partial: scratch memory of max(threads, E) floats.
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
  sync<S>();
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

// Computes the loss l_aux (balance loss and z-loss) and writes it.
//
// load_E: number of rows of each expert.
// partial: scratch memory of max(threads, E) floats.
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

// Writes the fault: not_finite if any logit is infinite or NaN, else 0.
template <class S>
__device__ __forceinline__ void write_fault(const Forward& a, const Place<S>& at, const Shared<S>& shared) {
  float strange = 0.0f;
  PMOE_ROLLED
  for (int b = own_thread<S>(); b < a.sizes.blocks(); b += S::kThreads)
    strange += static_cast<float>(a.workspace.strange_G[b]);
  strange = block_sum(at, shared, strange);
  if (own_thread<S>() == 0) *a.fault = strange == 0.0f ? 0 : a.not_finite;
}

// Runs the last block of the grid, which has no tokens: it writes the counts of all chunks, the loss, the
// fault, and the messages of row counts.
template <class S>
__device__ __forceinline__ void add_up(const Forward& a, const Place<S>& at, const Shared<S>& shared) {
  int32_t* const load_E = shared.ints(2 * a.sizes.num_experts);
  add_counts<S>(a, at, shared, load_E);
  write_loss<S>(a, at, shared, load_E, shared.floats(3 * a.sizes.num_experts));
  write_fault<S>(a, at, shared);
  if (a.pack.sent == nullptr) return;
  sync_block();  // the block's threads have written counts and fault, which the messages repeat
  counts::write_messages(a.pack, own_thread<S>(), S::kThreads);
}

}  // namespace pmoe::route

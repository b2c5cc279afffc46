// Kernels of the exchange of row counts, in which every rank sends a message to every rank (layout.h):
//
//   pack_kernel    writes the messages of this rank
//   agree_kernel   computes, from the messages that arrived, what all ranks must agree on, such as how often
//                  chunks must be cut finer
//   order_kernel   computes the orders in which rows and their routing weights are sorted and sent, and where
//                  the rows of each expert end
//
// They use no torch.
#pragma once
#include <cmath>

#include "common/device.cuh"
#include "counts/layout.h"
#include "counts/messages.cuh"

namespace pmoe::counts {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  PMOE_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) value += shfl_xor(value, mask);
  return value;
}

template <class T>
__device__ __forceinline__ T warp_largest(T value) {
  PMOE_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) value = larger(value, shfl_xor(value, mask));
  return value;
}

// ---- the messages

__global__ void __launch_bounds__(kThreads) pack_kernel(const Pack a) {
  write_messages(a, static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int32_t>(threadIdx.x),
                 static_cast<int32_t>(gridDim.x) * kThreads);
}

// ---- what ranks must agree on

// Numbers in the shared memory of a block of agree_kernel.
//
// travelling_F: for each bin, the number of rows that other ranks send to this one. If own_rank is -1, this
//     rank counts as one of them.
// all_F: for each bin, the number of rows from all ranks, this one included.
// most_tokens: the largest number of tokens of a rank.
struct AgreeShared {
  int64_t* travelling_F;
  int64_t* all_F;
  int32_t* most_tokens;

  static int bytes(int bins) { return 2 * 8 * bins + 16; }

  static __device__ __forceinline__ AgreeShared at(uint8_t* base, int bins) {
    auto* const first = reinterpret_cast<int64_t*>(base);
    return {first, first + bins, reinterpret_cast<int32_t*>(first + 2 * bins)};
  }
};

// Returns how many times `degree` chunks must be cut finer (cut_finer in layout.h) until no chunk has more
// rows than `limit`, or until each chunk is one bin. All lanes of a warp call this function.
//
// rows_F: number of rows in each bin.
// degree: number of chunks at first.
__device__ __forceinline__ int32_t depth_of(const int64_t* rows_F, int32_t bins, int32_t degree, double limit,
                                            int lane) {
  int32_t depth = 0;
  for (int32_t chunks = degree; chunks < bins; chunks = cut_finer(chunks, bins)) {
    const int32_t chunk_bins = bins / chunks;
    int64_t most = 0;
    for (int32_t chunk = lane; chunk < chunks; chunk += 32) {
      int64_t rows = 0;
      for (int32_t bin = 0; bin < chunk_bins; ++bin) rows += rows_F[chunk * chunk_bins + bin];
      most = larger(most, rows);
    }
    depth += static_cast<double>(warp_largest(most)) > limit;
  }
  return depth;
}

// Computes `agreed` from the messages of all ranks. The grid has one block.
__global__ void __launch_bounds__(kThreads) agree_kernel(const Agree a) {
  const int32_t words = a.message.words(), bins = a.message.bins, experts = a.message.experts;
  const int32_t ranks = a.message.ranks;
  const AgreeShared shared = AgreeShared::at(shared_memory(), bins);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  for (int32_t bin = thread; bin < bins; bin += kThreads) {
    int64_t all = 0, own = 0;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const int32_t* const counts = a.received + int64_t{rank} * words + kHeader + bin * experts;
      int64_t rows = 0;
      for (int32_t expert = 0; expert < experts; ++expert) rows += counts[expert];
      all += rows;
      if (rank == a.own_rank) own = rows;
    }
    shared.all_F[bin] = all;
    shared.travelling_F[bin] = all - own;
  }
  if (warp < kHeader) {
    int32_t most = INT32_MIN;
    for (int32_t rank = lane; rank < ranks; rank += 32)
      most = larger(most, a.received[int64_t{rank} * words + warp]);
    most = warp_largest(most);
    if (lane == 0) a.agreed[warp] = most;
    if (lane == 0 && warp == 0) *shared.most_tokens = most;
  }
  sync_block();
  if (warp == 0) {
    int64_t rows = 0;
    for (int32_t bin = lane; bin < bins; bin += 32) rows += shared.all_F[bin];
    rows = warp_sum(rows);
    if (lane == 0) {
      a.agreed[kHeader] = a.host_rows >= 0 && rows > a.host_rows;
      a.agreed[kHeader + 1] = a.asks_rows ? rows : 0;
      a.agreed[kHeader + 2] = a.irregular;
    }
  }
  for (int32_t d = warp; d < a.degrees; d += kWarps) {
    const double limit = ceil(static_cast<double>(*shared.most_tokens) * a.limit_a_token[d]);
    const int32_t depth = depth_of(shared.travelling_F, bins, a.degree[d], limit, lane);
    if (lane == 0) a.agreed[kHeader + 3 + d] = depth;
  }
}

// ---- the order of rows by expert

// Numbers of rows that arrive from one rank, for one block of write_row_order. The block writes the indices
// of one run: an expert's rows in one group of bins of one chunk.
//
// run: rows of the run.
// before: rows of the same chunk that come before the run when sorted by expert, then group.
// chunk, earlier, all: rows of the chunk, of the chunks before it, and of all chunks.
struct RankSums {
  int32_t run, before, chunk, earlier, all;
};

// Returns the numbers of rows from one rank, for the run of a chunk, an expert and a group. All lanes of a
// warp call this function, and it returns the same to all. For own_rank it returns zeros.
__device__ __forceinline__ RankSums sums_of(const Order& a, int32_t rank, int32_t chunk, int32_t expert,
                                            int32_t group, int lane) {
  RankSums sums{0, 0, 0, 0, 0};
  const int32_t experts = a.message.experts, count = a.message.bins * experts;
  const int32_t* const counts = a.received + int64_t{rank} * a.message.words() + kHeader;
  for (int32_t i = lane; i < count && rank != a.own_rank; i += 32) {
    const int32_t rows = counts[i], bin = i / experts, its_expert = i % experts;
    const int32_t its_chunk = bin / a.chunk_bins(), its_group = bin % a.chunk_bins() / a.joined;
    sums.all += rows;
    if (its_chunk < chunk) sums.earlier += rows;
    if (its_chunk != chunk) continue;
    sums.chunk += rows;
    const bool is_same = its_expert == expert;
    if (its_expert < expert || (is_same && its_group < group)) sums.before += rows;
    if (is_same && its_group == group) sums.run += rows;
  }
  return {warp_sum(sums.run), warp_sum(sums.before), warp_sum(sums.chunk), warp_sum(sums.earlier),
          warp_sum(sums.all)};
}

// Writes the indices of_chunks and of_all (Order in layout.h) for one run: an expert's rows in one group of
// bins of one chunk.
//
// block: index of the run. Runs are numbered by chunk, then expert, then group.
__device__ __forceinline__ void write_row_order(const Order& a, int32_t block) {
  auto* const sums_W = reinterpret_cast<RankSums*>(shared_memory());
  const int32_t ranks = a.message.ranks, runs = a.message.experts * a.groups();
  const int32_t chunk = block / runs, expert = block % runs / a.groups(), group = block % a.groups();
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  for (int32_t rank = warp; rank < ranks; rank += kWarps) {
    const RankSums sums = sums_of(a, rank, chunk, expert, group, lane);
    if (lane == 0) sums_W[rank] = sums;
  }
  sync_block();
  for (int32_t rank = warp; rank < ranks; rank += kWarps) {
    const RankSums own = sums_W[rank];
    if (own.run == 0) continue;
    int32_t arrived = 0, arrived_all = 0, sorted = 0, chunk_start = 0;
    for (int32_t other = lane; other < ranks; other += 32) {
      const RankSums sums = sums_W[other];
      sorted += sums.before;
      chunk_start += sums.earlier;
      if (other >= rank) continue;
      sorted += sums.run;
      arrived += sums.chunk;
      arrived_all += sums.all;
    }
    const int32_t first = warp_sum(chunk_start) + warp_sum(sorted);
    const int32_t in_chunk = warp_sum(arrived) + own.before;
    const int64_t in_all = int64_t{warp_sum(arrived_all)} + own.earlier + own.before;
    for (int32_t i = lane; i < own.run; i += 32) {
      a.of_chunks[first + i] = in_chunk + i;
      a.of_all[first + i] = in_all + i;
    }
  }
}

// ---- the order of the numbers that are sent

// Numbers of this rank's rows, for one block of write_number_order. The block handles one run: the rows of a
// chunk that go to one rank.
//
// run: rows of the run.
// sorted: rows before the run, in the order in which this rank sorts its rows.
// sent: rows before the run, in the order in which this rank sends a number for each row (number_slot).
struct RunSums {
  int32_t run, sorted, sent;
};

// Returns the numbers of rows for the run of a chunk and a rank. All threads of a block call this function,
// and it returns the same to all.
__device__ __forceinline__ RunSums sums_of_run(const Order& a, int32_t chunk, int32_t rank) {
  auto* const shared = reinterpret_cast<int32_t*>(shared_memory());
  const int32_t words = a.message.words(), experts = a.message.experts, ranks = a.message.ranks;
  const int32_t of_rank = a.message.bins * experts, count = ranks * of_rank;
  const int thread = static_cast<int>(threadIdx.x);
  const bool stays = rank == a.own_rank;
  if (thread < 3) shared[thread] = 0;
  sync_block();
  RunSums sums{0, 0, 0};
  for (int32_t i = thread; i < count; i += kThreads) {
    const int32_t its_rank = i / of_rank, word = i % of_rank;
    const int32_t rows = a.sent[int64_t{its_rank} * words + kHeader + word];
    const int32_t its_chunk = word / experts / a.chunk_bins();
    const bool its_stays = its_rank == a.own_rank;
    // Whether the rows for its_rank come before those of the run in an order by rank, in which the rows that
    // stay on this rank are the last.
    const bool is_before = its_stays == stays ? its_rank < rank : stays;
    if (its_rank == rank && its_chunk == chunk) sums.run += rows;
    if (its_chunk < chunk || (its_chunk == chunk && is_before)) sums.sorted += rows;
    if (is_before || (its_rank == rank && its_chunk < chunk)) sums.sent += rows;
  }
  sums = {warp_sum(sums.run), warp_sum(sums.sorted), warp_sum(sums.sent)};
  if (thread % 32 == 0) {
    atomicAdd(shared, sums.run);
    atomicAdd(shared + 1, sums.sorted);
    atomicAdd(shared + 2, sums.sent);
  }
  sync_block();
  return {shared[0], shared[1], shared[2]};
}

// Writes number_slot and number_weight (Order in layout.h) for one run: the rows of a chunk for one rank.
//
// block: index of the run. Runs are numbered by chunk, then rank.
__device__ __forceinline__ void write_number_order(const Order& a, int32_t block) {
  const RunSums sums = sums_of_run(a, block / a.message.ranks, block % a.message.ranks);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < sums.run; i += kThreads) {
    const int32_t slot = a.slot[sums.sorted + i];
    a.number_slot[sums.sent + i] = slot;
    if (a.weight != nullptr) a.number_weight[sums.sent + i] = a.weight[slot];
  }
}

// ---- where the rows of each expert end

constexpr int kExpertsAtOnce = 512;

// Returns the number of rows of one expert among the rows to which a line of Order::ends refers. All lanes of
// a warp call this function, and it returns the same to all.
//
// line: index of the line.
__device__ __forceinline__ int32_t rows_of_line(const Order& a, int32_t line, int32_t expert, int lane) {
  const int32_t ranks = a.message.ranks;
  const bool stays = line >= a.chunks;
  const int32_t piece = line - a.chunks, shared_chunks = a.chunks - a.pieces + 1;
  const int32_t first = !stays ? line : piece == 0 ? 0 : piece + shared_chunks - 1;
  const int32_t chunks = stays && piece == 0 ? shared_chunks : 1;
  const int32_t own_bins = chunks * a.chunk_bins();
  int32_t rows = 0;
  for (int32_t i = lane; i < ranks * own_bins; i += 32) {
    const int32_t rank = i / own_bins, bin = first * a.chunk_bins() + i % own_bins;
    if ((rank == a.own_rank) != stays) continue;
    const int32_t* const counts = a.received + int64_t{rank} * a.message.words() + kHeader;
    rows += counts[bin * a.message.experts + expert];
  }
  return warp_sum(rows);
}

// Writes one line of Order::ends: for each expert, the number of rows of the experts up to and with it.
__device__ __forceinline__ void write_ends(const Order& a, int32_t line) {
  auto* const rows_E = reinterpret_cast<int32_t*>(shared_memory());
  const int32_t experts = a.message.experts;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  int32_t end = 0;  // number of rows of the experts before; only the first warp keeps it up to date
  for (int32_t begin = 0; begin < experts; begin += kExpertsAtOnce) {
    const int32_t count = smaller(kExpertsAtOnce, experts - begin);
    for (int32_t e = warp; e < count; e += kWarps) {
      const int32_t rows = rows_of_line(a, line, begin + e, lane);
      if (lane == 0) rows_E[e] = rows;
    }
    sync_block();
    for (int32_t e = lane; warp == 0 && e - lane < count; e += 32) {
      int32_t up_to = e < count ? rows_E[e] : 0;
      PMOE_UNROLL
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t left = shfl_up(up_to, distance);
        if (lane >= distance) up_to += left;
      }
      if (e < count) a.ends[line * experts + begin + e] = end + up_to;
      end += shfl(up_to, 31);
    }
    sync_block();
  }
}

inline int order_bytes(int ranks) {
  return larger(ranks * static_cast<int>(sizeof(RankSums)),
                kExpertsAtOnce * static_cast<int>(sizeof(int32_t)));
}

// Computes the results that Order (layout.h) describes. Each block writes one run of an order, or one line of
// the ends. Block 0 also sets Order::zeros to 0.
//
// The 4 in __launch_bounds__ asks for 4 blocks of 256 threads on a multiprocessor, so a thread may have up to
// 64 registers. Without the 4, nvcc 13.0 gives a thread only 40 registers on Blackwell, and spills others.
__global__ void __launch_bounds__(kThreads, 4) order_kernel(const Order a) {
  int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block == 0)
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < a.num_zeros; i += kThreads) a.zeros[i] = 0;
  if (block < a.row_blocks()) return write_row_order(a, block);
  block -= a.row_blocks();
  if (block < a.number_blocks()) return write_number_order(a, block);
  write_ends(a, block - a.number_blocks());
}

}  // namespace pmoe::counts

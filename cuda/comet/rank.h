// The arguments of one rank in a launch of COMET's kernels, except those of its product
// (grouped_gemm/problem.h).
#pragma once
#include "comet/layout.h"
#include "comet/order.h"
#include "common/host_device.h"
#include "peers/watch.h"

namespace pmoe::comet {

using peers::Report;
using peers::Wait;
using peers::Watch;

// The arguments of one rank: its heap, its routing, and how many of its blocks communicate.
struct Rank {
  Layout layout;          // of every rank's heap
  uint8_t* const* heaps;  // (W,) heaps, as this rank addresses them
  int rank = 0;
  Watch watch;

  // Row counts by rank and expert; E is the number of experts of a rank.
  //
  // send_counts: [target * E + e] is the number of rows that this rank sends to expert e of rank `target`.
  // recv_counts: [source * recv_stride + e] is the number of rows that this rank receives from rank `source`
  //     for its own expert e.
  const int32_t* send_counts = nullptr;
  const int32_t* recv_counts = nullptr;
  int64_t recv_stride = 0;

  // The routing of this rank's T tokens, with K choices each. A slot is a (token, choice) pair.
  //
  // expert: (T, K) the expert of each slot, an index among the experts of all ranks.
  // weight: (T, K) the routing weight of each slot.
  // position: (T, K) the index of each slot's row in the order sorted by expert; -1 if the row is not sent.
  // slot: the slot of each row in sorted order.
  // first_row: 0, unless one process runs several ranks (in tests and measurements). These ranks share the
  //     arrays, and positions count the rows of all of them. first_row is then the number of rows that the
  //     lower ranks send. The index of a row among the rows that this rank sends, and in the region `home`,
  //     is position - first_row.
  const int32_t* expert = nullptr;
  const float* weight = nullptr;
  const int32_t* position = nullptr;
  const int32_t* slot = nullptr;
  int first_row = 0;
  int choices = 1;                 // K
  Divisor by_choices, by_experts;  // K, E

  // For the dispatching kernel: this rank's tokens. A token has layout.row_bytes bytes, and the next token
  // begins source_stride bytes after it.
  const uint8_t* source = nullptr;
  int64_t source_stride = 0;  // bytes

  // For the combining kernel: memory for the tokens' results. This rank's tokens have the indices first_token
  // to first_token + tokens - 1.
  uint8_t* result = nullptr;
  int64_t result_stride = 0;  // bytes
  int first_token = 0, tokens = 0;
  Chunks chunks = {0, 1};
  const float* row_dots = nullptr;  // (parts, dot_rows) partial gradients of the weights, or null
  int dot_parts = 0;
  int64_t dot_rows = 0;
  float* weight_gradient = nullptr;  // (T, K); used if row_dots is set

  int communicating = 1;  // number of communicating blocks (n_c in the paper)
  int blocks = 2;         // blocks of this rank
  int computes = 1;       // 0: rows are sent and awaited, but nothing is multiplied

  PMOE_HD int ranks() const { return layout.ranks; }
  PMOE_HD int experts() const { return layout.experts; }
  PMOE_HD uint8_t* heap(int peer) const { return heaps[peer]; }
  PMOE_HD uint8_t* own() const { return heaps[rank]; }
  PMOE_HD Counters* counters() const { return reinterpret_cast<Counters*>(own() + layout.counters()); }
  PMOE_HD uint8_t* inbox(int peer, int row) const {
    return heap(peer) + layout.inbox() + row * layout.row_bytes;
  }
};

}  // namespace pmoe::comet

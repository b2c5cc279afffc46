// What one rank's part of a fused launch is told, next to its product (grouped_gemm/problem.h).
#pragma once
#include "comet/layout.h"
#include "comet/order.h"
#include "comet/watch.h"
#include "common/host_device.h"

namespace pmoe::comet {

struct Rank {
  Layout layout;          // of every rank's heap
  uint8_t* const* heaps;  // (W), as this rank sees them
  int rank = 0;
  Watch watch;

  // Rows by rank and expert: send_counts[target * E + e] of this rank's, and recv_counts[source *
  // recv_stride + e] that come.
  const int32_t* send_counts = nullptr;
  const int32_t* recv_counts = nullptr;
  int64_t recv_stride = 0;

  // By slot: the expert of all ranks', the routing weight, and where the row stands in the order in which
  // rows are sent, less first_row; -1 for a row that is not sent. slot: of each row that is sent.
  const int32_t* expert = nullptr;
  const float* weight = nullptr;
  const int32_t* position = nullptr;
  const int32_t* slot = nullptr;
  int first_row = 0;
  int choices = 1;                 // K
  Divisor by_choices, by_experts;  // K, E

  // dispatch: rows of tokens. row_bytes of the layout each.
  const uint8_t* source = nullptr;
  int64_t source_stride = 0;  // bytes

  // combine: the tokens' sums, first_token and on.
  uint8_t* result = nullptr;
  int64_t result_stride = 0;  // bytes
  int first_token = 0, tokens = 0;
  Chunks chunks = {0, 1};
  const float* row_dots = nullptr;  // (parts, dot_rows) of this rank's rows, or null
  int dot_parts = 0;
  int64_t dot_rows = 0;
  float* weight_gradient = nullptr;  // by slot; where there are row_dots

  int communicating = 1;  // n_c: blocks
  int blocks = 2;         // of this rank
  int computes = 1;       // 0: rows are sent and awaited, nothing is multiplied

  PMOE_HD int ranks() const { return layout.ranks; }
  PMOE_HD int experts() const { return layout.experts; }
  PMOE_HD uint8_t* heap(int peer) const { return heaps[peer]; }
  PMOE_HD uint8_t* own() const { return heaps[rank]; }
  PMOE_HD Counters* counters() const { return reinterpret_cast<Counters*>(own() + layout.counters()); }
  PMOE_HD uint8_t* inbox(int peer, int row) const {
    return heap(peer) + layout.inbox() + row * layout.row_bytes;
  }
};

// Threads that work together: a warp's lanes; one alone where tests have a thread for a warp.
struct Team {
  int lane, lanes;
  int number, count;  // of all the rank's communicating ones
};

}  // namespace pmoe::comet

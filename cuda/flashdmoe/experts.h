// The arguments of a launch: for each rank that this process runs, its pass (routing, rows, tasks) and its
// experts.
#pragma once
#include "flashdmoe/pass.h"

namespace pmoe::flashdmoe {

using peers::kMostVirtual;

// A rank's experts, and the activations of the rows that arrived. All tensors have the rows' dtype, except
// dots.
//
// A cell is the rows of one source rank for one expert. With a capacity, a cell has room for C rows, and an
// activation is a tensor (number of cells * C, columns). Without a capacity, all cells share a pool of C rows
// (layout.h), and an activation is a tensor (C, columns). Where no row arrived, a tensor keeps old values.
struct Experts {
  int model = 0, hidden = 0;  // M, H; G = H, or 2 H for SwiGLU
  const void *w1 = nullptr, *b1 = nullptr, *w2 = nullptr, *b2 = nullptr;
  void* input = nullptr;   // T_DI, M columns: forward copies it here, backward reads it; null: not kept
  void* wide = nullptr;    // T_M, G columns: the first product writes it; null: not kept
  void* active = nullptr;  // the activated hidden, H columns; in backward times the routing weight

  // For the backward pass.
  void* gradient = nullptr;  // gradient of T_M, G columns
  float* dots = nullptr;     // (parts, cells * C): partial sums of the routing weights' gradients
  void *of_w1 = nullptr, *of_w2 = nullptr, *of_b1 = nullptr, *of_b2 = nullptr;  // null: not wanted
};

// The arguments of one rank in a launch.
struct Member {
  Pass pass;
  Experts experts;
};

// All arguments of a launch.
struct Launch {
  Member of_rank[kMostVirtual];
  int ranks = 1;
};
static_assert(sizeof(Launch) <= 4096, "more bytes than a kernel's arguments may have");

// Sets how many tasks a forward pass has: routing tasks, if the launch does the routing, and the tiles of the
// products.
//
// halves: true for SwiGLU, whose T_M has two halves of columns, gate and up. A tile of the first product then
//     has half of its columns in each half.
// columns: number of columns of a product's tile.
inline void plan_forward(Pass& pass, const Experts& experts, bool halves, int columns) {
  const int most = smaller(pass.processors, kMostGroups);
  RoutingTasks& routing = pass.routing;
  routing.groups = !routing.is_asked ? 0 : larger(1, smaller(most, ceil_div(pass.tokens, kRoutedTokens)));
  if (routing.choice.weight != nullptr) {
    routing.products[0] = ceil_div(pass.tokens, pass.layout.tile_rows);
    routing.products[1] = ceil_div(pass.layout.cells(), columns);
  }
  pass.stages = {};
  pass.stages.columns[0] = ceil_div(experts.hidden, halves ? columns / 2 : columns);
  pass.stages.columns[1] = ceil_div(experts.model, columns);
}

// Sets how many tasks a backward pass has.
//
// halves: true for SwiGLU, whose hidden columns are two halves.
// rows: number of rows of a tile of a weight's gradient.
// columns: number of columns of a product's tile.
// recomputes: whether T_M, the hidden activation, is computed once more from T_DI.
inline void plan_backward(Pass& pass, const Experts& experts, bool halves, int rows, int columns,
                          bool recomputes) {
  const int model = experts.model, hidden = experts.hidden, wide = halves ? 2 * hidden : hidden;
  Stages& stages = pass.stages;
  stages = {};
  int i = 0;
  if (recomputes) stages.columns[i++] = ceil_div(hidden, halves ? columns / 2 : columns);
  stages.type[i] = TaskType::kHiddenGradient, stages.columns[i++] = ceil_div(hidden, columns);
  stages.type[i] = TaskType::kInputGradient, stages.columns[i++] = ceil_div(model, columns);
  stages.count = i;
  WeightTasks& sums = pass.weights;
  sums = {};
  if (experts.of_w1) sums.down[0] = ceil_div(wide, rows), sums.across[0] = ceil_div(model, columns);
  if (experts.of_w2) sums.down[1] = ceil_div(model, rows), sums.across[1] = ceil_div(hidden, columns);
  if (experts.of_b1) sums.bias[0] = ceil_div(wide, kBiasColumns);
  if (experts.of_b2) sums.bias[1] = ceil_div(model, kBiasColumns);
  pass.is_backward = true;
}

// Assigns addresses in the workspace to the queue and counters of `pass`, and returns the workspace's size in
// bytes. Forward and backward launches use the same workspace, and rely on counters that are zero when a
// launch begins. So each counter must have the same offset in every launch. Offsets are computed for the
// largest pass: a backward pass with all gradients and `tokens` tokens.
//
// halves: true for SwiGLU, whose hidden columns are two halves.
// rows, columns: numbers of rows and columns of a product's tile.
// base: address of the workspace, a multiple of 1024. If it is null, the function only counts the bytes.
inline int64_t place_for_all(Pass& pass, const Experts& experts, bool halves, int rows, int columns,
                             int tokens, uint8_t* base) {
  Experts all = experts;
  all.of_w1 = all.of_w2 = all.of_b1 = all.of_b2 = &all;
  Pass largest = pass;
  largest.tokens = tokens, largest.routing.groups = kMostGroups;
  largest.routing.products[0] = ceil_div(tokens, rows);
  largest.routing.products[1] = ceil_div(kMostChosen, columns);
  plan_backward(largest, all, halves, rows, columns, true);
  const int64_t bytes = place_workspace(largest, base);
  pass.queue = largest.queue, pass.mailboxes = largest.mailboxes,
  pass.finished_tiles = largest.finished_tiles;
  pass.expert_progress = largest.expert_progress, pass.next_tile = largest.next_tile;
  RoutingTasks &routing = pass.routing, &most = largest.routing;
  routing.rows = most.rows, routing.choice.probability = most.choice.probability;
  routing.choice.z = most.choice.z;
  return bytes;
}

}  // namespace pmoe::flashdmoe

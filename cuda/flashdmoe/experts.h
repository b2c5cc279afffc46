// A launch of a pass of the layer: of every rank that this process runs, its pass and its experts.
#pragma once
#include "flashdmoe/pass.h"

namespace pmoe::flashdmoe {

// Ranks of one launch: one, or several virtual ones that share a device (for tests and measurements).
constexpr int kMostVirtual = 4;

// All of the rows' type. Rows of a cell stand in its C rows of (cells C, columns); those that have not come
// are left as they are.
struct Experts {
  int model = 0, hidden = 0;  // M, H; G = H, or 2 H for SwiGLU
  const void *w1 = nullptr, *b1 = nullptr, *w2 = nullptr, *b2 = nullptr;
  void* input = nullptr;   // T_DI: forward copies it there, backward reads it; null: not kept
  void* wide = nullptr;    // T_M, G columns: written by GEMM_0, but for a forward pass that keeps none
  void* active = nullptr;  // H columns: the activated ones, in backward times the routing weight

  // Backward.
  void* gradient = nullptr;                                                     // dT_M, G columns
  float* dots = nullptr;                                                        // (parts, cells C)
  void *of_w1 = nullptr, *of_w2 = nullptr, *of_b1 = nullptr, *of_b2 = nullptr;  // null: not wanted
};

struct Member {
  Pass pass;
  Experts experts;
};

struct Launch {
  Member of_rank[kMostVirtual];
  int ranks = 1;
};
static_assert(sizeof(Launch) <= 4096, "more than a kernel's arguments");

// What a pass is made of, for products whose tiles have so many columns (and `half` where they are halves).
// Its tokens are routed first where their experts have been chosen and no more.
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

// recomputes: T_M is made again from T_DI.
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

// A workspace serves both passes, whatever gradients are wanted, and up to so many tokens: its parts lie at
// the same places in all of them.
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
  pass.queue = largest.queue, pass.doors = largest.doors, pass.made = largest.made;
  pass.whole = largest.whole, pass.heard = largest.heard;
  RoutingTasks &routing = pass.routing, &most = largest.routing;
  routing.rows = most.rows, routing.choice.probability = most.choice.probability;
  routing.choice.z = most.choice.z;
  return bytes;
}

}  // namespace pmoe::flashdmoe

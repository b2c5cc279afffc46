// What one rank's part of a persistent launch is told.
#pragma once
#include <type_traits>

#include "comet/watch.h"
#include "flashdmoe/layout.h"
#include "flashdmoe/task.h"

namespace pmoe::flashdmoe {

using comet::Wait;
using comet::Watch;

constexpr int kCombineTokens = 32;  // of a combine task
constexpr int kBiasColumns = 64;    // of a bias gradient's task
constexpr int kRoutedTokens = 64;   // of a group that is routed, at least
constexpr int kMostGroups = 128;    // so many: each reads what all others have counted
constexpr int kMostChosen = 256;    // experts of all ranks, where the launch chooses

// A processor's door: who is it, and what should it do?
constexpr uint32_t kAbsent = 0, kIdle = 1, kFirstTask = 2;  // kFirstTask + i: the task at place i of tQ

// An expert's rows are complete when every source has announced its rows and none of their tiles is left. A
// bit of Watch::not_waited, for tests: sums over them then do not wait for that.
constexpr uint32_t kSourceAnnounced = 1u << 20;
constexpr uint32_t kCompleteBit = 1u << 8;

// Of the same kind: rows are placed before all groups of tokens have been counted.
constexpr uint32_t kCountedBit = 1u << 9;

// And: experts are chosen before all scores are there.
constexpr uint32_t kScoredBit = 1u << 11;

// And: a cell's offset is used before it is chosen.
constexpr uint32_t kKnownBit = 1u << 10;

// Tiles of one expert's weight gradients; 0 where a gradient is not wanted.
struct WeightTasks {
  int down[2] = {}, across[2] = {};  // of w1 and of w2
  int bias[2] = {};                  // of b1 and of b2: columns

  PMOE_HD int tasks() const { return down[0] * across[0] + down[1] * across[1] + bias[0] + bias[1]; }
};

// The gate's choice, where the launch makes it: from the scores of all experts the pass's expert and weight,
// and what the gate's loss and gradient are made of.
struct GateChoice {
  bool is_asked = false;
  bool normalizes = false;                  // a token's weights are divided by their sum
  float balance_scale = 0.0f, z_scale = 0;  // see route/layout.h
  float* logits = nullptr;                  // (tokens, experts of all ranks)
  const void* weight = nullptr;  // (experts of all ranks, M), of the rows' type; null: logits are there
  int32_t* counts = nullptr;     // by expert, of all choices: also those beyond a capacity
  float* l_aux = nullptr;
  float* probability = nullptr;  // (groups, experts of all ranks): summed over the group's tokens
  float* z = nullptr;            // (groups): squared logsumexp, summed likewise
};

// What a launch makes of the experts that a gate has chosen, before any row leaves: the pass's counts, slot,
// expert and row. Without groups these were there before.
struct RoutingTasks {
  bool is_asked = false;
  int products[2] = {};             // tiles of the gate's product, down (of tokens) and across
  int groups = 0;                   // of tokens
  const int64_t* chosen = nullptr;  // by slot the expert; null: they stand in the pass's already
  const uint8_t* keep = nullptr;    // by slot, 0: dropped; null: none is
  int capacity = 0;                 // rows of an expert that are kept, in the tokens' order; at most C
  int32_t* rows = nullptr;          // (groups, experts of all ranks): of each group
  GateChoice choice;

  PMOE_HD int scored() const { return products[0] * products[1]; }
  PMOE_HD int tasks() const { return scored() + 2 * groups; }
};

struct Pass {
  Layout layout;          // of every rank's heap
  uint8_t* const* heaps;  // (P), as this rank sees them
  int rank = 0;
  Watch watch;

  // Routing: rows by expert of all ranks, at most C each; the slot of an expert's c-th row, at [expert * C +
  // c]; and by slot the expert, the routing weight and c, -1 where it is dropped. In a pool c begins at the
  // expert's home, and the slot is at [c].
  int32_t* counts = nullptr;
  int32_t* home = nullptr;    // by expert of all ranks; null where there is no pool
  int32_t* offset = nullptr;  // by cell of this rank: forward makes it, backward reads it
  int32_t* slot = nullptr;
  int32_t* expert = nullptr;
  int32_t* row = nullptr;
  float* weight = nullptr;  // written where the launch chooses
  RoutingTasks routing;
  int tokens = 0, choices = 1;     // S, k
  Divisor by_choices, by_experts;  // k, E

  const uint8_t* source = nullptr;  // rows of tokens, row_bytes of the layout each: T_I, or dY
  int64_t source_stride = 0;        // bytes
  uint8_t* result = nullptr;        // T_O, or dX
  int64_t result_stride = 0;        // bytes

  // Backward: weights and their gradients travel with the rows, and T_I where it is sent again.
  bool is_backward = false;
  const uint8_t* again = nullptr;
  int64_t again_stride = 0;          // bytes
  float* weight_gradient = nullptr;  // by slot

  Stages stages;
  WeightTasks weights;

  // Zeros before the first round.
  Queue queue = {};
  uint32_t* doors = nullptr;  // (processors)
  uint32_t* made = nullptr;   // (stages, tiles of all cells): of a stage's tiles across
  uint32_t* whole = nullptr;  // (experts): sources announced, and tiles that are left
  int32_t* heard = nullptr;   // (cells): see subscriber.h
  int processors = 1;

  PMOE_HD uint8_t* own() const { return heaps[rank]; }
  PMOE_HD uint8_t* at(int peer, const Coordinates& i) const { return heaps[peer] + layout.at(i); }
  PMOE_HD int groups() const { return ceil_div(tokens, kCombineTokens); }
  PMOE_HD const int32_t* announced_rows(int source_rank) const {
    return reinterpret_cast<const int32_t*>(own() + layout.counts(source_rank));
  }
  // offset: of the task's cell.
  PMOE_HD uint32_t* made_of(const Task& t, int stage, int offset) const {
    return made + int64_t{stage} * layout.all_tiles() +
           (layout.first_row(t.peer, t.expert) + offset) / layout.tile_rows + t.tile;
  }
  PMOE_HD int rows_of(int count, int tile) const {
    return smaller(layout.tile_rows, count - tile * layout.tile_rows);
  }
};

// Tasks of a round, at most.
PMOE_HD int64_t most_tasks(const Pass& pass) {
  const Layout& layout = pass.layout;
  return int64_t{layout.all_tiles()} * (1 + pass.stages.tasks()) +
         int64_t{layout.experts} * pass.weights.tasks() + pass.groups() + pass.routing.tasks();
}

// What a rank keeps from round to round, in one piece of memory on 1024 bytes: where its parts lie. Sizes
// must have been told. Returns its bytes; zeros before the first round.
inline int64_t place_workspace(Pass& pass, uint8_t* base) {
  int64_t taken = 0;
  const auto take = [&](auto*& part, int64_t count) {
    using Part = std::remove_reference_t<decltype(*part)>;
    part = base == nullptr ? nullptr : reinterpret_cast<Part*>(base + taken);
    taken += Layout::whole(count * int64_t{sizeof(Part)});
  };
  const Layout& layout = pass.layout;
  pass.queue.room = static_cast<int>(most_tasks(pass));
  take(pass.queue.state, 1);
  take(pass.queue.entry, pass.queue.room);
  take(pass.doors, pass.processors);
  take(pass.made, int64_t{pass.stages.count} * layout.all_tiles());
  take(pass.whole, layout.experts);
  take(pass.heard, layout.cells());
  take(pass.routing.rows, int64_t{pass.routing.groups} * layout.cells());
  take(pass.routing.choice.probability, int64_t{pass.routing.groups} * layout.cells());
  take(pass.routing.choice.z, pass.routing.groups);
  return taken;
}

}  // namespace pmoe::flashdmoe

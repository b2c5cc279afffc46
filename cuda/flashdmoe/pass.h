// The arguments of one rank's part of a persistent launch, besides its experts.
#pragma once
#include <type_traits>

#include "flashdmoe/layout.h"
#include "flashdmoe/task.h"
#include "peers/watch.h"

namespace pmoe::flashdmoe {

using peers::Wait;
using peers::Watch;

constexpr int kCombineTokens = 32;  // tokens of a combine task
constexpr int kBiasColumns = 64;    // columns of a bias gradient's task
constexpr int kRoutedTokens = 64;   // fewest tokens of a group that is routed
constexpr int kMostGroups = 128;    // largest number of groups; each group reads the counts of all
constexpr int kMostChosen = 256;    // largest number of experts of all ranks if the launch chooses

// The values of a processor's mailbox for tasks: not running, idle, or kFirstTask + i, which means that it
// has the task at place i of tQ. The processor writes the first two, the scheduler the last.
constexpr uint32_t kAbsent = 0, kIdle = 1, kFirstTask = 2;  // kFirstTask + i: the task at place i of tQ

// The state of an expert's rows in Pass::expert_progress:
//
//   expert_progress[e] = kSourceAnnounced * (sources that have announced their rows)
//                      + (their tiles that are not done)
//
// An expert is complete when all sources have announced and no tile is left. Sums over its rows wait for
// that. kCompleteBit, a bit of Watch::not_waited, makes a test's sums not wait.
constexpr uint32_t kSourceAnnounced = 1u << 20;
constexpr uint32_t kCompleteBit = 1u << 8;

// Another bit of Watch::not_waited, for tests: rows are placed before all groups of tokens have been counted.
constexpr uint32_t kCountedBit = 1u << 9;

// Another such bit: experts are chosen before all scores are computed.
constexpr uint32_t kScoredBit = 1u << 11;

// Another such bit: a cell's offset is used before it is chosen.
constexpr uint32_t kKnownBit = 1u << 10;

// The tasks of one expert's parameter gradients; 0 for a gradient that is not wanted.
struct WeightTasks {
  int down[2] = {}, across[2] = {};  // tiles of w1's gradient and of w2's
  int bias[2] = {};                  // tasks along the columns of b1's gradient and of b2's

  PMOE_HD int tasks() const { return down[0] * across[0] + down[1] * across[1] + bias[0] + bias[1]; }
};

// The gate's choice, if the launch makes it. From the scores of all experts it makes Pass::expert and
// Pass::weight, and the numbers for the gate's loss and gradient.
struct GateChoice {
  bool is_asked = false;
  bool normalizes = false;                  // divides a token's weights by their sum
  float balance_scale = 0.0f, z_scale = 0;  // see route/layout.h
  float* logits = nullptr;                  // (tokens, experts of all ranks): scores
  const void* weight = nullptr;  // (experts of all ranks, M), of the rows' type; null: logits are given
  int32_t* counts = nullptr;     // (experts of all ranks): all choices, also those beyond a capacity
  float* l_aux = nullptr;
  float* probability = nullptr;  // (groups, experts of all ranks): summed over the group's tokens
  float* z = nullptr;            // (groups,): squared logsumexp, summed over the group's tokens
};

// The routing tasks of a launch, which come before any row leaves. From the chosen experts they make
// Pass::counts, slot, expert and row. Without groups these are given.
struct RoutingTasks {
  bool is_asked = false;
  int products[2] = {};             // tiles of the gate's product: down (tokens) and across (experts)
  int groups = 0;                   // groups of tokens
  const int64_t* chosen = nullptr;  // (tokens, choices): expert of each slot; null: they are in Pass::expert
  const uint8_t* keep = nullptr;    // (tokens, choices): 0 if a slot is dropped; null: none is
  int capacity = 0;                 // rows of an expert that are kept, in the tokens' order; at most C
  int32_t* rows = nullptr;          // (groups, experts of all ranks): rows of each group
  GateChoice choice;

  PMOE_HD int scored() const { return products[0] * products[1]; }
  PMOE_HD int tasks() const { return scored() + 2 * groups; }
};

// One rank's part of a launch: its heap, routing, rows and tasks.
struct Pass {
  Layout layout;          // of every rank's heap
  uint8_t* const* heaps;  // (P,) heaps, as this rank addresses them
  int rank = 0;
  Watch watch;

  // The routing of this rank's tokens.
  //
  // counts: (P * E) rows of each expert of all ranks; at most C each.
  // home: (P * E) where an expert's products come home in the pool; null without a pool.
  // offset: (P, E) where each cell of this rank begins in the pool; forward writes it, backward reads it.
  // slot: the slot of an expert's c-th row, at [expert * C + c]; in a pool, at [c].
  // expert: (S, k) expert of each slot.
  // row: (S, k) the slot's c: its place among its expert's rows, in a pool plus the expert's home; -1 if it
  //     is dropped.
  // weight: (S, k) routing weight of each slot; written if the launch chooses.
  int32_t* counts = nullptr;
  int32_t* home = nullptr;
  int32_t* offset = nullptr;
  int32_t* slot = nullptr;
  int32_t* expert = nullptr;
  int32_t* row = nullptr;
  float* weight = nullptr;
  RoutingTasks routing;
  int tokens = 0, choices = 1;     // S, k
  Divisor by_choices, by_experts;  // k, E

  const uint8_t* source = nullptr;  // rows of tokens, layout.row_bytes each: T_I, or dY in backward
  int64_t source_stride = 0;        // bytes
  uint8_t* result = nullptr;        // T_O, or dX in backward
  int64_t result_stride = 0;        // bytes

  // Backward only: weights and their gradients travel with the rows, and T_I if it is sent again.
  bool is_backward = false;
  const uint8_t* again = nullptr;    // T_I, or null if it is not sent again
  int64_t again_stride = 0;          // bytes
  float* weight_gradient = nullptr;  // (S, k)

  Stages stages;
  WeightTasks weights;

  // The workspace, which a rank keeps from round to round. It must be zero before the first round.
  Queue queue = {};
  uint32_t* mailboxes = nullptr;        // (processors,): see kAbsent
  uint32_t* finished_tiles = nullptr;   // (stages, tiles of all cells): finished tiles across of each stage
  uint32_t* expert_progress = nullptr;  // (experts,): see kSourceAnnounced
  int32_t* next_tile = nullptr;         // (cells,): see subscriber.h
  int processors = 1;

  PMOE_HD uint8_t* own() const { return heaps[rank]; }
  PMOE_HD uint8_t* at(int peer, const Coordinates& i) const { return heaps[peer] + layout.at(i); }
  PMOE_HD int groups() const { return ceil_div(tokens, kCombineTokens); }
  PMOE_HD const int32_t* announced_rows(int source_rank) const {
    return reinterpret_cast<const int32_t*>(own() + layout.counts(source_rank));
  }
  // Returns the counter of a task's row tile in a stage. offset: where the task's cell begins.
  PMOE_HD uint32_t* finished_counter(const Task& t, int stage, int offset) const {
    return finished_tiles + int64_t{stage} * layout.all_tiles() +
           (layout.first_row(t.peer, t.expert) + offset) / layout.tile_rows + t.tile;
  }
  PMOE_HD int rows_of(int count, int tile) const {
    return smaller(layout.tile_rows, count - tile * layout.tile_rows);
  }
};

// Returns the largest possible number of tasks in a round.
PMOE_HD int64_t most_tasks(const Pass& pass) {
  const Layout& layout = pass.layout;
  return int64_t{layout.all_tiles()} * (1 + pass.stages.tasks()) +
         int64_t{layout.experts} * pass.weights.tasks() + pass.groups() + pass.routing.tasks();
}

// Lays out the workspace in memory that begins at a multiple of 1024 bytes, and returns its bytes. The pass's
// sizes must be set before. The memory must be zero before the first round.
//
// base: beginning of the memory; null: only the bytes are counted.
inline int64_t place_workspace(Pass& pass, uint8_t* base) {
  int64_t taken = 0;
  const auto take = [&](auto*& part, int64_t count) {
    using Part = std::remove_reference_t<decltype(*part)>;
    part = base == nullptr ? nullptr : reinterpret_cast<Part*>(base + taken);
    taken += align_region(count * int64_t{sizeof(Part)});
  };
  const Layout& layout = pass.layout;
  pass.queue.room = static_cast<int>(most_tasks(pass));
  take(pass.queue.state, 1);
  take(pass.queue.entry, pass.queue.room);
  take(pass.mailboxes, pass.processors);
  take(pass.finished_tiles, int64_t{pass.stages.count} * layout.all_tiles());
  take(pass.expert_progress, layout.experts);
  take(pass.next_tile, layout.cells());
  take(pass.routing.rows, int64_t{pass.routing.groups} * layout.cells());
  take(pass.routing.choice.probability, int64_t{pass.routing.groups} * layout.cells());
  take(pass.routing.choice.z, pass.routing.groups);
  return taken;
}

}  // namespace pmoe::flashdmoe

// The arguments of one rank in a launch of FlashDMoE's persistent kernel, except those of its experts.
#pragma once
#include <type_traits>

#include "flashdmoe/layout.h"
#include "flashdmoe/task.h"
#include "peers/puts.h"
#include "peers/watch.h"

namespace pmoe::flashdmoe {

using peers::Wait;
using peers::Watch;

constexpr int kCombineTokens = 32;  // tokens of a combine task
constexpr int kBiasColumns = 64;    // columns of a bias gradient's task
constexpr int kRoutedTokens = 64;   // fewest tokens of a group that is routed
constexpr int kMostGroups = 128;    // largest number of groups; each group reads the counts of all
constexpr int kMostChosen = 256;    // largest number of experts of all ranks if the launch chooses them

// The values of a processor's mailbox, a word of memory through which the scheduler gives it tasks:
//
//   kAbsent          the processor is not running   (written by the processor)
//   kIdle            it wants a task                (written by the processor)
//   kFirstTask + i   it has task i of the queue tQ  (written by the scheduler)
constexpr uint32_t kAbsent = 0, kIdle = 1, kFirstTask = 2;  // kFirstTask + i: the task at place i of tQ

// The factor of the number of ranks in the progress of an expert. Gradients of an expert's parameters are
// sums over all of its rows. They are computed when all rows are done, which means that the gradient of T_M
// is computed for them. To find that out, one number for each expert counts ranks and tiles:
//
//   expert_progress[e] = kSourceAnnounced * (number of ranks that have announced their row counts)
//                      + (number of tiles of announced rows that are not done)
//
// The sums begin when all ranks have announced their counts and no tile is left.
constexpr uint32_t kSourceAnnounced = 1u << 20;

// Bits of Watch::not_waited, which tests set to skip one wait of the kernel. The results must then be wrong:
// otherwise the tests would not notice if that wait were missing. What happens if a bit is set:
//
//   kCompleteBit   gradients of parameters begin before all rows of the expert are done
//   kCountedBit    rows get their indices before all groups of tokens have been counted
//   kScoredBit     experts are chosen before all scores are computed
//   kKnownBit      the offset of a source's rows in the pool is used before it is chosen
constexpr uint32_t kCompleteBit = 1u << 8;
constexpr uint32_t kCountedBit = 1u << 9;
constexpr uint32_t kScoredBit = 1u << 11;
constexpr uint32_t kKnownBit = 1u << 10;

// The numbers of tasks for the parameter gradients of one expert; 0 for a gradient that is not wanted. Index
// 0 is for w1 and b1, index 1 for w2 and b2. A weight's gradient has down * across tiles, and each tile is a
// task.
struct WeightTasks {
  int down[2] = {}, across[2] = {};  // numbers of tiles below each other, and side by side
  int bias[2] = {};                  // number of tasks of a bias's gradient: each sums a range of columns

  PMOE_HD int tasks() const { return down[0] * across[0] + down[1] * across[1] + bias[0] + bias[1]; }
};

// The gate's choice of experts, if the launch itself chooses (is_asked). The launch then computes, from the
// scores of all experts: Pass::expert, Pass::weight, the gate's loss, and what the gate's backward needs.
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

// The routing tasks of a launch, which run before any row is sent. From the chosen experts they compute the
// arrays counts, slot, expert and row of Pass. Tokens are cut into groups, and each group has tasks of its
// own. If `groups` is 0, as in backward, there are no routing tasks: the caller passes the four arrays with
// their values.
struct RoutingTasks {
  bool is_asked = false;
  int products[2] = {};             // numbers of tiles of the gate's product: down (tokens), across (experts)
  int groups = 0;                   // number of groups of tokens
  const int64_t* chosen = nullptr;  // (tokens, choices): expert of each slot; null: they are in Pass::expert
  const uint8_t* keep = nullptr;    // (tokens, choices): 0 if a slot is dropped; null: no slot is dropped
  int capacity = 0;                 // most rows of an expert that are kept, in the tokens' order; at most C
  int32_t* rows = nullptr;          // (groups, experts of all ranks): number of rows of each group
  GateChoice choice;

  PMOE_HD int scored() const { return products[0] * products[1]; }
  PMOE_HD int tasks() const { return scored() + 2 * groups; }
};

// The arguments of one rank in a launch: its heap, routing, rows and tasks.
struct Pass {
  Layout layout;          // of every rank's heap
  uint8_t* const* heaps;  // (P,) heaps, as this rank addresses them; null if it cannot (is_mapped)
  int rank = 0;
  Watch watch;

  // The routing of this rank's S tokens, with k choices for each token. There are P ranks with E experts
  // each. A slot is a (token, choice) pair. C is the capacity: the largest number of rows that one rank sends
  // to one expert. Without a capacity, all rows that a rank receives share a pool, and C is the number of
  // rows of the pool. Results also come back into a pool of C rows, on the rank that sent the rows.
  //
  // The rows of this rank for an expert are numbered c = 0, 1, ...
  //
  // counts: (P * E) number of this rank's rows for each expert of all ranks; at most C for an expert.
  // home: (P * E) without a capacity: for each expert of all ranks, the index in this rank's pool of results
  //     of the expert's first result; else null.
  // offset: (P, E) without a capacity: for each source rank and each expert of this rank, the index in this
  //     rank's pool of the first row; else null. Forward writes it, backward reads it.
  // slot: the slot of row c of an expert, at [expert * C + c]; without a capacity, at [home[expert] + c].
  // expert: (S, k) the expert of each slot.
  // row: (S, k) the index c of each slot's row; without a capacity, home[expert] + c; -1 if the slot is
  //     dropped.
  // weight: (S, k) the routing weight of each slot; written if the launch chooses the experts.
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

  // Rows of tokens, layout.row_bytes each: the layer's input, or the gradient of its output in backward.
  const uint8_t* source = nullptr;
  int64_t source_stride = 0;  // bytes
  // Rows of tokens: the layer's output, or the gradient of its input in backward.
  uint8_t* result = nullptr;
  int64_t result_stride = 0;  // bytes

  // For the backward pass only. Routing weights are sent with the rows, and the gradients of the weights come
  // back with the results. The layer's input T_I is sent again if forward did not keep the rows that arrived.
  bool is_backward = false;
  const uint8_t* again = nullptr;    // T_I, or null if it is not sent again
  int64_t again_stride = 0;          // bytes
  float* weight_gradient = nullptr;  // (S, k)

  Stages stages;
  WeightTasks weights;

  // The workspace: memory in the rank's heap that all launches share. It must be zero before the first
  // launch.
  Queue queue = {};
  uint32_t* mailboxes = nullptr;        // (processors,): see kAbsent
  uint32_t* finished_tiles = nullptr;   // (stages, tiles of all cells): see finished_counter()
  uint32_t* expert_progress = nullptr;  // (experts,): see kSourceAnnounced
  int32_t* next_tile = nullptr;         // (cells,): see subscriber.h
  int processors = 1;

  PMOE_HD uint8_t* own() const { return heaps[rank]; }
  // Returns whether this rank's loads and stores reach a peer's heap. If they do not, L has B = 2, and data
  // for the peer travel by puts (packets.cuh). If a rank can reach the heap of another rank, that rank can
  // reach its heap, too.
  PMOE_HD bool is_mapped(int peer) const { return !peers::kHasPuts || heaps[peer] != nullptr; }
  PMOE_HD uint8_t* at(int peer, const Coordinates& i) const { return heaps[peer] + layout.at(i); }
  PMOE_HD int groups() const { return ceil_div(tokens, kCombineTokens); }
  PMOE_HD const int32_t* announced_rows(int source_rank) const {
    return reinterpret_cast<const int32_t*>(own() + layout.counts(source_rank));
  }
  // Returns the address of the counter for a tile of rows and a stage. A stage is one of the products that
  // the rows go through. The product's result for these rows has several tiles side by side. The counter is
  // the number of these tiles that are finished.
  //
  // t: a task with these rows.
  // offset: without a capacity, the index in the pool of the first row of the task's source and expert; else
  //     0.
  PMOE_HD uint32_t* finished_counter(const Task& t, int stage, int offset) const {
    return finished_tiles + int64_t{stage} * layout.all_tiles() +
           (layout.first_row(t.peer, t.expert) + offset) / layout.tile_rows + t.tile;
  }
  PMOE_HD int rows_of(int count, int tile) const {
    return smaller(layout.tile_rows, count - tile * layout.tile_rows);
  }
};

// Returns the largest possible number of tasks in a launch, for the size of the task queue.
PMOE_HD int64_t most_tasks(const Pass& pass) {
  const Layout& layout = pass.layout;
  return int64_t{layout.all_tiles()} * (1 + pass.stages.tasks()) +
         int64_t{layout.experts} * pass.weights.tasks() + pass.groups() + pass.routing.tasks();
}

// Assigns addresses in the workspace to the task queue and the counters of a pass, and returns the
// workspace's size in bytes. The sizes in `pass` must be set before. The memory must be zero before the first
// launch.
//
// base: address of the workspace, a multiple of 1024. If it is null, the function only counts the bytes.
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

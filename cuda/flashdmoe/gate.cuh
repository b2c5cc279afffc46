// Routing inside the launch (FlashDMoE, Algorithm 1), built from the code of cuda/route.
//
// Unless experts were chosen before the launch, this code chooses each token's experts and weights from the
// token's scores. Then it counts the rows of each expert, and gives each (token, choice) slot the index of
// its row among the rows of its expert, in the order of tokens.
//
// Tokens are cut into groups, and each group has two tasks. The first task (kCount) chooses experts, and
// counts the group's rows by expert. The second task (kPlace) is put into the task queue when all groups have
// been counted. It gives the group's rows the indices behind those of all groups before it. So no task waits
// for another task, and the result does not depend on the order in which tasks are done.
#pragma once
#include "flashdmoe/experts.h"
#include "route/choose.cuh"
#include "route/place.cuh"

namespace pmoe::flashdmoe {

// How kThreads threads share the routing: each warp chooses the experts of one token at a time, and each lane
// of the warp has up to eight of the token's scores.
template <int kThreads>
struct RoutingShape : route::Shape<32, kMostChosen / 32, kThreads / 32> {
  // These kernels have no free registers in which lanes could sort scores: with SiLU, nvcc would spill.
  static constexpr bool kSortsLanes = false;
  static constexpr bool kMerges = false;
  static constexpr bool kChecksFinite = false;
};

// One group of tokens, which a block routes. The index of a row among the rows of its expert does not depend
// on how tokens are cut into groups.
template <class Shape>
class Group {
 public:
  __device__ __forceinline__ Group(const Pass& pass, int number)
      : pass_(pass), experts_(pass.layout.cells()), shared_(experts_) {
    at_.block = number;
    stages_.sizes = {pass.tokens, experts_, pass.choices, 1, pass.routing.groups};
    const GateChoice& choice = pass.routing.choice;
    stages_.workspace = {pass.routing.rows, choice.probability, choice.z, nullptr};  // null: logits unchecked
    const bool is_aligned = reinterpret_cast<uintptr_t>(choice.logits) % 16 == 0;
    stages_.rows = {pass.tokens, experts_, is_aligned && experts_ % 4 == 0};
    stages_.logits_TE = choice.logits, stages_.normalize = choice.normalizes;
    stages_.balance_scale = choice.balance_scale, stages_.z_scale = choice.z_scale;
    stages_.weight_TK = pass.weight, stages_.expert_TK = pass.expert, stages_.l_aux = choice.l_aux;
    slots_ = route::slots_of_warp<Shape>(stages_.sizes, at_);
  }

  // Chooses experts for the group's tokens, counts the group's rows by expert, and sums the probabilities
  // that the gate's loss needs.
  __device__ __forceinline__ void choose() const {
    route::Sums<Shape> sums;
    sums.clear();
    route::choose_tokens<Shape>(stages_, at_, shared_, sums);
    route::write_sums<Shape>(stages_, at_, shared_, sums);
  }

  // Counts the group's rows by expert, if the experts were chosen before the launch.
  __device__ __forceinline__ void count() const {
    int32_t* const rows_E = pass_.routing.rows + int64_t{at_.block} * experts_;
    count_warps([&](int expert, int32_t rows) { write(rows_E + expert, rows); });
  }

  // Gives each of the group's rows its index among the rows of its expert. The task of group 0 also writes
  // the number of rows of each expert over all groups, and the gate's loss.
  __device__ __forceinline__ void place() const {
    count_warps([](int, int32_t) {});
    const route::ChunkCounts counts =
        route::count_chunk<Shape>(stages_, shared_, 0, at_.block, stages_.sizes.chunk_blocks);
    const int capacity = pass_.routing.capacity;
    const int32_t* const home_E = homes(counts.total_E);
    const auto put = [&](int64_t slot, int32_t expert, int32_t placed) {
      const int32_t row = expert < 0 ? capacity : counts.before_E[expert] + placed;
      const int32_t at = row < capacity ? (home_E == nullptr ? 0 : home_E[expert]) + row : -1;
      write(pass_.row + slot, at);
      if (pass_.routing.chosen != nullptr) write(pass_.expert + slot, chosen(slot));
      if (at >= 0) write(pass_.slot + pass_.layout.first_row(0, expert) + at, static_cast<int32_t>(slot));
    };
    route::place_slots<Shape>(at_, shared_, experts_, slots_, choice(), put);
    if (at_.block > 0) return;
    const GateChoice& gate_choice = pass_.routing.choice;
    for (int e = route::own_thread<Shape>(); e < experts_; e += Shape::kThreads) {
      write(pass_.counts + e, smaller(counts.total_E[e], capacity));
      if (home_E != nullptr) write(pass_.home + e, home_E[e]);
      if (gate_choice.is_asked) write(gate_choice.counts + e, counts.total_E[e]);
    }
    if (gate_choice.is_asked)
      route::write_loss<Shape>(stages_, at_, shared_, counts.total_E, shared_.floats(3 * experts_));
  }

 private:
  // Counts the rows of each warp by expert.
  //
  // found(expert, rows): is called for each expert, with the number of rows of all warps together.
  template <class Found>
  __device__ __forceinline__ void count_warps(const Found& found) const {
    route::count_slots<Shape>(at_, shared_, experts_, slots_, choice());
    route::add_warps<Shape>(shared_, experts_, found);
  }

  // Computes to which rows of this rank's pool the results of its rows return (layout.h). In the pool, the
  // results of each expert take whole tiles, and the experts of all ranks follow each other. Returns an array
  // in shared memory that has, for each expert, the index of the first row of its results in the pool; null
  // if there is no pool. All threads call this function.
  //
  // total_E: number of this rank's rows for each expert, before they are limited to the capacity.
  __device__ __forceinline__ const int32_t* homes(const int32_t* total_E) const {
    const Layout& layout = pass_.layout;
    if (!layout.is_pool) return nullptr;
    int32_t* const home_E = shared_.ints(2 * experts_);
    for (int e = route::own_thread<Shape>(); e < experts_; e += Shape::kThreads)
      home_E[e] = layout.tiles(smaller(total_E[e], pass_.routing.capacity)) * layout.tile_rows;
    route::sync<Shape>();
    if (at_.warp == 0)
      route::scan(home_E, experts_, at_.lane, 0, [&](int e, int32_t first, int32_t) { home_E[e] = first; });
    route::sync<Shape>();
    return home_E;
  }

  // Returns a function that maps a (token, choice) slot to the expert of its row, or to -1 if the gate has
  // dropped the slot.
  __device__ __forceinline__ auto choice() const {
    return [this](int64_t slot) -> int32_t {
      const uint8_t* const keep = pass_.routing.keep;
      return keep == nullptr || read(keep + slot) != 0 ? chosen(slot) : -1;
    };
  }

  // Returns the expert that the gate has chosen for a slot, whether the slot is kept or not.
  __device__ __forceinline__ int32_t chosen(int64_t slot) const {
    const int64_t* const wide = pass_.routing.chosen;
    return wide == nullptr ? read(pass_.expert + slot) : static_cast<int32_t>(read(wide + slot));
  }

  const Pass& pass_;
  int experts_;  // number of experts of all ranks
  route::Shared<Shape> shared_;
  route::Place<Shape> at_;
  route::Slots slots_;
  route::Forward stages_ = {};
};

// Bytes of shared memory that a routing task needs.
template <class Shape>
constexpr int kRoutingBytes =
    4 * larger(route::ForwardShared<Shape>::area(route::kMostExperts) + 3 * route::kMostExperts,
               route::ForwardShared<Shape>::words(kMostChosen, route::kMostChoices));

// Does a routing task (kCount or kPlace) of one group of tokens. All Shape::kThreads threads call this
// function.
template <class Shape>
__device__ __forceinline__ void route_group(const Pass& pass, const Task& task) {
  const Group<Shape> group(pass, task.tile);
  if (task.type == TaskType::kPlace)
    group.place();
  else if (pass.routing.choice.is_asked)
    group.choose();
  else
    group.count();
}

}  // namespace pmoe::flashdmoe

// Routing inside the launch, behind the gate's choice (FlashDMoE, Algorithm 1): with the stages of
// cuda/route, what a slot's row is among its expert's rows, in the tokens' order, and how many rows an expert
// has.
//
// Groups of tokens are tasks of two kinds. The first counts a group's rows by expert; behind the last of them
// each group is placed: before its rows are those of all groups before it. No group waits for another one,
// and nothing depends on the order in which they are taken.
#pragma once
#include "flashdmoe/experts.h"
#include "route/place.cuh"

namespace pmoe::flashdmoe {

// Threads that route. Where lanes stand among logits has no meaning here.
template <int kThreads>
using RoutingShape = route::Shape<32, 4, kThreads / 32>;

// A block's part of it. What a slot's row is does not depend on how tokens are cut.
template <class Shape>
class Group {
 public:
  __device__ __forceinline__ Group(const Pass& pass, int number)
      : pass_(pass), experts_(pass.layout.cells()), shared_(experts_) {
    at_.block = number;
    stages_.sizes = {pass.tokens, experts_, pass.choices, 1, pass.routing.groups};
    stages_.workspace.rows_GE = pass.routing.rows;
    slots_ = route::slots_of_warp<Shape>(stages_.sizes, at_);
  }

  __device__ __forceinline__ void count() const {
    int32_t* const rows_E = pass_.routing.rows + int64_t{at_.block} * experts_;
    count_warps([&](int expert, int32_t rows) { write(rows_E + expert, rows); });
  }

  __device__ __forceinline__ void place() const {
    count_warps([](int, int32_t) {});
    const route::ChunkCounts counts = route::count_chunk<Shape>(stages_, shared_, 0, at_.block);
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
    for (int e = route::own_thread<Shape>(); e < experts_; e += Shape::kThreads) {
      write(pass_.counts + e, smaller(counts.total_E[e], capacity));
      if (home_E != nullptr) write(pass_.home + e, home_E[e]);
    }
  }

 private:
  template <class Found>
  __device__ __forceinline__ void count_warps(const Found& found) const {
    route::count_slots<Shape>(at_, shared_, experts_, slots_, choice());
    route::add_warps<Shape>(shared_, experts_, found);
  }

  // By expert where its rows come home: behind those of all experts before, on a whole tile. null: without a
  // pool. total_E: rows.
  __device__ __forceinline__ const int32_t* homes(const int32_t* total_E) const {
    const Layout& layout = pass_.layout;
    if (!layout.is_pool) return nullptr;
    int32_t* const home_E = shared_.ints(2 * experts_);
    for (int e = route::own_thread<Shape>(); e < experts_; e += Shape::kThreads)
      home_E[e] = layout.tiles(smaller(total_E[e], pass_.routing.capacity)) * layout.tile_rows;
    route::meet<Shape>();
    if (at_.warp == 0)
      route::scan(home_E, experts_, at_.lane, 0, [&](int e, int32_t first, int32_t) { home_E[e] = first; });
    route::meet<Shape>();
    return home_E;
  }

  // Of a slot: the expert of its row, or -1 where the gate has dropped it.
  __device__ __forceinline__ auto choice() const {
    return [this](int64_t slot) -> int32_t {
      const uint8_t* const keep = pass_.routing.keep;
      return keep == nullptr || read(keep + slot) != 0 ? chosen(slot) : -1;
    };
  }

  __device__ __forceinline__ int32_t chosen(int64_t slot) const {
    const int64_t* const wide = pass_.routing.chosen;
    return wide == nullptr ? read(pass_.expert + slot) : static_cast<int32_t>(read(wide + slot));
  }

  const Pass& pass_;
  int experts_;  // of all ranks
  route::Shared<Shape> shared_;
  route::Place<Shape> at_;
  route::Slots slots_;
  route::Forward stages_ = {};
};

// Of shared memory.
template <class Shape>
constexpr int kRoutingBytes =
    4 * (route::ForwardShared<Shape>::area(route::kMostExperts) + 3 * route::kMostExperts);

template <class Shape>
__device__ __forceinline__ void route_group(const Pass& pass, const Task& task) {
  const Group<Shape> group(pass, task.tile);
  if (task.type == TaskType::kCount)
    group.count();
  else
    group.place();
}

}  // namespace pmoe::flashdmoe

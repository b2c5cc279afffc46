// The layer's forward pass in one launch, with the instructions of sm_80: dispatch, both products, combine.
//
// The first block of a rank is the operating system: a warp schedules, the others subscribe. All other blocks
// are processors. Any two blocks of a rank that are resident make progress: nobody waits for a block that
// has not come.
#pragma once
#include "flashdmoe/forward.h"
#include "flashdmoe/processor.cuh"
#include "flashdmoe/scheduler.h"
#include "flashdmoe/subscriber.h"
#include "grouped_gemm/ampere.cuh"

namespace pmoe::flashdmoe {

struct AmpereShared {
  ampere::Shared gemm;
  int place;
};
static_assert(sizeof(AmpereShared) <= 99 * 1024, "more than a block of 8.6 has");

// A walk of one tile.
struct OneTile {
  Tile tile;
  bool is_left = true;
  __device__ __forceinline__ bool next(Tile& found) {
    found = tile;
    const bool is_there = is_left;
    is_left = false;
    return is_there;
  }
};

template <class T>
PMOE_HD void* row_of(const void* base, int64_t row, int64_t stride) {
  return base == nullptr ? nullptr : const_cast<T*>(static_cast<const T*>(base)) + row * stride;
}

template <class T, Activation kActivation>
__device__ __forceinline__ void multiply_sm80(const Forward& f, ampere::Shared& shared, const Task& task) {
  const Pass& pass = f.pass;
  const Layout& layout = pass.layout;
  const int count = read(pass.announced_rows(task.peer) + task.expert);
  const int row = task.tile * layout.tile_rows, rows = pass.rows_of(count, task.tile);
  const int64_t hidden_row = int64_t{layout.cell(task.peer, task.expert)} * layout.capacity;
  const auto nothing = [](const Tile&) {};
  const auto tile = [&](int columns) -> OneTile {
    return {{task.expert, 0, count, row, rows, task.column * columns}};
  };
  if (task.type == TaskType::kGemm0) {
    Problem p = f.gemm[0];
    p.a = pass.at(pass.rank, {task.peer, Round::kDispatch, Staging::kIncoming, task.expert, 0});
    p.d = row_of<T>(p.d, hidden_row, p.d_stride), p.active = row_of<T>(p.active, hidden_row, p.active_stride);
    constexpr bool kHalves = are_halves(Epilogue::kHidden, kActivation);
    ampere::compute<T, Form::kForward, Epilogue::kHidden, kActivation>(
        p, shared, tile(ampere::tile_columns(kHalves)), nothing, nothing);
  } else {
    Problem p = f.gemm[1];
    p.a = row_of<T>(p.a, hidden_row, p.a_stride);
    p.d = pass.at(task.peer, {pass.rank, Round::kCombine, Staging::kIncoming, task.expert, 0});
    ampere::compute<T, Form::kForward, Epilogue::kPlain, Activation::kNone>(p, shared, tile(ampere::kColumns),
                                                                            nothing, nothing);
  }
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(ampere::kThreads, 1) forward_sm80(const __grid_constant__ Launch launch) {
  auto& shared = *reinterpret_cast<AmpereShared*>(shared_memory());
  // Ranks take turns, so that the first blocks to come are some of every rank's.
  const int ranks = launch.ranks, block = static_cast<int>(blockIdx.x) / ranks;
  const Forward& f = launch.of_rank[static_cast<int>(blockIdx.x) % ranks];
  const int thread = static_cast<int>(threadIdx.x);
  if (block == 0) {
    if (thread < 32)
      Scheduler(f.pass, thread, 32).run(ampere::kThreads - 32);
    else
      Subscriber(f.pass, thread - 32, ampere::kThreads - 32).run();
    return;
  }
  process<T>(
      f.pass, block - 1, &shared.place, thread, ampere::kThreads / 32, 32, [] { sync_block(); },
      [&](const Task& task) { multiply_sm80<T, kActivation>(f, shared.gemm, task); });
}

}  // namespace pmoe::flashdmoe

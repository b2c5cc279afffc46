// The layer's forward pass in one launch, with the instructions of sm_80: dispatch, both products, combine.
//
// The first block of a rank is the operating system: a warp schedules, the others subscribe. All other blocks
// are processors. Any two blocks of a rank that are resident make progress: nobody waits for a block that
// has not come.
#pragma once
#include "flashdmoe/experts.h"
#include "flashdmoe/gate.cuh"
#include "flashdmoe/processor.cuh"
#include "flashdmoe/scheduler.h"
#include "flashdmoe/subscriber.h"
#include "grouped_gemm/ampere.cuh"

namespace pmoe::flashdmoe {

struct AmpereShared {
  ampere::Shared gemm;
  Problem problem;  // of the task at hand: in registers it would leave accumulators none
  int place;
};
static_assert(kRoutingBytes<ampere::kThreads> <= sizeof(ampere::Shared), "routing has the room of tiles");
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

// The rows of a task: of one cell's, a tile.
struct CellTile {
  int64_t first;  // of the cell, among all cells' rows
  int count, row, rows;

  __device__ __forceinline__ CellTile(const Pass& pass, const Task& task)
      : first(pass.layout.first_row(task.peer, task.expert)),
        count(read(pass.announced_rows(task.peer) + task.expert)),
        row(task.tile * pass.layout.tile_rows),
        rows(pass.rows_of(count, task.tile)) {}

  __device__ __forceinline__ OneTile walk(const Task& task, int columns) const {
    return {{task.expert, 0, count, row, rows, task.column * columns}};
  }
};

__device__ __forceinline__ uint8_t* arrived(const Pass& pass, const Task& task, Round round) {
  return pass.at(pass.rank, {task.peer, round, Staging::kIncoming, task.expert, 0});
}
__device__ __forceinline__ uint8_t* home(const Pass& pass, const Task& task) {
  return pass.at(task.peer, {pass.rank, Round::kCombine, Staging::kIncoming, task.expert, 0});
}

template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation = Activation::kNone,
          class Pieces = ampere::OnePiece>
__device__ __forceinline__ void compute(AmpereShared& shared, const Problem& p, const OneTile& walk,
                                        const Pieces& pieces = {}) {
  if (threadIdx.x == 0) shared.problem = p;
  sync_block();
  const auto nothing = [](const Tile&) {};
  ampere::compute<T, kForm, kEpilogue, kActivation>(shared.problem, shared.gemm, walk, nothing, nothing,
                                                    pieces);
}

// GEMM_0 of a tile. rows: of its cell.
template <class T, Activation kActivation>
__device__ __forceinline__ void first_product(const Member& m, AmpereShared& shared, const Task& task,
                                              const CellTile& cell, const void* rows) {
  constexpr bool kHalves = are_halves(Epilogue::kHidden, kActivation);
  const Experts& e = m.experts;
  Problem p;
  p.n = kHalves ? 2 * e.hidden : e.hidden, p.k = e.model;
  p.a = rows, p.a_stride = e.model, p.b = e.w1, p.bias = e.b1;
  p.d = row_of<T>(e.wide, cell.first, p.n), p.d_stride = p.n;
  p.active = row_of<T>(e.active, cell.first, e.hidden), p.active_stride = e.hidden;
  compute<T, Form::kForward, Epilogue::kHidden, kActivation>(shared, p,
                                                             cell.walk(task, ampere::tile_columns(kHalves)));
}

// T_DI: the tiles across each copy some of the rows.
__device__ __forceinline__ void keep_rows(const Member& m, const Task& task, const CellTile& cell) {
  const int64_t bytes = m.pass.layout.row_bytes;
  const int thread = static_cast<int>(threadIdx.x), step = m.pass.stages.columns[0] * ampere::kThreads / 32;
  const uint8_t* const from = arrived(m.pass, task, Round::kDispatch);
  auto* const to = static_cast<uint8_t*>(m.experts.input) + cell.first * bytes;
  for (int i = task.column * ampere::kThreads / 32 + thread / 32; i < cell.rows; i += step)
    comet::copy_row(to + (cell.row + i) * bytes, from + (cell.row + i) * bytes, bytes,
                    {thread % 32, 32, 0, 1});
}

template <class T, Activation kActivation>
__device__ __forceinline__ void compute_sm80(const Member& m, AmpereShared& shared, const Task& task) {
  if (task.type == TaskType::kCount || task.type == TaskType::kPlace)
    return route_group<ampere::kThreads>(m.pass, task);
  const CellTile cell(m.pass, task);
  const Experts& e = m.experts;
  if (task.type == TaskType::kGemm0) {
    first_product<T, kActivation>(m, shared, task, cell, arrived(m.pass, task, Round::kDispatch));
    if (e.input != nullptr) keep_rows(m, task, cell);
    return;
  }
  Problem p;
  p.n = e.model, p.k = e.hidden, p.b = e.w2, p.bias = e.b2;
  p.a = row_of<T>(e.active, cell.first, e.hidden), p.a_stride = e.hidden;
  p.d = home(m.pass, task), p.d_stride = e.model;
  compute<T, Form::kForward, Epilogue::kPlain>(shared, p, cell.walk(task, ampere::kColumns));
}

// The life of a block. compute(member, task): routing or a tile of a product, of the pass that is launched.
template <class T, class Compute>
__device__ __forceinline__ void act(const Launch& launch, int* place, const Compute& compute) {
  // Ranks take turns, so that the first blocks to come are some of every rank's.
  const int ranks = launch.ranks, block = static_cast<int>(blockIdx.x) / ranks;
  const Member& m = launch.of_rank[static_cast<int>(blockIdx.x) % ranks];
  const int thread = static_cast<int>(threadIdx.x);
  if (block == 0) {
    if (thread < 32)
      Scheduler(m.pass, thread, 32).run(ampere::kThreads - 32);
    else
      Subscriber(m.pass, thread - 32, ampere::kThreads - 32).run();
    return;
  }
  process<T>(
      m.pass, block - 1, place, thread, ampere::kThreads / 32, 32, [] { sync_block(); },
      [&](const Task& task) { compute(m, task); });
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(ampere::kThreads, 1) forward_sm80(const __grid_constant__ Launch launch) {
  auto& shared = *reinterpret_cast<AmpereShared*>(shared_memory());
  act<T>(launch, &shared.place,
         [&](const Member& m, const Task& task) { compute_sm80<T, kActivation>(m, shared, task); });
}

}  // namespace pmoe::flashdmoe

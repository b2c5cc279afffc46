// The forward pass of a layer in one launch (FlashDMoE), with the instructions of sm_80: routing, dispatch,
// both products of the experts, combine.
//
// The first block of each rank manages the other blocks (the paper's "operating system"). One of its warps is
// the scheduler, which hands out tasks. Its other warps are subscribers, which wait for data from other
// ranks. All other blocks are processors, which do tasks. Blocks need not all be resident at once: the
// scheduler gives tasks only to processors that have started, so the first block and a single processor can
// finish all tasks.
#pragma once
#include "flashdmoe/products.cuh"
#include "grouped_gemm/ampere.cuh"

namespace pmoe::flashdmoe {

struct AmpereShared {
  ampere::Shared gemm;
  Problem problem;  // the current task's product; it is here because accumulators take all registers
  int place;        // index of the current task in the task queue
};
static_assert(sizeof(AmpereShared) <= 99 * 1024, "more shared memory than a block of 8.6 has");
// Routing tasks use all threads of a block, and the shared memory in which products keep their operands.
using AmpereRouting = RoutingShape<ampere::kThreads>;
static_assert(kRoutingBytes<AmpereRouting> <= sizeof(ampere::Shared));
static_assert(ampere::kDepth == kTileDepth && ampere::kThreads == kComputeThreads);

// Computes one tile of a product. All threads of the block call it.
template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation = Activation::kNone,
          class Pieces = ampere::OnePiece>
__device__ __forceinline__ void compute(AmpereShared& shared, const Problem& p, const Tile& tile,
                                        const Pieces& pieces = {}) {
  if (threadIdx.x == 0) shared.problem = p;
  sync_block();
  const auto nothing = [](const Tile&) {};
  ampere::compute<T, kForm, kEpilogue, kActivation>(shared.problem, shared.gemm, OneTile{tile}, nothing,
                                                    nothing, pieces);
}

// Computes a tile of the first product, T_DI w1^T, and the nonlinearity. T_DI are the rows that arrived.
//
// cell: the tile's rows. They are a part of a cell, the rows of one source rank for one expert.
// rows: address of the first row of the cell.
template <class T, Activation kActivation>
__device__ __forceinline__ void compute_first(const Member& m, AmpereShared& shared, const Task& task,
                                              const CellTile& cell, const void* rows) {
  constexpr bool kHalves = are_halves(Epilogue::kHidden, kActivation);
  compute<T, Form::kForward, Epilogue::kHidden, kActivation>(
      shared, first_product<T, kActivation>(m.experts, cell, rows),
      cell.tile(task, ampere::tile_columns(kHalves)));
}

// Does one task of the forward pass: a routing task, or a tile of a product.
template <class T, Activation kActivation>
__device__ __forceinline__ void compute_sm80(const Member& m, AmpereShared& shared, const Task& task) {
  if (task.type == TaskType::kCount || task.type == TaskType::kPlace)
    return route_group<AmpereRouting>(m.pass, task);
  // One call of compute() is for two types of tasks: the gate's scores, and the second product. With two
  // calls, the long code of a product would be inlined twice.
  if (task.type == TaskType::kScores || task.type == TaskType::kGemm1) {
    const bool scores = task.type == TaskType::kScores;
    Problem p;
    Tile tile;
    if (scores) {
      p = gate_product<T>(m), tile = gate_tile(m.pass, task, ampere::kColumns);
    } else {
      const CellTile cell(m.pass, task);
      p = second_product<T>(m, task, cell), tile = cell.tile(task, ampere::kColumns);
    }
    return compute<T, Form::kForward, Epilogue::kWideOrPlain>(shared, p, tile);
  }
  const CellTile cell(m.pass, task);
  compute_first<T, kActivation>(m, shared, task, cell, arrived(m.pass, task, Round::kDispatch));
  if (m.experts.input != nullptr) keep_rows(m, task, cell, static_cast<int>(threadIdx.x));
}

// Runs a block: the scheduler and the subscribers, or a processor.
//
// compute(member, task): does a routing task, or a tile of a product.
template <class T, class Compute>
__device__ __forceinline__ void run_block_sm80(const Launch& launch, AmpereShared& shared,
                                               const Compute& compute) {
  run_block<ampere::kThreads>(launch, [&](const Member& m, int number, int) {
    run_uniform_processor<T>(
        m.pass, number, &shared.place, static_cast<int>(threadIdx.x), ampere::kThreads / 32, 32,
        [] { sync_block(); }, [&](const Task& task) { compute(m, task); });
  });
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(ampere::kThreads, 1) forward_sm80(const __grid_constant__ Launch launch) {
  auto& shared = *reinterpret_cast<AmpereShared*>(shared_memory());
  run_block_sm80<T>(launch, shared, [&](const Member& m, const Task& task) {
    compute_sm80<T, kActivation>(m, shared, task);
  });
}

}  // namespace pmoe::flashdmoe

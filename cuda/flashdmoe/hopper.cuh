// Both passes of a layer in one launch each (FlashDMoE) on Hopper. ampere.cuh and backward.cuh explain what
// they compute.
//
// A processor is a block with nine active warps. The first warp asks the scheduler for tasks, and loads their
// operands by the tensor memory accelerator, as in grouped_gemm/hopper.cuh. The other eight warps multiply,
// and do all tasks that are not products.
//
// Operands pass through a ring of stages (buffers) in shared memory. A stage holds the operands of one step
// of a product's reduction. A product begins with the stage after the last stage that the product before has
// used.
#pragma once
#include <cstddef>

#include "flashdmoe/maps.h"
#include "flashdmoe/products.cuh"
#include "grouped_gemm/hopper.cuh"
#include "grouped_gemm/parts.h"

// Marks a lambda that must be inlined. If the compiler made it a function, it would insert waits for running
// wgmma products at the call.
#define PMOE_INLINE __attribute__((always_inline))

namespace pmoe::flashdmoe {

struct HopperShared {
  hopper::Shared gemm;
  // The current product, its tile and its rows. They are in shared memory because no registers are left
  // beside the accumulators.
  Problem problem;
  Tile tile;
  CellPieces pieces;  // for the gradient of a weight
  int begin;          // index in A's tensor map of the cell's first row
  uint32_t steps;     // number of steps of all products before this one
  // place: index of the current task in the task queue tQ.
  // number: index of this processor among the processors of its rank.
  // index: index of the rank among the ranks of the launch.
  int place, number, index;
};
static_assert(sizeof(HopperShared) <= 232448 - 1024, "more shared memory than a block of Hopper has");
static_assert(hopper::kDepth == kTileDepth && hopper::kMultipliers == kComputeThreads);
static_assert(sizeof(hopper::Shared::exchange) >= kBiasBytes, "biases are summed in the exchange buffers");

// How threads share a routing task. The threads that multiply do the task, in the shared memory of the
// stages, which hold no operands between products.
struct HopperRouting : RoutingShape<kComputeThreads> {
  static constexpr int kFirstThread = hopper::kLoaders, kBarrier = 1;
};
static_assert(kRoutingBytes<HopperRouting> <= offsetof(hopper::Shared, exchange));

#if PMOE_HOPPER_CODE

// Registers of a thread. The numbers are those of the grouped product. They stay the same during a whole
// pass.
constexpr int kLoaderRegisters = hopper::kLoaderRegisters;
constexpr int kMultiplierRegisters = hopper::kMultiplierRegisters;

// sync_all() synchronizes the warp that loads with the warps that multiply; sync_multipliers() only the warps
// that multiply.
__device__ __forceinline__ void sync_all() { sync_named(2, 32 + hopper::kMultipliers); }
__device__ __forceinline__ void sync_multipliers() { sync_named(1, hopper::kMultipliers); }

// ---- the warp that loads
//
// The first thread of this warp receives a task by an acquire load. Other threads have written the task's
// operands, and bulk copies (the asynchronous proxy) read them. So a proxy fence must come between the
// acquire load and the copies.

// Loads the operands of one tile, in all steps along the reduction.
//
// begin: index in A's tensor map of the first row from the tile's source rank for the tile's expert.
// steps: number of steps that this block has loaded so far, in all products. This function adds the tile's
//     steps.
template <Form kForm, bool kHalves = false>
__device__ __forceinline__ void load(HopperShared& shared, const MapPair& maps, const Problem& p,
                                     const Tile& tile, int begin, uint32_t& steps) {
  if (thread_again() == 0) {
    shared.problem = p, shared.tile = tile, shared.begin = begin, shared.steps = steps;
  }
  sync_all();
  if (thread_again() == 0) {
    if constexpr (peers::kPlant != peers::Plant::kNoProxyFence) fence_proxy_async_global();
    // The tile is read from shared memory, because there are no registers to keep it across the barrier.
    Tile own = shared.tile;
    own.group_begin = shared.begin;
    const hopper::Loader<kForm, kHalves, 1> loader{maps.a, maps.b, shared.problem, 0};
    auto ring = Ring<hopper::kStages>::after(shared.steps);
    if constexpr (kForm == Form::kWeight) {
      const CellPieces pieces = shared.pieces;
      hopper::load_tile(loader, shared.gemm, own, ring, pieces);
      steps += static_cast<uint32_t>(pieces.steps(own));
    } else {
      hopper::load_tile(loader, shared.gemm, own, ring);
      steps += static_cast<uint32_t>(hopper::steps<kForm>(shared.problem, own));
    }
  }
  sync_warp();
}

// A cell is the rows of one source rank for one expert. Both functions return the index of a row.
//
// row_in_heap(): the index of row `offset` of a cell, counted over all rows of the tensor L in this rank's
// heap.
//   If cells share a pool, `offset` is an index in the pool.
// row_by_cell(): the index of a cell's first row, counted over the rows of the activations that this rank
//   keeps (Experts). If cells share a pool, it is 0, and the caller adds the cell's offset in the pool.
__device__ __forceinline__ int row_in_heap(const Layout& layout, int peer, Round round, int expert,
                                           int offset = 0) {
  return static_cast<int>(layout.row({peer, round, Staging::kIncoming, expert, offset}));
}
__device__ __forceinline__ int row_by_cell(const Layout& layout, int peer, int expert) {
  return static_cast<int>(layout.first_row(peer, expert));
}

// Loads the operands of a tile of the first product, T_DI w1^T. T_DI are the rows that arrived.
//
// begin, steps: the arguments of load().
template <class T, Activation kActivation>
__device__ __forceinline__ void load_first(const Member& m, HopperShared& shared, const MapPair& maps,
                                           const Task& task, const CellTile& cell, int begin,
                                           uint32_t& steps) {
  constexpr bool kHalves = are_halves(Epilogue::kHidden, kActivation);
  load<Form::kForward, kHalves>(shared, maps, first_product<T, kActivation>(m.experts, cell, nullptr),
                                cell.tile(task, hopper::tile_columns(kHalves)), begin, steps);
}

// Loads the operands of a task of the forward pass, if it is a product. Other tasks have nothing to load.
template <class T, Activation kActivation>
__device__ __forceinline__ void load_forward(const Member& m, HopperShared& shared, const Maps<3>& maps,
                                             const Task& task, uint32_t& steps) {
  const Layout& layout = m.pass.layout;
  if (task.type == TaskType::kGemm0) {
    const CellTile cell(m.pass, task);
    const int cell_offset = offset_of(m.pass, task.peer, task.expert);
    load_first<T, kActivation>(m, shared, maps.of[kFirstProduct], task, cell,
                               row_in_heap(layout, task.peer, Round::kDispatch, task.expert, cell_offset),
                               steps);
  } else if (task.type == TaskType::kScores || task.type == TaskType::kGemm1) {
    // One call of load() is for two types of tasks, the gate's scores and the second product, so that its
    // code is inlined only once.
    const bool scores = task.type == TaskType::kScores;
    Problem p;
    Tile tile;
    int begin = 0;
    if (scores) {
      p = gate_product<T>(m), tile = gate_tile(m.pass, task, hopper::kColumns);
    } else {
      const CellTile cell(m.pass, task);
      p = second_product<T>(m, task, cell), tile = cell.tile(task, hopper::kColumns);
      begin = static_cast<int>(cell.first);
    }
    load<Form::kForward>(shared, maps.of[scores ? kGateProduct : kSecondProduct], p, tile, begin, steps);
  }
}

// ---- the warps that multiply

// Multiplies one tile.
//
// meanwhile(): other work of the task, which these warps do while the first operands are being loaded.
template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation, class Meanwhile>
__device__ __forceinline__ void multiply(HopperShared& shared, const Meanwhile& meanwhile) {
  sync_all();
  meanwhile();
  const auto nothing = [](const Tile&) {};
  const OneTile walk = {shared.tile};
  const auto ring = Ring<hopper::kStages>::after(read(&shared.steps));
  if constexpr (kForm == Form::kWeight)
    hopper::multiply<T, kForm, kEpilogue, kActivation, 1>(shared.problem, shared.gemm, walk, nothing, ring,
                                                          shared.pieces);
  else
    hopper::multiply<T, kForm, kEpilogue, kActivation, 1>(shared.problem, shared.gemm, walk, nothing, ring);
  // Without this barrier the compiler would let the threads of the warp converge only behind the code of all
  // products.
  sync_warp();
}

template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation = Activation::kNone>
__device__ __forceinline__ void multiply(HopperShared& shared) {
  multiply<T, kForm, kEpilogue, kActivation>(shared, [] {});
}

// Does one task of the forward pass: a routing task, or a tile of a product.
template <class T, Activation kActivation>
__device__ __forceinline__ void multiply_forward(const Member& m, HopperShared& shared, const Task& task,
                                                 int thread) {
  // If backward needs the rows that arrived (T_DI), they are copied out of the heap, which the next dispatch
  // overwrites. This is done before the product begins, because during the product no registers are left to
  // hold the task.
  if (task.type == TaskType::kGemm0) {
    multiply<T, Form::kForward, Epilogue::kHidden, kActivation>(shared, [&]() PMOE_INLINE {
      if (m.experts.input != nullptr) keep_rows(m, task, CellTile(m.pass, task), thread);
    });
  } else if (task.type == TaskType::kScores || task.type == TaskType::kGemm1) {
    multiply<T, Form::kForward, Epilogue::kWideOrPlain>(shared);
  } else {
    route_group<HopperRouting>(m.pass, task);
    fence_proxy_async();  // orders these accesses before the accelerator's next writes there
  }
  sync_warp();
}

// ---- blocks

// Runs a block: the scheduler and the subscribers, or a processor.
//
// load(member, index, task, steps): loads the operands of a tile. `index` is the index of the rank in the
//     launch.
// multiply(member, task, thread): multiplies the tile, or does a task that is no product.
template <class T, class Load, class Multiply>
__device__ __forceinline__ void run_block_sm90a(const Launch& launch, HopperShared& shared, const Load& load,
                                                const Multiply& multiply) {
  run_block<hopper::kThreads>(launch, [&](const Member&, int number, int index) PMOE_INLINE {
    if (threadIdx.x == 0)
      hopper::init_barriers(shared.gemm, 1, 1, 1), shared.number = number, shared.index = index;
    sync_block();
    const auto own_number = [&] { return read(&shared.number); };
    const auto sync = [] { sync_all(); };
    // Returns the index of this rank in the launch, read from shared memory at each use. The compiler would
    // otherwise load the launch's arguments once, and hold them in registers.
    const auto rank_index = [&] {
      int own = read(&shared.index);
      make_opaque(own);
      return own;
    };
    const auto pass = [&]() -> const Pass& { return launch.of_rank[rank_index()].pass; };
    if (threadIdx.x < hopper::kLoaders) {
      fewer_registers<kLoaderRegisters>();
      if (threadIdx.x >= 32) return;
      uint32_t steps = 0;
      run_processor(pass, own_number, &shared.place, threadIdx.x == 0, sync,
                    [&](const Task& task) PMOE_INLINE {
                      const int own = rank_index();
                      load(launch.of_rank[own], own, task, steps);
                    });
    } else {
      more_registers<kMultiplierRegisters>();
      run_processor(pass, own_number, &shared.place, false, sync, [&](const Task& task) PMOE_INLINE {
        const Member& m = launch.of_rank[rank_index()];
        const int thread = thread_again() - hopper::kLoaders;
        do_task<T>(m.pass, task, thread, kComputeThreads / 32, 32,
                   [&](const Task& product) PMOE_INLINE { multiply(m, product, thread); });
      });
    }
  });
}

#endif  // PMOE_HOPPER_CODE

template <class T, Activation kActivation>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    forward_sm90a(const __grid_constant__ HopperLaunch<3> all) {
#if PMOE_HOPPER_CODE
  auto& shared = *reinterpret_cast<HopperShared*>(shared_memory());
  run_block_sm90a<T>(
      all.launch, shared,
      [&](const Member& m, int index, const Task& task, uint32_t& steps)
          PMOE_INLINE { load_forward<T, kActivation>(m, shared, all.maps[index], task, steps); },
      [&](const Member& m, const Task& task, int thread)
          PMOE_INLINE { multiply_forward<T, kActivation>(m, shared, task, thread); });
#endif
}

}  // namespace pmoe::flashdmoe

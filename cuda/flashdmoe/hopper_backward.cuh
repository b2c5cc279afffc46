// The backward pass of a layer in one launch on Hopper: the tasks of backward.cuh, computed with the tiles of
// hopper.cuh.
#pragma once
#include "flashdmoe/hopper.cuh"

namespace pmoe::flashdmoe {

#if PMOE_HOPPER_CODE

// Returns the index, in T_DI's tensor map, of the first row from rank `peer` for an expert. T_DI are the rows
// that arrived in forward. If forward has kept them, they are in the tensor Experts::input. If not, they have
// arrived again in backward and are in the heap.
//
// kept: the index of the row in the tensor. The function returns it if forward has kept T_DI.
// offset: without a capacity, the index in the pool of the first row from `peer` for the expert; else 0.
__device__ __forceinline__ int row_of_input(const Member& m, int peer, int expert, int kept, int offset) {
  return m.experts.input != nullptr ? kept : row_in_heap(m.pass.layout, peer, Round::kAgain, expert, offset);
}

// Loads the operands of a task of the backward pass, if it is a product.
template <class T, Activation kActivation>
__device__ __forceinline__ void load_backward(const Member& m, HopperShared& shared, const Maps<5>& maps,
                                              const Task& task, uint32_t& steps) {
  const Layout& layout = m.pass.layout;
  const bool is_w2 = task.peer != 0;
  if (task.type == TaskType::kWeightGradient) {
    CellPieces pieces = {};
    const Problem p = weight_gradient<T>(m, task, wide_columns(m.experts, kActivation), pieces);
    pieces.a_begin =
        is_w2 ? row_in_heap(layout, 0, Round::kDispatch, task.expert) : row_by_cell(layout, 0, task.expert);
    const int kept = row_by_cell(layout, 0, task.expert);
    pieces.b_begin = is_w2 ? kept : row_of_input(m, 0, task.expert, kept, 0);
    if (thread_again() == 0) shared.pieces = pieces;
    load<Form::kWeight>(shared, maps.of[is_w2 ? kOfW2 : kOfW1], p,
                        weight_tile(task, p, hopper::kRows, hopper::kColumns), 0, steps);
    return;
  }
  if (task.type < TaskType::kGemm0 || task.type > TaskType::kInputGradient) return;
  const CellTile cell(m.pass, task);
  const int cell_offset = offset_of(m.pass, task.peer, task.expert);
  if (task.type == TaskType::kGemm0)
    load_first<T, kActivation>(
        m, shared, maps.of[kFirstProduct], task, cell,
        row_of_input(m, task.peer, task.expert, static_cast<int>(cell.first), cell_offset), steps);
  else if (task.type == TaskType::kHiddenGradient)
    load<Form::kInput>(shared, maps.of[kHiddenProduct], hidden_gradient<T, kActivation>(m, task, cell),
                       cell.tile(task, hopper::kColumns),
                       row_in_heap(layout, task.peer, Round::kDispatch, task.expert, cell_offset), steps);
  else
    load<Form::kInput>(shared, maps.of[kInputProduct], input_gradient<T, kActivation>(m, task, cell),
                       cell.tile(task, hopper::kColumns), static_cast<int>(cell.first), steps);
}

// Does one task of the backward pass: a tile of a product, or a part of a bias gradient. The threads of a
// warp synchronize before each product, because instructions of products need a converged warp.
template <class T, Activation kActivation>
__device__ __forceinline__ void multiply_backward(const Member& m, HopperShared& shared, const Task& task,
                                                  int thread) {
  if (task.type == TaskType::kBiasGradient)
    bias_gradient<T>(m, shared.gemm.exchange[0], task, wide_columns(m.experts, kActivation), thread,
                     [] { sync_multipliers(); });
  sync_warp();
  if (task.type == TaskType::kBiasGradient) return;
  if (task.type == TaskType::kGemm0)
    return multiply<T, Form::kForward, Epilogue::kHidden, kActivation>(shared);
  if (task.type == TaskType::kHiddenGradient)
    return multiply<T, Form::kInput, Epilogue::kHiddenGradient, kActivation>(shared);
  if (task.type == TaskType::kWeightGradient) return multiply<T, Form::kWeight, Epilogue::kPlain>(shared);
  // The gradients of the routing weights are sent before the product begins, because during the product no
  // registers are left to hold the task.
  multiply<T, Form::kInput, Epilogue::kPlain, Activation::kNone>(shared, [&]() PMOE_INLINE {
    send_tile_dots<T>(m, task, hopper_row_dot_parts(m.experts.hidden), thread);
  });
}

#endif  // PMOE_HOPPER_CODE

template <class T, Activation kActivation>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    backward_sm90a(const __grid_constant__ HopperLaunch<5> all) {
#if PMOE_HOPPER_CODE
  auto& shared = *reinterpret_cast<HopperShared*>(shared_memory());
  run_block_sm90a<T>(
      all.launch, shared,
      [&](const Member& m, int index, const Task& task, uint32_t& steps)
          PMOE_INLINE { load_backward<T, kActivation>(m, shared, all.maps[index], task, steps); },
      [&](const Member& m, const Task& task, int thread)
          PMOE_INLINE { multiply_backward<T, kActivation>(m, shared, task, thread); });
#endif
}

}  // namespace pmoe::flashdmoe

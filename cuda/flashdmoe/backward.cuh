// The backward pass of a layer in one launch, with the instructions of sm_80.
//
// dY travels to the experts; so does T_I once more if T_DI was not kept. The gradients of both products and
// of the nonlinearity are computed tile by tile. dX and the routing weights' gradients come home. The
// parameters' gradients are summed when all rows of an expert have been computed, by source and row, so that
// they are the same bit for bit in every run.
#pragma once
#include "flashdmoe/ampere.cuh"
#include "grouped_gemm/parts.h"

namespace pmoe::flashdmoe {

static_assert(sizeof(ampere::Shared::a) >= kBiasBytes);

// Does a product's tile, or a bias gradient, of the backward pass.
template <class T, Activation kActivation>
__device__ __forceinline__ void multiply_back(const Member& m, AmpereShared& shared, const Task& task) {
  const int wide = wide_columns(m.experts, kActivation), thread = static_cast<int>(threadIdx.x);
  if (task.type == TaskType::kWeightGradient) {
    CellPieces pieces = {};
    const Problem p = weight_gradient<T>(m, task, wide, pieces);
    return compute<T, Form::kWeight, Epilogue::kPlain, Activation::kNone>(
        shared, p, weight_tile(task, p, ampere::kRows, ampere::kColumns), pieces);
  }
  if (task.type == TaskType::kBiasGradient)
    return bias_gradient<T>(m, shared.gemm.a[0], task, wide, thread, [] { sync_block(); });
  const CellTile cell(m.pass, task);
  if (task.type == TaskType::kGemm0) {
    const int cell_offset = offset_of(m.pass, task.peer, task.expert);
    compute_first<T, kActivation>(m, shared, task, cell,
                                  InputRows::of<T>(m, task.peer, task.expert, cell_offset).begin);
  } else if (task.type == TaskType::kHiddenGradient) {
    compute<T, Form::kInput, Epilogue::kHiddenGradient, kActivation>(
        shared, hidden_gradient<T, kActivation>(m, task, cell), cell.tile(task, ampere::kColumns));
  } else {
    compute<T, Form::kInput, Epilogue::kPlain>(shared, input_gradient<T, kActivation>(m, task, cell),
                                               cell.tile(task, ampere::kColumns));
    send_tile_dots<T>(m, task, ampere_row_dot_parts(m.experts.hidden), thread);
  }
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(ampere::kThreads, 1) backward_sm80(const __grid_constant__ Launch launch) {
  auto& shared = *reinterpret_cast<AmpereShared*>(shared_memory());
  run_block_sm80<T>(launch, shared, [&](const Member& m, const Task& task) {
    multiply_back<T, kActivation>(m, shared, task);
  });
}

}  // namespace pmoe::flashdmoe

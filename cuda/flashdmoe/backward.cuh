// The backward pass of a layer in one launch (FlashDMoE), with the instructions of sm_80.
//
// dY, the gradient of the output, is sent to the experts. So is the layer's input T_I, if the rows that
// arrived in forward (T_DI) were not kept. The gradients of both products and of the nonlinearity are
// computed tile by tile. The gradients of the layer's input and of the routing weights are sent back.
//
// The gradients of the experts' parameters are sums over rows. They are computed when all rows of an expert
// are done. The rows are added by source rank, and the rows of a source rank in their order. So the gradients
// are the same bit for bit in every run.
#pragma once
#include "flashdmoe/ampere.cuh"
#include "grouped_gemm/parts.h"

namespace pmoe::flashdmoe {

static_assert(sizeof(ampere::Shared::a) >= kBiasBytes);

// Does one task of the backward pass: a tile of a product, or a part of a bias gradient.
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

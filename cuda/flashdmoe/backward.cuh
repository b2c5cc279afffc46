// The layer's backward pass in one launch, with the instructions of sm_80: dY travels to the experts (and T_I
// once more, where T_DI was not kept), the gradients of both products and of the nonlinearity are computed
// tile by tile, dX and the routing weights' gradients come home, and the parameters' gradients are summed
// when an expert's rows are complete: by source and row, so that they repeat to the bit.
#pragma once
#include "flashdmoe/ampere.cuh"

namespace pmoe::flashdmoe {

// The rows of an expert, by source: each begins on a new step. a_apart, b_apart: rows from a source to the
// next.
struct CellPieces {
  const int32_t* counts;
  int stride, sources, a_apart, b_apart;
  int source = 0, before = 0;  // the source of the last step, and the steps before it

  __device__ __forceinline__ int rows(int of) const { return read(counts + of * stride); }
  __device__ __forceinline__ int steps(const Tile&) const {
    int sum = 0;
    for (int i = 0; i < sources; ++i) sum += ceil_div(rows(i), ampere::kDepth);
    return sum;
  }
  __device__ __forceinline__ ampere::OnePiece::Step step(const Tile&, int number) {
    int count = rows(source);
    while (number - before >= ceil_div(count, ampere::kDepth)) {
      before += ceil_div(count, ampere::kDepth);
      count = rows(++source);
    }
    return {source * a_apart, source * b_apart, count, (number - before) * ampere::kDepth};
  }
};

// T_DI of an expert's rows from source 0, and the rows from a source to the next.
struct InputRows {
  const void* begin;
  int apart;

  template <class T>
  static __device__ __forceinline__ InputRows of(const Member& m, int peer, int expert) {
    const Layout& layout = m.pass.layout;
    if (m.experts.input != nullptr)
      return {row_of<T>(m.experts.input, layout.first_row(peer, expert), m.experts.model),
              layout.experts * layout.capacity};
    return {m.pass.at(m.pass.rank, {peer, Round::kAgain, Staging::kIncoming, expert, 0}),
            static_cast<int>(layout.rows_of_rank())};
  }
};

template <class T, Activation kActivation>
__device__ __forceinline__ void hidden_gradient(const Member& m, AmpereShared& shared, const Task& task,
                                                const CellTile& cell) {
  const Experts& e = m.experts;
  const Layout& layout = m.pass.layout;
  const int wide = kActivation == Activation::kSwiglu ? 2 * e.hidden : e.hidden;
  Problem p;
  p.n = e.hidden, p.k = e.model, p.b = e.w2;
  p.a = arrived(m.pass, task, Round::kDispatch), p.a_stride = e.model;
  p.hidden = row_of<T>(e.wide, cell.first, wide), p.hidden_stride = wide;
  p.d = row_of<T>(e.gradient, cell.first, wide), p.d_stride = wide;
  p.active = row_of<T>(e.active, cell.first, e.hidden), p.active_stride = e.hidden, p.weighs_active = 1;
  p.weight = reinterpret_cast<const float*>(m.pass.own() + layout.weights(task.peer, task.expert));
  p.row_dots = e.dots + cell.first, p.rows = static_cast<int>(layout.first_row(layout.ranks, 0));
  compute<T, Form::kInput, Epilogue::kHiddenGradient, kActivation>(shared, p,
                                                                   cell.walk(task, ampere::kColumns));
}

template <class T, Activation kActivation>
__device__ __forceinline__ void input_gradient(const Member& m, AmpereShared& shared, const Task& task,
                                               const CellTile& cell) {
  const Experts& e = m.experts;
  Problem p;
  p.k = kActivation == Activation::kSwiglu ? 2 * e.hidden : e.hidden, p.n = e.model, p.b = e.w1;
  p.a = row_of<T>(e.gradient, cell.first, p.k), p.a_stride = p.k;
  p.d = home(m.pass, task), p.d_stride = e.model;
  compute<T, Form::kInput, Epilogue::kPlain>(shared, p, cell.walk(task, ampere::kColumns));
  if (task.column != 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int parts = ceil_div(e.hidden, ampere::kColumns) * ampere::kWarpColumns;
  send_dots<T>(m.pass, task, e.dots, parts, static_cast<const T*>(e.b2), e.model, thread % 32, 32,
               thread / 32, ampere::kThreads / 32);
}

// dW1 = dT_M^T T_DI (peer 0), dW2 = dY^T active (peer 1): one tile.
template <class T>
__device__ __forceinline__ void weight_gradient(const Member& m, AmpereShared& shared, const Task& task,
                                                int wide) {
  const Experts& e = m.experts;
  const Layout& layout = m.pass.layout;
  const int64_t first = layout.first_row(0, task.expert);
  const int apart = layout.experts * layout.capacity;
  CellPieces pieces = {m.pass.announced_rows(0) + task.expert, layout.experts, layout.ranks, apart, apart};
  Problem p;
  if (task.peer == 0) {
    const InputRows input = InputRows::of<T>(m, 0, task.expert);
    p.m = wide, p.n = e.model, p.d = e.of_w1;
    p.a = row_of<T>(e.gradient, first, wide);
    p.b = input.begin, pieces.b_apart = input.apart;
  } else {
    p.m = e.model, p.n = e.hidden, p.d = e.of_w2;
    p.a = m.pass.at(m.pass.rank, {0, Round::kDispatch, Staging::kIncoming, task.expert, 0});
    pieces.a_apart = static_cast<int>(layout.rows_of_rank());
    p.b = row_of<T>(e.active, first, e.hidden);
  }
  p.a_stride = p.m, p.b_stride = p.n;
  const int row = task.tile * ampere::kRows;
  const OneTile walk = {
      {task.expert, 0, 0, row, smaller(ampere::kRows, p.m - row), task.column * ampere::kColumns}};
  compute<T, Form::kWeight, Epilogue::kPlain, Activation::kNone>(shared, p, walk, pieces);
}

// db1 = the sum of dT_M (peer 0), db2 = that of dY, weighed (peer 1): 64 columns. Each eighth of a warp has
// every 32nd row, in their order, and what they have is summed in theirs.
template <class T>
__device__ __forceinline__ void bias_gradient(const Member& m, uint8_t* shared, const Task& task, int wide) {
  constexpr int kGroups = ampere::kThreads / 8;
  auto& partial = *reinterpret_cast<float (*)[kGroups][kBiasColumns]>(shared);
  const Experts& e = m.experts;
  const Pass& pass = m.pass;
  const Layout& layout = pass.layout;
  const int thread = static_cast<int>(threadIdx.x), group = thread / 8;
  const int columns = task.peer == 0 ? wide : e.model, own = task.column * kBiasColumns + thread % 8 * 8;
  float sum[8] = {};
  for (int source = 0; source < layout.ranks && own < columns; ++source) {
    const int rows = read(pass.announced_rows(source) + task.expert);
    const auto* const weight =
        reinterpret_cast<const float*>(pass.own() + layout.weights(source, task.expert));
    const void* const begin =
        task.peer == 0 ? row_of<T>(e.gradient, layout.first_row(source, task.expert), wide)
                       : pass.at(pass.rank, {source, Round::kDispatch, Staging::kIncoming, task.expert, 0});
    for (int row = group; row < rows; row += kGroups) {
      float value[8] = {};
      comet::add_vector<T>(value, load16(static_cast<const T*>(begin) + int64_t{row} * columns + own));
      const float by = task.peer == 0 ? 1.0f : read(weight + row);
      PMOE_UNROLL
      for (int i = 0; i < 8; ++i) sum[i] += by * value[i];
    }
  }
  PMOE_UNROLL
  for (int i = 0; i < 8; ++i) write(&partial[group][thread % 8 * 8 + i], sum[i]);
  sync_block();
  const int column = task.column * kBiasColumns + thread;
  if (thread >= kBiasColumns || column >= columns) return;
  float all = 0.0f;
  for (int i = 0; i < kGroups; ++i) all += read(&partial[i][thread]);
  T* const to = static_cast<T*>(task.peer == 0 ? e.of_b1 : e.of_b2);
  write(to + int64_t{task.expert} * columns + column, narrow<T>(all));
}

template <class T, Activation kActivation>
__device__ __forceinline__ void multiply_back(const Member& m, AmpereShared& shared, const Task& task) {
  const int wide = kActivation == Activation::kSwiglu ? 2 * m.experts.hidden : m.experts.hidden;
  if (task.type == TaskType::kWeightGradient) return weight_gradient<T>(m, shared, task, wide);
  if (task.type == TaskType::kBiasGradient) return bias_gradient<T>(m, shared.gemm.a[0], task, wide);
  const CellTile cell(m.pass, task);
  if (task.type == TaskType::kGemm0)
    first_product<T, kActivation>(m, shared, task, cell, InputRows::of<T>(m, task.peer, task.expert).begin);
  else if (task.type == TaskType::kHiddenGradient)
    hidden_gradient<T, kActivation>(m, shared, task, cell);
  else
    input_gradient<T, kActivation>(m, shared, task, cell);
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(ampere::kThreads, 1) backward_sm80(const __grid_constant__ Launch launch) {
  auto& shared = *reinterpret_cast<AmpereShared*>(shared_memory());
  act<T>(launch, &shared.place,
         [&](const Member& m, const Task& task) { multiply_back<T, kActivation>(m, shared, task); });
}

}  // namespace pmoe::flashdmoe

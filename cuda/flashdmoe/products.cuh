// The operands and results of the products of FlashDMoE's passes: which tensors and which rows a task reads
// and writes. The kernels of all architectures use this file.
#pragma once
#include "flashdmoe/experts.h"
#include "flashdmoe/gate.cuh"
#include "flashdmoe/processor.cuh"
#include "flashdmoe/scheduler.h"
#include "flashdmoe/subscriber.h"
#include "grouped_gemm/pieces.h"

namespace pmoe::flashdmoe {

constexpr int kTileDepth = 64;        // rows or columns of the reduction in one step
constexpr int kComputeThreads = 256;  // threads of a processor that compute

// A list of tiles with a single tile, for product code that asks for one tile after another.
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

// Returns the address of a row in a tensor of elements T, or null if the tensor is null.
//
// stride: elements between rows.
template <class T>
PMOE_HD void* row_of(const void* base, int64_t row, int64_t stride) {
  return base == nullptr ? nullptr : const_cast<T*>(static_cast<const T*>(base)) + row * stride;
}

// The rows of a task: one tile of the rows that one source rank has sent to one expert (a cell).
//
// first: index of the cell's first row among the rows of all cells.
// count: number of rows of the cell.
// row, rows: index in the cell of the tile's first row, and number of the tile's rows.
struct CellTile {
  int64_t first;
  int count, row, rows;

  __device__ __forceinline__ CellTile(const Pass& pass, const Task& task)
      : first(pass.layout.first_row(task.peer, task.expert) + offset_of(pass, task.peer, task.expert)),
        count(read(pass.announced_rows(task.peer) + task.expert)),
        row(task.tile * pass.layout.tile_rows),
        rows(pass.rows_of(count, task.tile)) {}

  __device__ __forceinline__ Tile tile(const Task& task, int columns) const {
    return {task.expert, 0, count, row, rows, task.column * columns};
  }
};

// Returns the tile of a weight's gradient that a task computes.
__device__ __forceinline__ Tile weight_tile(const Task& task, const Problem& p, int rows, int columns) {
  const int row = task.tile * rows;
  return {task.expert, 0, 0, row, smaller(rows, p.m - row), task.column * columns};
}

// arrived() returns the address in this rank's heap at which the rows of a task's source and expert have
// arrived. home() returns the address at which this rank writes the results of these rows: in the heap of the
// source, or in the outgoing part of its own heap.
__device__ __forceinline__ uint8_t* arrived(const Pass& pass, const Task& task, Round round) {
  const int cell_offset = offset_of(pass, task.peer, task.expert);
  return pass.at(pass.rank, {task.peer, round, Staging::kIncoming, task.expert, cell_offset});
}
__device__ __forceinline__ uint8_t* home(const Pass& pass, const Task& task) {
  const int home_offset = home_at(pass, task.peer, task.expert);
  const int cell_offset = offset_of(pass, task.peer, task.expert);
  return rows_for(pass, {task.peer, task.expert, home_offset, cell_offset}, Round::kCombine);
}

// Returns the number of columns of the hidden activation T_M: d_hidden, twice as many for SwiGLU.
PMOE_HD int wide_columns(const Experts& e, Activation activation) {
  return activation == Activation::kSwiglu ? 2 * e.hidden : e.hidden;
}

// ---- forward

// Returns the first product of a task: T_DI w1^T and the nonlinearity, GEMM_0 in the paper. T_DI are the rows
// that arrived.
//
// cell: the task's rows. They are a part of a cell, the rows of one source rank for one expert.
// rows: address in T_DI of the first row of the cell; null if a tensor map loads the rows.
template <class T, Activation kActivation>
__device__ __forceinline__ Problem first_product(const Experts& e, const CellTile& cell, const void* rows) {
  Problem p;
  p.n = wide_columns(e, kActivation), p.k = e.model;
  p.a = rows, p.a_stride = e.model, p.b = e.w1, p.bias = e.b1;
  p.d = row_of<T>(e.wide, cell.first, p.n), p.d_stride = p.n;
  p.active = row_of<T>(e.active, cell.first, e.hidden), p.active_stride = e.hidden;
  return p;
}

// Returns the second product of a task: the activated hidden rows times w2^T, GEMM_1 in the paper. The
// results are written into the heap of the rank that sent the rows.
template <class T>
__device__ __forceinline__ Problem second_product(const Member& m, const Task& task, const CellTile& cell) {
  const Experts& e = m.experts;
  Problem p;
  p.n = e.model, p.k = e.hidden, p.b = e.w2, p.bias = e.b2;
  p.a = row_of<T>(e.active, cell.first, e.hidden), p.a_stride = e.hidden;
  p.d = home(m.pass, task), p.d_stride = e.model;
  return p;
}

// gate_product() returns the gate's product x Wg^T, the scores of all tokens. gate_tile() returns the tile of
// the product that a task computes.
template <class T>
__device__ __forceinline__ Problem gate_product(const Member& m) {
  const Pass& pass = m.pass;
  Problem p;
  p.n = pass.layout.cells(), p.k = m.experts.model, p.a_stride = m.experts.model;
  p.a = pass.source, p.b = pass.routing.choice.weight, p.d = pass.routing.choice.logits, p.wide = 1;
  return p;
}
__device__ __forceinline__ Tile gate_tile(const Pass& pass, const Task& task, int columns) {
  return {0,
          0,
          pass.tokens,
          task.tile * pass.layout.tile_rows,
          pass.rows_of(pass.tokens, task.tile),
          task.column * columns};
}

// Copies the arrived rows of a tile (T_DI) to memory that backward reads. Tiles side by side have the same
// rows, so their tasks share the work: each task copies some of the rows.
//
// thread: index among the kComputeThreads threads.
__device__ __forceinline__ void keep_rows(const Member& m, const Task& task, const CellTile& cell,
                                          int thread) {
  const int64_t bytes = m.pass.layout.row_bytes;
  const int step = m.pass.stages.columns[0] * kComputeThreads / 32;
  const uint8_t* const from = arrived(m.pass, task, Round::kDispatch);
  auto* const to = static_cast<uint8_t*>(m.experts.input) + cell.first * bytes;
  for (int i = task.column * kComputeThreads / 32 + thread / 32; i < cell.rows; i += step)
    peers::copy_row(to + (cell.row + i) * bytes, from + (cell.row + i) * bytes, bytes,
                    {thread % 32, 32, 0, 1});
}

// ---- backward

// Lists the rows of an expert in the order in which a weight's gradient sums over them: by source rank, in
// steps of kTileDepth rows. A step has rows of one source only.
//
// counts: the number of rows of source s is at [s * stride].
// offsets: the index in the pool of the first row of source s is at [s * stride]; null if there is no pool.
// a_begin, b_begin: index of the first row of source 0 in the operands A and B.
// a_apart, b_apart: number of rows from one source's first row to the next source's first row.
struct CellPieces {
  using Step = OnePiece<kTileDepth>::Step;

  const int32_t *counts, *offsets;
  int stride, sources, a_apart, b_apart;
  int a_begin = 0, b_begin = 0;
  int source = 0, before = 0;  // the source of the last step, and the number of steps before that source

  __device__ __forceinline__ int rows(int of) const { return read(counts + of * stride); }
  __device__ __forceinline__ int steps(const Tile&) const {
    int sum = 0;
    for (int i = 0; i < sources; ++i) sum += ceil_div(rows(i), kTileDepth);
    return sum;
  }
  __device__ __forceinline__ Step step(const Tile&, int number) {
    int count = rows(source);
    while (number - before >= ceil_div(count, kTileDepth)) {
      before += ceil_div(count, kTileDepth);
      count = rows(++source);
    }
    const int offset = offsets == nullptr ? 0 : read(offsets + source * stride);
    return {a_begin + source * a_apart + offset, b_begin + source * b_apart + offset, count,
            (number - before) * kTileDepth};
  }
};

// The address of the first row of T_DI (the layer's input as it arrived) from one source, and the number of
// rows from there to the first row of the next source. Either forward has kept T_DI, or backward has sent it
// again.
struct InputRows {
  const void* begin;
  int apart;

  // Returns the rows of T_DI from rank `peer` for an expert.
  //
  // offset: without a capacity, the index in the pool of the first row from `peer` for the expert; else 0.
  template <class T>
  static __device__ __forceinline__ InputRows of(const Member& m, int peer, int expert, int offset) {
    const Layout& layout = m.pass.layout;
    if (m.experts.input != nullptr)
      return {row_of<T>(m.experts.input, layout.first_row(peer, expert) + offset, m.experts.model),
              static_cast<int>(layout.first_row(1, 0))};
    return {m.pass.at(m.pass.rank, {peer, Round::kAgain, Staging::kIncoming, expert, offset}),
            static_cast<int>(layout.rows_of_rank())};
  }
};

// Returns the product dY w2 of a task; dY is the gradient of the layer's output. The product's epilogue
// computes dT_M (the gradient of the hidden activation T_M), the activated hidden rows, and the gradients of
// the routing weights.
template <class T, Activation kActivation>
__device__ __forceinline__ Problem hidden_gradient(const Member& m, const Task& task, const CellTile& cell) {
  const Experts& e = m.experts;
  const Layout& layout = m.pass.layout;
  const int wide = wide_columns(e, kActivation);
  Problem p;
  p.n = e.hidden, p.k = e.model, p.b = e.w2;
  p.a = arrived(m.pass, task, Round::kDispatch), p.a_stride = e.model;
  p.hidden = row_of<T>(e.wide, cell.first, wide), p.hidden_stride = wide;
  p.d = row_of<T>(e.gradient, cell.first, wide), p.d_stride = wide;
  p.active = row_of<T>(e.active, cell.first, e.hidden), p.active_stride = e.hidden, p.weighs_active = 1;
  p.weight = reinterpret_cast<const float*>(m.pass.own() + layout.weights(0, 0)) + cell.first;
  p.row_dots = e.dots + cell.first, p.rows = layout.all_rows();
  return p;
}

// Returns the product dT_M w1 of a task, the gradient of the expert's input. dT_M is the gradient of the
// hidden activation T_M. The results are written into the heap of the rank that sent the rows.
template <class T, Activation kActivation>
__device__ __forceinline__ Problem input_gradient(const Member& m, const Task& task, const CellTile& cell) {
  const Experts& e = m.experts;
  Problem p;
  p.k = wide_columns(e, kActivation), p.n = e.model, p.b = e.w1;
  p.a = row_of<T>(e.gradient, cell.first, p.k), p.a_stride = p.k;
  p.d = home(m.pass, task), p.d_stride = e.model;
  return p;
}

// Returns the product for one tile of a weight's gradient, a sum over an expert's rows:
//
//   task.peer 0   gradient of w1 = (gradient of T_M)^T T_DI
//   task.peer 1   gradient of w2 = (gradient of the output)^T activated hidden
//
// wide: number of columns of T_M, the hidden activation, and of its gradient.
// pieces: result: lists the rows over which the sum runs, by source rank, in steps.
template <class T>
__device__ __forceinline__ Problem weight_gradient(const Member& m, const Task& task, int wide,
                                                   CellPieces& pieces) {
  const Experts& e = m.experts;
  const Layout& layout = m.pass.layout;
  const int64_t first = layout.first_row(0, task.expert);
  const auto apart = static_cast<int>(layout.first_row(1, 0));
  const int32_t* const offsets = layout.is_pool ? m.pass.offset + task.expert : nullptr;
  pieces = {m.pass.announced_rows(0) + task.expert, offsets, layout.experts, layout.ranks, apart, apart};
  Problem p;
  if (task.peer == 0) {
    const InputRows input = InputRows::of<T>(m, 0, task.expert, 0);
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
  return p;
}

// Bytes of shared memory that bias_gradient() needs.
constexpr int kBiasBytes = kComputeThreads / 8 * kBiasColumns * 4;

// Sums 64 columns of a bias's gradient over an expert's rows:
//
//   task.peer 0   gradient of b1 = sum of the gradients of T_M, the hidden activation
//   task.peer 1   gradient of b2 = sum of (gradient of the output) * routing weight
//
// Eight threads form a group. A group takes every 32nd row of each source, and adds its rows in their order.
// Then the sums of the groups are added in the order of the groups, so that the result is the same in every
// run.
//
// shared: kBiasBytes of memory.
// thread: index among the kComputeThreads threads.
// sync(): the barrier of these threads.
template <class T, class Sync>
__device__ __forceinline__ void bias_gradient(const Member& m, uint8_t* shared, const Task& task, int wide,
                                              int thread, const Sync& sync) {
  constexpr int kGroups = kComputeThreads / 8;
  auto& partial = *reinterpret_cast<float (*)[kGroups][kBiasColumns]>(shared);
  const Experts& e = m.experts;
  const Pass& pass = m.pass;
  const Layout& layout = pass.layout;
  const int group = thread / 8;
  const int columns = task.peer == 0 ? wide : e.model, own = task.column * kBiasColumns + thread % 8 * 8;
  float sum[8] = {};
  for (int source = 0; source < layout.ranks && own < columns; ++source) {
    const int rows = read(pass.announced_rows(source) + task.expert);
    const int cell_offset = offset_of(pass, source, task.expert);
    const auto* const weight =
        reinterpret_cast<const float*>(pass.own() + layout.weights(source, task.expert)) + cell_offset;
    const void* const begin =
        task.peer == 0
            ? row_of<T>(e.gradient, layout.first_row(source, task.expert) + cell_offset, wide)
            : pass.at(pass.rank, {source, Round::kDispatch, Staging::kIncoming, task.expert, cell_offset});
    for (int row = group; row < rows; row += kGroups) {
      float value[8] = {};
      peers::add_vector<T>(value, load16(static_cast<const T*>(begin) + int64_t{row} * columns + own));
      const float by = task.peer == 0 ? 1.0f : read(weight + row);
      PMOE_UNROLL
      for (int i = 0; i < 8; ++i) sum[i] += by * value[i];
    }
  }
  PMOE_UNROLL
  for (int i = 0; i < 8; ++i) write(&partial[group][thread % 8 * 8 + i], sum[i]);
  sync();
  const int column = task.column * kBiasColumns + thread;
  if (thread >= kBiasColumns || column >= columns) return;
  float all = 0.0f;
  for (int i = 0; i < kGroups; ++i) all += read(&partial[i][thread]);
  T* const to = static_cast<T*>(task.peer == 0 ? e.of_b1 : e.of_b2);
  write(to + int64_t{task.expert} * columns + column, narrow<T>(all));
}

// Sends the gradients of the routing weights of a tile's rows to the rank that sent the rows. Tiles side by
// side have the same rows, so only the task of the first tile sends them.
//
// parts: number of partial sums of each gradient.
template <class T>
__device__ __forceinline__ void send_tile_dots(const Member& m, const Task& task, int parts, int thread) {
  const Experts& e = m.experts;
  if (task.column == 0)
    send_dots<T>(m.pass, task, e.dots, parts, static_cast<const T*>(e.b2), e.model, thread % 32, 32,
                 thread / 32, kComputeThreads / 32);
}

// ---- blocks

// Runs a block of kThreads threads: the scheduler and the subscribers in the first block of a rank, a
// processor in each other block.
//
// run(member, number, index): runs the processor with the index `number` of a rank; `index` is the index of
//     the rank in the launch.
template <int kThreads, class Run>
__device__ __forceinline__ void run_block(const Launch& launch, const Run& run) {
  // A launch may run several ranks (in tests). These ranks wait for each other, so the blocks that start
  // first must include some blocks of every rank. Therefore successive blocks belong to different ranks.
  const int ranks = launch.ranks, block = static_cast<int>(blockIdx.x) / ranks;
  const int index = static_cast<int>(blockIdx.x) % ranks;
  const Member& m = launch.of_rank[index];
  const int thread = static_cast<int>(threadIdx.x);
  if (block > 0) return run(m, block - 1, index);
  if (thread < 32)
    Scheduler(m.pass, thread, 32).run(kThreads - 32);
  else
    Subscriber(m.pass, thread - 32, kThreads - 32).run();
  // Without this barrier the compiler would let the threads of these warps converge only at the end of the
  // kernel.
  sync_warp();
}

}  // namespace pmoe::flashdmoe

// Processors (FlashDMoE, Algorithm 4): blocks that do one task after another. If another rank waits for the
// result of a task, the processor then raises a flag there. If further tasks of this rank waited only for
// this result, the processor puts these tasks into the task queue tQ. Processors never wait for other ranks,
// only for a task from the scheduler.
#pragma once
#include "flashdmoe/places.cuh"
#include "flashdmoe/queue.h"
#include "peers/protocol.h"
#include "peers/rows.cuh"

namespace pmoe::flashdmoe {

// Waits for this processor's next task, and returns the task's index in the task queue tQ; -1 if no task is
// left. One thread of the processor calls this function.
__device__ __forceinline__ int next_task(const Pass& pass, int processor) {
  uint32_t* const mailbox = &pass.mailboxes[processor];
  store_release(mailbox, kIdle);
  for (;;) {
    const uint32_t seen = load_relaxed(mailbox), last = load_relaxed(&pass.queue.state->over);
    if (seen < kFirstTask && !peers::reached(last, peers::epoch_of(pass.watch))) {
      pause();
      continue;
    }
    // `over` must be read before the mailbox. Every task is handed out before the launch is over. So if
    // `over` is set, a task for this processor is already visible in its mailbox.
    const bool is_over = peers::reached(load_acquire(&pass.queue.state->over), peers::epoch_of(pass.watch));
    const uint32_t value = load_acquire(mailbox);
    if (value >= kFirstTask) return static_cast<int>(value - kFirstTask);
    if (is_over) break;
  }
  write(mailbox, kAbsent);
  return -1;
}

// Returns the address of a row's float in a region that has one float for each row.
__device__ __forceinline__ float* of_row(uint8_t* floats, int row) {
  return reinterpret_cast<float*>(floats) + row;
}

// Sends one row of the layer's input, in backward. The same task also sends the gradient of the token's
// output.
__device__ __forceinline__ void send_again(const Pass& pass, const Packet& row, int token, int lane,
                                           int lanes) {
  uint8_t* const to = rows_for(pass, row, Round::kAgain);
  peers::copy_row(to, pass.again + token * pass.again_stride, pass.layout.row_bytes, {lane, lanes, 0, 1});
}

// Returns the places, at the peer and on this rank, of the routing weights that a dispatch task sends with
// its tile of rows.
//
// peer_row: index of the tile's first row in the peer's cell or pool.
// own_row: index of the same row in this rank's cell or pool.
__device__ __forceinline__ Ends weights_ends(const Layout& layout, int rank, const Task& task, int peer_row,
                                             int own_row) {
  return {layout.weights(rank, task.expert) + int64_t{peer_row} * 4,
          layout.weights(task.peer, task.expert) + int64_t{own_row} * 4};
}

// Returns the places, at the source and on this rank, of the routing weights' gradients that this rank
// returns for some rows of a cell: from the first row of the cell on, or from the first row of a tile on.
//
// home_offset: index of the first of these rows in the source's cell or, with a pool, in the source's pool.
// cell_offset: index of the same row in this rank's cell or pool.
__device__ __forceinline__ Ends dots_ends(const Layout& layout, int rank, const Task& task, int home_offset,
                                          int cell_offset) {
  return {layout.dots(rank, task.expert) + int64_t{home_offset} * 4,
          layout.dots(task.peer, task.expert) + int64_t{cell_offset} * 4};
}

// Sends a tile of rows to the rank of their expert. Each warp copies one row at a time.
//
// lane, lanes: index of the thread in its warp, and number of threads in a warp.
// warp, warps: index of the warp in its block, and number of warps in a block.
__device__ __forceinline__ void send_tile(const Pass& pass, const Task& task, int lane, int lanes, int warp,
                                          int warps) {
  const Layout& layout = pass.layout;
  const int expert = layout.cell(task.peer, task.expert), first = task.tile * layout.tile_rows;
  const int rows = pass.rows_of(read(pass.counts + expert), task.tile);
  const int own_row = own_home(pass, expert) + first;
  const int32_t* const all = pass.slot + layout.first_row(0, expert) + own_row;
  const int peer_row = offset_at(pass, task.peer, task.expert) + first;
  uint8_t* const to = rows_for(pass, {task.peer, task.expert, peer_row, own_row}, Round::kDispatch);
  for (int i = warp; i < rows; i += warps) {
    const int slot = read(all + i), token = pass.by_choices.divide(slot);
    peers::copy_row(to + i * layout.row_bytes, pass.source + token * pass.source_stride, layout.row_bytes,
                    {lane, lanes, 0, 1});
    if (pass.again != nullptr)
      send_again(pass, {task.peer, task.expert, peer_row + i, own_row + i}, token, lane, lanes);
    if (pass.is_backward && lane == 0)
      write(of_row(region_for(pass, task.peer, weights_ends(layout, pass.rank, task, peer_row, own_row)), i),
            read(pass.weight + slot));
  }
}

// Sends the gradients of the routing weights of a tile's rows to the rank that sent the rows. Each warp takes
// one row at a time.
//
// The gradient of a routing weight is the inner product <dY, output of the expert>, where dY is the gradient
// of the layer's output. The products have computed `count` partial sums of this inner product, which are
// added in a fixed order.
//
// parts: the partial sums of all rows.
// bias: the experts' second bias b2, or null. The partial sums do not contain <dY, b2>, so this function adds
//     it.
// columns: number of columns of dY and b2.
template <class T>
__device__ __forceinline__ void send_dots(const Pass& pass, const Task& task, const float* parts, int count,
                                          const T* bias, int columns, int lane, int lanes, int warp,
                                          int warps) {
  const Layout& layout = pass.layout;
  const int first = task.tile * layout.tile_rows;
  const int rows = pass.rows_of(read(pass.announced_rows(task.peer) + task.expert), task.tile);
  const int cell_offset = offset_of(pass, task.peer, task.expert),
            home_offset = home_at(pass, task.peer, task.expert);
  const int64_t apart = layout.all_rows(), own = layout.first_row(task.peer, task.expert) + cell_offset;
  uint8_t* const to =
      region_for(pass, task.peer, dots_ends(layout, pass.rank, task, home_offset, cell_offset));
  for (int row = first + warp; row < first + rows; row += warps) {
    float dot = 0.0f;
    if (bias != nullptr) {
      const uint8_t* const from = pass.at(
          pass.rank, {task.peer, Round::kDispatch, Staging::kIncoming, task.expert, cell_offset + row});
      for (int v = lane; v < columns / 8; v += lanes) {
        float dy[8] = {}, b[8] = {};
        peers::add_vector<T>(dy, load16(from + int64_t{v} * 16));
        peers::add_vector<T>(b, load16(bias + int64_t{task.expert} * columns + int64_t{v} * 8));
        PMOE_UNROLL
        for (int i = 0; i < 8; ++i) dot += dy[i] * b[i];
      }
      for (int mask = 1; mask < lanes; mask *= 2) dot += shfl_xor(dot, mask);
    }
    if (lane != 0) continue;
    for (int part = 0; part < count; ++part) dot += read(parts + part * apart + own + row);
    write(of_row(to, row), dot);
  }
}

// Computes the result of each token of a task: the sum of the rows that have returned for the token, times
// their routing weights, always in the order of the token's choices (equations 5.1 and 5.2). If the gate
// normalizes weights, it has done so before. In backward the returned rows have already been multiplied by
// the weights. There, this function also stores the gradients of the weights, which have come back with the
// rows.
template <class T>
__device__ __forceinline__ void combine_tokens(const Pass& pass, const Task& task, int lane, int lanes,
                                               int warp, int warps) {
  const Layout& layout = pass.layout;
  const int begin = task.tile * kCombineTokens, end = smaller(begin + kCombineTokens, pass.tokens);
  const int vectors = static_cast<int>(layout.row_bytes / 16);
  for (int token = begin + warp; token < end; token += warps) {
    const int slot = token * pass.choices;
    uint8_t* const to = pass.result + token * pass.result_stride;
    for (int v = lane; v < vectors; v += lanes) {
      float sum[8] = {};
      for (int k = 0; k < pass.choices; ++k) {
        const int row = read(pass.row + slot + k);
        if (row < 0) continue;
        const int expert = read(pass.expert + slot + k), peer = pass.by_experts.divide(expert);
        const uint8_t* const from = pass.at(
            pass.rank, {peer, Round::kCombine, Staging::kIncoming, expert - peer * layout.experts, row});
        float product[8] = {};
        peers::add_vector<T>(product, load16(from + int64_t{v} * 16));
        const float weight = pass.is_backward ? 1.0f : read(pass.weight + slot + k);
        PMOE_UNROLL
        for (int i = 0; i < 8; ++i) sum[i] += weight * product[i];
      }
      store16(to + int64_t{v} * 16, peers::round_vector<T>(sum));
    }
    for (int k = lane; pass.is_backward && k < pass.choices; k += lanes) {
      const int row = read(pass.row + slot + k), expert = read(pass.expert + slot + k);
      const int peer = pass.by_experts.divide(expert);
      uint8_t* const dots = pass.own() + layout.dots(peer, expert - peer * layout.experts);
      write(pass.weight_gradient + slot + k, row < 0 ? 0.0f : read(of_row(dots, row)));
    }
  }
}

// Counts a finished tile in a row of `columns` tiles. Returns whether all tiles of the row are finished. If
// they are, it also sets the count back to 0 for the next launch.
__device__ __forceinline__ bool is_last(uint32_t* count, int columns) {
  if (add_acq_rel(count, 1u) + 1 != static_cast<uint32_t>(columns)) return false;
  write(count, 0u);
  return true;
}

// Sends, by puts, the data that a dispatch task has written for a peer that is not mapped.
//
// peer_row, flag: index of the tile's first row, and byte offset of its flag, in the peer's heap.
__device__ __forceinline__ void put_tile(const Pass& pass, const Task& task, int peer_row, int64_t flag) {
  const Layout& layout = pass.layout;
  const int expert = layout.cell(task.peer, task.expert);
  const int rows = pass.rows_of(read(pass.counts + expert), task.tile);
  const int own_row = own_home(pass, expert) + task.tile * layout.tile_rows;
  const Packet packet = {task.peer, task.expert, peer_row, own_row};
  if (pass.again != nullptr) put_rows(pass, packet, rows, Round::kAgain);
  if (pass.is_backward)
    put_region(pass, task.peer, weights_ends(layout, pass.rank, task, peer_row, own_row), int64_t{rows} * 4);
  put_rows_with_flag(pass, packet, rows, Round::kDispatch, flag);
}

// Sends, by puts, the results of a tile to the rank that has sent its rows. That rank is not mapped.
//
// flag: byte offset of the tile's flag in that rank's heap.
__device__ __forceinline__ void put_results(const Pass& pass, const Task& task, int64_t flag) {
  const Layout& layout = pass.layout;
  const int rows = pass.rows_of(read(pass.announced_rows(task.peer) + task.expert), task.tile);
  const int first = task.tile * layout.tile_rows;
  const int home_row = home_at(pass, task.peer, task.expert) + first;
  const int own_row = offset_of(pass, task.peer, task.expert) + first;
  if (pass.is_backward)
    put_region(pass, task.peer, dots_ends(layout, pass.rank, task, home_row, own_row), int64_t{rows} * 4);
  put_rows_with_flag(pass, {task.peer, task.expert, home_row, own_row}, rows, Round::kCombine, flag);
}

// Ends a task: raises a flag if another rank waits for the result, or pushes the tasks that waited only for
// this result. All threads of the block have finished the task; one of them calls this.
__device__ __forceinline__ void end_task(const Pass& pass, const Task& task) {
  const Layout& layout = pass.layout;
  peers::test_delay(pass.watch, 7300 + task.tile);
  if (task.type <= TaskType::kPlace) {
    add_acq_rel(&pass.queue.state->routed, 1u);
    return;
  }
  if (task.type == TaskType::kDispatch) {
    const int peer_tile = offset_at(pass, task.peer, task.expert) / layout.tile_rows + task.tile;
    const int64_t flag = layout.arrival(pass.rank, task.expert, peer_tile);
    if (pass.is_mapped(task.peer))
      peers::signal(pass.watch, pass.heaps[task.peer] + flag);
    else
      put_tile(pass, task, peer_tile * layout.tile_rows, flag);
  }
  const Stages& stages = pass.stages;
  const int stage = stages.index(task.type), next = stage + 1;
  if (stage == stages.count) return;
  const int cell_offset = offset_of(pass, task.peer, task.expert);
  const bool ends = is_last(pass.finished_counter(task, stage, cell_offset), stages.columns[stage]);
  if (next == stages.count) {
    const int home_tile = home_at(pass, task.peer, task.expert) / layout.tile_rows + task.tile;
    const int64_t flag = layout.returned(pass.rank, task.expert, home_tile);
    if (ends && pass.is_mapped(task.peer)) peers::signal(pass.watch, pass.heaps[task.peer] + flag);
    if (ends && !pass.is_mapped(task.peer)) put_results(pass, task, flag);
    return;
  }
  const bool begins = pass.watch.not_waited >> static_cast<int>(Wait::kDone) & 1 ? task.column == 0 : ends;
  if (begins)
    push(pass.queue, {stages.type[next], task.peer, task.expert, task.tile, 0}, stages.columns[next]);
  if (ends && task.type == TaskType::kHiddenGradient) count_tiles(pass, task.expert, 0u - 1u);
}

// Runs a processor until the launch is over.
//
// pass(): returns the rank's Pass.
// processor(): returns the index of this processor.
// place: a word of shared memory. The first thread writes the task's index in the task queue to it.
// is_first: true for the one thread that asks for tasks and ends them (end_task).
// sync(): a barrier of all threads that call this function.
// work(task): does a task; all these threads call it.
template <class GetPass, class Number, class Sync, class Work>
__device__ __forceinline__ void run_processor(const GetPass& pass, const Number& processor, int* place,
                                              bool is_first, const Sync& sync, const Work& work) {
  for (;;) {
    if (is_first) write(place, next_task(pass(), processor()));
    sync();
    if (shfl(read(place), 0) < 0) return;
    const auto current_task = [&] { return Task::from(load16(&pass().queue.entry[read(place)].task)); };
    work(current_task());
    sync();
    if (is_first)
      end_task(pass(), current_task());  // read again, because a product leaves no registers for it
  }
}

// Does one task. `warps` warps of `lanes` threads call it together.
//
// compute(task): does a task that is neither dispatch nor combine: a routing task or a tile of a product.
template <class T, class Compute>
__device__ __forceinline__ void do_task(const Pass& pass, const Task& task, int thread, int warps, int lanes,
                                        const Compute& compute) {
  const int warp = thread / lanes, lane = thread % lanes;
  // All threads of a warp have the same task, and must be converged when they begin a product. The shuffle
  // shows the compiler that all threads of the warp have the same type of task, so that it keeps them
  // converged.
  Task own = task;
  own.type = static_cast<TaskType>(shfl(static_cast<int>(task.type), 0));
  if (own.type == TaskType::kDispatch) send_tile(pass, own, lane, lanes, warp, warps);
  sync_warp();
  if (own.type == TaskType::kCombine) combine_tokens<T>(pass, own, lane, lanes, warp, warps);
  sync_warp();
  if (own.type != TaskType::kDispatch && own.type != TaskType::kCombine) compute(own);
}

// Runs a processor on devices before Hopper, where all threads take part in every task. (On Hopper one warp
// only loads.)
template <class T, class Sync, class Compute>
__device__ __forceinline__ void run_uniform_processor(const Pass& pass, int processor, int* place, int thread,
                                                      int warps, int lanes, const Sync& sync,
                                                      const Compute& compute) {
  const auto get_pass = [&]() -> const Pass& { return pass; };
  run_processor(
      get_pass, [&] { return processor; }, place, thread == 0, sync,
      [&](const Task& task) { do_task<T>(pass, task, thread, warps, lanes, compute); });
}

}  // namespace pmoe::flashdmoe

// Processors (FlashDMoE, Algorithm 4): blocks that do one task after another, send its result with its
// signal, and put what follows from it into tQ. They wait for the scheduler alone.
#pragma once
#include "comet/combine.cuh"
#include "comet/dispatch.cuh"
#include "flashdmoe/pass.h"
#include "flashdmoe/queue.h"

namespace pmoe::flashdmoe {

// The place of the next task, or -1 behind the last. By one thread.
__device__ __forceinline__ int next_task(const Pass& pass, int processor) {
  uint32_t* const door = &pass.doors[processor];
  store_release(door, kIdle);
  for (;;) {
    // In this order: what is handed out is handed out before the round is over.
    const bool is_over = comet::reached(load_acquire(&pass.queue.state->over), pass.watch.epoch);
    const uint32_t found = load_acquire(door);
    if (found >= kFirstTask) return static_cast<int>(found - kFirstTask);
    if (is_over) break;
    pause();
  }
  write(door, kAbsent);
  return -1;
}

// A tile of rows on its way to an expert; a warp copies a row at a time. warp: of `warps` of the block.
__device__ __forceinline__ void send_tile(const Pass& pass, const Task& task, int lane, int lanes, int warp,
                                          int warps) {
  const Layout& layout = pass.layout;
  const int expert = layout.cell(task.peer, task.expert), first = task.tile * layout.tile_rows;
  const int rows = pass.rows_of(read(pass.counts + expert), task.tile);
  uint8_t* const to =
      pass.at(task.peer, {pass.rank, Round::kDispatch, Staging::kIncoming, task.expert, first});
  const int32_t* const slot = pass.slot + int64_t{expert} * layout.capacity + first;
  for (int i = warp; i < rows; i += warps) {
    const int token = pass.by_choices.divide(read(slot + i));
    comet::copy_row(to + i * layout.row_bytes, pass.source + token * pass.source_stride, layout.row_bytes,
                    {lane, lanes, 0, 1});
  }
}

// Equations 5.1 and 5.2 with weights that are normalised already: products times their weights, always in the
// order of a token's choices.
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
        comet::add_vector<T>(product, load16(from + int64_t{v} * 16));
        const float weight = read(pass.weight + slot + k);
        PMOE_UNROLL
        for (int i = 0; i < 8; ++i) sum[i] += weight * product[i];
      }
      store16(to + int64_t{v} * 16, comet::round_vector<T>(sum));
    }
  }
}

// Whether this tile across was the last of its row tile; the count is then 0 again, for the next round.
__device__ __forceinline__ bool is_last(uint32_t* count, int columns) {
  if (add_acq_rel(count, 1u) + 1 != static_cast<uint32_t>(columns)) return false;
  write(count, 0u);
  return true;
}

// What follows from a task that all threads of the block have ended. By one of them.
__device__ __forceinline__ void end_task(const Pass& pass, const Task& task) {
  const Layout& layout = pass.layout;
  comet::nap(pass.watch, 7300 + task.tile);
  if (task.type == TaskType::kDispatch)
    comet::signal(pass.watch, pass.heaps[task.peer] + layout.arrival(pass.rank, task.expert, task.tile));
  if (task.type == TaskType::kGemm0) {
    const bool ends = is_last(&pass.made[pass.tile_number(task)], pass.columns_0);
    const bool begins = pass.watch.not_waited >> static_cast<int>(Wait::kDone) & 1 ? task.column == 0 : ends;
    if (begins) push(pass.queue, {TaskType::kGemm1, task.peer, task.expert, task.tile, 0}, pass.columns_1);
  }
  if (task.type == TaskType::kGemm1 && is_last(&pass.sent[pass.tile_number(task)], pass.columns_1))
    comet::signal(pass.watch, pass.heaps[task.peer] + layout.returned(pass.rank, task.expert, task.tile));
}

// A block's life. shared: a word of the block's. meet(): its barrier. multiply(task): a GEMM's tile.
template <class T, class Meet, class Multiply>
__device__ __forceinline__ void process(const Pass& pass, int processor, int* shared, int thread, int warps,
                                        int lanes, const Meet& meet, const Multiply& multiply) {
  const int warp = thread / lanes, lane = thread % lanes;
  for (;;) {
    if (thread == 0) write(shared, next_task(pass, processor));
    meet();
    const int place = read(shared);
    if (place < 0) return;
    const Task task = Task::from(load16(&pass.queue.entry[place].task));
    if (task.type == TaskType::kDispatch)
      send_tile(pass, task, lane, lanes, warp, warps);
    else if (task.type == TaskType::kCombine)
      combine_tokens<T>(pass, task, lane, lanes, warp, warps);
    else
      multiply(task);
    meet();
    if (thread == 0) end_task(pass, task);
  }
}

}  // namespace pmoe::flashdmoe

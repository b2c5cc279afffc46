// Puts tasks into the task queue tQ. Subscribers (threads that wait for other ranks) and processors (blocks
// that do tasks) call these functions.
#pragma once
#include "common/device.cuh"
#include "flashdmoe/pass.h"

namespace pmoe::flashdmoe {

// Puts the tasks of a rectangle of tiles into the task queue tQ. The rectangle has `down` rows of tiles,
// beginning with row task.tile, and `columns` columns of tiles, beginning with column 0.
//
// The tasks get neighbouring places of the queue, and one release store publishes all of them. Tasks of the
// same column follow each other, so that the column's weights are still in the L2 cache.
__device__ __forceinline__ void push(const Queue& queue, Task task, int columns = 1, int down = 1) {
  const auto count = static_cast<uint32_t>(columns * down);
  if (count == 0) return;
  Entry* const first = queue.entry + add_acq_rel(&queue.state->tail, count);
  Entry* entry = first;
  const int begin = task.tile;
  for (task.column = 0; task.column < columns; ++task.column)
    for (task.tile = begin; task.tile < begin + down; ++task.tile, ++entry)
      store16(&entry->task, task.packed());
  store_release(&first->ready, count);
}

// Pushes the tasks for the gradients of an expert's parameters. These gradients are sums over rows in a fixed
// order, so the tasks must be pushed only when all rows of the expert are done.
__device__ __forceinline__ void push_sums(const Pass& pass, int expert) {
  const WeightTasks& all = pass.weights;
  for (int i = 0; i < 2; ++i) {
    push(pass.queue, {TaskType::kWeightGradient, i, expert, 0, 0}, all.across[i], all.down[i]);
    push(pass.queue, {TaskType::kBiasGradient, i, expert, 0, 0}, all.bias[i]);
  }
}

// Adds a change to the progress of an expert (kSourceAnnounced in pass.h). If all ranks have then announced
// their rows for the expert, and all tiles are done, this function pushes the tasks for the gradients of the
// expert's parameters.
//
// change: kSourceAnnounced + the rank's number of tiles, when a rank has announced its rows; -1 when a tile
//     is done.
__device__ __forceinline__ void count_tiles(const Pass& pass, int expert, uint32_t change) {
  const uint32_t all = static_cast<uint32_t>(pass.layout.ranks) * kSourceAnnounced;
  const uint32_t now = add_acq_rel(&pass.expert_progress[expert], change) + change;
  bool begins = now == all;
  if (begins) write(&pass.expert_progress[expert], 0u);  // nobody adds to it again in this round
  if (pass.watch.not_waited & kCompleteBit)
    begins = change >= kSourceAnnounced && now >= all && change != 0u - 1u;
  if (begins) push_sums(pass, expert);
}

}  // namespace pmoe::flashdmoe

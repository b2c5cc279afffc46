// Putting tasks into tQ: what subscribers and processors do.
#pragma once
#include "common/device.cuh"
#include "flashdmoe/task.h"

namespace pmoe::flashdmoe {

// `columns` tasks, alike but for their column, in neighbouring places.
__device__ __forceinline__ void push(const Queue& queue, Task task, int columns = 1) {
  const auto first = static_cast<int>(add_acq_rel(&queue.state->tail, static_cast<uint32_t>(columns)));
  for (task.column = 0; task.column < columns; ++task.column) {
    Entry& entry = queue.entry[first + task.column];
    store16(&entry.task, task.packed());
    store_release(&entry.is_ready, 1u);
  }
}

}  // namespace pmoe::flashdmoe

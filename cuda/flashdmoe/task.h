// Tasks (FlashDMoE, section 5.2): the tiles of work that subscribers and processors put into the task queue
// tQ and the scheduler hands out.
#pragma once
#include "common/host_device.h"

namespace pmoe::flashdmoe {

enum class TaskType : uint32_t { kDispatch, kGemm0, kGemm1, kCombine };

// Packed as kind, peer, expert: the metadata M of the paper's tuple. What is multiplied follows from it.
struct Task {
  TaskType type;
  int peer;    // dispatch: to whom; GEMMs: whose rows
  int expert;  // of the rank that computes
  int tile;    // of the cell's rows; combine: of the tokens
  int column;  // GEMMs: tile across

  PMOE_HD Words packed() const {
    return {{static_cast<uint32_t>(type) << 16 | static_cast<uint32_t>(peer), static_cast<uint32_t>(expert),
             static_cast<uint32_t>(tile), static_cast<uint32_t>(column)}};
  }
  PMOE_HD static Task from(const Words& w) {
    return {static_cast<TaskType>(w.word[0] >> 16), static_cast<int>(w.word[0] & 0xFFFF),
            static_cast<int>(w.word[1]), static_cast<int>(w.word[2]), static_cast<int>(w.word[3])};
  }
};

// A place of tQ. It is used once a round: whoever puts a task there has taken its number from the tail.
struct alignas(32) Entry {
  Words task;
  uint32_t is_ready;  // set behind the task, cleared by the scheduler
};

// Of one rank: what its actors share, all zeros between rounds but for `over`.
struct State {
  uint32_t tail;      // of tQ
  uint32_t promised;  // tasks that subscribers know of: behind the last subscriber, all of the round's
  uint32_t listened;  // subscribers that have heard everything
  uint32_t over;      // the last round that has ended
};

struct Queue {
  Entry* entry;
  int room;
  State* state;
};

}  // namespace pmoe::flashdmoe

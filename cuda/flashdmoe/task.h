// Tasks (FlashDMoE, section 5.2): the tiles of work that subscribers and processors put into the task queue
// tQ and the scheduler hands out.
#pragma once
#include "common/host_device.h"

namespace pmoe::flashdmoe {

// What routes comes first.
enum class TaskType : uint32_t {
  kScores,  // the gate's product: a tile of its scores
  kCount,   // a group of tokens: its experts, where they are chosen here; its rows by expert
  kPlace,   // a group of tokens: where its rows stand among their experts'
  kDispatch,
  kGemm0,           // T_DI w1^T and the nonlinearity
  kGemm1,           // the activated hidden rows, times w2^T
  kHiddenGradient,  // dY w2 and the nonlinearity's gradient: dT_M
  kInputGradient,   // dT_M w1
  kWeightGradient,  // of w1 (peer 0) and w2 (peer 1)
  kBiasGradient,    // of b1 (peer 0) and b2 (peer 1)
  kCombine,
};

// Packed as kind, peer, expert: the metadata M of the paper's tuple. What is multiplied follows from it.
struct Task {
  TaskType type;
  int peer;    // dispatch: to whom; products of rows: whose rows
  int expert;  // of the rank that computes
  int tile;    // of the cell's rows; routing and combine: group of tokens; scores and weights: down
  int column;  // tile across

  PMOE_HD Words packed() const {
    return {{static_cast<uint32_t>(type) << 16 | static_cast<uint32_t>(peer), static_cast<uint32_t>(expert),
             static_cast<uint32_t>(tile), static_cast<uint32_t>(column)}};
  }
  PMOE_HD static Task from(const Words& w) {
    return {static_cast<TaskType>(w.word[0] >> 16), static_cast<int>(w.word[0] & 0xFFFF),
            static_cast<int>(w.word[1]), static_cast<int>(w.word[2]), static_cast<int>(w.word[3])};
  }
};

// The products that a tile of rows goes through, one after the other, and how many tiles across each has.
constexpr int kMostStages = 3;

struct Stages {
  TaskType type[kMostStages] = {TaskType::kGemm0, TaskType::kGemm1};
  int columns[kMostStages] = {1, 1, 0};
  int count = 2;

  PMOE_HD int index(TaskType of) const {
    int i = 0;
    while (i < count && type[i] != of) ++i;
    return i;
  }
  PMOE_HD int tasks() const { return columns[0] + columns[1] + columns[2]; }
};

// A place of tQ. It is used once a round: whoever puts a task there has taken its number from the tail.
struct alignas(32) Entry {
  Words task;
  uint32_t ready;  // tasks from here on that are: set behind the last, cleared by the scheduler
};

// Of one rank: what its actors share, all zeros between rounds but for `over`.
struct State {
  uint32_t tail;      // of tQ
  uint32_t promised;  // tasks that subscribers know of: behind the last subscriber, all of the round's
  uint32_t listened;  // subscribers that have heard everything
  uint32_t granted;   // tiles of the pool
  uint32_t routed;    // routing tasks that have ended: scores, then those that count, those that place
  uint32_t hungry;    // 1: a processor is idle, and no task is ready. A hint
  uint32_t over;      // the last round that has ended
};

struct Queue {
  Entry* entry;
  int room;
  State* state;
};

}  // namespace pmoe::flashdmoe

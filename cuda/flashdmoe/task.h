// Tasks of a launch (FlashDMoE, section 5.2), such as one tile of a product. Subscribers (threads that wait
// for other ranks) and processors (blocks that do tasks) push tasks to the task queue tQ, and the scheduler
// gives them to processors.
#pragma once
#include "common/host_device.h"

namespace pmoe::flashdmoe {

// The types of tasks. The routing tasks (kScores, kCount, kPlace) come first, because other code tests for
// them with `type <= kPlace`.
enum class TaskType : uint32_t {
  kScores,  // the gate's product: a tile of its scores
  kCount,   // a group of tokens: chooses experts, if the launch does, and counts rows by expert
  kPlace,   // a group of tokens: finds the places of its rows among all rows of their experts
  kDispatch,
  kGemm0,           // T_DI w1^T and the nonlinearity
  kGemm1,           // the activated hidden rows, times w2^T
  kHiddenGradient,  // gradient of T_M: (gradient of the output) w2, times the nonlinearity's derivative
  kInputGradient,   // gradient of the rows: (gradient of T_M) w1
  kWeightGradient,  // of w1 (peer 0) or w2 (peer 1)
  kBiasGradient,    // of b1 (peer 0) or b2 (peer 1)
  kCombine,
};

// One task, which packed() stores in 16 bytes. In the paper a task is a tuple, whose metadata M are type,
// peer and expert here. The operands of the task's product follow from these three.
struct Task {
  TaskType type;
  int peer;    // dispatch: the receiver; products of rows: the rows' source; gradients of parameters: 0 or 1
  int expert;  // index of the expert on the rank that computes
  int tile;    // index of a row tile of the cell or the result; routing, combine: index of a group of tokens
  int column;  // index of a column of tiles

  PMOE_HD Words packed() const {
    return {{static_cast<uint32_t>(type) << 16 | static_cast<uint32_t>(peer), static_cast<uint32_t>(expert),
             static_cast<uint32_t>(tile), static_cast<uint32_t>(column)}};
  }
  PMOE_HD static Task from(const Words& w) {
    return {static_cast<TaskType>(w.word[0] >> 16), static_cast<int>(w.word[0] & 0xFFFF),
            static_cast<int>(w.word[1]), static_cast<int>(w.word[2]), static_cast<int>(w.word[3])};
  }
};

constexpr int kMostStages = 3;

// The stages: the products that a tile of rows goes through, one after the other.
//
// type: the product of each stage.
// columns: how many tiles the product's result has side by side; 0 for a stage that does not exist.
// count: number of stages.
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

// An entry of the task queue tQ. A push reserves entries by adding to the queue's tail. Each entry is used
// only once in a launch.
struct alignas(32) Entry {
  Words task;
  // In the first entry of a push: the number of tasks of the push. It is stored last, and the scheduler sets
  // it back to 0. In all other entries it stays 0.
  uint32_t ready;
};

// The counters that scheduler, subscribers and processors of one rank share. All but `over` are zero between
// launches.
struct State {
  uint32_t tail;  // number of tasks that have been put into tQ
  // Number of tasks that the finished subscribers have counted. When all subscribers have finished, it is the
  // number of all tasks of the launch.
  uint32_t expected_tasks;
  uint32_t finished_subscribers;  // number of subscribers to whom everything has arrived
  uint32_t granted;               // number of tiles of the pool that are given away
  uint32_t routed;  // number of finished routing tasks; first come those of kScores, then kCount, then kPlace
  uint32_t has_idle_processor;  // hint: 1 while a processor is idle and no task is ready
  uint32_t over;                // the last round that has ended
};

// The task queue tQ of a rank, with `room` places.
struct Queue {
  Entry* entry;
  int room;
  State* state;
};

}  // namespace pmoe::flashdmoe

// The scheduler of FlashDMoE (Algorithm 2): one warp that assigns ready tasks to idle processors (blocks).
//
// It is work-conserving: while a task is ready, no processor stays idle. Lane l of the warp serves the
// processors l, l + lanes, l + 2 lanes, ... In each iteration every lane looks for an idle processor among
// its own. The lanes that find one take the next tasks from the head of the task queue, lowest lane first.
#pragma once
#include "flashdmoe/pass.h"
#include "peers/protocol.h"
#include "peers/puts.cuh"

namespace pmoe::flashdmoe {

class Scheduler {
 public:
  __device__ __forceinline__ Scheduler(const Pass& pass, int lane, int lanes)
      : pass_(pass), lane_(lane), lanes_(lanes) {}

  // Runs until the pass is over.
  //
  // subscribers: number of subscribers, the threads that wait for other ranks. The pass may end only when all
  //     of them have reported that everything has arrived.
  __device__ __forceinline__ void run(int subscribers) {
    State* const state = pass_.queue.state;
    uint64_t since = 0;
    bool has_ended = false, had_idle = false;
    while (!has_ended && ballot(load_relaxed(pass_.watch.failed) != 0) == 0) {
      const ProcessorStates states = poll_mailboxes<false>();
      if (ready_ < lanes_) find_ready();
      const int taken = hand_out(states.idle);
      const bool is_busy = ballot(states.any_busy) != 0;
      const bool has_idle = ready_ == 0 && ballot(states.idle >= 0) != 0;
      if (has_idle != had_idle && lane_ == 0) store_release(&state->has_idle_processor, has_idle ? 1u : 0u);
      had_idle = has_idle;
      has_ended = taken == 0 && ready_ == 0 && !is_busy && is_over(subscribers);
      // `since` is the start of the time limit. The limit starts again when a task is handed out, and as long
      // as no task is ready or running. So an error is reported if tasks are ready or running, but no task
      // was handed out for too long.
      const uint64_t now = nanoseconds();
      if (taken > 0 || since == 0 || !(is_busy || ready_ > 0)) since = now;
      if (now - since > pass_.watch.bound) peers::report(pass_.watch, Wait::kDone, pass_.rank, 0, 0);
      if (taken == 0) pause();
    }
    sync_warp();
    if (lane_ != 0) return;
    // Puts read the outgoing part of the heap. The next launch writes to it, so all puts must be complete.
    if (peers::kHasPuts && has_ended && pass_.layout.buffers == 2) peers::puts::quiet(pass_.own());
    // The next launch relies on these counters being zero. After a failure nothing is reset, because the heap
    // is not used again.
    if (has_ended)
      write(&state->tail, 0u), write(&state->expected_tasks, 0u), write(&state->finished_subscribers, 0u),
          write(&state->granted, 0u), write(&state->routed, 0u);
    store_release(&state->has_idle_processor, 0u);
    store_release(&state->over, peers::epoch_of(pass_.watch));
  }

 private:
  // The state of the processors that a lane serves, as their mailboxes show it.
  struct ProcessorStates {
    int idle;  // an idle processor of this lane, or -1
    bool any_busy;
  };

  // Reads the mailboxes of the processors that this lane serves.
  //
  // kInOrder: whether the mailboxes are read with acquire. Everything that idle processors have done is then
  //     visible to this lane.
  template <bool kInOrder>
  __device__ __forceinline__ ProcessorStates poll_mailboxes() const {
    constexpr int kAtOnce = kInOrder ? 1 : 4;  // loads in flight
    ProcessorStates found = {-1, false};
    for (int first = lane_; first < pass_.processors; first += kAtOnce * lanes_) {
      uint32_t mailbox[kAtOnce];
      PMOE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int processor = first + i * lanes_;
        if (processor >= pass_.processors)
          mailbox[i] = kAbsent;
        else
          mailbox[i] = kInOrder ? load_acquire(&pass_.mailboxes[processor])
                                : load_relaxed(&pass_.mailboxes[processor]);
      }
      PMOE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (mailbox[i] >= kFirstTask) found.any_busy = true;
        if (mailbox[i] == kIdle && found.idle < 0) found.idle = first + i * lanes_;
      }
    }
    return found;
  }

  // Returns whether all tasks of the launch have been handed out, and none is running.
  //
  // subscribers: number of subscribers, the threads that wait for other ranks. The number of all tasks is
  //     known only when all of them have finished.
  __device__ __forceinline__ bool is_over(int subscribers) {
    const bool have_finished =
        load_acquire(&pass_.queue.state->finished_subscribers) == static_cast<uint32_t>(subscribers);
    const uint32_t expected_tasks = load_acquire(&pass_.queue.state->expected_tasks);
    const bool is_last = have_finished && expected_tasks == static_cast<uint32_t>(head_);
    if (ballot(is_last) == 0) return false;
    return ballot(poll_mailboxes<true>().any_busy) == 0;
  }

  // Looks for more ready tasks in the queue, behind those that are already known. A push of several tasks
  // stores the number of these tasks at the first of its places in the queue. Each lane reads one place.
  __device__ __forceinline__ void find_ready() {
    const int place = head_ + ready_ + lane_;
    const uint32_t pushed = place < pass_.queue.room ? load_acquire(&pass_.queue.entry[place].ready) : 0;
    for (int lane = 0; lane < lanes_;) {
      const auto more = static_cast<int>(shfl(pushed, lane));
      if (more == 0) break;
      if (lane == lane_) write(&pass_.queue.entry[place].ready, 0u);
      ready_ += more, lane += more;
    }
    sync_warp();
  }

  // Gives the next ready tasks to idle processors, at most one task for each lane. Returns how many tasks
  // were given.
  //
  // idle: an idle processor of this lane, or -1.
  __device__ __forceinline__ int hand_out(int idle) {
    const uint32_t waiting = ballot(idle >= 0);
    const int first = count_bits(waiting & ((1u << lane_) - 1));
    const int count = smaller(ready_, count_bits(waiting));
    if (idle >= 0 && first < count) {
      peers::test_delay(pass_.watch, 7200 + lane_);
      store_release(&pass_.mailboxes[idle], kFirstTask + static_cast<uint32_t>(head_ + first));
    }
    sync_warp();
    head_ += count, ready_ -= count;
    return count;
  }

  const Pass& pass_;
  int lane_, lanes_;
  int head_ = 0;   // head of tQ: index of the next task to hand out
  int ready_ = 0;  // number of tasks from the head on that are known to be ready
};

}  // namespace pmoe::flashdmoe

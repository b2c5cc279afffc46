// The scheduler (FlashDMoE, Algorithm 2): a warp that hands tasks to idle processors, work-conserving: none
// is idle while a task is ready. Each lane has its own processors, every `lanes`-th; the lanes that see an
// idle one take the tasks at the queue's head in their order.
#pragma once
#include "comet/protocol.h"
#include "flashdmoe/pass.h"

namespace pmoe::flashdmoe {

class Scheduler {
 public:
  __device__ __forceinline__ Scheduler(const Pass& pass, int lane, int lanes)
      : pass_(pass), lane_(lane), lanes_(lanes), next_(lane) {}

  // subscribers: threads that must have heard everything before the round is over.
  __device__ __forceinline__ void run(int subscribers) {
    State* const state = pass_.queue.state;
    uint64_t since = 0;
    bool is_whole = false;
    while (!is_whole) {
      if (ballot(comet::has_failed(pass_.watch))) break;
      const bool has_heard_all = load_acquire(&state->listened) == static_cast<uint32_t>(subscribers);
      const uint32_t promised = load_acquire(&state->promised);
      const Doors doors = look();
      const int taken = hand_out(doors.idle);
      head_ += taken;
      const bool is_busy = ballot(doors.any_busy) != 0;
      is_whole =
          ballot(has_heard_all && promised == static_cast<uint32_t>(head_)) != 0 && taken == 0 && !is_busy;
      // Where tasks wait or are computed, some of them end.
      const uint64_t now = nanoseconds();
      if (taken > 0 || since == 0 || !(is_busy || is_ready(head_))) since = now;
      if (now - since > pass_.watch.bound) comet::report(pass_.watch, Wait::kDone, pass_.rank, 0, 0);
      if (taken == 0) pause();
    }
    sync_warp();
    if (lane_ != 0) return;
    if (is_whole)
      write(&state->tail, 0u), write(&state->promised, 0u), write(&state->listened, 0u),
          write(&state->routed, 0u);
    store_release(&state->over, pass_.watch.epoch);
  }

 private:
  struct Doors {
    int idle;  // a processor, or -1
    bool any_busy;
  };

  // At this lane's processors. The search for an idle one goes on where the last ended.
  __device__ __forceinline__ Doors look() {
    Doors found = {-1, false};
    const int count = pass_.processors;
    for (int i = lane_; i < count; i += lanes_, next_ = next_ + lanes_ < count ? next_ + lanes_ : lane_) {
      const uint32_t door = load_acquire(&pass_.doors[next_]);
      if (door >= kFirstTask) found.any_busy = true;
      if (door == kIdle && found.idle < 0) found.idle = next_;
    }
    return found;
  }

  __device__ __forceinline__ bool is_ready(int place) const {
    return place < pass_.queue.room && load_acquire(&pass_.queue.entry[place].is_ready) != 0;
  }

  // Returns how many tasks found a processor.
  __device__ __forceinline__ int hand_out(int idle) {
    const uint32_t ready = ballot(is_ready(head_ + lane_)), waiting = ballot(idle >= 0);
    const uint32_t run_of_ready = ready & ~(ready + 1);  // the ones below its first zero
    const int first = count_bits(waiting & ((1u << lane_) - 1));
    const int count = smaller(count_bits(run_of_ready), count_bits(waiting));
    if (idle >= 0 && first < count) {
      write(&pass_.queue.entry[head_ + first].is_ready, 0u);
      comet::nap(pass_.watch, 7200 + lane_);
      store_release(&pass_.doors[idle], kFirstTask + static_cast<uint32_t>(head_ + first));
    }
    sync_warp();
    return count;
  }

  const Pass& pass_;
  int lane_, lanes_;
  int next_;      // the processor to look at first
  int head_ = 0;  // of tQ
};

}  // namespace pmoe::flashdmoe

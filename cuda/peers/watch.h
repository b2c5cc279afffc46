// The time limits of a rank's waits, and the report that the host reads when a wait was too long.
#pragma once
#include <cstdint>

namespace pmoe::peers {

// The events for which kernels wait. pmoe/kernels/heap.py has a text for each event (WAITS for COMET,
// PERSISTENT_WAITS for FlashDMoE). Exchanges of pass programs wait for kGrant and kArrival (program/push.h).
enum class Wait : int { kNone, kGrant, kArrival, kDone, kReturn, kAnnounced, kRouted, kPlaced, kRoom };

// The report of a wait that was too long, in memory that the host reads. It is written once, with `wait`
// last.
struct Report {
  int32_t wait;  // a Wait
  int32_t peer;  // the rank that was awaited
  // Index of the expert, and of the piece, tile or column chunk, as the texts in pmoe/kernels/heap.py say. In
  // an exchange of a pass program, `expert` is 0 and `part` is the channel.
  int32_t expert, part;
  uint32_t epoch;
  int32_t rank;
};

// The time limit and the report of the waits of one rank in one launch.
struct Watch {
  uint32_t* failed;  // in the rank's own heap; not 0 after a wait of the rank exceeded its time limit
  Report* report;
  int rank;
  uint32_t epoch;       // number of the round; not used if `round` is set
  uint64_t bound;       // longest wait in nanoseconds
  uint32_t delay_seed;  // 0, or the seed of random delays (for tests)
  uint32_t not_waited;  // bit i is set if the waits for event i of Wait are left out (for tests)

  // The number of the round in device memory, for launches that a CUDA graph repeats; or null.
  const uint32_t* round = nullptr;
};

}  // namespace pmoe::peers

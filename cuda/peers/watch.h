// The time limits of a rank's waits, and the report that the host reads when a wait was too long.
#pragma once
#include <cstdint>

namespace pmoe::peers {

// The reasons to wait. pmoe/kernels/heap.py has a text for each.
enum class Wait : int { kNone, kGrant, kArrival, kDone, kReturn, kAnnounced, kRouted, kPlaced, kRoom };

// The report of a wait that was too long, in memory that the host reads. It is written once, with `wait`
// last.
struct Report {
  int32_t wait;          // a Wait
  int32_t peer;          // the rank that was awaited
  int32_t expert, part;  // expert and piece of the peer's rows, or part is the column chunk
  uint32_t epoch;
  int32_t rank;
};

// The time limit and the report of the waits of one rank in one launch.
struct Watch {
  uint32_t* failed;  // nonzero after a timeout; in the rank's own heap
  Report* report;
  int rank;
  uint32_t epoch;       // number of the round; not used if `round` is set
  uint64_t bound;       // longest wait in nanoseconds
  uint32_t delay_seed;  // 0, or the seed of random delays (for tests)
  uint32_t not_waited;  // one bit for each Wait that is left out (for tests)

  // The number of the round in device memory, for launches that a CUDA graph repeats; or null.
  const uint32_t* round = nullptr;
};

}  // namespace pmoe::peers

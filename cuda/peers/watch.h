// How long a rank waits, and what it reports to the host when a wait was too long.
#pragma once
#include <cstdint>

namespace pmoe::peers {

// The reasons of waits. pmoe/kernels/heap.py says them in words.
enum class Wait : int { kNone, kGrant, kArrival, kDone, kReturn, kAnnounced, kRouted, kPlaced, kRoom };

// The report of a failed wait, in memory that the host reads. It is written once, `wait` last.
struct Report {
  int32_t wait;          // a Wait
  int32_t peer;          // the rank that was awaited
  int32_t expert, part;  // expert and piece of the peer's rows, or part is the column chunk
  uint32_t epoch;
  int32_t rank;
};

// Bounds and reports of the waits of one rank in one launch.
struct Watch {
  uint32_t* failed;  // nonzero after a timeout; in the rank's own heap
  Report* report;
  int rank;
  uint32_t epoch;
  uint64_t bound;       // longest wait in nanoseconds
  uint32_t delay_seed;  // 0, or the seed of random delays (for tests)
  uint32_t not_waited;  // one bit for each Wait that is left out (for tests)
};

}  // namespace pmoe::peers

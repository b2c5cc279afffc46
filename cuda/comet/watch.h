// What a rank waits for, for how long, and what it tells the host when that was too long.
#pragma once
#include <cstdint>

namespace pmoe::comet {

// What is waited for. In the host's words: pmoe/kernels/heap.py.
enum class Wait : int { kNone, kGrant, kArrival, kDone, kReturn, kAnnounced, kRouted, kPlaced, kRoom };

struct Report {          // in memory that the host reads; written once, `wait` last
  int32_t wait;          // a Wait
  int32_t peer;          // the rank that was waited for
  int32_t expert, part;  // of the peer's rows, or the column chunk
  uint32_t epoch;
  int32_t rank;
};

// Of one rank in one launch.
struct Watch {
  uint32_t* failed;  // in the rank's own heap
  Report* report;
  int rank;
  uint32_t epoch;
  uint64_t bound;       // nanoseconds
  uint32_t nap_seed;    // 0, or everybody sleeps now and then: for tests
  uint32_t not_waited;  // a bit a Wait that is left out: for tests
};

}  // namespace pmoe::comet

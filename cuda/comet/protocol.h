// How blocks and ranks tell each other what is there: flags that only rise, waits that end.
//
// A flag holds the number of the last round (epoch) in which it was raised; it is written by one rank, with
// release, behind what it announces, and read with acquire before that is used. A heap's rounds are numbered
// from 1, alike on all ranks, and nothing is reset between them.
//
// A wait that lasts too long is reported, once a rank: from then on nobody of the rank waits any more, and
// nobody raises a flag that another rank waits for, so that the kernel ends, here and (after their own bound)
// on the other ranks. What it has computed is worthless.
//
// The kernels compile this file, and so do the emulator and plain threads under ThreadSanitizer
// (tests/cuda). Mistakes that those tests must find are planted by PMOE_PLANT and by
// Watch::not_waited.
#pragma once
#include "comet/layout.h"
#include "comet/watch.h"
#include "common/device.cuh"

namespace pmoe::comet {

enum class Plant : int { kNothing, kNoProxyFence };
#ifndef PMOE_PLANT
#define PMOE_PLANT kNothing
#endif
constexpr Plant kPlant = Plant::PMOE_PLANT;

// A number that looks like chance.
PMOE_HD uint32_t scrambled(uint32_t x) {
  x ^= x >> 16, x *= 0x7FEB352Du;
  x ^= x >> 15, x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

// Where a test wants it, some of the callers come late, by up to 16 microseconds.
__device__ __forceinline__ void nap(const Watch& watch, uint32_t who) {
  if (watch.nap_seed == 0) return;
  const uint32_t chance = scrambled(watch.nap_seed ^ scrambled(who ^ watch.epoch * 0x9E3779B9u));
  if (chance % 4) return;
  const uint64_t until = nanoseconds() + chance / 4 % 16384;
  while (nanoseconds() < until) pause();
}

__device__ __forceinline__ bool reached(uint32_t value, uint32_t wanted) {
  return static_cast<int32_t>(value - wanted) >= 0;
}

__device__ __forceinline__ bool has_failed(const Watch& watch) { return load_acquire(watch.failed) != 0; }

// Whoever is first writes what it waited for.
__device__ __forceinline__ void report(const Watch& watch, Wait wait, int peer, int expert, int part) {
  if (add_acq_rel(watch.failed, 1) != 0) return;
  write(&watch.report->peer, peer);
  write(&watch.report->expert, expert);
  write(&watch.report->part, part);
  write(&watch.report->epoch, watch.epoch);
  write(&watch.report->rank, watch.rank);
  store_release_system(reinterpret_cast<uint32_t*>(&watch.report->wait), static_cast<uint32_t>(wait));
}

// Until value() has reached `wanted`, or the rank has failed. Bounded.
template <class Value>
__device__ __forceinline__ void wait_until_reached(const Watch& watch, const Value& value, uint32_t wanted,
                                                   Wait wait, int peer, int expert, int part) {
  if (watch.not_waited >> static_cast<int>(wait) & 1) return;
  uint64_t start = 0;
  for (uint32_t looks = 1; !reached(value(), wanted); ++looks) {
    pause();
    if (looks % 16) continue;
    if (has_failed(watch)) return;
    const uint64_t now = nanoseconds();
    if (start == 0) start = now;
    if (now - start > watch.bound) {
      report(watch, wait, peer, expert, part);
      return;
    }
  }
}

// A flag that another rank raises.
__device__ __forceinline__ void await(const Watch& watch, const void* flag, Wait wait, int peer, int expert,
                                      int part) {
  const auto* const word = static_cast<const uint32_t*>(flag);
  wait_until_reached(watch, [&] { return load_acquire_system(word); }, watch.epoch, wait, peer, expert, part);
}

// Raises a flag. What the caller's warp or block has written is to be announced: they have met before.
__device__ __forceinline__ void signal(const Watch& watch, void* flag) {
  if (has_failed(watch)) return;
  store_release_system(static_cast<uint32_t*>(flag), watch.epoch);
}

}  // namespace pmoe::comet

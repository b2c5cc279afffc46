// The protocol by which blocks and ranks signal to each other that data is ready: flags whose numbers only
// grow, and waits with a time limit.
//
// A round is one launch of FlashDMoE's kernel, or the launches of COMET's dispatching and combining kernels
// together. The rounds of a heap (memory that all ranks can write) are numbered from 1, the same on all
// ranks; the number is called epoch.
//
// A flag holds the number of the last round in which it was raised. Only one rank writes a given flag. It
// first writes the data that the flag announces, and then the flag, with release. Other threads load the flag
// with acquire before they use the data. Nothing is reset between rounds, because a flag that was raised in
// an earlier round has a smaller number.
//
// comet/layout.h and flashdmoe/layout.h show which rank waits for which flag. Exchanges of pass programs use
// the waits and reports of this file, too, but their flags hold numbers of grants and of pieces
// (program/push.h).
//
// If a wait exceeds its time limit, the rank reports it, once. From then on no thread of the rank waits, and
// none raises a flag of another rank. So the kernel ends, and the kernels of the other ranks end after their
// own limits. The results of the round are wrong.
//
// This file is also compiled for the CPU, by tests that run kernels in an emulator and in plain threads under
// ThreadSanitizer (tests/cuda). To prove that these tests find mistakes, PMOE_PLANT and Watch::not_waited
// make mistakes on purpose: they leave out a fence or a wait.
#pragma once
#include "common/device.cuh"
#include "peers/watch.h"

namespace pmoe::peers {

// Mistakes that a test can compile into a kernel, to prove that the test finds them.
enum class Plant : int { kNothing, kNoProxyFence };
#ifndef PMOE_PLANT
#define PMOE_PLANT kNothing
#endif
constexpr Plant kPlant = Plant::PMOE_PLANT;

// Returns a hash of x, for pseudorandom delays.
PMOE_HD uint32_t hash32(uint32_t x) {
  x ^= x >> 16, x *= 0x7FEB352Du;
  x ^= x >> 15, x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

// Returns the number of a launch's round. A CUDA graph repeats the arguments of its launches, so the launches
// of a graph read the number from memory.
__device__ __forceinline__ uint32_t epoch_of(const Watch& watch) {
  return watch.round == nullptr ? watch.epoch : read(watch.round);
}

// Delays one in four callers by up to 16 microseconds, in tests that set Watch::delay_seed. That changes the
// order in which threads reach their waits.
//
// who: a number that differs between callers, so that their pseudorandom delays differ.
__device__ __forceinline__ void test_delay(const Watch& watch, uint32_t who) {
  if (watch.delay_seed == 0) return;
  const uint32_t chance = hash32(watch.delay_seed ^ hash32(who ^ epoch_of(watch) * 0x9E3779B9u));
  if (chance % 4) return;
  const uint64_t until = nanoseconds() + chance / 4 % 16384;
  while (nanoseconds() < until) pause();
}

// Returns whether a counter that only rises has reached `wanted`. The signed difference is compared, so the
// counter may wrap around.
__device__ __forceinline__ bool reached(uint32_t value, uint32_t wanted) {
  return static_cast<int32_t>(value - wanted) >= 0;
}

// Returns whether a wait of this rank has exceeded its time limit.
__device__ __forceinline__ bool has_failed(const Watch& watch) { return load_acquire(watch.failed) != 0; }

// Reports the wait that exceeded its time limit. Only the rank's first report is written. The field `wait` is
// written last, because the host takes the report as complete when `wait` is not 0.
__device__ __forceinline__ void report(const Watch& watch, Wait wait, int peer, int expert, int part) {
  if (add_acq_rel(watch.failed, 1) != 0) return;
  write(&watch.report->peer, peer);
  write(&watch.report->expert, expert);
  write(&watch.report->part, part);
  write(&watch.report->epoch, epoch_of(watch));
  write(&watch.report->rank, watch.rank);
  store_release_system(reinterpret_cast<uint32_t*>(&watch.report->wait), static_cast<uint32_t>(wait));
}

// Waits until value() has reached `wanted`. Returns earlier if another wait of the rank has exceeded its time
// limit, or if this wait exceeds it. In the second case the function reports this wait.
//
// value: returns the current value of a counter that only rises. It is called at each poll.
// wait, peer, expert, part: the content of that report, which says what is awaited (Report in watch.h).
template <class Value>
__device__ __forceinline__ void wait_until_reached(const Watch& watch, const Value& value, uint32_t wanted,
                                                   Wait wait, int peer, int expert, int part) {
  if (watch.not_waited >> static_cast<int>(wait) & 1) return;
  uint64_t start = 0;
  for (uint32_t polls = 1; !reached(value(), wanted); ++polls) {
    pause();
    if (polls % 16) continue;
    if (has_failed(watch)) return;
    const uint64_t now = nanoseconds();
    if (start == 0) start = now;
    if (now - start > watch.bound) {
      report(watch, wait, peer, expert, part);
      return;
    }
  }
}

// Waits until another rank has raised a flag of this rank in this round, at most until the time limit.
//
// wait, peer, expert, part: the content of the report if the time limit is exceeded (Report in watch.h).
__device__ __forceinline__ void await(const Watch& watch, const void* flag, Wait wait, int peer, int expert,
                                      int part) {
  const auto* const word = static_cast<const uint32_t*>(flag);
  wait_until_reached(
      watch, [&] { return load_acquire_system(word); }, epoch_of(watch), wait, peer, expert, part);
}

// Raises a flag of another rank, unless this rank has failed. The threads whose writes the flag announces
// must have synchronized with this thread before.
__device__ __forceinline__ void signal(const Watch& watch, void* flag) {
  if (has_failed(watch)) return;
  store_release_system(static_cast<uint32_t*>(flag), epoch_of(watch));
}

}  // namespace pmoe::peers

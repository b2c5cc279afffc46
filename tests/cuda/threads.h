// What the protocol of cuda/comet asks of the machine, on plain threads: ThreadSanitizer then sees every
// access, and every order that a release and an acquire make. One thread stands for a warp: it is a WarpTeam
// of one lane. Same names as cuda/common/device_ptx.cuh, those alone that
// comet/{protocol.h,dispatch.cuh,combine.cuh} and flashdmoe/ use.
//
// PMOE_ACCESS(pointer, bytes, writes): where a test defines it, it sees every access too.
#pragma once
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "common/host_device.h"

#define __device__
#define __forceinline__ inline

#ifndef PMOE_ACCESS
#define PMOE_ACCESS(pointer, bytes, writes)
#endif

namespace pmoe {

inline void sync_warp() {}

template <class V>
V read(const V* p) {
  PMOE_ACCESS(p, sizeof(V), false);
  return *p;
}

template <class V>
void write(V* p, V value) {
  PMOE_ACCESS(p, sizeof(V), true);
  *p = value;
}

inline Words load16(const void* p) {
  PMOE_ACCESS(p, 16, false);
  Words v;
  std::memcpy(v.word, p, 16);
  return v;
}

inline void store16(void* p, const Words& v) {
  PMOE_ACCESS(p, 16, true);
  std::memcpy(p, v.word, 16);
}

// ---- flags and counters. (An atomic_ref of something const there is from C++26 on.)

inline uint32_t load_acquire(const uint32_t* p) {
  PMOE_ACCESS(p, 4, false);
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(p)).load(std::memory_order_acquire);
}

inline uint32_t load_relaxed(const uint32_t* p) {
  PMOE_ACCESS(p, 4, false);
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(p)).load(std::memory_order_relaxed);
}

inline uint32_t load_acquire_system(const uint32_t* p) { return load_acquire(p); }

inline uint32_t add_acq_rel(uint32_t* p, uint32_t value) {
  PMOE_ACCESS(p, 4, true);
  return std::atomic_ref<uint32_t>(*p).fetch_add(value, std::memory_order_acq_rel);
}

// A mistake that a test plants: signals then order nothing. Set before any thread begins.
inline bool signals_are_relaxed = false;

inline void store_release_system(uint32_t* p, uint32_t value) {
  PMOE_ACCESS(p, 4, true);
  const std::atomic_ref<uint32_t> word(*p);
  if (signals_are_relaxed)
    word.store(value, std::memory_order_relaxed);
  else
    word.store(value, std::memory_order_release);
}

inline void store_release(uint32_t* p, uint32_t value) { store_release_system(p, value); }

// Of a warp that one thread stands for.
inline uint32_t ballot(bool holds) { return holds; }

template <class T>
T shfl(T value, int) {
  return value;
}

template <class T>
T shfl_xor(T value, int) {
  return value;
}

// ---- time

inline uint64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

// Who looks for something that another thread does lets it have the processor.
inline void pause() { std::this_thread::sleep_for(std::chrono::microseconds(1)); }

}  // namespace pmoe

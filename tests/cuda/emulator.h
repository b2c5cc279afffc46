// Runs a kernel's own source on the CPU: every CUDA thread is a fiber of one OS thread, all blocks of a grid
// are resident, and what a GPU does asynchronously happens at a moment drawn from a seed, the latest that the
// program allows included. Same names as cuda/common/device_ptx.cuh.
//
// What it finds: wrong results, deadlocks (reported with what every thread waits for), shared memory used
// before it arrived or written while still in use, barriers with the wrong number of arrivals, reads through
// a missing fence of the asynchronous proxy, and accesses outside registered arrays (`Memory`). What it does
// not model: time, weak ordering of ordinary memory accesses, bank conflicts, register pressure.
#pragma once
#include "common/host_device.h"
#include "common/scalar.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__

#define PMOE_EMULATOR 1
#define PMOE_HOPPER_CODE 1

#include "emulator_grid.h"

namespace pmoe {

// ---- threads

inline uint8_t* shared_memory() { return emu::shared_base(*emu::self().block); }

inline int thread_again() { return static_cast<int>(threadIdx.x); }

template <class T>
T shfl_xor(T value, int mask) {
  const int lane = emu::self().linear % 32;
  return emu::of_bits<T>(emu::exchange(emu::bits_of(value))[lane ^ mask]);
}

template <class T>
T shfl(T value, int lane) {
  return emu::of_bits<T>(emu::exchange(emu::bits_of(value))[lane & 31]);
}

template <class T>
T shfl_up(T value, int distance) {
  const int lane = emu::self().linear % 32;
  const T found =
      emu::of_bits<T>(emu::exchange(emu::bits_of(value))[lane < distance ? lane : lane - distance]);
  return found;
}

inline uint32_t ballot(bool holds) {
  const auto& values = emu::exchange(holds);
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= uint32_t{values[i] != 0} << i;
  return mask;
}

inline uint32_t reduce_max(uint32_t value) {
  uint64_t largest = 0;
  for (const uint64_t each : emu::exchange(value)) largest = larger(largest, each);
  return static_cast<uint32_t>(largest);
}

inline void sync_warp() { emu::exchange(0); }

inline void sync_block() {
  emu::meet(emu::self().block->barriers[0], static_cast<int>(blockDim.x), "the block's barrier");
}

inline void sync_named(int id, int threads) {
  emu::meet(emu::self().block->barriers[id], threads, "named barrier " + std::to_string(id));
}

inline void make_opaque(int64_t&) {}
inline void make_opaque(int&) {}

// ---- memory

template <class V>
V read(const V* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(V)) throw emu::Error("a load that is not aligned");
  emu::check_access(p, sizeof(V), false);
  return *p;
}

template <class V>
void write(V* p, V value) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(V)) throw emu::Error("a store that is not aligned");
  emu::check_access(p, sizeof(V), true);
  emu::mark_written(p, sizeof(V));
  *p = value;
}

inline Words load16(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) throw emu::Error("a 16-byte load that is not aligned");
  emu::check_access(p, 16, false);
  Words v;
  std::memcpy(&v, p, 16);
  return v;
}

inline void store16(void* p, const Words& v) {
  if (reinterpret_cast<uintptr_t>(p) % 16) throw emu::Error("a 16-byte store that is not aligned");
  emu::check_access(p, 16, true);
  emu::mark_written(p, 16);
  std::memcpy(p, &v, 16);
}

inline void add_pair(float* p, float first, float second) {
  if (reinterpret_cast<uintptr_t>(p) % 8) throw emu::Error("a pair that is not aligned");
  emu::check_access(p, 8, true);
  p[0] += first, p[1] += second;
}

inline void prefetch_l2(const void* p) { emu::check_access(p, 1, false); }

inline void store16_shared(void* p, const Words& v) {
  emu::address_of(*emu::self().block, p);
  store16(p, v);
}

inline void cp_async16(void* dst, const void* src, bool valid) {
  emu::Fiber& fiber = emu::self();
  if (reinterpret_cast<uintptr_t>(dst) % 16) throw emu::Error("cp.async to an address that is not aligned");
  if (valid && reinterpret_cast<uintptr_t>(src) % 16)
    throw emu::Error("cp.async from an address that is not aligned");
  if (valid) emu::check_access(src, 16, false);
  const int unit = emu::unit_to_write(fiber, dst);
  emu::add_writer(fiber, unit);
  std::memset(dst, 0xFF, 16);
  emu::Deferred copy = [dst, src, valid] {
    if (valid)
      std::memcpy(dst, src, 16);
    else
      std::memset(dst, 0, 16);
  };
  if (emu::chance()) {
    copy();
    copy = nullptr;
  }
  fiber.copies.push_back({std::move(copy), unit});
}

inline void cp_async_commit() {
  emu::Fiber& fiber = emu::self();
  fiber.groups.push_back(std::move(fiber.copies));
  fiber.copies.clear();
}

template <int kLeft>
void cp_async_wait() {
  emu::Fiber& fiber = emu::self();
  while (static_cast<int>(fiber.groups.size()) > kLeft) {
    for (auto& copy : fiber.groups.front()) {
      if (copy.run) copy.run();
      fiber.unfenced.push_back(copy.unit);
    }
    fiber.groups.pop_front();
  }
}

// ---- across blocks

// What follows may have been written by others: bulk reads of it need a fence.
inline uint32_t load_acquire(const uint32_t* p) {
  ++emu::self().block->acquires[emu::self().linear / 32];
  emu::check_access(p, 4, false);
  return *p;
}

inline uint32_t load_relaxed(const uint32_t* p) { return read(p); }

inline uint32_t add_acq_rel(uint32_t* p, uint32_t value) {
  emu::check_access(p, 4, true);
  const uint32_t before = *p;
  *p += value;
  return before;
}

inline void store_release(uint32_t* p, uint32_t value) { write(p, value); }

inline uint32_t load_acquire_system(const uint32_t* p) { return load_acquire(p); }

inline void store_release_system(uint32_t* p, uint32_t value) { write(p, value); }

inline void fence_proxy_async_global() {
  emu::Fiber& fiber = emu::self();
  fiber.fenced = fiber.block->acquires[fiber.linear / 32];
}

// Every thread has had its turn between two of these.
inline uint64_t nanoseconds() { return 100 * emu::grid->passes; }

inline void pause() { emu::yield(); }

template <class T>
T atomicAdd(T* p, T value) {
  emu::check_access(p, sizeof(T), true);
  const T before = *p;
  *p = before + value;
  return before;
}

// ---- matrix instructions of sm_80

inline void load_matrices(uint32_t (&r)[4], const void* row, bool transpose) {
  if (reinterpret_cast<uintptr_t>(row) % 16) throw emu::Error("ldmatrix from an address that is not aligned");
  emu::address_of(*emu::self().block, row);
  const auto rows = emu::exchange(emu::bits_of(row));
  const int lane = emu::self().linear % 32;
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int line = transpose ? lane % 4 * 2 + i : lane / 4;
      const int column = transpose ? lane / 4 : lane % 4 * 2 + i;
      std::memcpy(&pair[i], emu::of_bits<const uint8_t*>(rows[m * 8 + line]) + 2 * column, 2);
    }
    r[m] = uint32_t{pair[0]} | uint32_t{pair[1]} << 16;
  }
  sync_warp();
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { load_matrices(r, row, false); }

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { load_matrices(r, row, true); }

inline void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
  if (reinterpret_cast<uintptr_t>(row) % 16) throw emu::Error("stmatrix to an address that is not aligned");
  emu::address_of(*emu::self().block, row);
  const auto rows = emu::exchange(emu::bits_of(row));
  const int lane = emu::self().linear % 32;
  for (int m = 0; m < 4; ++m) {
    uint8_t* const word = emu::of_bits<uint8_t*>(rows[m * 8 + lane / 4]) + lane % 4 * 4;
    emu::mark_written(word, 4);
    std::memcpy(word, &r[m], 4);
  }
}

template <class T>
void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = emu::self().linear % 32;
  // a0: rows 0-7, k 0-7; a1: rows 8-15; a2: k 8-15; a3: both. b0: k 0-7, b1: k 8-15.
  uint64_t words[3] = {uint64_t{a[0]} | uint64_t{a[1]} << 32, uint64_t{a[2]} | uint64_t{a[3]} << 32,
                       uint64_t{b0} | uint64_t{b1} << 32};
  std::vector<uint64_t> all[3];
  for (int i = 0; i < 3; ++i) all[i] = emu::exchange(words[i]);
  for (int c = 0; c < 4; ++c) {
    const int row = lane / 4 + (c / 2) * 8, column = lane % 4 * 2 + c % 2;
    float sum = d[c];
    for (int k = 0; k < 16; ++k) {
      const int of_a = (row % 8) * 4 + (k % 8) / 2, of_b = column * 4 + (k % 8) / 2;
      const uint32_t word_a = static_cast<uint32_t>(all[k / 8][of_a] >> (row / 8 * 32));
      const uint32_t word_b = static_cast<uint32_t>(all[2][of_b] >> (k / 8 * 32));
      const float x = k % 2 ? high_half<T>(word_a) : low_half<T>(word_a);
      const float y = k % 2 ? high_half<T>(word_b) : low_half<T>(word_b);
      sum += x * y;
    }
    d[c] = sum;
  }
}

}  // namespace pmoe

#include "emulator_hopper.h"

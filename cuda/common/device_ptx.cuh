// The PTX instructions that implement device.cuh on the GPU, except those that only Hopper has. Functions are
// named like the instructions.
#pragma once
#include <cuda.h>  // only for the type CUtensorMap; its encoder is looked up in the driver at run time
#include <cuda_runtime.h>

#include <type_traits>

#include "host_device.h"
#include "scalar.h"

// 1 in code that is compiled for sm_90a, else 0. Some instructions of Hopper exist only in such code.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PMOE_HOPPER_CODE 1
#else
#define PMOE_HOPPER_CODE 0
#endif

namespace pmoe {

using TensorMap = CUtensorMap;

// ---- threads

__device__ __forceinline__ uint8_t* shared_memory() {
  extern __shared__ __align__(1024) uint8_t pmoe_shared[];
  return pmoe_shared;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Returns threadIdx.x, read from its special register at each call, so that no general register is held for
// it between calls.
__device__ __forceinline__ int thread_again() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

template <class T>
__device__ __forceinline__ T shfl_xor(T value, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
}

template <class T>
__device__ __forceinline__ T shfl(T value, int lane) {
  return __shfl_sync(0xFFFFFFFFu, value, lane);
}

template <class T>
__device__ __forceinline__ T shfl_up(T value, int distance) {
  return __shfl_up_sync(0xFFFFFFFFu, value, distance);
}

__device__ __forceinline__ uint32_t ballot(bool holds) { return __ballot_sync(0xFFFFFFFFu, holds); }

// Returns the largest value of a warp's threads.
__device__ __forceinline__ uint32_t reduce_max(uint32_t value) {
  return __reduce_max_sync(0xFFFFFFFFu, value);
}

__device__ __forceinline__ void sync_warp() { __syncwarp(); }

__device__ __forceinline__ void sync_block() { __syncthreads(); }

// Waits at the named barrier `id` (1 to 15) until `threads` threads have arrived there. The number must be a
// multiple of 32.
__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Makes the compiler treat the value as unknown. Numbers that depend on the value are then computed once more
// after this call, instead of being kept in registers.
__device__ __forceinline__ void make_opaque(int64_t& value) { asm volatile("" : "+l"(value)); }
__device__ __forceinline__ void make_opaque(int& value) { asm volatile("" : "+r"(value)); }

// ---- memory

template <class V>
__device__ __forceinline__ V read(const V* p) {
  return *p;
}

template <class V>
__device__ __forceinline__ void write(V* p, V value) {
  *p = value;
}

__device__ __forceinline__ Words load16(const void* p) {
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ void store16(void* p, const Words& v) {
  *reinterpret_cast<uint4*>(p) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}

// Adds to two neighbouring floats in memory, at an address that is a multiple of 8 bytes. No other thread may
// access them in this launch.
//
// On Hopper the memory system does the addition, so the thread does not wait for a read. That addition treats
// numbers below 2^-126 as 0.
__device__ __forceinline__ void add_pair(float* p, float first, float second) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(first), "f"(second)
               : "memory");
#else
  auto* const pair = reinterpret_cast<float2*>(p);
  const float2 before = *pair;
  *pair = make_float2(before.x + first, before.y + second);
#endif
}

// Asks for the 128 bytes around p to be brought into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Stores 16 bytes to shared memory. Before wgmma or a bulk copy reads them (the asynchronous proxy),
// fence_proxy_async() is needed.
__device__ __forceinline__ void store16_shared(void* p, const Words& v) { store16(p, v); }

// Starts a copy of 16 bytes into shared memory. If `valid` is false, it writes zeros and does not read src.
// The 256 bytes around src may be loaded into the L2 cache as well, because they are likely to be read next.
__device__ __forceinline__ void cp_async16(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kLeft>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// ---- synchronization between blocks of one grid, all of which are resident

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Reads a word without ordering any other access. It is for polling: several of these loads can be in flight
// at the same time. When the word has the awaited value, a load_acquire must follow.
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t add_acq_rel(uint32_t* p, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(p), "r"(value)
               : "memory");
  return before;
}

__device__ __forceinline__ void store_release(uint32_t* p, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// ---- synchronization between ranks, which may be other devices and other processes

__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_release_system(uint32_t* p, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Waits 64 ns between two polls of a value that another block will change.
__device__ __forceinline__ void pause() { __nanosleep(64); }

// ---- matrix instructions of sm_80

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

#if PMOE_HOPPER_CODE
__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace pmoe

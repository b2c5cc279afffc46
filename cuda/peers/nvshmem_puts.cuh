// Puts by NVSHMEM's device functions (puts.cuh says what they must do). A rank of the heap is the PE of the
// same number. pmoe._nvshmem has kernels with these puts (nvshmem/start.cpp). They have never run.
//
// - The network card reads the bytes of a put, so a fence of the whole system comes before each put.
// - NVSHMEM's signal of a put comes after that put's own bytes, but it may overtake earlier puts. So put(),
//   which has no signal, calls nvshmem_fence(): later puts and their signals then come after its bytes.
// - see() calls nvshmem_uint64_wait_until(), which makes arrived bytes visible to this device.
//   nvshmem_signal_wait_until() may not make them visible.
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

namespace pmoe::peers::puts {

__device__ __forceinline__ void put(int peer, void* to, const void* from, int64_t bytes) {
  __threadfence_system();
  nvshmem_putmem_nbi(to, from, static_cast<size_t>(bytes), peer);
  nvshmem_fence();
}

__device__ __forceinline__ void put_with_flag(int peer, void* to, const void* from, int64_t bytes, void* flag,
                                              uint32_t value) {
  __threadfence_system();
  nvshmem_putmem_signal_nbi(to, from, static_cast<size_t>(bytes), static_cast<uint64_t*>(flag), value,
                            NVSHMEM_SIGNAL_SET, peer);
}

__device__ __forceinline__ void put_flag(int peer, void* flag, uint32_t value) {
  nvshmemx_signal_op(static_cast<uint64_t*>(flag), value, NVSHMEM_SIGNAL_SET, peer);
}

__device__ __forceinline__ void quiet(const void*) { nvshmem_quiet(); }

__device__ __forceinline__ void see(const void* flag, uint32_t value) {
  auto* const word = static_cast<uint64_t*>(const_cast<void*>(flag));
  nvshmem_uint64_wait_until(word, NVSHMEM_CMP_GE, value);
}

}  // namespace pmoe::peers::puts

// Puts: copies from this rank's heap into the heap of a peer whose memory cannot be mapped, for example over
// InfiniBand. The compiler gets one of three implementations:
//
// - none (the default). Then all peers must be mapped, and kernels have no code for puts (kHasPuts).
// - nvshmem_puts.cuh, NVSHMEM's device functions, with PMOE_NVSHMEM_PUTS.
// - tests/cuda/late_puts.h, with PMOE_LATE_PUTS: for tests on the CPU, in which puts are late and overtake
//   each other.
//
// An implementation has the functions below. A single thread makes each call. `to` and `flag` are addresses
// in this rank's heap; they stand for the same places of the peer's heap. A flag that puts write has 8 bytes.
//
//   put(peer, to, from, bytes)
//       begins to copy bytes. They arrive before the flag of the same thread's next put_with_flag() to the
//       same peer.
//   put_with_flag(peer, to, from, bytes, flag, value)
//       begins to copy bytes. When they have arrived, it writes `value` to the flag.
//   put_flag(peer, flag, value)
//       writes `value` to the flag.
//   quiet(heap)
//       waits until all puts of this rank have arrived. Until then, the bytes at `from` must not change.
//       heap: this rank's heap.
//   see(flag, value)
//       makes the bytes that arrived before a flag visible to this device. The caller has already seen in the
//       flag `value` or a later number.
//
// Except for the order that put() and put_with_flag() promise, puts of a rank may arrive in any order.
#pragma once
#include "common/device.cuh"
#include "peers/puts.h"

#if defined(PMOE_NVSHMEM_PUTS)
#include "peers/nvshmem_puts.cuh"
#elif defined(PMOE_LATE_PUTS)
#include "late_puts.h"
#else

namespace pmoe::peers::puts {

// Never called: with kHasPuts false, every peer counts as mapped.
__device__ __forceinline__ void put(int, void*, const void*, int64_t) {}
__device__ __forceinline__ void put_with_flag(int, void*, const void*, int64_t, void*, uint32_t) {}
__device__ __forceinline__ void put_flag(int, void*, uint32_t) {}
__device__ __forceinline__ void quiet(const void*) {}
__device__ __forceinline__ void see(const void*, uint32_t) {}

}  // namespace pmoe::peers::puts

#endif

// The PTX instructions that implement the part of device.cuh that only Hopper has. They exist only in code
// for sm_90a.
#pragma once
#include "device_ptx.cuh"

namespace pmoe {

#if PMOE_HOPPER_CODE

// ---- mbarriers (barriers in shared memory that also count bytes) and the tensor memory accelerator

__device__ __forceinline__ void mbarrier_init(uint64_t* bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals)
               : "memory");
}

// Makes newly initialised barriers visible to bulk copies (the asynchronous proxy). A barrier of the whole
// block must follow.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

// Arrives once at the barrier, and adds `bytes` to the number of bytes that must be loaded before its current
// phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
               : "memory");
}

// Waits until the phase with this parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "LAB_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra LAB_DONE;\n"
      "bra LAB_WAIT;\n"
      "LAB_DONE:\n"
      "}" ::"r"(shared_address(bar)),
      "r"(parity)
      : "memory");
}

// Orders this thread's ordinary writes to shared memory before later reads by wgmma or TMA. After the fence,
// this thread and the threads that start these reads must synchronize.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders ordinary writes to global memory, by any thread, before this thread's later bulk copies. This thread
// must have observed the writes by an acquire load.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_2d(void* dst, const TensorMap* map, uint64_t* bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(shared_address(dst)),
      "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void tma_load_3d(void* dst, const TensorMap* map, uint64_t* bar, int x, int y,
                                            int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(dst)),
      "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Stores one box of a tensor from shared memory. Elements of the box that lie outside of the tensor are left
// out. The store belongs to this thread's current group of bulk stores.
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, const void* src, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(src)), "r"(x), "r"(y)
               : "memory");
}

// ---- bulk copies between global and shared memory; addresses and sizes must be multiples of 16 bytes

__device__ __forceinline__ void bulk_load(void* dst, const void* src, uint64_t* bar, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(dst)),
      "l"(src), "r"(bytes), "r"(shared_address(bar))
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* dst, const void* src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
               "r"(shared_address(src)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kLeft of this thread's groups of bulk stores still read shared memory. The memory of
// the other groups may then be overwritten.
template <int kLeft>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// Waits until at most kLeft of this thread's groups of bulk stores are unfinished. The data of the other
// groups is then visible to this thread. If the thread then sets a flag with release semantics, readers of
// the flag see the data, too.
template <int kLeft>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
}

// ---- clusters: blocks of one grid that can access each other's shared memory

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Synchronizes all threads of all blocks of the cluster. Everything written before is visible after it.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Returns the address in another block's shared memory that corresponds to p in this one.
//
// rank: rank of the other block in the cluster.
__device__ __forceinline__ uint32_t cluster_address(const void* p, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(rank));
  return remote;
}

// Arrives once at a barrier of any block of the cluster.
//
// bar: the barrier's address, a result of cluster_address().
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* bar, uint32_t rank) {
  mbarrier_arrive_remote(cluster_address(bar, rank));
}

// Stores 16 bytes in the shared memory of block `rank` of the cluster, at the address that corresponds to
// `place` in this block. The bytes count at the barrier of that block that corresponds to `bar`.
__device__ __forceinline__ void store_async(Words* place, const Words& v, uint64_t* bar, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, signal;\n"
      "mapa.shared::cluster.u32 remote, %0, %6;\n"
      "mapa.shared::cluster.u32 signal, %5, %6;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [remote], {%1, %2, %3, %4}, "
      "[signal];\n"
      "}" ::"r"(shared_address(place)),
      "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]), "r"(shared_address(bar)), "r"(rank)
      : "memory");
}

// Loads one box of a tensor into the shared memory of several blocks of the cluster at once. In every block
// whose bit is set in `ranks`, the box goes to the address that corresponds to `dst`, and its bytes count at
// the barrier that corresponds to `bar`.
__device__ __forceinline__ void tma_load_2d_to(void* dst, const TensorMap* map, uint64_t* bar, int x, int y,
                                               uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(dst)),
      "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "h"(ranks)
      : "memory");
}

__device__ __forceinline__ void tma_load_3d_to(void* dst, const TensorMap* map, uint64_t* bar, int x, int y,
                                               int z, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(dst)),
      "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "r"(z), "h"(ranks)
      : "memory");
}

// ---- warpgroup products

template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Prevents the compiler from moving uses of the accumulators across this point.
template <int kCount>
__device__ __forceinline__ void pin_accumulators(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define PMOE_R8(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define PMOE_R64(i)                                                                               \
  PMOE_R8(i), PMOE_R8(i + 8), PMOE_R8(i + 16), PMOE_R8(i + 24), PMOE_R8(i + 32), PMOE_R8(i + 40), \
      PMOE_R8(i + 48), PMOE_R8(i + 56)
#define PMOE_WGMMA_256(TYPE)                                                                                 \
  asm volatile(                                                                                              \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                          \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                                           \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "    \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
      "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, " \
      "%61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
      "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "      \
      "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, "     \
      "%116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "                            \
      "%128, %129, p, 1, 1, %131, %132;\n}"                                                                  \
      : PMOE_R64(0), PMOE_R64(64)                                                                            \
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(kTransposeA)), "n"(int(kTransposeB)))

#define PMOE_WGMMA_128(TYPE)                                                                              \
  asm volatile(                                                                                           \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                        \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                        \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "   \
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "   \
      "%59, %60, %61, %62, %63}, "                                                                        \
      "%64, %65, p, 1, 1, %67, %68;\n}"                                                                   \
      : PMOE_R64(0)                                                                                       \
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(kTransposeA)), "n"(int(kTransposeB)))

// Computes d = A B, or d += A B if `accumulate`, by one warpgroup.
//
// d: 64 x 256 floats, spread over the 128 threads.
// a, b: matrix descriptors of A (64 x 16) and B (16 x 256) in shared memory. The 16 elements that are
//     multiplied and summed for one element of d are neighbours in memory. In a transposed operand they are
//     not: there, neighbours belong to neighbouring rows of A, or to neighbouring columns of B.
template <class T, bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    PMOE_WGMMA_256("bf16");
  } else {
    PMOE_WGMMA_256("f16");
  }
}

// The function above for 128 columns: d is 64 x 128 floats, B is 16 x 128.
template <class T, bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    PMOE_WGMMA_128("bf16");
  } else {
    PMOE_WGMMA_128("f16");
  }
}

#undef PMOE_WGMMA_128
#undef PMOE_WGMMA_256
#undef PMOE_R64
#undef PMOE_R8

#endif  // PMOE_HOPPER_CODE

}  // namespace pmoe

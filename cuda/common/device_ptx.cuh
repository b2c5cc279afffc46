// See device.cuh. Names follow the PTX instructions.
#pragma once
#include <cuda.h>  // the type CUtensorMap only: its encoder is asked of the driver at run time
#include <cuda_runtime.h>

#include <type_traits>

#include "host_device.h"
#include "scalar.h"

// Hopper's own instructions exist in code for sm_90a alone.
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

// threadIdx.x, asked for anew: not held in a register since the last time.
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

__device__ __forceinline__ void sync_warp() { __syncwarp(); }

__device__ __forceinline__ void sync_block() { __syncthreads(); }

// The first `threads` of a block that name barrier `id` (1 to 15).
__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The compiler takes the value for a new one: it keeps nothing in registers that follows from the old.
__device__ __forceinline__ void forget(int64_t& value) { asm volatile("" : "+l"(value)); }
__device__ __forceinline__ void forget(int& value) { asm volatile("" : "+r"(value)); }

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

// Asks for 128 bytes to be in the L2 cache soon.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Into shared memory, where the asynchronous proxy reads it behind fence_proxy_async().
__device__ __forceinline__ void store16_shared(void* p, const Words& v) { store16(p, v); }

// Copies 16 bytes into shared memory, or writes zeros where `valid` is false (src is then not read).
__device__ __forceinline__ void cp_async16(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kLeft>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// ---- across blocks of a grid that is resident as a whole

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
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

// ---- across ranks: other devices, and processes

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

// Between two looks at a value that another block will change.
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

#if PMOE_HOPPER_CODE

// ---- barriers in shared memory that count bytes, and the tensor memory accelerator

__device__ __forceinline__ void mbarrier_init(uint64_t* bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy; a block-wide barrier follows.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

// One arrival, and so many bytes to wait for.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
               : "memory");
}

// Until the phase of this parity has ended.
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

// Ordinary writes of this thread to shared memory, before wgmma or TMA of whoever it then meets.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What ordinary accesses have written to global memory, here seen behind an acquire, before bulk reads of it.
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

// ---- clusters: blocks of one grid that see each other's shared memory

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster; what each wrote before is seen by all behind it.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// An arrival at the same barrier of the block with this rank in the cluster.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* bar, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(bar)),
      "r"(rank)
      : "memory");
}

// 16 bytes to the same place of the block with this rank, and their number to the same barrier there.
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

// The same place and barrier of every block whose bit is set.
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

// The compiler must not move uses of accumulators across this point.
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

// d (64 x 256 of a warpgroup) = A (64 x 16) B (16 x 256), plus d where `accumulate`. Operands by descriptor;
// transposed ones have the reduction in rows.
template <class T, bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    PMOE_WGMMA_256("bf16");
  } else {
    PMOE_WGMMA_256("f16");
  }
}

#undef PMOE_WGMMA_256
#undef PMOE_R64
#undef PMOE_R8

#endif  // PMOE_HOPPER_CODE

}  // namespace pmoe

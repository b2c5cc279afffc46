// One kernel for each function of cuda/common/*_ptx.cuh, ours_NAME, and one for the same by
// NVIDIA's own headers, theirs_NAME: CUTLASS's, or libcu++'s, or the runtime's. They are compiled, never run:
// tests/unit/test_primitives.py compares their machine code.
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cuda/atomic>
#include <cuda/ptx>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "common/device.cuh"

#if PMOE_HOPPER_CODE  // of the device alone: there is nothing to launch

using namespace pmoe;
using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;

// Shared memory begins with the extension's own base, so that both sides have the same addresses.
#define COMMA ,
#define SAME(NAME, PARAMETERS, OURS, THEIRS)                                            \
  extern "C" __global__ void __launch_bounds__(384, 1) ours_##NAME PARAMETERS { OURS; } \
  extern "C" __global__ void __launch_bounds__(384, 1) theirs_##NAME PARAMETERS { THEIRS; }

namespace {

__device__ __forceinline__ uint64_t* bar() { return reinterpret_cast<uint64_t*>(shared_memory()); }
__device__ __forceinline__ uint8_t* box() { return shared_memory() + 1024; }

constexpr cuda::ptx::space_cluster_t cluster = {};
constexpr cuda::ptx::space_global_t memory = {};
constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

template <class Op, size_t... kAll>
__device__ __forceinline__ void fma(float (&d)[128], uint64_t a, uint64_t b, int accumulate,
                                    std::index_sequence<kAll...>) {
  Op::fma(a, b, d[kAll]..., static_cast<cute::SM90::GMMA::ScaleOut>(accumulate));
}

// A product between its fence and its wait, and accumulators that come from and go to memory.
template <class Multiply>
__device__ __forceinline__ void product(float* memory, const Multiply& multiply) {
  float d[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = memory[i];
  multiply(d);
#pragma unroll
  for (int i = 0; i < 128; ++i) memory[i] = d[i];
}

template <class T, bool kA, bool kB>
__device__ __forceinline__ void ours(float* memory, uint64_t a, uint64_t b, int accumulate) {
  product(memory, [&](float (&d)[128]) {
    wgmma_fence();
    wgmma_m64n256k16<T, kA, kB>(d, a, b, accumulate);
    wgmma_commit();
    wgmma_wait<0>();
    pin_accumulators(d);
  });
}

template <class Op>
__device__ __forceinline__ void theirs(float* memory, uint64_t a, uint64_t b, int accumulate) {
  product(memory, [&](float (&d)[128]) {
    cute::warpgroup_arrive();
    fma<Op>(d, a, b, accumulate, std::make_index_sequence<128>());
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < 128; ++i) cute::warpgroup_fence_operand(d[i]);
  });
}

template <class T>
__device__ __forceinline__ void sm_80(float* d, uint4 a, uint2 b) {
  const uint32_t words[4] = {a.x, a.y, a.z, a.w};
  mma_m16n8k16<T>(d, words, b.x, b.y);
}

template <class Op>
__device__ __forceinline__ void sm_80_of(float* d, uint4 a, uint2 b) {
  Op::fma(d[0], d[1], d[2], d[3], a.x, a.y, a.z, a.w, b.x, b.y, d[0], d[1], d[2], d[3]);
}

using OnDevice = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;
using OnSystem = cuda::atomic_ref<uint32_t, cuda::thread_scope_system>;

}  // namespace

// ---- barriers

SAME(sync_named, (int id, int threads), sync_named(id, threads),
     cutlass::arch::NamedBarrier::sync(threads, static_cast<cutlass::arch::ReservedNamedBarriers>(id)))
SAME(mbarrier_init, (int n), mbarrier_init(bar(), n), ClusterBarrier::init(bar(), n))
SAME(fence_mbarrier_init, (), fence_mbarrier_init(), cutlass::arch::fence_barrier_init())
SAME(mbarrier_arrive, (), mbarrier_arrive(bar()), ClusterBarrier::arrive(bar()))
SAME(mbarrier_arrive_expect, (int bytes), mbarrier_arrive_expect(bar(), bytes),
     ClusterTransactionBarrier::arrive_and_expect_tx(bar(), bytes))
SAME(mbarrier_wait, (uint32_t parity), mbarrier_wait(bar(), parity), ClusterBarrier::wait(bar(), parity))
SAME(cluster_address, (uint32_t rank, uint32_t* out), *out = cluster_address(bar(), rank),
     *out = cute::set_block_rank(cute::cast_smem_ptr_to_uint(bar()), rank))
SAME(mbarrier_arrive_at, (uint32_t rank), mbarrier_arrive_at(bar(), rank),
     ClusterBarrier::arrive(bar(), rank, 1u))
SAME(sync_cluster, (), sync_cluster(), cuda::ptx::barrier_cluster_arrive(cuda::ptx::sem_release);
     cuda::ptx::barrier_cluster_wait(cuda::ptx::sem_acquire))
SAME(cluster_rank, (uint32_t* p), *p = cluster_rank(), *p = cute::block_rank_in_cluster())
SAME(fence_proxy_async, (), fence_proxy_async(), cutlass::arch::fence_view_async_shared())
SAME(fence_proxy_async_global, (), fence_proxy_async_global(),
     cuda::ptx::fence_proxy_async(cuda::ptx::space_global))

// ---- copies

SAME(cp_async16, (const uint4* from, bool valid), cp_async16(box(), from, valid),
     cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(*from, *reinterpret_cast<uint4*>(box()), valid))
SAME(cp_async_commit, (), cp_async_commit(), cute::cp_async_fence())
SAME(cp_async_wait, (), cp_async_wait<2>(), cute::cp_async_wait<2>())
SAME(tma_prefetch, (const __grid_constant__ TensorMap map), tma_prefetch(&map),
     cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&map)))
SAME(bulk_load, (const uint4* from, int bytes), bulk_load(box(), from, bar(), bytes),
     cute::SM90_BULK_COPY_G2S::copy(from, bar(), box(), bytes))
SAME(bulk_store, (uint4 * to, int bytes), bulk_store(to, box(), bytes),
     cute::SM90_BULK_COPY_S2G::copy(box(), to, bytes))
SAME(bulk_commit, (uint4 * to), bulk_store(to, box(), 64);
     bulk_commit(), cute::SM90_BULK_COPY_S2G::copy(box(), to, 64); cute::tma_store_arrive())
SAME(bulk_wait_read, (), bulk_wait_read<1>(), cute::tma_store_wait<1>())
SAME(bulk_wait, (), bulk_wait<0>(), cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>{}))

#define LOAD(NAME, PARAMETERS, OURS, LIBRARY, CUTLASS)                                \
  SAME(NAME, (const __grid_constant__ TensorMap map COMMA PARAMETERS), OURS, LIBRARY) \
  SAME(NAME##_cutlass, (const __grid_constant__ TensorMap map COMMA PARAMETERS), OURS, CUTLASS)
LOAD(tma_load_2d, int x COMMA int y, tma_load_2d(box(), &map, bar(), x, y),
     cuda::ptx::cp_async_bulk_tensor(cluster, memory, box(), &map, {x COMMA y}, bar()),
     cute::SM90_TMA_LOAD_2D::copy(&map, bar(), kHint, box(), x, y))
LOAD(tma_load_3d, int x COMMA int y COMMA int z, tma_load_3d(box(), &map, bar(), x, y, z),
     cuda::ptx::cp_async_bulk_tensor(cluster, memory, box(), &map, {x COMMA y COMMA z}, bar()),
     cute::SM90_TMA_LOAD_3D::copy(&map, bar(), kHint, box(), x, y, z))
LOAD(tma_load_2d_to, int x COMMA int y COMMA uint16_t mask, tma_load_2d_to(box(), &map, bar(), x, y, mask),
     cuda::ptx::cp_async_bulk_tensor(cluster, memory, box(), &map, {x COMMA y}, bar(), mask),
     cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, bar(), mask, kHint, box(), x, y))
LOAD(tma_load_3d_to, int x COMMA int y COMMA int z COMMA uint16_t mask,
     tma_load_3d_to(box(), &map, bar(), x, y, z, mask),
     cuda::ptx::cp_async_bulk_tensor(cluster, memory, box(), &map, {x COMMA y COMMA z}, bar(), mask),
     cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, bar(), mask, kHint, box(), x, y, z))
SAME(tma_store_2d, (const __grid_constant__ TensorMap map, int x, int y), tma_store_2d(&map, box(), x, y),
     cute::SM90_TMA_STORE_2D::copy(&map, box(), x, y))
SAME(store_async, (Words v, uint32_t rank), store_async(reinterpret_cast<Words*>(box()), v, bar(), rank),
     cute::store_shared_remote(v.word[0], cute::cast_smem_ptr_to_uint(box()),
                               cute::cast_smem_ptr_to_uint(bar()), rank))

// ---- matrices

SAME(ldmatrix_x4, (uint32_t* out, int at), uint32_t r[4]; ldmatrix_x4(r, box() + at);
     for (int i = 0; i < 4; ++i) out[i] = r[i], uint32_t r[4];
     cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t*>(box() + at), r[0], r[1], r[2], r[3]);
     for (int i = 0; i < 4; ++i) out[i] = r[i])
SAME(ldmatrix_x4_trans, (uint32_t* out, int at), uint32_t r[4]; ldmatrix_x4_trans(r, box() + at);
     for (int i = 0; i < 4; ++i) out[i] = r[i], uint32_t r[4];
     cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t*>(box() + at), r[0], r[1], r[2], r[3]);
     for (int i = 0; i < 4; ++i) out[i] = r[i])
SAME(stmatrix_x4, (uint4 v, int at), const uint32_t r[4] = {v.x COMMA v.y COMMA v.z COMMA v.w};
     stmatrix_x4(box() + at, r),
     cute::SM90_U32x4_STSM_N::copy(v.x, v.y, v.z, v.w, *reinterpret_cast<cute::uint128_t*>(box() + at)))
SAME(mma_bf16, (float* d, uint4 a, uint2 b), sm_80<bf16>(d, a, b),
     sm_80_of<cute::SM80_16x8x16_F32BF16BF16F32_TN>(d, a, b))
SAME(mma_fp16, (float* d, uint4 a, uint2 b), sm_80<fp16>(d, a, b),
     sm_80_of<cute::SM80_16x8x16_F32F16F16F32_TN>(d, a, b))

#define WGMMA(NAME, T, OP, A, B)                                                                       \
  SAME(wgmma_##NAME, (float* d, uint64_t a, uint64_t b, int accumulate),                               \
       (ours<T, A, B>)(d, a, b, accumulate),                                                           \
       (theirs<cute::SM90::GMMA::OP<cute::SM90::GMMA::Major(A), cute::SM90::GMMA::Major(B)>>)(d, a, b, \
                                                                                              accumulate))
WGMMA(forward_bf16, bf16, MMA_64x256x16_F32BF16BF16_SS, 0, 0)
WGMMA(input_bf16, bf16, MMA_64x256x16_F32BF16BF16_SS, 0, 1)
WGMMA(weight_bf16, bf16, MMA_64x256x16_F32BF16BF16_SS, 1, 1)
WGMMA(forward_fp16, fp16, MMA_64x256x16_F32F16F16_SS, 0, 0)
WGMMA(input_fp16, fp16, MMA_64x256x16_F32F16F16_SS, 0, 1)
WGMMA(weight_fp16, fp16, MMA_64x256x16_F32F16F16_SS, 1, 1)
SAME(fewer_registers, (), fewer_registers<40>(), cutlass::arch::warpgroup_reg_dealloc<40>())
SAME(more_registers, (), more_registers<232>(), cutlass::arch::warpgroup_reg_alloc<232>())

// ---- memory and flags

SAME(load_acquire, (uint32_t* p, uint32_t* out), *out = load_acquire(p),
     *out = OnDevice(*p).load(cuda::memory_order_acquire))
SAME(load_relaxed, (uint32_t* p, uint32_t* out), *out = load_relaxed(p),
     *out = OnDevice(*p).load(cuda::memory_order_relaxed))
SAME(load_acquire_system, (uint32_t* p, uint32_t* out), *out = load_acquire_system(p),
     *out = OnSystem(*p).load(cuda::memory_order_acquire))
SAME(store_release, (uint32_t* p, uint32_t v), store_release(p, v),
     OnDevice(*p).store(v, cuda::memory_order_release))
SAME(store_release_system, (uint32_t* p, uint32_t v), store_release_system(p, v),
     OnSystem(*p).store(v, cuda::memory_order_release))
SAME(add_acq_rel, (uint32_t* p, uint32_t v, uint32_t* out), *out = add_acq_rel(p, v),
     *out = OnDevice(*p).fetch_add(v, cuda::memory_order_acq_rel))
SAME(add_pair, (float* p, float x, float y), add_pair(p, x, y),
     atomicAdd(reinterpret_cast<float2*>(p), make_float2(x, y)))
SAME(load16, (const uint4* p, uint4* out), *reinterpret_cast<Words*>(out) = load16(p), *out = *p)
SAME(store16, (uint4 * p, uint4 v), store16(p, {{v.x COMMA v.y COMMA v.z COMMA v.w}}), *p = v)
SAME(nanoseconds, (uint64_t* out), *out = nanoseconds(), *out = cuda::ptx::get_sreg_globaltimer())
SAME(pause, (), pause(), __nanosleep(64))
SAME(thread_again, (int* out), *out = thread_again(), *out = static_cast<int>(threadIdx.x))
SAME(pack2_bf16, (float x, float y, uint32_t* out), *out = pack2<bf16>(x, y),
     *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(x, y))
SAME(pack2_fp16, (float x, float y, uint32_t* out), *out = pack2<fp16>(x, y),
     *reinterpret_cast<__half2*>(out) = __floats2half2_rn(x, y))

#endif

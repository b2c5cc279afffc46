// The functions and constants of NVSHMEM that cuda/peers/nvshmem_puts.cuh uses, with their exact types. This
// file compiles with NVSHMEM's own headers, and with the declarations in tests/cuda/nvshmem. So both declare
// the same functions, and the emulator's tests, which use the declarations, call them as NVSHMEM has them.
#define PMOE_NVSHMEM_PUTS
#if !defined(__CUDACC__)
#define PMOE_THREADS
#endif

#include <nvshmem.h>
#include <nvshmemx.h>

#include <type_traits>

#include "peers/puts.cuh"

static_assert(NVSHMEM_SIGNAL_SET == 9 && NVSHMEM_CMP_GE == 5, "see cuda/peers/nvshmem_puts.cuh");

#if defined(__CUDACC__)
#define DEVICE __device__
#else
#define DEVICE inline
#endif

DEVICE void check_types() {
  static_assert(std::is_same<decltype(nvshmem_putmem_nbi), void(void*, const void*, size_t, int)>::value, "");
  static_assert(std::is_same<decltype(nvshmem_putmem_signal_nbi),
                             void(void*, const void*, size_t, uint64_t*, uint64_t, int, int)>::value,
                "");
  static_assert(std::is_same<decltype(nvshmemx_signal_op), void(uint64_t*, uint64_t, int, int)>::value, "");
  static_assert(std::is_same<decltype(nvshmem_fence), void()>::value, "");
  static_assert(std::is_same<decltype(nvshmem_quiet), void()>::value, "");
  static_assert(std::is_same<decltype(nvshmem_uint64_wait_until), void(uint64_t*, int, uint64_t)>::value, "");
}

#if defined(__CUDACC__)
// Uses each function of the interface, so that each is compiled.
__global__ void use_puts(int peer, char* to, const char* from, int64_t bytes, void* flag) {
  using namespace pmoe::peers;
  puts::put(peer, to, from, bytes);
  puts::put_with_flag(peer, to, from, bytes, flag, 1);
  puts::put_flag(peer, flag, 2);
  puts::see(flag, 2);
  puts::quiet(to);
}
#endif

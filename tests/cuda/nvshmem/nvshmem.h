// The functions of NVSHMEM's device library that cuda/peers/nvshmem_puts.cuh calls, with the types that
// NVSHMEM 3 documents. nvcc gets declarations. On the CPU, each writes down its call.
#pragma once
#include <cstddef>
#include <cstdint>

enum { NVSHMEM_SIGNAL_SET = 9, NVSHMEM_CMP_GE = 5 };

#if defined(__CUDACC__)

__device__ void nvshmem_putmem_nbi(void* dest, const void* source, size_t bytes, int pe);
__device__ void nvshmem_putmem_signal_nbi(void* dest, const void* source, size_t bytes, uint64_t* sig_addr,
                                          uint64_t signal, int sig_op, int pe);
__device__ void nvshmemx_signal_op(uint64_t* sig_addr, uint64_t signal, int sig_op, int pe);
__device__ void nvshmem_fence();
__device__ void nvshmem_quiet();
__device__ void nvshmem_uint64_wait_until(uint64_t* ivar, int cmp, uint64_t cmp_value);

#else

#include <string>

inline std::string nvshmem_calls;

// Arguments as numbers; addresses as offsets from the first one that a test gives.
inline const unsigned char* nvshmem_base = nullptr;

inline std::string nvshmem_text(const void* p) {
  return std::to_string(static_cast<const unsigned char*>(p) - nvshmem_base);
}

inline void __threadfence_system() { nvshmem_calls += "threadfence_system\n"; }
inline void nvshmem_putmem_nbi(void* dest, const void* source, size_t bytes, int pe) {
  nvshmem_calls += "put to " + nvshmem_text(dest) + " from " + nvshmem_text(source) + " bytes " +
                   std::to_string(bytes) + " pe " + std::to_string(pe) + "\n";
}
inline void nvshmem_putmem_signal_nbi(void* dest, const void* source, size_t bytes, uint64_t* sig_addr,
                                      uint64_t signal, int sig_op, int pe) {
  nvshmem_putmem_nbi(dest, source, bytes, pe);
  nvshmem_calls += "signal " + nvshmem_text(sig_addr) + " value " + std::to_string(signal) + " op " +
                   std::to_string(sig_op) + " pe " + std::to_string(pe) + "\n";
}
inline void nvshmemx_signal_op(uint64_t* sig_addr, uint64_t signal, int sig_op, int pe) {
  nvshmem_calls += "signal alone " + nvshmem_text(sig_addr) + " value " + std::to_string(signal) + " op " +
                   std::to_string(sig_op) + " pe " + std::to_string(pe) + "\n";
}
inline void nvshmem_fence() { nvshmem_calls += "fence\n"; }
inline void nvshmem_quiet() { nvshmem_calls += "quiet\n"; }
inline void nvshmem_uint64_wait_until(uint64_t* ivar, int cmp, uint64_t cmp_value) {
  nvshmem_calls += "wait " + nvshmem_text(ivar) + " cmp " + std::to_string(cmp) + " value " +
                   std::to_string(cmp_value) + "\n";
}

#endif

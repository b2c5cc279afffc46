// The operations that kernels may use, with one implementation for the GPU and two for tests on the CPU.
//
// - nvcc compiles the PTX instructions themselves (device_ptx.cuh, hopper_ptx.cuh).
// - tests/cuda/emulator.h has the same names on the CPU. A kernel's own source runs there, every thread of
//   it.
// - tests/cuda/threads.h has the few that the protocol of cuda/peers needs, on plain threads under
//   ThreadSanitizer (PMOE_THREADS).
//
// For the emulator's sake kernels follow two rules. They reach shared memory only through shared_memory().
// They synchronize only full warps, whole blocks, or the threads of a named barrier.
#pragma once
#include "host_device.h"

#if defined(__CUDACC__)
#include "device_ptx.cuh"
#include "hopper_ptx.cuh"
#elif defined(PMOE_THREADS)
#include "threads.h"
#else
#include "emulator.h"
#endif

// The operations that kernels may use, with one implementation for the GPU and two for tests on the CPU.
//
// - For the GPU, nvcc compiles PTX instructions (device_ptx.cuh, hopper_ptx.cuh).
// - tests/cuda/emulator.h has functions of the same names for the CPU. This emulator runs the unchanged
//   source of a kernel, with all of the kernel's threads.
// - tests/cuda/threads.h has the few functions that the protocol of cuda/peers needs, for plain threads under
//   ThreadSanitizer (PMOE_THREADS).
//
// For the emulator, kernels must follow two rules: they access shared memory only through shared_memory(),
// and they synchronize only full warps, whole blocks, or the threads of a named barrier.
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

// What kernels ask of the machine. nvcc compiles the instructions themselves; tests/cuda/emulator.h has the
// same names on the CPU, so that a kernel's own source runs there, every thread of it; tests/cuda/threads.h
// has those that cuda/comet's protocol needs, on plain threads under ThreadSanitizer (PMOE_THREADS).
//
// Kernels use shared memory through shared_memory() alone, and meet in full warps, whole blocks, or named
// barriers.
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

// What kernels ask of the machine. nvcc compiles the instructions themselves; tests/cuda/emulator.h has the
// same names on the CPU, so that a kernel's own source runs there, every thread of it.
//
// Kernels use shared memory through shared_memory() alone, and meet in full warps, whole blocks, or named
// barriers.
#pragma once
#include "host_device.h"

#if defined(__CUDACC__)
#include "device_ptx.cuh"
#else
#include "emulator.h"
#endif

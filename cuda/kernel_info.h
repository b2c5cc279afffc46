// Facts about a kernel, for pmoe.kernels.status() and for tests that disassemble kernels. It is plain C++,
// because .cu files include it, too.
#pragma once

#include <vector>

namespace pmoe {

struct KernelInfo {
  const char* name;          // unique; users and tests see it
  const void* function;      // the __global__ function, reinterpret_cast<const void*>(&kernel<...>)
  int threads;               // of a block, as launched
  int dynamic_shared_bytes;  // of a block, the largest amount that it is launched with
  bool hopper = false;       // its body exists only in code for sm_90a (wgmma, TMA); elsewhere it is empty
};

}  // namespace pmoe

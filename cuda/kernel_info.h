// What pmoe.kernels.status() and the disassembly tests are told of a kernel. Plain C++: for .cu files, too.
#pragma once

#include <vector>

namespace pmoe {

struct KernelInfo {
  const char* name;          // unique, as users and tests read it
  const void* function;      // the __global__ function, reinterpret_cast<const void*>(&kernel<...>)
  int threads;               // of a block, as it is launched
  int dynamic_shared_bytes;  // of a block, the most that it is launched with
  bool hopper = false;       // its body is sm_90a code (wgmma, TMA), and nothing elsewhere
};

}  // namespace pmoe

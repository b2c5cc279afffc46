// A kernel that is about to be launched: the one way in which pmoe launches anything.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "common/errors.h"

namespace pmoe {

struct Grid {
  int blocks, threads;
  int shared_bytes = 0;  // dynamic, of a block
  int cluster = 0;  // blocks of a cluster; 0: a launch without clusters, as devices before Hopper have it
  bool together = false;  // all blocks are resident at once, or there is no launch
};

// Before a kernel's first launch with so much dynamic shared memory on the current device, and before what
// asks how many blocks are resident. What is set is the most that a block can have, always: a smaller number
// would be another thread's limit, too.
inline void allow_shared(const void* kernel, int bytes) {
  constexpr int kAllowed = 48 << 10;  // without asking
  if (bytes <= kAllowed) return;
  int device = 0, most = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  if (bytes > most)
    throw std::runtime_error("pmoe._cuda: a block needs " + std::to_string(bytes) +
                             " bytes of shared memory, and device " + std::to_string(device) + " gives " +
                             std::to_string(most));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
        "cudaFuncSetAttribute");
}

template <class... Parameters>
class Prepared {
 public:
  // The current device's. name: what an error calls it.
  Prepared(std::string name, void (*kernel)(Parameters...), const Grid& grid, void* stream)
      : name_(std::move(name)), kernel_(kernel), grid_(grid), stream_(static_cast<cudaStream_t>(stream)) {
    allow_shared(reinterpret_cast<const void*>(kernel), grid.shared_bytes);
  }

  void launch(const Parameters&... arguments) const {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(grid_.blocks));
    config.blockDim = dim3(static_cast<unsigned>(grid_.threads));
    config.dynamicSmemBytes = static_cast<size_t>(grid_.shared_bytes);
    config.stream = stream_;
    config.attrs = attributes;
    if (grid_.cluster) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(grid_.cluster), 1, 1};
    }
    if (grid_.together) {
      attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
      attributes[config.numAttrs++].val.cooperative = 1;
    }
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel_, arguments...);
    if (error != cudaSuccess) check(error, told().c_str());
  }

 private:
  std::string told() const {
    return "launch of " + name_ + ", " + std::to_string(grid_.blocks) + " blocks of " +
           std::to_string(grid_.threads) + " threads with " + std::to_string(grid_.shared_bytes) +
           " bytes of shared memory" +
           (grid_.cluster ? ", in clusters of " + std::to_string(grid_.cluster) : "") +
           (grid_.together ? ", all at once" : "");
  }

  std::string name_;
  void (*kernel_)(Parameters...);
  Grid grid_;
  cudaStream_t stream_;
};

}  // namespace pmoe

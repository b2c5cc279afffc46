// Launches a kernel. Every launch of pmoe is made by Prepared.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "common/errors.h"

namespace pmoe {

// The grid of a launch, and the shared memory and cluster size of its blocks.
struct Grid {
  int blocks, threads;
  int shared_bytes = 0;  // dynamic shared memory of a block
  int cluster = 0;  // blocks in a cluster; 0 means a launch without clusters, as devices before Hopper need
  bool together = false;  // cooperative launch: all blocks are resident at once, or the launch fails
};

// Allows a kernel to use `bytes` of dynamic shared memory on the current device. Throws std::runtime_error if
// a block of the device cannot have that much.
//
// It must be called before the kernel's first launch, and before a query of how many of its blocks fit on a
// multiprocessor. It sets the kernel's limit to the device's maximum, not to `bytes`: the limit also applies
// to launches of the same kernel by other threads of the host, which may need more.
inline void allow_shared(const void* kernel, int bytes) {
  constexpr int kAllowed = 48 << 10;  // available without raising the limit
  if (bytes <= kAllowed) return;
  int device = 0, most = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  if (bytes > most)
    throw std::runtime_error("pmoe._cuda: a block needs " + std::to_string(bytes) +
                             " bytes of shared memory, but device " + std::to_string(device) +
                             " allows at most " + std::to_string(most));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
        "cudaFuncSetAttribute");
}

// A kernel with its grid and stream, ready to be launched.
template <class... Parameters>
class Prepared {
 public:
  // Prepares a launch on the current device.
  //
  // name: the kernel's name in error messages.
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
    if (error != cudaSuccess) check(error, description().c_str());
  }

 private:
  std::string description() const {
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

// Makes a device the current one for the duration of a C++ function, and creates its CUDA context if needed.
#pragma once
#include "common/driver.h"

namespace pmoe {

// Returns whether this process has a context on the device already. Asking does not create one.
inline bool has_context(int device) {
  static const auto state =
      driver_function<PFN_cuDevicePrimaryCtxGetState_v7000>("cuDevicePrimaryCtxGetState", 7000);
  unsigned flags = 0;
  int active = 0;
  return state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

// Makes a device current while this object exists; the destructor makes the earlier device current again.
class OnDevice {
 public:
  // Sets the device even if it is current already. A thread that has not called the CUDA runtime, such as
  // autograd's thread or a thread of the user, has no context yet, and calls of the driver fail without a
  // context. From CUDA 12 on, cudaSetDevice creates the context.
  explicit OnDevice(int device) {
    int before = 0;
    check(cudaGetDevice(&before), "cudaGetDevice");
    // The destructor sets the earlier device again only if it has a context: cudaSetDevice would otherwise
    // create one there, which takes memory.
    const bool goes_back = before != device && has_context(before);
    check(cudaSetDevice(device), ("cudaSetDevice(" + std::to_string(device) + ")").c_str());
    if (goes_back) before_ = before;
  }
  ~OnDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = -1;
};

}  // namespace pmoe

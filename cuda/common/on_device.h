// Makes a call's device current, with its context, in whatever thread the call is made.
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

// Makes a device current for as long as this object lives, then restores the one before.
class OnDevice {
 public:
  // Sets the device even if it is current already. A thread that has made no call of the runtime, such as
  // autograd's thread or one that the user started, has no context yet, and calls of the driver fail without
  // one. From CUDA 12 on, cudaSetDevice creates it.
  explicit OnDevice(int device) {
    int before = 0;
    check(cudaGetDevice(&before), "cudaGetDevice");
    // Setting a device back would create a context there, so one without a context is not set back.
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

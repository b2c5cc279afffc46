// The device that a call is for, and its context, in whatever thread the call is made.
#pragma once
#include "common/driver.h"

namespace pmoe {

// Whether this process uses a device already. Makes no context there.
inline bool has_context(int device) {
  static const auto state =
      driver_function<PFN_cuDevicePrimaryCtxGetState_v7000>("cuDevicePrimaryCtxGetState", 7000);
  unsigned flags = 0;
  int active = 0;
  return state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

// The current device while this lives.
class OnDevice {
 public:
  // A device that is current already is set, too: a thread that has made no call of the runtime has no
  // context yet (autograd's of device 0, a user's own), and calls of the driver fail without one. From CUDA
  // 12 on cudaSetDevice makes it.
  explicit OnDevice(int device) {
    int before = 0;
    check(cudaGetDevice(&before), "cudaGetDevice");
    const bool goes_back = before != device && has_context(before);  // else going back would make a context
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

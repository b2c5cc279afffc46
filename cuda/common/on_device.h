// Host side of every launch: CUDA's errors as exceptions, and the device that a call is for.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace pmoe {

inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next launch, of whoever, would report it
  const std::string from = "pmoe._cuda: ";
  if (error == cudaErrorInsufficientDriver)
    throw std::runtime_error(from + "there is no CUDA driver here, or one too old for this build");
  if (error == cudaErrorNoDevice) throw std::runtime_error(from + "no CUDA device is visible");
  throw std::runtime_error(from + call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// The current device while this lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace pmoe

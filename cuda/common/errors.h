// Turns error codes of the CUDA runtime into exceptions.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace pmoe {

inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, else the next launch, perhaps somebody else's, would report it
  const std::string from = "pmoe._cuda: ";
  if (error == cudaErrorInsufficientDriver)
    throw std::runtime_error(from + "no CUDA driver is installed, or it is too old for this build of pmoe");
  if (error == cudaErrorNoDevice)
    throw std::runtime_error(from + "no CUDA device is visible to this process (see CUDA_VISIBLE_DEVICES)");
  throw std::runtime_error(from + call + ": " + cudaGetErrorName(error) + " (" +
                           std::to_string(static_cast<int>(error)) + "): " + cudaGetErrorString(error));
}

}  // namespace pmoe

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
    throw std::runtime_error(from + "there is no CUDA driver here, or one too old for this build");
  if (error == cudaErrorNoDevice) throw std::runtime_error(from + "no CUDA device is visible");
  throw std::runtime_error(from + call + ": " + cudaGetErrorName(error) + " (" +
                           std::to_string(static_cast<int>(error)) + "): " + cudaGetErrorString(error));
}

}  // namespace pmoe

// Functions of the driver. A machine that compiles need not have it, so they are asked for at run time, and
// by their version.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "common/errors.h"

namespace pmoe {

// Throws where the driver has none. version: as in the name of its PFN_ type.
template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess || entry == nullptr)
    throw std::runtime_error(std::string("pmoe._cuda: the driver has no ") + name + " of version " +
                             std::to_string(version));
  return reinterpret_cast<Function>(entry);
}

// call: with its arguments, which are what an error is read by. Asked for where there is an error only.
template <class Call>
void check_driver(CUresult result, const Call& call) {
  if (result == CUDA_SUCCESS) return;
  static const auto name_of = driver_function<PFN_cuGetErrorName_v6000>("cuGetErrorName", 6000);
  const char* name = nullptr;
  if (name_of(result, &name) != CUDA_SUCCESS || name == nullptr) name = "an error without a name";
  throw std::runtime_error("pmoe._cuda: " + std::string(call()) + ": " + name + " (" +
                           std::to_string(static_cast<int>(result)) + ")");
}

}  // namespace pmoe

// Looks up functions of the CUDA driver at run time, by name and version. pmoe is not linked against the
// driver, because a machine that only compiles need not have one.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "common/errors.h"

namespace pmoe {

// Returns a function of the driver. Throws std::runtime_error if the driver does not have it.
//
// version: the number in the name of the function's PFN_ type, such as 12000.
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

// Throws std::runtime_error if `result` is an error.
//
// call: returns a text that names the failed function and its arguments, for the message. It is only invoked
//     on an error.
template <class Call>
void check_driver(CUresult result, const Call& call) {
  if (result == CUDA_SUCCESS) return;
  static const auto name_of = driver_function<PFN_cuGetErrorName_v6000>("cuGetErrorName", 6000);
  const char* name = nullptr;
  if (name_of(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  throw std::runtime_error("pmoe._cuda: " + std::string(call()) + ": " + name + " (" +
                           std::to_string(static_cast<int>(result)) + ")");
}

}  // namespace pmoe

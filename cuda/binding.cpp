// The Python module pmoe._cuda: the functions that each kernel's folder binds (module.h), and facts about all
// kernels. The module pmoe._nvshmem (nvshmem/start.cpp) has this file, too: setup.py then compiles the file
// with PMOE_MODULE defined as _nvshmem.
//
// No torch header is used. Tensors are passed as addresses and streams as integers, so one build works with
// every version of torch for this Python.

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/on_device.h"
#include "module.h"
#include "pmoe_build.h"  // written by setup.py

#ifndef PMOE_MODULE
#define PMOE_MODULE _cuda
#endif

namespace py = pybind11;

namespace {

using pmoe::check;
using pmoe::OnDevice;

int device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    return 0;
  }
  check(error, "cudaGetDeviceCount");
  return count;
}

std::vector<pmoe::KernelInfo> all_kernels() {
  std::vector<pmoe::KernelInfo> found;
  for (const pmoe::Module* each = pmoe::Module::first(); each; each = each->next) each->list(found);
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return std::strcmp(a.name, b.name) < 0; });
  return found;
}

py::dict facts_of(const pmoe::KernelInfo& kernel) {
  py::dict found;
  found["name"] = kernel.name;
  found["threads"] = kernel.threads;
  found["dynamic_shared_bytes"] = kernel.dynamic_shared_bytes;
  found["hopper"] = kernel.hopper;
  return found;
}

py::list declared() {
  py::list found;
  for (const pmoe::KernelInfo& kernel : all_kernels()) {
    Dl_info place{};
    if (!dladdr(kernel.function, &place))
      throw std::runtime_error(std::string("pmoe._cuda: ") + kernel.name +
                               ": its function is not in this module");
    py::dict one = facts_of(kernel);
    one["offset"] =
        reinterpret_cast<std::uintptr_t>(kernel.function) - reinterpret_cast<std::uintptr_t>(place.dli_fbase);
    found.append(one);
  }
  return found;
}

py::list kernels(int device, const std::string& only) {
  const OnDevice on_device(device);
  py::list found;
  for (const pmoe::KernelInfo& kernel : all_kernels()) {
    if (!only.empty() && only != kernel.name) continue;
    cudaFuncAttributes attributes{};
    const std::string call = std::string("cudaFuncGetAttributes(") + kernel.name + ")";
    check(cudaFuncGetAttributes(&attributes, kernel.function), call.c_str());
    py::dict one = facts_of(kernel);
    one["binary_version"] = attributes.binaryVersion;
    one["ptx_version"] = attributes.ptxVersion;
    one["registers"] = attributes.numRegs;
    one["shared_bytes"] = attributes.sharedSizeBytes;
    one["local_bytes"] = attributes.localSizeBytes;
    found.append(one);
  }
  return found;
}

// Returns whether this process loads kernels when CUDA starts. CUDA must have been started.
bool loads_eagerly() {
  static const auto mode_of =
      pmoe::driver_function<PFN_cuModuleGetLoadingMode_v11070>("cuModuleGetLoadingMode", 11070);
  CUmoduleLoadingMode mode;
  pmoe::check_driver(mode_of(&mode), [] { return "cuModuleGetLoadingMode"; });
  return mode == CU_MODULE_EAGER_LOADING;
}

}  // namespace

PYBIND11_MODULE(PMOE_MODULE, m) {
  m.doc() = "The CUDA kernels of pmoe; pmoe.kernels is their Python side";
  m.attr("ARCHS") = PMOE_ARCHS;
  m.attr("NVCC") = PMOE_NVCC;
  m.def("device_count", &device_count,
        "Returns the number of CUDA devices that this process can use; 0 without a driver.");
  m.def("declared", &declared,
        "Returns a dict for each kernel, as its source declares it, without a device. offset: the place of "
        "the host "
        "function in this module's file; that function's symbol is the kernel's.");
  m.def("kernels", &kernels, py::arg("device"), py::arg("only") = "",
        "Returns a dict for each kernel as loaded on a device, or for the one named `only`: its binary and "
        "PTX version, and what it uses. Loads the kernels; the driver compiles those that are only PTX.");
  m.def("loads_eagerly", &loads_eagerly,
        "Returns whether kernels are loaded when CUDA starts (CUDA_MODULE_LOADING=EAGER), not later.");
  for (const pmoe::Module* each = pmoe::Module::first(); each; each = each->next) each->bind(m);
}

// The Python module pmoe._nvshmem: FlashDMoE's kernels with puts by NVSHMEM (peers/puts.cuh), and the start
// of NVSHMEM's device library, which is linked into the module. setup.py builds it if PMOE_NVSHMEM=1.
//
// The module is built from the files of cuda/flashdmoe that pmoe._cuda has, too, and from this folder. It has
// the kernels with the instructions of sm_80 only (no_hopper.cpp). Importing it needs NVSHMEM's host library.
// pmoe._cuda stays free of both libraries. This code has never run on a GPU.
#include <host/nvshmem_api.h>
#include <host/nvshmemx_api.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "common/on_device.h"
#include "module.h"

namespace py = pybind11;

namespace {

// Gives this module's kernels on `device` NVSHMEM's state: where peers' memory is, and how puts get there.
//
// pmoe._cuda must have started NVSHMEM for the device. The header's nvshmemx_init_attr() ends the process if
// it fails. It fails if NVSHMEM is not started, or if its host library has another version than the device
// library. So both are checked before: the first here, the versions in Python (pmoe/kernels/extension.py).
void start(int device) {
  const pmoe::OnDevice on_device(device);
  if (nvshmemx_init_status() < NVSHMEM_STATUS_IS_INITIALIZED)
    throw std::runtime_error("pmoe._nvshmem: NVSHMEM is not started on device " + std::to_string(device) +
                             ": pmoe._cuda.nvshmem_init starts it");
  const int status = nvshmemx_init_attr(0, nullptr);
  if (status != 0)
    throw std::runtime_error("pmoe._nvshmem: nvshmemx_init_attr failed with status " +
                             std::to_string(status) + " (set NVSHMEM_DEBUG=INFO for details)");
}

void bind_start(py::module_& m) {
  m.attr("NVSHMEM") = std::to_string(NVSHMEM_VENDOR_MAJOR_VERSION) + "." +
                      std::to_string(NVSHMEM_VENDOR_MINOR_VERSION) + "." +
                      std::to_string(NVSHMEM_VENDOR_PATCH_VERSION);
  m.def("nvshmem_start", &start, py::arg("device"),
        "Gives this module's kernels the state of NVSHMEM, which pmoe._cuda has started on the device.",
        py::call_guard<py::gil_scoped_release>());
}

void list_none(std::vector<pmoe::KernelInfo>&) {}

const pmoe::Module module(bind_start, list_none);

}  // namespace

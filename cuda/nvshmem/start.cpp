// The Python module pmoe._nvshmem: FlashDMoE's kernels with puts by NVSHMEM (peers/puts.cuh), and the start
// of NVSHMEM's device library, which is linked into the module. setup.py builds it if PMOE_NVSHMEM=1.
//
// The module consists of this folder and of files of cuda/flashdmoe, which pmoe._cuda has, too. It has only
// kernels with the instructions of sm_80 (no_hopper.cpp). Importing the module needs NVSHMEM's host library;
// importing pmoe._cuda needs no library of NVSHMEM. This code has never run on a GPU.
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
// pmoe._cuda must have started NVSHMEM for the device. nvshmemx_init_attr() fails if NVSHMEM is not started,
// or if NVSHMEM's host library has another version than its device library. A failure of that function ends
// the process, so both causes are checked before the call: the start in this function, the versions in Python
// (pmoe/kernels/extension.py).
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

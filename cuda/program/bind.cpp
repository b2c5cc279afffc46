// Python binding of pass programs on CUDA devices. Addresses and streams are passed as integers;
// pmoe/program/on_cuda.py calls it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "module.h"
#include "program/cuda_backend.h"

namespace py = pybind11;
namespace program = pmoe::program;

namespace {

using Address = std::uintptr_t;

// Everything may wait: for other ranks, for another thread's pass, or for room in the queue of launches. The
// GIL is released meanwhile, so that other threads can run.
using no_gil = py::call_guard<py::gil_scoped_release>;

std::unique_ptr<program::Communicator> make_communicator(const std::string& id, int ranks, int rank,
                                                         int device, double seconds) {
  return std::make_unique<program::Communicator>(id, ranks, rank, device, seconds);
}

std::unique_ptr<program::CudaProgram> load(std::vector<int64_t> words, std::vector<std::string> labels,
                                           int device, bool hopper, int element, int activation, int spare,
                                           std::shared_ptr<program::Communicator> communicator) {
  int multiprocessors = 0;
  pmoe::check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
              "cudaDeviceGetAttribute");
  const program::Facts facts = {
      device, hopper,         static_cast<pmoe::Element>(element), static_cast<pmoe::Activation>(activation),
      spare,  multiprocessors};
  return std::make_unique<program::CudaProgram>(std::move(words), std::move(labels), facts,
                                                std::move(communicator));
}

program::Cut cut(const program::CudaProgram& self, int64_t tokens, int64_t rank, Address send, Address recv) {
  return self.cut(
      {tokens, rank, reinterpret_cast<const int64_t*>(send), reinterpret_cast<const int64_t*>(recv)});
}

void bind_program(py::module_& m) {
  using py::arg;
  m.def(
      "nccl_id", [] { return py::bytes(program::make_id()); },
      "Returns the bytes of a new NCCL id, which all ranks of a communicator need.");
  m.def(
      "nccl_loaded", [] { program::Nccl::loaded(); }, "Raises RuntimeError if no library of NCCL is loaded.");
  py::class_<program::Communicator, std::shared_ptr<program::Communicator>>(
      m, "Communicator", py::module_local(), "A communicator of NCCL for the exchanges of pass programs.")
      .def(py::init(&make_communicator), arg("id"), arg("ranks"), arg("rank"), arg("device"), arg("seconds"),
           no_gil(), "Waits until all ranks have come.")
      .def("abort_if_late", &program::Communicator::abort_if_late, no_gil(),
           "Aborts it if a pass has not ended in time. Returns why it was aborted, \"\" if it was not.");
  py::class_<program::Cut>(m, "PassCut", py::module_local(),
                           "The numbers of one call, computed from its row counts.")
      .def_readonly("arena_bytes", &program::Cut::arena_bytes, "Bytes of all ring slots.");
  py::class_<program::CudaProgram>(m, "PassProgram", py::module_local(),
                                   "A pass program that was loaded for a CUDA device.")
      .def(py::init(&load), py::kw_only(), arg("words"), arg("labels"), arg("device"), arg("hopper"),
           arg("element"), arg("activation"), arg("spare"), arg("communicator"), no_gil())
      .def("cut", &cut, arg("tokens"), arg("rank"), arg("send"), arg("recv"), no_gil(),
           "Computes the numbers of a call.")
      .def(
          "workspace_bytes",
          [](const program::CudaProgram& self, const program::Cut& cut) {
            return self.backend().workspace_bytes(cut);
          },
          arg("cut"), "Returns the bytes of device memory that a pass needs besides its bases.")
      .def(
          "run",
          [](program::CudaProgram& self, const program::Cut& cut, const std::vector<int64_t>& bases,
             const std::vector<int64_t>& streams,
             Address workspace) { self.run(cut, bases, streams, reinterpret_cast<void*>(workspace)); },
          arg("cut"), arg("bases"), arg("streams"), arg("workspace"), no_gil(), "Issues a pass.");
}

const pmoe::Module module(bind_program, program::list_kernels);

}  // namespace

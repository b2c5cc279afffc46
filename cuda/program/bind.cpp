// Python binding of pass programs on CUDA devices. Addresses and streams are passed as integers;
// pmoe/program/on_cuda.py calls it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "module.h"
#include "program/cuda_backend.h"
#include "program/heap_exchanger.h"
#include "program/nccl.h"

namespace py = pybind11;
namespace program = pmoe::program;

namespace {

using Address = std::uintptr_t;

// Most of these functions may wait: for other ranks, for another thread's pass, or for room in the queue of
// launches. The GIL is released meanwhile, so that other threads can run.
using no_gil = py::call_guard<py::gil_scoped_release>;

std::unique_ptr<program::Communicator> make_communicator(const std::string& id, int ranks, int rank,
                                                         int device, double seconds) {
  return std::make_unique<program::Communicator>(id, ranks, rank, device, seconds);
}

std::unique_ptr<program::HeapExchanger> make_heap_exchanger(std::vector<int64_t> heaps, int rank, int device,
                                                            int64_t bytes, Address report, double seconds) {
  const pmoe::OnDevice on_device(device);
  return std::make_unique<program::HeapExchanger>(program::HeapPlace{
      std::move(heaps), rank, device, bytes, reinterpret_cast<pmoe::peers::Report*>(report), seconds});
}

// Launches one exchange outside of a pass: rows that lie at `source` arrive at `target` of other ranks.
void exchange(program::HeapExchanger& self, Address stream, int64_t source, int64_t target, int64_t row_bytes,
              const std::vector<int64_t>& send, const std::vector<int64_t>& recv) {
  const auto ranks = static_cast<size_t>(self.ranks());
  if (send.size() != ranks || recv.size() != ranks)
    throw std::invalid_argument("send and recv must have a number of rows for each of " +
                                std::to_string(ranks) + " ranks");
  program::Call call = {};
  call.stream = static_cast<int64_t>(stream);
  call.ranks = self.ranks();
  call.send = send.data();
  call.recv = recv.data();
  call.operand[0] = {source, 0, 0, row_bytes};
  call.operand[1] = {target, 0, 0, row_bytes};
  self.begin(reinterpret_cast<cudaStream_t>(stream));
  self.exchange({call});
  self.end(reinterpret_cast<cudaStream_t>(stream));
}

std::unique_ptr<program::CudaProgram> load(std::vector<int64_t> words, std::vector<std::string> labels,
                                           int device, bool hopper, int element, int activation, int spare,
                                           std::shared_ptr<program::Exchanger> communicator) {
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
  py::class_<program::Exchanger, std::shared_ptr<program::Exchanger>>(
      m, "Exchanger", py::module_local(), "What exchanges rows with other ranks for pass programs.")
      .def("take_arena", &program::Exchanger::take_arena, arg("bytes"), no_gil(),
           "Returns memory for the ring slots of a pass, to which rows travel fastest; 0 if there is none.")
      .def("give_back_arena", &program::Exchanger::give_back_arena, no_gil(), "Ends take_arena().")
      .def_property_readonly("arena_bytes", &program::Exchanger::arena_bytes,
                             "Bytes that take_arena() gives at most.");
  py::class_<program::HeapExchanger, program::Exchanger, std::shared_ptr<program::HeapExchanger>>(
      m, "HeapExchanger", py::module_local(), "Exchanges rows by writing them into the heaps of other ranks.")
      .def(py::init(&make_heap_exchanger), py::kw_only(), arg("heaps"), arg("rank"), arg("device"),
           arg("bytes"), arg("report"), arg("seconds"), no_gil())
      .def("close", &program::HeapExchanger::close, no_gil(), "Refuses all later passes.")
      .def("throw_failure", &program::HeapExchanger::throw_failure, no_gil(),
           "Raises RuntimeError if an exchange has waited too long, or after close().")
      .def("exchange", &exchange, arg("stream"), arg("source"), arg("target"), arg("row_bytes"), arg("send"),
           arg("recv"), no_gil(), "Launches one exchange by itself.");
  m.def(
      "program_heap_bytes", [](int ranks) { return program::HeapRegions::of(ranks).arena; }, arg("ranks"),
      "Returns the bytes of a heap's flags and landing places. An arena comes after them.");
  m.attr("PROGRAM_MOST_HEAPS") = program::kMostHeaps;
  py::class_<program::Communicator, program::Exchanger, std::shared_ptr<program::Communicator>>(
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

// Python binding of heaps (device memory that other ranks can write). Addresses and streams are passed as
// integers, handles as bytes. pmoe/kernels/heap.py is the Python side.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "heap/heap.h"
#include "module.h"

namespace py = pybind11;
namespace heap = pmoe::heap;

namespace {

using Address = std::uintptr_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Most of these functions wait for the device or the driver. The GIL is released meanwhile, so that other
// threads can run.
using no_gil = py::call_guard<py::gil_scoped_release>;

void bind_heap(py::module_& m) {
  using py::arg;
  m.def(
      "heap_allocate",
      [](int device, int64_t bytes) { return reinterpret_cast<Address>(heap::allocate(device, bytes)); },
      arg("device"), arg("bytes"), "Allocates zeroed memory and returns its address.", no_gil());
  m.def(
      "heap_free", [](int device, Address base) { heap::release(device, at(base)); }, arg("device"),
      arg("base"), no_gil());
  m.def(
      "heap_handle", [](int device, Address base) { return py::bytes(heap::handle(device, at(base))); },
      arg("device"), arg("base"), "Returns 64 bytes by which another process of the node opens this memory.");
  m.def(
      "heap_open",
      [](int device, const py::bytes& handle) {
        const std::string handle_bytes = handle;
        const py::gil_scoped_release without_gil;
        return reinterpret_cast<Address>(heap::open(device, handle_bytes));
      },
      arg("device"), arg("handle"), "Maps another process's memory and returns its address in this process.");
  m.def(
      "heap_close", [](int device, Address peer) { heap::close(device, at(peer)); }, arg("device"),
      arg("peer"), no_gil());
  m.def(
      "heap_raise_flag",
      [](int device, Address stream, Address flag, uint32_t value) {
        heap::raise_flag(device, at(stream), at<uint32_t>(flag), value);
      },
      arg("device"), arg("stream"), arg("flag"), arg("value"), no_gil());
  m.def(
      "heap_await_flag",
      [](int device, Address stream, Address flag, uint32_t wanted, uint64_t bound_nanoseconds,
         Address waited) {
        heap::await_flag(device, at(stream), at<const uint32_t>(flag), wanted, bound_nanoseconds,
                         at<int64_t>(waited));
      },
      arg("device"), arg("stream"), arg("flag"), arg("wanted"), arg("bound_nanoseconds"), arg("waited"),
      "Launches a wait. waited: int64 in memory that the host reads; receives nanoseconds, or -1.", no_gil());
}

const pmoe::Module module(bind_heap, heap::list_kernels);

}  // namespace

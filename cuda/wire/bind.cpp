// Python binding of the kernels that pack and unpack messages. Addresses and streams are passed as integers;
// pmoe/kernels/wire.py has checked the tensors.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "module.h"
#include "wire/launch.h"

namespace py = pybind11;
namespace wire = pmoe::wire;

namespace {

using Address = std::uintptr_t;

wire::Wire make_wire(int device, Address stream, int type, int format, int64_t columns) {
  return {device, reinterpret_cast<void*>(stream), static_cast<wire::RowType>(type),
          static_cast<wire::Format>(format), columns};
}

wire::RowsAt rows_at(Address data, int64_t stride_bytes) {
  return {reinterpret_cast<void*>(data), stride_bytes};
}

void pack(const wire::Wire& wire, int64_t tokens, int64_t choices, int64_t num_messages, Address position,
          Address x, int64_t x_stride, Address messages, int64_t messages_stride) {
  wire::pack(wire, tokens, choices, num_messages, reinterpret_cast<const int32_t*>(position),
             rows_at(x, x_stride), rows_at(messages, messages_stride));
}

void unpack(const wire::Wire& wire, int64_t rows, int64_t num_messages, Address index, bool wide,
            Address messages, int64_t messages_stride, Address out, int64_t out_stride) {
  wire::unpack(wire, rows, num_messages, reinterpret_cast<const void*>(index), wide,
               rows_at(messages, messages_stride), rows_at(out, out_stride));
}

// A launch blocks while the queue of launches is full. The GIL is released meanwhile, so that other threads
// can run.
using no_gil = py::call_guard<py::gil_scoped_release>;

void bind_wire(py::module_& m) {
  using py::arg;
  py::class_<wire::Wire>(m, "Wire", py::module_local(),
                         "The arguments that both launches of pmoe.kernels.wire share.")
      .def(py::init(&make_wire), arg("device"), arg("stream"), arg("type"), arg("format"), arg("columns"));
  m.def("wire_pack", &pack, arg("wire"), arg("tokens"), arg("choices"), arg("num_messages"), arg("position"),
        arg("x"), arg("x_stride"), arg("messages"), arg("messages_stride"), no_gil(),
        "Writes each token into the messages of its choices.");
  m.def("wire_unpack", &unpack, arg("wire"), arg("rows"), arg("num_messages"), arg("index"), arg("wide"),
        arg("messages"), arg("messages_stride"), arg("out"), arg("out_stride"), no_gil(),
        "Reads each row from its message.");
}

const pmoe::Module module(bind_wire, wire::list_kernels);

}  // namespace

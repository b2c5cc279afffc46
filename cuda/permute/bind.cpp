// Python binding of the permutes. Addresses and streams are passed as integers;
// pmoe/kernels/permute/operators.py has checked the tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "module.h"
#include "permute/launch.h"

namespace py = pybind11;
namespace permute = pmoe::permute;

namespace {

using Address = std::uintptr_t;

permute::Moving moving(int device, Address stream, int type, int64_t tokens, int64_t choices,
                       int64_t num_rows, int64_t row_bytes, Address position, Address weight, int parts,
                       int64_t first_row) {
  return {device,
          reinterpret_cast<void*>(stream),
          static_cast<permute::RowType>(type),
          tokens,
          choices,
          num_rows,
          row_bytes,
          reinterpret_cast<const int32_t*>(position),
          reinterpret_cast<const float*>(weight),
          parts,
          first_row};
}

permute::RowsAt rows(Address data, int64_t stride_bytes) {
  return {reinterpret_cast<void*>(data), stride_bytes};
}

float* floats(Address data) { return reinterpret_cast<float*>(data); }

// A launch blocks while the queue of launches is full. The GIL is released meanwhile, so that other threads
// can run.
using no_gil = py::call_guard<py::gil_scoped_release>;

void bind_permute(py::module_& m) {
  py::class_<permute::Moving>(m, "Moving", py::module_local(),
                              "The arguments that the launches of pmoe.kernels.permute share.")
      .def(py::init(&moving), py::arg("device"), py::arg("stream"), py::arg("type"), py::arg("tokens"),
           py::arg("choices"), py::arg("num_rows"), py::arg("row_bytes"), py::arg("position"),
           py::arg("weight"), py::arg("parts"), py::arg("first_row") = 0);
  m.def(
      "permute",
      [](const permute::Moving& moving, Address x, int64_t x_stride, Address out, int64_t out_stride) {
        permute::permute(moving, rows(x, x_stride), rows(out, out_stride));
      },
      no_gil());
  m.def(
      "permute_several",
      [](const std::vector<std::tuple<permute::Moving, Address, int64_t, Address, int64_t>>& copies) {
        std::vector<permute::Copying> all;
        for (const auto& [moving, x, x_stride, out, out_stride] : copies)
          all.push_back({moving, rows(x, x_stride), rows(out, out_stride)});
        permute::permute_several(all);
      },
      no_gil());
  m.def(
      "unpermute",
      [](const permute::Moving& moving, Address b, int64_t b_stride, Address y, int64_t y_stride) {
        permute::unpermute(moving, rows(b, b_stride), rows(y, y_stride));
      },
      no_gil());
  m.def(
      "permute_backward",
      [](const permute::Moving& moving, Address x, int64_t x_stride, Address d_rows, int64_t d_rows_stride,
         Address d_x, int64_t d_x_stride, Address d_weight) {
        permute::permute_backward(moving, rows(x, x_stride), rows(d_rows, d_rows_stride),
                                  rows(d_x, d_x_stride), floats(d_weight));
      },
      no_gil());
  m.def(
      "unpermute_backward",
      [](const permute::Moving& moving, Address d_y, int64_t d_y_stride, Address b, int64_t b_stride,
         Address d_rows, int64_t d_rows_stride, Address d_weight) {
        permute::unpermute_backward(moving, rows(d_y, d_y_stride), rows(b, b_stride),
                                    rows(d_rows, d_rows_stride), floats(d_weight));
      },
      no_gil());
}

const pmoe::Module module(bind_permute, permute::list_kernels);

}  // namespace

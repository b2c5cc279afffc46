// Python binding of the kernels of row counts. Addresses and streams are passed as integers;
// pmoe/kernels/counts.py has checked the tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "counts/launch.h"
#include "module.h"

namespace py = pybind11;
namespace counts = pmoe::counts;

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

counts::Message message(int ranks, int bins, int experts) { return {ranks, bins, experts}; }

void pack(int device, Address stream, const std::array<int, 3>& sizes,
          const std::array<int32_t, counts::kHeader>& header, Address fault, Address of_experts,
          Address sent) {
  counts::Pack a{};
  a.message = message(sizes[0], sizes[1], sizes[2]);
  for (int i = 0; i < counts::kHeader; ++i) a.header[i] = header[i];
  a.fault = at<const int64_t>(fault);
  a.counts = at<const int32_t>(of_experts);
  a.sent = at<int32_t>(sent);
  counts::pack(device, at<void>(stream), a);
}

void agree(int device, Address stream, const std::array<int, 3>& sizes, Address received, Address agreed,
           int own_rank, int64_t host_rows, bool asks_rows, bool irregular,
           const std::vector<std::pair<int, double>>& degrees) {
  if (degrees.size() > counts::kMostDegrees)
    throw std::invalid_argument("degrees (" + std::to_string(degrees.size()) + ") must be at most " +
                                std::to_string(counts::kMostDegrees));
  counts::Agree a{};
  a.message = message(sizes[0], sizes[1], sizes[2]);
  a.received = at<const int32_t>(received);
  a.agreed = at<int64_t>(agreed);
  a.own_rank = own_rank, a.host_rows = host_rows;
  a.asks_rows = asks_rows, a.irregular = irregular;
  for (const auto& [degree, limit] : degrees) {
    a.degree[a.degrees] = degree;
    a.limit_a_token[a.degrees++] = limit;
  }
  counts::agree(device, at<void>(stream), a);
}

void order(int device, Address stream, const std::array<int, 3>& sizes, Address received, Address sent,
           int chunks, int joined, int own_rank, int pieces, Address of_chunks, Address of_all, Address slot,
           Address number_slot, Address weight, Address number_weight, Address ends, Address zeros,
           int num_zeros) {
  counts::Order a{};
  a.message = message(sizes[0], sizes[1], sizes[2]);
  a.received = at<const int32_t>(received), a.sent = at<const int32_t>(sent);
  a.chunks = chunks, a.joined = joined, a.own_rank = own_rank, a.pieces = pieces;
  a.of_chunks = at<int32_t>(of_chunks), a.of_all = at<int64_t>(of_all);
  a.slot = at<const int32_t>(slot), a.number_slot = at<int64_t>(number_slot);
  a.weight = at<const float>(weight), a.number_weight = at<float>(number_weight);
  a.ends = at<int32_t>(ends);
  a.zeros = at<int32_t>(zeros), a.num_zeros = num_zeros;
  counts::order(device, at<void>(stream), a);
}

// A launch blocks while the queue of launches is full. The GIL is released meanwhile, so that other threads
// can run.
using no_gil = py::call_guard<py::gil_scoped_release>;

void bind_counts(py::module_& m) {
  using py::arg;
  m.def("counts_pack", &pack, py::kw_only(), arg("device"), arg("stream"), arg("sizes"), arg("header"),
        arg("fault") = 0, arg("counts"), arg("sent"), no_gil(), "Writes the messages of row counts.");
  m.def("counts_agree", &agree, py::kw_only(), arg("device"), arg("stream"), arg("sizes"), arg("received"),
        arg("agreed"), arg("own_rank"), arg("host_rows"), arg("asks_rows"), arg("irregular"), arg("degrees"),
        no_gil(), "Computes what ranks must agree on from the messages that arrived.");
  m.def("counts_order", &order, py::kw_only(), arg("device"), arg("stream"), arg("sizes"), arg("received"),
        arg("sent"), arg("chunks"), arg("joined"), arg("own_rank"), arg("pieces"), arg("of_chunks") = 0,
        arg("of_all") = 0, arg("slot") = 0, arg("number_slot") = 0, arg("weight") = 0,
        arg("number_weight") = 0, arg("ends"), arg("zeros") = 0, arg("num_zeros") = 0, no_gil(),
        "Computes the orders of rows and of their routing weights, and where the rows of each expert end.");
}

const pmoe::Module module(bind_counts, counts::list_kernels);

}  // namespace

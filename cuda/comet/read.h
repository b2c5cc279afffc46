// Reads a launch from Python dicts into the kernels' structures. It needs no CUDA, so that tests can launch
// the same way on the CPU.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "comet/fused.h"

namespace pmoe::comet {

namespace py = pybind11;

// Reads the fields of a rank by name. A missing field is 0. finish() throws if the dict has other fields.
class Fields {
 public:
  explicit Fields(const py::dict& given) : given_(given) {}

  int64_t number(const char* name) {
    if (!given_.contains(name)) return 0;
    ++used_;
    return given_[name].cast<int64_t>();
  }
  double real(const char* name) {
    if (!given_.contains(name)) return 0;
    ++used_;
    return given_[name].cast<double>();
  }
  int small(const char* name) { return static_cast<int>(number(name)); }
  template <class T>
  T* at(const char* name) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(number(name)));
  }
  void finish() const {
    if (used_ != given_.size())
      throw py::value_error("a rank's dict has a field that the kernel does not know");
  }

 private:
  const py::dict& given_;
  size_t used_ = 0;
};

inline Layout layout_of(int ranks, int experts, int64_t rows, int64_t home_rows, int64_t row_bytes) {
  return {ranks, experts, rows, home_rows, row_bytes};
}

inline void read_problem(Fields& given, Problem& p) {
  p.a = given.at<void>("a"), p.b = given.at<void>("b"), p.d = given.at<void>("d");
  p.a_stride = given.number("a_stride"), p.d_stride = given.number("d_stride");
  p.experts = given.small("local_experts"), p.rows = given.small("rows");
  p.n = given.small("n"), p.k = given.small("k");
  p.bias = given.at<void>("bias"), p.weight = given.at<const float>("row_weight");
  p.active = given.at<void>("active"), p.active_stride = given.number("active_stride");
  p.hidden = given.at<void>("hidden"), p.hidden_stride = given.number("hidden_stride");
  p.row_dots = given.at<float>("made_dots"), p.weighs_active = given.small("weighs_active");
}

inline void read_rank(Fields& given, Rank& r) {
  r.layout = layout_of(given.small("ranks"), given.small("experts"), given.number("heap_rows"),
                       given.number("heap_home_rows"), given.number("row_bytes"));
  r.heaps = given.at<uint8_t* const>("heaps");
  r.rank = given.small("rank");
  r.watch.failed = given.at<uint32_t>("failed");
  r.watch.report = given.at<Report>("report");
  r.watch.rank = r.rank;
  r.watch.epoch = static_cast<uint32_t>(given.number("epoch"));
  r.watch.bound = static_cast<uint64_t>(given.number("bound_nanoseconds"));
  r.watch.nap_seed = static_cast<uint32_t>(given.number("nap_seed"));
  r.watch.not_waited = static_cast<uint32_t>(given.number("not_waited"));
  r.send_counts = given.at<const int32_t>("send_counts");
  r.recv_counts = given.at<const int32_t>("recv_counts");
  r.recv_stride = given.number("recv_stride");
  r.expert = given.at<const int32_t>("expert");
  r.weight = given.at<const float>("weight");
  r.position = given.at<const int32_t>("position");
  r.slot = given.at<const int32_t>("slot");
  r.first_row = given.small("first_row");
  r.choices = given.small("top_k");
  r.by_choices = Divisor(r.choices), r.by_experts = Divisor(r.layout.experts);
  r.source = given.at<const uint8_t>("source");
  r.source_stride = given.number("source_stride");
  r.result = given.at<uint8_t>("result");
  r.result_stride = given.number("result_stride");
  r.first_token = given.small("first_token"), r.tokens = given.small("tokens");
  r.chunks = {given.small("columns"), given.small("chunk_columns")};
  r.row_dots = given.at<const float>("row_dots");
  r.dot_parts = given.small("dot_parts");
  r.dot_rows = given.number("dot_rows");
  r.weight_gradient = given.at<float>("weight_gradient");
  r.communicating = given.small("n_c");
  r.computes = given.small("computes");
}

// Reads the launch.
//
// ranks: one dict for each rank.
// a_rows: receives, for each rank, the number of rows of A that may be read.
inline Launch read_launch(const py::list& ranks, int blocks, int64_t (&a_rows)[kMostVirtual]) {
  Launch all;
  const int count = static_cast<int>(ranks.size());
  if (count < 1 || count > kMostVirtual)
    throw py::value_error("ranks of one launch (" + std::to_string(count) + ") must be from 1 to " +
                          std::to_string(kMostVirtual));
  all.blocks = blocks;
  for (int i = 0; i < count; ++i) {
    const auto given = ranks[static_cast<size_t>(i)].cast<py::dict>();
    Fields fields(given);
    read_problem(fields, all.fused[i].problem);
    read_rank(fields, all.fused[i].rank);
    a_rows[i] = fields.number("a_rows");
    all.fused[i].rank.blocks = blocks;
    fields.finish();
  }
  return all;
}

inline py::dict tell_layout(int ranks, int experts, int64_t rows, int64_t home_rows, int64_t row_bytes) {
  const Layout found = layout_of(ranks, experts, rows, home_rows, row_bytes);
  py::dict told;
  told["bytes"] = found.bytes(), told["counters"] = found.counters(), told["inbox"] = found.inbox();
  told["weights"] = found.weights(), told["links"] = found.links(), told["dots"] = found.dots();
  told["home"] = found.home();
  return told;
}

inline py::dict tell_limits() {
  return py::dict(py::arg("ranks") = kMostRanks, py::arg("experts") = kMostExperts,
                  py::arg("chunks") = kMostChunks, py::arg("virtual") = kMostVirtual);
}

}  // namespace pmoe::comet

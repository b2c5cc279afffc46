// Converts the arguments of a launch from Python dicts into the kernels' structures. This header needs no
// CUDA, so tests use it, too, when they run the kernels on the CPU.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "comet/fused.h"
#include "peers/fields.h"

namespace pmoe::comet {

namespace py = pybind11;

using peers::Fields;

inline Layout layout_of(int ranks, int experts, int64_t rows, int64_t home_rows, int64_t row_bytes) {
  return {ranks, experts, rows, home_rows, row_bytes};
}

inline void read_problem(Fields& fields, Problem& p) {
  p.a = fields.at<void>("a"), p.b = fields.at<void>("b"), p.d = fields.at<void>("d");
  p.a_stride = fields.number("a_stride"), p.d_stride = fields.number("d_stride");
  p.experts = fields.small("local_experts"), p.rows = fields.small("rows");
  p.n = fields.small("n"), p.k = fields.small("k");
  p.bias = fields.at<void>("bias"), p.weight = fields.at<const float>("row_weight");
  p.active = fields.at<void>("active"), p.active_stride = fields.number("active_stride");
  p.hidden = fields.at<void>("hidden"), p.hidden_stride = fields.number("hidden_stride");
  p.row_dots = fields.at<float>("made_dots"), p.weighs_active = fields.small("weighs_active");
}

inline void read_rank(Fields& fields, Rank& r) {
  r.layout = layout_of(fields.small("ranks"), fields.small("experts"), fields.number("heap_rows"),
                       fields.number("heap_home_rows"), fields.number("row_bytes"));
  r.heaps = fields.at<uint8_t* const>("heaps");
  r.rank = fields.small("rank");
  r.watch = peers::read_watch(fields, r.rank);
  r.send_counts = fields.at<const int32_t>("send_counts");
  r.recv_counts = fields.at<const int32_t>("recv_counts");
  r.recv_stride = fields.number("recv_stride");
  r.expert = fields.at<const int32_t>("expert");
  r.weight = fields.at<const float>("weight");
  r.position = fields.at<const int32_t>("position");
  r.slot = fields.at<const int32_t>("slot");
  r.first_row = fields.small("first_row");
  r.choices = fields.small("top_k");
  r.by_choices = Divisor(r.choices), r.by_experts = Divisor(r.layout.experts);
  r.source = fields.at<const uint8_t>("source");
  r.source_stride = fields.number("source_stride");
  r.result = fields.at<uint8_t>("result");
  r.result_stride = fields.number("result_stride");
  r.first_token = fields.small("first_token"), r.tokens = fields.small("tokens");
  r.chunks = {fields.small("columns"), fields.small("chunk_columns")};
  r.row_dots = fields.at<const float>("row_dots");
  r.dot_parts = fields.small("dot_parts");
  r.dot_rows = fields.number("dot_rows");
  r.weight_gradient = fields.at<float>("weight_gradient");
  r.communicating = fields.small("n_c");
  r.computes = fields.small("computes");
}

// Returns the arguments of a launch, read from Python dicts.
//
// ranks: one dict for each rank.
// blocks: number of blocks of each rank.
// a_rows: result: for each rank, the number of rows of operand A that may be read.
inline Launch read_launch(const py::list& ranks, int blocks, int64_t (&a_rows)[kMostVirtual]) {
  Launch all;
  const int count = peers::count_ranks(ranks);
  all.blocks = blocks;
  for (int i = 0; i < count; ++i) {
    const auto dict = ranks[static_cast<size_t>(i)].cast<py::dict>();
    Fields fields(dict);
    read_problem(fields, all.fused[i].problem);
    read_rank(fields, all.fused[i].rank);
    a_rows[i] = fields.number("a_rows");
    all.fused[i].rank.blocks = blocks;
    fields.finish();
  }
  return all;
}

inline py::dict layout_dict(int ranks, int experts, int64_t rows, int64_t home_rows, int64_t row_bytes) {
  const Layout found = layout_of(ranks, experts, rows, home_rows, row_bytes);
  py::dict offsets;
  offsets["bytes"] = found.bytes(), offsets["counters"] = found.counters(), offsets["inbox"] = found.inbox();
  offsets["weights"] = found.weights(), offsets["links"] = found.links(), offsets["dots"] = found.dots();
  offsets["home"] = found.home();
  return offsets;
}

inline py::dict limits_dict() {
  return py::dict(py::arg("ranks") = kMostRanks, py::arg("experts") = kMostExperts,
                  py::arg("chunks") = kMostChunks, py::arg("virtual") = kMostVirtual);
}

}  // namespace pmoe::comet

// Addresses come as integers; pmoe/kernels/comet.py has checked what they stand for.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <string>

#include "comet/launch.h"
#include "common/on_device.h"
#include "module.h"

namespace py = pybind11;

namespace {

using pmoe::Activation;
using pmoe::Element;
using pmoe::Epilogue;
using pmoe::Form;
using namespace pmoe::comet;

std::string name_of(const Which& which, const char* path) {
  std::string name = which.kernel == Kernel::kDispatch ? "comet.dispatch_gemm." : "comet.gemm_combine.";
  name += path;
  name += which.element == Element::kBf16 ? ".bf16" : ".fp16";
  name += which.form == Form::kForward ? ".forward" : ".input";
  if (which.epilogue == Epilogue::kHidden) name += ".hidden";
  if (which.epilogue == Epilogue::kHiddenGradient) name += ".hidden_gradient";
  const char* const names[] = {"", ".relu", ".gelu", ".silu", ".swiglu"};
  return name + names[static_cast<int>(which.activation)];
}

void list_kernels(std::vector<pmoe::KernelInfo>& found) {
  static std::map<std::string, int> names;  // whose keys outlive what points to them
  for (const bool hopper : {true, false}) {
    const Path& path = hopper ? hopper_path : ampere_path;
    for_each([&](const Which& which) {
      const auto name = names.emplace(name_of(which, hopper ? "sm_90a" : "sm_80"), 0).first;
      found.push_back({name->first.c_str(), reinterpret_cast<const void*>(path.kernel(which)), path.threads,
                       path.shared_bytes, hopper});
    });
  }
}

// A field of a rank, by name; 0 where it is left out.
class Fields {
 public:
  explicit Fields(const py::dict& given) : given_(given) {}

  int64_t number(const char* name) {
    if (!given_.contains(name)) return 0;
    ++used_;
    return given_[name].cast<int64_t>();
  }
  int small(const char* name) { return static_cast<int>(number(name)); }
  template <class T>
  T* at(const char* name) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(number(name)));
  }
  void finish() const {
    if (used_ != given_.size()) throw py::value_error("a field of a rank that there is not, or given twice");
  }

 private:
  const py::dict& given_;
  size_t used_ = 0;
};

Layout layout_of(int ranks, int experts, int64_t rows, int64_t home_rows, int64_t row_bytes) {
  return {ranks, experts, rows, home_rows, row_bytes};
}

void read_problem(Fields& given, pmoe::Problem& p) {
  p.a = given.at<void>("a"), p.b = given.at<void>("b"), p.d = given.at<void>("d");
  p.a_stride = given.number("a_stride"), p.d_stride = given.number("d_stride");
  p.experts = given.small("local_experts"), p.rows = given.small("rows");
  p.n = given.small("n"), p.k = given.small("k");
  p.bias = given.at<void>("bias"), p.weight = given.at<const float>("row_weight");
  p.active = given.at<void>("active"), p.active_stride = given.number("active_stride");
  p.hidden = given.at<void>("hidden"), p.hidden_stride = given.number("hidden_stride");
  p.row_dots = given.at<float>("made_dots"), p.weighs_active = given.small("weighs_active");
}

void read_rank(Fields& given, Rank& r) {
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
  r.by_choices = pmoe::Divisor(r.choices);
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

void run(int device, std::uintptr_t stream, bool hopper, int kernel, int element, int form, int epilogue,
         int activation, int blocks, const py::list& ranks) {
  const Which which = {static_cast<Kernel>(kernel), static_cast<Element>(element), static_cast<Form>(form),
                       static_cast<Epilogue>(epilogue), static_cast<Activation>(activation)};
  Launch all;
  int64_t a_rows[kMostVirtual] = {};
  const int count = static_cast<int>(ranks.size());
  if (count < 1 || count > kMostVirtual)
    throw py::value_error("ranks of one launch (" + std::to_string(count) + ") must be 1 to " +
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
  const py::gil_scoped_release others_run;  // a full queue of launches blocks
  const pmoe::OnDevice here(device);
  const Path& path = hopper ? hopper_path : ampere_path;
  pmoe::check(launch(path, which, all, count, a_rows, reinterpret_cast<cudaStream_t>(stream)),
              name_of(which, "launch").c_str());
}

py::dict layout(int ranks, int experts, int64_t rows, int64_t home_rows, int64_t row_bytes) {
  const Layout found = layout_of(ranks, experts, rows, home_rows, row_bytes);
  py::dict told;
  told["bytes"] = found.bytes(), told["counters"] = found.counters(), told["inbox"] = found.inbox();
  told["weights"] = found.weights(), told["links"] = found.links(), told["dots"] = found.dots();
  told["home"] = found.home();
  return told;
}

void bind_comet(py::module_& m) {
  using py::arg;
  m.def("comet", &run, py::kw_only(), arg("device"), arg("stream"), arg("hopper"), arg("kernel"),
        arg("element"), arg("form"), arg("epilogue") = 0, arg("activation") = 0, arg("blocks"), arg("ranks"),
        "One launch of a fused kernel, for each rank of which there is a dict; see cuda/comet/rank.h.");
  m.def("comet_layout", &layout, arg("ranks"), arg("experts"), arg("rows"), arg("home_rows"),
        arg("row_bytes"), "Byte offsets of a heap's regions, and \"bytes\", the size of all.");
  m.def(
      "comet_path",
      [](bool hopper) {
        const Path& path = hopper ? hopper_path : ampere_path;
        py::dict told;
        told["tile_rows"] = path.tile_rows, told["tile_columns"] = path.tile_columns;
        told["board_words"] = path.board_words;
        return told;
      },
      arg("hopper"), "Rows and columns of a tile; words for (ranks + 1) x experts of a rank.");
  m.attr("comet_limits") = py::dict(py::arg("ranks") = kMostRanks, py::arg("experts") = kMostExperts,
                                    py::arg("chunks") = kMostChunks, py::arg("virtual") = kMostVirtual);
}

const pmoe::Module joined(bind_comet, list_kernels);

}  // namespace

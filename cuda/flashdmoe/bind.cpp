// Python binding of FlashDMoE's kernels. Addresses and streams arrive as integers.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <string>

#include "comet/read.h"
#include "common/on_device.h"
#include "flashdmoe/launch.h"
#include "module.h"
#include "route/layout.h"

namespace py = pybind11;

namespace {

using pmoe::Activation;
using pmoe::Element;
using pmoe::comet::Fields;
using namespace pmoe::flashdmoe;

constexpr int kTileRows = 128;           // rows of a tile on every architecture
constexpr int kFewestTileColumns = 128;  // smallest tile width of any architecture; it gives the most tasks
constexpr int kMostBlocks = 1024;        // largest number of blocks of a rank

void list_kernels(std::vector<pmoe::KernelInfo>& found) {
  static std::map<std::string, int> names;  // static, because KernelInfo::name points to its keys
  for_each([&](const Which& which) {
    const auto name = names.emplace(name_of(which), 0).first;
    const Path& path = path_of(which);
    found.push_back({name->first.c_str(), kernel_of(which), path.threads, path.shared_bytes, which.hopper});
  });
}

Layout layout_of(int ranks, int experts, int rows, int64_t row_bytes, bool is_pool, bool is_staged,
                 bool sends_again) {
  const int capacity = pmoe::ceil_div(rows, kTileRows) * kTileRows;
  return {ranks, experts, capacity, kTileRows, is_staged ? 2 : 1, row_bytes, sends_again ? 3 : 2, is_pool};
}

bool are_halves(Activation activation) { return pmoe::are_halves(pmoe::Epilogue::kHidden, activation); }

// Lays out the workspace and returns its bytes. Its parts lie at the same offsets for every activation,
// number of blocks and architecture, because all of them share it.
int64_t place(Pass& pass, const Experts& experts, int most_tokens, uint8_t* base) {
  pass.processors = kMostBlocks - 1;
  return place_for_all(pass, experts, true, kTileRows, kFewestTileColumns, most_tokens, base);
}

Experts read_experts(Fields& given, int model) {
  Experts e;
  e.model = model, e.hidden = given.small("d_hidden");
  e.w1 = given.at<void>("w1"), e.b1 = given.at<void>("b1");
  e.w2 = given.at<void>("w2"), e.b2 = given.at<void>("b2");
  e.input = given.at<void>("input"), e.wide = given.at<void>("hidden"), e.active = given.at<void>("active");
  e.gradient = given.at<void>("gradient"), e.dots = given.at<float>("dots");
  e.of_w1 = given.at<void>("of_w1"), e.of_w2 = given.at<void>("of_w2");
  e.of_b1 = given.at<void>("of_b1"), e.of_b2 = given.at<void>("of_b2");
  return e;
}

void read_choice(Fields& given, Pass& pass) {
  GateChoice& choice = pass.routing.choice;
  const int experts = pass.layout.cells();
  choice.is_asked = given.small("chooses") != 0, choice.normalizes = given.small("normalize") != 0;
  choice.balance_scale = pmoe::route::balance_scale(pass.tokens, experts, pass.choices);
  choice.z_scale = pmoe::route::z_scale(given.real("z_loss_weight"), pass.tokens);
  choice.logits = given.at<float>("logits"), choice.weight = given.at<const void>("gate_weight"),
  choice.counts = given.at<int32_t>("all_counts");
  choice.l_aux = given.at<float>("l_aux");
  if (choice.weight != nullptr && experts % 2 != 0)
    throw py::value_error("experts (" + std::to_string(experts) +
                          ") must be even if the launch computes the gate's scores");
  if (choice.is_asked && (experts > kMostChosen || pass.choices > pmoe::route::kMostChoices))
    throw py::value_error("experts (" + std::to_string(experts) + ") and top_k (" +
                          std::to_string(pass.choices) + ") must be at most " + std::to_string(kMostChosen) +
                          " and " + std::to_string(pmoe::route::kMostChoices) +
                          " if the launch chooses experts");
}

// Reads one rank's part of a launch. Rows of tokens must lie without gaps.
Member read_member(Fields& given, const Which& which, int blocks) {
  Member m;
  Pass& pass = m.pass;
  const int64_t row_bytes = given.number("row_bytes");
  pass.layout =
      layout_of(given.small("ranks"), given.small("experts"), given.small("heap_rows"), row_bytes,
                given.small("is_pool") != 0, given.small("is_staged") != 0, given.small("sends_again") != 0);
  pass.heaps = given.at<uint8_t* const>("heaps");
  pass.rank = given.small("rank");
  pass.watch.failed = given.at<uint32_t>("failed");
  pass.watch.report = given.at<pmoe::comet::Report>("report");
  pass.watch.rank = pass.rank;
  pass.watch.epoch = static_cast<uint32_t>(given.number("epoch"));
  pass.watch.bound = static_cast<uint64_t>(given.number("bound_nanoseconds"));
  pass.watch.nap_seed = static_cast<uint32_t>(given.number("nap_seed"));
  pass.watch.not_waited = static_cast<uint32_t>(given.number("not_waited"));
  pass.counts = given.at<int32_t>("send_counts"), pass.slot = given.at<int32_t>("slot");
  pass.home = given.at<int32_t>("home"), pass.offset = given.at<int32_t>("offset");
  pass.expert = given.at<int32_t>("expert"), pass.row = given.at<int32_t>("row");
  RoutingTasks& routing = pass.routing;
  routing.is_asked = given.small("routes") != 0;
  routing.chosen = given.at<const int64_t>("chosen"), routing.keep = given.at<const uint8_t>("keep");
  routing.capacity = pmoe::smaller(given.small("capacity"), pass.layout.capacity);
  pass.weight = given.at<float>("weight");
  pass.tokens = given.small("tokens"), pass.choices = given.small("top_k");
  read_choice(given, pass);
  pass.by_choices = pmoe::Divisor(pass.choices), pass.by_experts = pmoe::Divisor(pass.layout.experts);
  pass.source = given.at<const uint8_t>("source"), pass.source_stride = row_bytes;
  pass.result = given.at<uint8_t>("result"), pass.result_stride = row_bytes;
  pass.again = given.at<const uint8_t>("again"), pass.again_stride = row_bytes;
  pass.weight_gradient = given.at<float>("weight_gradient");
  Experts& e = m.experts = read_experts(given, static_cast<int>(row_bytes / 2));
  void* const recomputed = given.at<void>("recomputed");  // for T_M in backward, if forward did not keep it
  if (recomputed != nullptr) e.wide = recomputed;
  const int most_tokens = given.small("heap_home_rows");
  if (pass.tokens > most_tokens)
    throw py::value_error("tokens (" + std::to_string(pass.tokens) + ") must be at most the heap's " +
                          std::to_string(most_tokens));
  place(pass, e, most_tokens, given.at<uint8_t>("workspace"));
  pass.processors = blocks - 1;
  const bool halves = are_halves(which.activation);
  const int columns = path_of(which).tile_columns;
  if (which.is_backward)
    plan_backward(pass, e, halves, kTileRows, columns, recomputed != nullptr);
  else
    plan_forward(pass, e, halves, columns);
  return m;
}

void run(int device, std::uintptr_t stream, bool hopper, bool is_backward, int element, int activation,
         int blocks, const py::list& ranks) {
  const Which which = {static_cast<Element>(element), static_cast<Activation>(activation), is_backward,
                       hopper};
  if (ranks.empty() || ranks.size() > kMostVirtual)
    throw py::value_error("ranks of one launch (" + std::to_string(ranks.size()) + ") must be from 1 to " +
                          std::to_string(kMostVirtual));
  if (blocks < 2 || blocks > kMostBlocks)
    throw py::value_error("blocks (" + std::to_string(blocks) +
                          ") must be from 2 (one of them schedules) to " + std::to_string(kMostBlocks));
  Launch all;
  all.ranks = static_cast<int>(ranks.size());
  for (int i = 0; i < all.ranks; ++i) {
    const auto given = ranks[static_cast<size_t>(i)].cast<py::dict>();
    Fields fields(given);
    all.of_rank[i] = read_member(fields, which, blocks);
    fields.finish();
  }
  const py::gil_scoped_release others_run;  // a launch blocks while the queue of launches is full
  const pmoe::OnDevice here(device);
  launch(which, all, blocks, reinterpret_cast<void*>(stream));
}

// Returns the byte offsets of the regions of a rank's heap, whose last region is the workspace; "bytes", the
// size of the heap; and "L", the size of the tensor L.
py::dict tell_layout(int ranks, int experts, int rows, int home_rows, int64_t row_bytes, int d_hidden,
                     bool sends_again, bool is_pool, bool is_staged) {
  Pass pass;
  const Layout& l = pass.layout = layout_of(ranks, experts, rows, row_bytes, is_pool, is_staged, sends_again);
  Experts e;
  e.model = static_cast<int>(row_bytes / 2), e.hidden = d_hidden;
  py::dict told;
  told["counters"] = l.failed(), told["inbox"] = l.begin(), told["weights"] = l.weights(0, 0);
  told["L"] = l.size(), told["workspace"] = l.bytes();
  told["bytes"] = l.bytes() + place(pass, e, home_rows, nullptr);
  return told;
}

void bind_flashdmoe(py::module_& m) {
  using py::arg;
  m.def("flashdmoe", &run, py::kw_only(), arg("device"), arg("stream"), arg("hopper"),
        arg("is_backward") = false, arg("element"), arg("activation"), arg("blocks"), arg("ranks"),
        "Launches a pass of a layer. ranks: one dict for each rank, with fields as in cuda/flashdmoe/pass.h, "
        "experts.h.");
  m.def("flashdmoe_layout", &tell_layout, arg("ranks"), arg("experts"), arg("rows"), arg("home_rows"),
        arg("row_bytes"), arg("d_hidden"), arg("sends_again") = false, arg("is_pool") = false,
        arg("is_staged") = false,
        "Returns byte offsets of a heap's regions, its size \"bytes\", and the size \"L\" of the tensor L.");
}

const pmoe::Module joined(bind_flashdmoe, list_kernels);

}  // namespace

// Python binding of FlashDMoE's kernels. Addresses and streams are passed as integers.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <string>

#include "common/on_device.h"
#include "flashdmoe/launch.h"
#include "module.h"
#include "peers/fields.h"
#include "route/layout.h"

namespace py = pybind11;

namespace {

using pmoe::Activation;
using pmoe::Element;
using pmoe::peers::Fields;
using namespace pmoe::flashdmoe;

constexpr int kTileRows = 128;           // rows of a tile on every architecture
constexpr int kFewestTileColumns = 128;  // smallest tile width of any architecture; it gives the most tasks
constexpr int kMostBlocks = 1024;        // largest number of blocks of a rank

void list_kernels(std::vector<pmoe::KernelInfo>& found) {
  static std::map<std::string, int> names;  // static, because KernelInfo::name points to its keys
  for_each([&](const Which& which) {
    if (kernel_of(which) == nullptr) return;  // pmoe._nvshmem has none for Hopper
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

// Assigns addresses in the workspace (task queue, counters) to a pass, and returns the workspace's size in
// bytes. All launches share one workspace, so the offsets do not depend on the activation, the number of
// blocks or the architecture.
int64_t place(Pass& pass, const Experts& experts, int most_tokens, uint8_t* base) {
  pass.processors = kMostBlocks - 1;
  return place_for_all(pass, experts, true, kTileRows, kFewestTileColumns, most_tokens, base);
}

Experts read_experts(Fields& fields, int model) {
  Experts e;
  e.model = model, e.hidden = fields.small("d_hidden");
  e.w1 = fields.at<void>("w1"), e.b1 = fields.at<void>("b1");
  e.w2 = fields.at<void>("w2"), e.b2 = fields.at<void>("b2");
  e.input = fields.at<void>("input"), e.wide = fields.at<void>("hidden"),
  e.active = fields.at<void>("active");
  e.gradient = fields.at<void>("gradient"), e.dots = fields.at<float>("dots");
  e.of_w1 = fields.at<void>("of_w1"), e.of_w2 = fields.at<void>("of_w2");
  e.of_b1 = fields.at<void>("of_b1"), e.of_b2 = fields.at<void>("of_b2");
  return e;
}

void read_choice(Fields& fields, Pass& pass) {
  GateChoice& choice = pass.routing.choice;
  const int experts = pass.layout.cells();
  choice.is_asked = fields.small("chooses") != 0, choice.normalizes = fields.small("normalize") != 0;
  choice.balance_scale = pmoe::route::balance_scale(pass.tokens, experts, pass.choices);
  choice.z_scale = pmoe::route::z_scale(fields.real("z_loss_weight"), pass.tokens);
  choice.logits = fields.at<float>("logits"), choice.weight = fields.at<const void>("gate_weight"),
  choice.counts = fields.at<int32_t>("all_counts");
  choice.l_aux = fields.at<float>("l_aux");
  if (choice.weight != nullptr && experts % 2 != 0)
    throw py::value_error("experts (" + std::to_string(experts) +
                          ") must be even if the launch computes the gate's scores");
  if (choice.is_asked && (experts > kMostChosen || pass.choices > pmoe::route::kMostChoices))
    throw py::value_error("experts (" + std::to_string(experts) + ") and top_k (" +
                          std::to_string(pass.choices) + ") must be at most " + std::to_string(kMostChosen) +
                          " and " + std::to_string(pmoe::route::kMostChoices) +
                          " if the launch chooses experts");
}

// Returns the arguments of one rank, read from its Python dict. Rows of tokens must be contiguous in memory.
Member read_member(Fields& fields, const Which& which, int blocks) {
  Member m;
  Pass& pass = m.pass;
  const int64_t row_bytes = fields.number("row_bytes");
  pass.layout = layout_of(fields.small("ranks"), fields.small("experts"), fields.small("heap_rows"),
                          row_bytes, fields.small("is_pool") != 0, fields.small("is_staged") != 0,
                          fields.small("sends_again") != 0);
  pass.heaps = fields.at<uint8_t* const>("heaps");
  pass.rank = fields.small("rank");
  pass.watch = pmoe::peers::read_watch(fields, pass.rank);
  pass.counts = fields.at<int32_t>("send_counts"), pass.slot = fields.at<int32_t>("slot");
  pass.home = fields.at<int32_t>("home"), pass.offset = fields.at<int32_t>("offset");
  pass.expert = fields.at<int32_t>("expert"), pass.row = fields.at<int32_t>("row");
  RoutingTasks& routing = pass.routing;
  routing.is_asked = fields.small("routes") != 0;
  routing.chosen = fields.at<const int64_t>("chosen"), routing.keep = fields.at<const uint8_t>("keep");
  routing.capacity = pmoe::smaller(fields.small("capacity"), pass.layout.capacity);
  pass.weight = fields.at<float>("weight");
  pass.tokens = fields.small("tokens"), pass.choices = fields.small("top_k");
  read_choice(fields, pass);
  pass.by_choices = pmoe::Divisor(pass.choices), pass.by_experts = pmoe::Divisor(pass.layout.experts);
  pass.source = fields.at<const uint8_t>("source"), pass.source_stride = row_bytes;
  pass.result = fields.at<uint8_t>("result"), pass.result_stride = row_bytes;
  pass.again = fields.at<const uint8_t>("again"), pass.again_stride = row_bytes;
  pass.weight_gradient = fields.at<float>("weight_gradient");
  Experts& e = m.experts = read_experts(fields, static_cast<int>(row_bytes / 2));
  void* const recomputed = fields.at<void>("recomputed");  // for T_M in backward, if forward did not keep it
  if (recomputed != nullptr) e.wide = recomputed;
  const int most_tokens = fields.small("heap_home_rows");
  if (pass.tokens > most_tokens)
    throw py::value_error("tokens (" + std::to_string(pass.tokens) + ") must be at most the heap's " +
                          std::to_string(most_tokens));
  place(pass, e, most_tokens, fields.at<uint8_t>("workspace"));
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
  const int count = pmoe::peers::count_ranks(ranks);
  if (blocks < 2 || blocks > kMostBlocks)
    throw py::value_error("blocks (" + std::to_string(blocks) +
                          ") must be from 2 (one of them schedules) to " + std::to_string(kMostBlocks));
  Launch all;
  all.ranks = count;
  for (int i = 0; i < all.ranks; ++i) {
    const auto dict = ranks[static_cast<size_t>(i)].cast<py::dict>();
    Fields fields(dict);
    all.of_rank[i] = read_member(fields, which, blocks);
    fields.finish();
  }
  const py::gil_scoped_release without_gil;  // a launch blocks while the queue of launches is full
  const pmoe::OnDevice on_device(device);
  launch(which, all, blocks, reinterpret_cast<void*>(stream));
}

// Returns a dict: the byte offset of each region of a rank's heap, by the region's name; "bytes", the size of
// the heap in bytes; and "L", the size in bytes of the tensor L that holds rows. The last region is the
// workspace.
py::dict layout_dict(int ranks, int experts, int rows, int home_rows, int64_t row_bytes, int d_hidden,
                     bool sends_again, bool is_pool, bool is_staged) {
  Pass pass;
  const Layout& l = pass.layout = layout_of(ranks, experts, rows, row_bytes, is_pool, is_staged, sends_again);
  Experts e;
  e.model = static_cast<int>(row_bytes / 2), e.hidden = d_hidden;
  py::dict offsets;
  offsets["counters"] = l.failed(), offsets["inbox"] = l.begin(), offsets["weights"] = l.weights(0, 0);
  offsets["L"] = l.size(), offsets["workspace"] = l.bytes();
  offsets["bytes"] = l.bytes() + place(pass, e, home_rows, nullptr);
  return offsets;
}

void bind_flashdmoe(py::module_& m) {
  using py::arg;
  m.attr("flashdmoe_puts") = has_puts();
  m.def("flashdmoe", &run, py::kw_only(), arg("device"), arg("stream"), arg("hopper"),
        arg("is_backward") = false, arg("element"), arg("activation"), arg("blocks"), arg("ranks"),
        "Launches a pass of a layer. ranks: one dict for each rank, with fields as in cuda/flashdmoe/pass.h, "
        "experts.h.");
  m.def("flashdmoe_layout", &layout_dict, arg("ranks"), arg("experts"), arg("rows"), arg("home_rows"),
        arg("row_bytes"), arg("d_hidden"), arg("sends_again") = false, arg("is_pool") = false,
        arg("is_staged") = false,
        "Returns byte offsets of a heap's regions, its size \"bytes\", and the size \"L\" of the tensor L.");
}

const pmoe::Module module(bind_flashdmoe, list_kernels);

}  // namespace

// Python binding of COMET's kernels. Addresses arrive as integers; pmoe/kernels/comet/operators.py has
// checked what they point to.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <string>

#include "comet/launch.h"
#include "comet/read.h"
#include "common/on_device.h"
#include "module.h"

namespace py = pybind11;

namespace {

using pmoe::Activation;
using pmoe::Element;
using pmoe::Epilogue;
using pmoe::Form;
using pmoe::Sharing;
using namespace pmoe::comet;

void list_kernels(std::vector<pmoe::KernelInfo>& found) {
  static std::map<std::string, int> names;  // static, because KernelInfo::name points to its keys
  for (const bool hopper : {true, false}) {
    const Path& path = hopper ? hopper_path : ampere_path;
    for_each([&](const Which& which) {
      const auto name = names.emplace(name_of(which, path), 0).first;
      found.push_back({name->first.c_str(), reinterpret_cast<const void*>(path.kernel(which)), path.threads,
                       path.shared_bytes, hopper});
    });
  }
}

void run(int device, std::uintptr_t stream, bool hopper, int kernel, int element, int form, int epilogue,
         int activation, int blocks, const py::list& ranks, int sharing) {
  const Which which = {static_cast<Kernel>(kernel), static_cast<Element>(element), static_cast<Form>(form),
                       static_cast<Epilogue>(epilogue), static_cast<Activation>(activation)};
  int64_t a_rows[kMostVirtual] = {};
  Launch all = read_launch(ranks, blocks, a_rows);
  const int count = static_cast<int>(ranks.size());
  const py::gil_scoped_release without_gil;  // a launch blocks while the queue of launches is full
  const pmoe::OnDevice on_device(device);
  const Path& path = hopper ? hopper_path : ampere_path;
  const bool in_pairs =
      sharing == 0 ? may_pair_blocks(path, which, all, count) : static_cast<Sharing>(sharing) == Sharing::kA;
  for (int i = 0; i < count; ++i) all.fused[i].problem.blocks_across = in_pairs ? 2 : 1;
  launch(path, which, all, count, a_rows, reinterpret_cast<void*>(stream));
}

void bind_comet(py::module_& m) {
  using py::arg;
  m.def("comet", &run, py::kw_only(), arg("device"), arg("stream"), arg("hopper"), arg("kernel"),
        arg("element"), arg("form"), arg("epilogue") = 0, arg("activation") = 0, arg("blocks"), arg("ranks"),
        arg("sharing") = 0,
        "Launches a fused kernel. ranks: one dict for each rank; for the fields see cuda/comet/rank.h.");
  m.def("comet_layout", &layout_dict, arg("ranks"), arg("experts"), arg("rows"), arg("home_rows"),
        arg("row_bytes"), "Returns byte offsets of a heap's regions, and its size \"bytes\".");
  m.def(
      "comet_path",
      [](bool hopper) {
        const Path& path = hopper ? hopper_path : ampere_path;
        py::dict facts;
        facts["tile_rows"] = path.tile_rows, facts["tile_columns"] = path.tile_columns;
        facts["board_words"] = path.board_words;
        return facts;
      },
      arg("hopper"), "Returns rows and columns of a tile, and the most (ranks + 1) x experts of a rank.");
  m.attr("comet_limits") = limits_dict();
}

const pmoe::Module module(bind_comet, list_kernels);

}  // namespace

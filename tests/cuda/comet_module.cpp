// A Python module with the functions of pmoe._cuda that fused layers call, which runs the kernels' own source
// in the emulator: so the Python face, and whole layers of several processes, run on the CPU.
#include <sched.h>

#include "comet/ampere.cuh"
#include "comet/hopper.cuh"
#include "comet/read.h"
#include "grouped_gemm/parts.h"
#include "maps.h"

using namespace pmoe;
using namespace pmoe::comet;

namespace {

using T = bf16;

void encode(Launch& all, int count, Form form, const int64_t* a_rows) {
  for (int i = 0; i < count; ++i) {
    const Problem& p = all.fused[i].problem;
    all.fused[i].a_map = map_2d(p.a, p.k, larger<int64_t>(a_rows[i], 1), p.a_stride, 128);
    all.fused[i].b_map =
        form == Form::kForward ? map_3d(p.b, p.k, p.n, p.experts, 128) : map_3d(p.b, p.n, p.k, p.experts, 64);
  }
}

template <Form kForm, Epilogue kEpilogue, Activation kActivation>
void dispatch(const Launch& all, bool hopper) {
  if (hopper)
    dispatch_gemm<T, kForm, kEpilogue, kActivation>(all);
  else
    dispatch_gemm_sm80<T, kForm, kEpilogue, kActivation>(all);
}

template <Form kForm, Epilogue kEpilogue>
void dispatch_as(const Launch& all, bool hopper, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return dispatch<kForm, kEpilogue, Activation::kRelu>(all, hopper);
    case Activation::kGelu:
      return dispatch<kForm, kEpilogue, Activation::kGelu>(all, hopper);
    case Activation::kSilu:
      return dispatch<kForm, kEpilogue, Activation::kSilu>(all, hopper);
    default:
      return dispatch<kForm, kEpilogue, Activation::kSwiglu>(all, hopper);
  }
}

void run(int, std::uintptr_t, bool hopper, int kernel, int element, int form, int epilogue, int activation,
         int blocks, const py::list& ranks) {
  static unsigned seed = 0;
  if (element != 0) throw py::value_error("the emulated kernels take bfloat16");
  int64_t a_rows[kMostVirtual] = {};
  Launch all = read_launch(ranks, blocks, a_rows);
  const int count = static_cast<int>(ranks.size());
  encode(all, count, static_cast<Form>(form), a_rows);
  const auto kind = static_cast<Activation>(activation);
  emu::most_passes = ~uint64_t{0};  // peers are other processes, and may be slow
  emu::between_passes = [] { sched_yield(); };
  emu::launch(static_cast<unsigned>(count * blocks),
              hopper ? static_cast<unsigned>(hopper::kThreads) : static_cast<unsigned>(ampere::kThreads),
              ++seed, [&] {
                const bool forward = static_cast<Form>(form) == Form::kForward;
                if (kernel == 0 && forward)
                  dispatch_as<Form::kForward, Epilogue::kHidden>(all, hopper, kind);
                else if (kernel == 0)
                  dispatch_as<Form::kInput, Epilogue::kHiddenGradient>(all, hopper, kind);
                else if (hopper)
                  forward ? gemm_combine<T, Form::kForward>(all) : gemm_combine<T, Form::kInput>(all);
                else
                  forward ? gemm_combine_sm80<T, Form::kForward>(all)
                          : gemm_combine_sm80<T, Form::kInput>(all);
              });
  (void)epilogue;
}

}  // namespace

PYBIND11_MODULE(comet_module, m) {
  using py::arg;
  m.def("comet", &run, py::kw_only(), arg("device"), arg("stream"), arg("hopper"), arg("kernel"),
        arg("element"), arg("form"), arg("epilogue") = 0, arg("activation") = 0, arg("blocks"), arg("ranks"));
  m.def("comet_layout", &tell_layout, arg("ranks"), arg("experts"), arg("rows"), arg("home_rows"),
        arg("row_bytes"));
  m.def("comet_path", [](bool hopper) {
    py::dict told;
    told["tile_rows"] = hopper ? hopper::kRows : ampere::kRows;
    told["tile_columns"] = hopper ? hopper::kColumns : ampere::kColumns;
    told["board_words"] = hopper ? kBoardWords : kSmallBoardWords;
    return told;
  });
  m.def("row_dot_parts", [](bool hopper, int columns) {
    return hopper ? hopper_row_dot_parts(columns) : ampere_row_dot_parts(columns);
  });
  m.attr("comet_limits") = tell_limits();
}

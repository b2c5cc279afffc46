// Python binding of the grouped products. Addresses and streams are passed as integers;
// pmoe/kernels/grouped_gemm/products.py has checked the tensors.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

#include "common/on_device.h"
#include "grouped_gemm/launch.h"
#include "grouped_gemm/parts.h"
#include "grouped_gemm/sharing.h"
#include "grouped_gemm/storing.h"
#include "module.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;
using pmoe::Element;
using pmoe::Epilogue;
using pmoe::Form;
using pmoe::GroupedGemm;
using pmoe::Sharing;
using pmoe::Storing;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void list_kernels(std::vector<pmoe::KernelInfo>& found) {
  static std::map<std::string, int> names;  // static, because KernelInfo::name points to its keys
  const auto add = [&](const GroupedGemm& which, const pmoe::GroupedGemmPath& path) {
    const char* name = names.emplace(name_of(which, path), 0).first->first.c_str();
    found.push_back(
        {name, path.function(which), path.threads, path.shared_bytes(which), &path == &pmoe::hopper_path});
  };
  for (int cluster : {1, 2})
    pmoe::for_each_grouped_gemm(cluster, [&](const GroupedGemm& which) { add(which, pmoe::hopper_path); });
  pmoe::for_each_in_turns([&](const GroupedGemm& which) { add(which, pmoe::hopper_path); });
  pmoe::for_each_boxed([&](const GroupedGemm& which) { add(which, pmoe::hopper_path); });
  pmoe::for_each_grouped_gemm(1, [&](const GroupedGemm& which) { add(which, pmoe::ampere_path); });
}

int multiprocessors() {
  int device = 0, count = 0;
  pmoe::check(cudaGetDevice(&device), "cudaGetDevice");
  pmoe::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
              "cudaDeviceGetAttribute");
  return count;
}

void grouped_gemm(int device, Address stream, bool hopper, int element, int form, int epilogue,
                  int activation, Address a, int64_t a_rows, int64_t a_stride, Address b, int64_t b_rows,
                  int64_t b_stride, Address d, int64_t d_stride, Address ends, int experts, int rows, int m,
                  int n, int k, Address slot, int top_k, bool a_gathered, Address bias, Address weight,
                  Address active, int64_t active_stride, Address hidden, int64_t hidden_stride,
                  Address row_dots, bool weighs_active, Address place, bool wide, bool accumulates,
                  int sharing, int storing, bool b_gathered, int spare, Address next_tile) {
  GroupedGemm which = {static_cast<Element>(element), static_cast<Form>(form),
                       static_cast<Epilogue>(epilogue), static_cast<pmoe::Activation>(activation)};
  const Storing storing_way = pmoe::storing_of(storing);
  const Sharing sharing_way = pmoe::sharing_of(sharing);
  which.b_gathered = b_gathered;
  if (b_gathered && (which.form != Form::kWeight || slot == 0 || !hopper))
    throw std::invalid_argument("b_gathered needs form 2 (weight), a slot and hopper; got form " +
                                std::to_string(form) + ", slot " + std::to_string(slot) + " and hopper " +
                                std::to_string(hopper));
  if (which.form != Form::kForward && (a_gathered || (slot != 0 && !b_gathered)))
    throw std::invalid_argument("slot and a_gathered must be left out in form " + std::to_string(form) +
                                ": only form 0 (forward) gathers rows of A or takes weights by slot");
  if (place != 0 && (which.form == Form::kWeight || which.epilogue != Epilogue::kPlain))
    throw std::invalid_argument("place must be left out in form " + std::to_string(form) + " with epilogue " +
                                std::to_string(epilogue) +
                                ": only the plain results of forms 0 and 1 are stored row by row");
  pmoe::Problem p;
  p.a = at<void>(a), p.b = at<void>(b), p.d = at<void>(d);
  p.a_stride = a_stride, p.b_stride = b_stride, p.d_stride = d_stride;
  p.ends = at<const int32_t>(ends), p.slot = at<const int32_t>(slot), p.top_k = pmoe::Divisor(top_k);
  p.experts = experts, p.rows = rows, p.m = m, p.n = n, p.k = k;
  p.a_gathered = a_gathered;
  p.bias = at<void>(bias), p.weight = at<const float>(weight);
  p.active = at<void>(active), p.active_stride = active_stride;
  p.hidden = at<void>(hidden), p.hidden_stride = hidden_stride;
  p.row_dots = at<float>(row_dots);
  p.place = at<const int32_t>(place);
  p.weighs_active = weighs_active, p.wide = wide, p.accumulates = accumulates;
  p.next_tile = at<uint32_t>(next_tile);
  if (hopper) {
    pmoe::choose_storing(which, p, storing_way, sharing_way);
    pmoe::share(which, p, sharing_way);
  }
  const pmoe::OnDevice on_device(device);
  const pmoe::GroupedGemmPath& path = hopper ? pmoe::hopper_path : pmoe::ampere_path;
  const int blocks = pmoe::num_blocks(which, p, hopper, multiprocessors(), spare);
  path.launch(which, p, a_rows, b_rows, blocks, at<void>(stream));
}

void bind_grouped_gemm(py::module_& m) {
  using py::arg;
  // A launch blocks while the queue of launches is full. The GIL is released meanwhile, so that other threads
  // can run.
  m.def("grouped_gemm", &grouped_gemm, py::kw_only(), arg("device"), arg("stream"), arg("hopper"),
        arg("element"), arg("form"), arg("epilogue") = 0, arg("activation") = 0, arg("a"), arg("a_rows"),
        arg("a_stride"), arg("b"), arg("b_rows") = 0, arg("b_stride") = 0, arg("d"), arg("d_stride"),
        arg("ends"), arg("experts"), arg("rows"), arg("m") = 0, arg("n"), arg("k") = 0, arg("slot") = 0,
        arg("top_k") = 1, arg("a_gathered") = false, arg("bias") = 0, arg("weight") = 0, arg("active") = 0,
        arg("active_stride") = 0, arg("hidden") = 0, arg("hidden_stride") = 0, arg("row_dots") = 0,
        arg("weighs_active") = false, arg("place") = 0, arg("wide") = false, arg("accumulates") = false,
        arg("sharing") = 0, arg("storing") = 0, arg("b_gathered") = false, arg("spare") = 0,
        arg("next_tile") = 0, py::call_guard<py::gil_scoped_release>(),
        "Launches a grouped product; for the arguments see cuda/grouped_gemm/problem.h.");
  m.def(
      "grouped_gemm_sharing",
      [](int form, int m, int n, bool a_gathered, bool b_gathered) {
        return static_cast<int>(pmoe::best_sharing(static_cast<Form>(form), m, n, a_gathered, b_gathered));
      },
      py::kw_only(), arg("form"), arg("m") = 0, arg("n"), arg("a_gathered") = false,
      arg("b_gathered") = false,
      "Returns which operand a product shares if `sharing` is 0: 1 none, 2 B, 3 A.");
  m.def(
      "grouped_gemm_takes_turns",
      [](int form, int epilogue, int activation, int k, bool a_gathered, bool placed, int storing) {
        const GroupedGemm which = {Element::kBf16, static_cast<Form>(form), static_cast<Epilogue>(epilogue),
                                   static_cast<pmoe::Activation>(activation)};
        pmoe::Problem p;
        p.k = k, p.a_gathered = a_gathered;
        const int32_t any_place = 0;
        if (placed) p.place = &any_place;
        return pmoe::takes_turns(which, p, pmoe::storing_of(storing));
      },
      py::kw_only(), arg("form"), arg("epilogue") = 0, arg("activation") = 0, arg("k"),
      arg("a_gathered") = false, arg("placed") = false, arg("storing"),
      "Returns whether a product is computed in turns on Hopper; for `storing` see\n"
      "cuda/grouped_gemm/storing.h. placed: whether the product has the argument `place`.");
  m.def(
      "row_dot_parts",
      [](bool hopper, int columns, bool in_turns) {
        if (!hopper) return pmoe::ampere_row_dot_parts(columns);
        return in_turns ? pmoe::turns_row_dot_parts(columns) : pmoe::hopper_row_dot_parts(columns);
      },
      arg("hopper"), arg("columns"), arg("in_turns") = false,
      "Returns the number of parts into which a kernel splits a row's inner product over `columns` columns.");
}

const pmoe::Module module(bind_grouped_gemm, list_kernels);

}  // namespace

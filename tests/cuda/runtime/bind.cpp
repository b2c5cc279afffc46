// Joins the product's own bindings where they are linked over this runtime: what it was asked, for tests.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sched.h>

#include "module.h"

namespace py = pybind11;

namespace {

py::list launched() {
  py::list found;
  for (const stub::Launched& each : stub::launched) {
    py::dict one;
    one["kernel"] = reinterpret_cast<std::uintptr_t>(each.kernel);
    one["blocks"] = each.blocks, one["threads"] = each.threads, one["cluster"] = each.cluster;
    one["shared_bytes"] = each.shared_bytes, one["together"] = each.together;
    one["stream"] = reinterpret_cast<std::uintptr_t>(each.stream), one["device"] = each.device;
    found.append(one);
  }
  return found;
}

py::list noted() {
  py::list found;
  for (const stub::Noted& each : stub::noted)
    found.append(py::make_tuple(each.what, each.stream, each.numbers, each.launches));
  return found;
}

// For another library that stands in for one of CUDA's, such as NCCL's: a function that writes a call down.
// ncclCommAbort runs in a separate thread, so it is not written into the journal, which only the main thread
// may change. It only checks that the device has a context.
void note(const char* what, void* stream, int64_t first, int64_t second, int64_t third) {
  if (std::string(what) == "ncclCommAbort") return stub::need_context();
  stub::note(what, reinterpret_cast<uintptr_t>(stream), {first, second, third});
}

template <class All>
py::list listed(const All& all) {
  py::list found;
  for (const auto& each : all) found.append(each);
  return found;
}

// A process without contexts, whose calling thread has none.
void reset(bool runs, int processors) {
  stub::launched.clear(), stub::encoded.clear(), stub::refused.clear();
  stub::contexts.clear(), stub::asked.clear(), stub::allowed.clear();
  stub::noted.clear(), stub::fails_after = -1, stub::are_reached = true, stub::is_broken = false;
  stub::captures = false, stub::captured.clear();
  stub::device = 0, stub::current = -1, stub::runs = runs, stub::processors = processors;
}

void bind_stub(py::module_& m) {
  emu::most_passes = ~uint64_t{0};  // peers are other processes, and may be slow
  emu::between_passes = [] { sched_yield(); };
  m.def("stub_reset", &reset, py::arg("runs") = true, py::arg("processors") = 16);
  m.def("stub_launched", &launched);
  m.def("stub_refused", [] { return listed(stub::refused); });
  m.def("stub_contexts", [] { return listed(stub::contexts); });
  m.def("stub_num_asked", [] { return stub::asked.size(); });
  m.def("stub_num_encoded", [] { return stub::encoded.size(); });
  m.def("stub_noted", &noted);
  m.def("stub_num_events", [] { return stub::events.size(); });
  m.def("stub_note_address", [] { return reinterpret_cast<std::uintptr_t>(&note); });
  m.def("stub_fail_after", [](int64_t calls) { stub::fails_after = calls; });
  m.def("stub_reach_events", [](bool are_reached) { stub::are_reached = are_reached; });
  m.def("stub_break_device", [] { stub::is_broken = true; });
  m.def("stub_capture", [](bool captures) { stub::captures = captures; });
  m.def("stub_num_captured", [] { return stub::captured.size(); });
  m.def("stub_replay", [](size_t number) { stub::replay(number); });
  m.def("stub_device", [] { return stub::device; });
}

const pmoe::Module joined(bind_stub, [](std::vector<pmoe::KernelInfo>&) {});

}  // namespace

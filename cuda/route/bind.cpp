// Python binding of the routing. Addresses and streams are passed as integers;
// pmoe/kernels/route/reference.py has checked the tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>

#include "module.h"
#include "route/launch.h"

namespace py = pybind11;
namespace route = pmoe::route;

namespace {

using Address = std::uintptr_t;

float* floats(Address data) { return reinterpret_cast<float*>(data); }
int32_t* ints(Address data) { return reinterpret_cast<int32_t*>(data); }

route::Problem problem(int device, Address stream, int64_t num_tokens, int64_t num_experts, int64_t top_k,
                       int64_t num_chunks, bool normalize, double z_loss_weight, int64_t sorted_chunks,
                       int64_t first_last, int64_t num_last) {
  return {device,        reinterpret_cast<void*>(stream),
          num_tokens,    num_experts,
          top_k,         num_chunks,
          normalize,     z_loss_weight,
          sorted_chunks, first_last,
          num_last};
}

// sent: address to which the messages of row counts are written; 0 if they are not wanted.
// ranks, header: the number of ranks that get a message, and the header of the messages.
void forward(const route::Problem& problem, Address logits, Address weight, Address expert, Address position,
             Address slot, Address counts, Address ends, Address fault, Address sent, Address l_aux,
             Address workspace, int64_t workspace_bytes, int32_t not_finite, int32_t ranks,
             const std::array<int32_t, pmoe::counts::kHeader>& header) {
  pmoe::counts::Pack pack{};
  if (sent != 0) {
    const auto experts = static_cast<int32_t>(problem.num_experts / (ranks < 1 ? 1 : ranks));
    pack.message = {ranks, static_cast<int32_t>(problem.num_chunks), experts};
    for (int i = 0; i < pmoe::counts::kHeader; ++i) pack.header[i] = header[i];
    pack.sent = ints(sent);
  }
  route::forward(problem, {floats(logits), floats(weight), ints(expert), ints(position), ints(slot),
                           ints(counts), ints(ends), floats(l_aux), reinterpret_cast<void*>(workspace),
                           workspace_bytes, reinterpret_cast<int64_t*>(fault), not_finite, pack});
}

void backward(const route::Problem& problem, Address logits, Address expert, Address weight, Address counts,
              Address grad_weight, Address partial, Address position, int64_t num_partials,
              Address grad_l_aux, Address grad_logits) {
  route::backward(problem,
                  {floats(logits), ints(expert), floats(weight), ints(counts), floats(grad_weight),
                   floats(partial), ints(position), num_partials, floats(grad_l_aux), floats(grad_logits)});
}

void halves(int device, Address stream, int64_t num_tokens, int64_t num_experts, int64_t columns,
            Address grad_logits, Address halves, Address weight, Address twice) {
  route::halves(device, reinterpret_cast<void*>(stream), num_tokens, num_experts, columns,
                {floats(grad_logits), reinterpret_cast<void*>(halves), reinterpret_cast<void*>(weight),
                 reinterpret_cast<void*>(twice)});
}

void bind_route(py::module_& m) {
  py::class_<route::Problem>(m, "RouteProblem", py::module_local(),
                             "The arguments that the launches of pmoe.kernels.route share.")
      .def(py::init(&problem), py::arg("device"), py::arg("stream"), py::arg("num_tokens"),
           py::arg("num_experts"), py::arg("top_k"), py::arg("num_chunks"), py::arg("normalize"),
           py::arg("z_loss_weight"), py::arg("sorted_chunks") = 1, py::arg("first_last") = 0,
           py::arg("num_last") = 0);
  m.def("route_refusal", &route::refusal, py::arg("num_tokens"), py::arg("num_experts"), py::arg("top_k"),
        py::arg("num_chunks"),
        "Returns why there is no kernel for these sizes, or an empty string. Does not look at the device.");
  m.def("route_prepare", &route::prepare, py::arg("device"), py::arg("num_experts"), py::arg("top_k"),
        py::call_guard<py::gil_scoped_release>(),
        "Makes the kernels ready. Raises RuntimeError if the device cannot run them.");
  m.def("route_workspace_bytes", &route::workspace_bytes,
        "Returns the bytes of workspace that a forward launch needs.");
  // A launch blocks while the queue of launches is full. The GIL is released meanwhile, so that other threads
  // can run.
  m.def("route", &forward, py::call_guard<py::gil_scoped_release>());
  m.def("route_backward", &backward, py::call_guard<py::gil_scoped_release>());
  m.def("route_halves", &halves, py::call_guard<py::gil_scoped_release>());
}

const pmoe::Module module(bind_route, route::list_kernels);

}  // namespace

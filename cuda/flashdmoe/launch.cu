#include "common/prepared.h"
#include "flashdmoe/ampere.cuh"
#include "flashdmoe/hopper.cuh"
#include "flashdmoe/launch.h"

namespace pmoe::flashdmoe {

namespace {

PassKernel ampere_kernel(const Which& which) {
  const bool is_bf16 = which.element == Element::kBf16;
  if (which.is_backward) return is_bf16 ? backward_bf16(which.activation) : backward_fp16(which.activation);
  return is_bf16 ? ampere_bf16(which.activation) : ampere_fp16(which.activation);
}

ForwardKernel hopper_forward(const Which& which) {
  return which.element == Element::kBf16 ? hopper_bf16(which.activation) : hopper_fp16(which.activation);
}

BackwardKernel hopper_backward(const Which& which) {
  return which.element == Element::kBf16 ? hopper_backward_bf16(which.activation)
                                         : hopper_backward_fp16(which.activation);
}

// The operands of one product, as its tensor maps describe them. A is the whole tensor that contains the rows
// of all tasks. a_rows and b_rows are the arguments of encode_maps().
struct Mapped {
  Form form;
  Problem problem;
  int64_t a_rows, b_rows = 0;
};

// Returns the beginning of the rank's own heap. The word `failed`, to which `watch` points, lies at a known
// offset.
const uint8_t* own_heap(const Pass& pass) {
  return reinterpret_cast<const uint8_t*>(pass.watch.failed) - pass.layout.failed();
}

struct Rows {
  const void* begin;
  int64_t count;
};

Rows rows_of_heap(const Pass& pass) { return {own_heap(pass) + pass.layout.begin(), pass.layout.rows()}; }

// Returns a description of a product of rows and weights, from which encode_maps() makes its tensor maps.
// Problem::d stays null, because encode_maps() only uses it for an operand without rows, and A has rows here.
Mapped of_rows(Form form, const Rows& rows, const void* weights, int n, int k, int experts) {
  Mapped mapped = {form, {}, rows.count};
  Problem& p = mapped.problem;
  p.a = rows.begin, p.a_stride = k, p.b = weights, p.n = n, p.k = k, p.experts = experts;
  return mapped;
}

void map_forward(const Which& which, const Member& m, Mapped (&mapped)[3]) {
  const Experts& e = m.experts;
  const int wide = wide_columns(e, which.activation), experts = m.pass.layout.experts;
  const int64_t cells = m.pass.layout.all_rows();
  mapped[kFirstProduct] = of_rows(Form::kForward, rows_of_heap(m.pass), e.w1, wide, e.model, experts);
  mapped[kSecondProduct] = of_rows(Form::kForward, {e.active, cells}, e.w2, e.model, e.hidden, experts);
  const void* const gate = m.pass.routing.choice.weight;
  // If the launch has no task with the gate's product, the product's map is not used, but must still point to
  // valid memory.
  mapped[kGateProduct] = mapped[kFirstProduct];
  if (m.pass.routing.scored() > 0)
    mapped[kGateProduct] =
        of_rows(Form::kForward, {m.pass.source, m.pass.tokens}, gate, m.pass.layout.cells(), e.model, 1);
}

// Returns a description of a sum over rows, A^T B, from which encode_maps() makes its tensor maps.
Mapped over_rows(const Rows& a, const Rows& b, int m, int n) {
  Mapped mapped = {Form::kWeight, {}, a.count, b.count};
  Problem& p = mapped.problem;
  p.a = a.begin, p.a_stride = p.m = m, p.b = b.begin, p.b_stride = p.n = n;
  return mapped;
}

void map_backward(const Which& which, const Member& m, Mapped (&mapped)[5]) {
  const Experts& e = m.experts;
  const int wide = wide_columns(e, which.activation), experts = m.pass.layout.experts;
  const int64_t cells = m.pass.layout.all_rows();
  const Rows heap = rows_of_heap(m.pass), gradient = {e.gradient, cells}, active = {e.active, cells};
  const Rows input = e.input == nullptr ? heap : Rows{e.input, cells};
  mapped[kFirstProduct] = of_rows(Form::kForward, input, e.w1, wide, e.model, experts);
  mapped[kHiddenProduct] = of_rows(Form::kInput, heap, e.w2, e.hidden, e.model, experts);
  mapped[kInputProduct] = of_rows(Form::kInput, gradient, e.w1, e.model, wide, experts);
  mapped[kOfW1] = over_rows(gradient, input, wide, e.model);
  mapped[kOfW2] = over_rows(heap, active, e.model, e.hidden);
}

template <int kProducts, class MapAll>
HopperLaunch<kProducts> with_maps(const Which& which, const Launch& launch, const MapAll& map_all) {
  HopperLaunch<kProducts> all = {};
  all.launch = launch;
  for (int rank = 0; rank < launch.ranks; ++rank) {
    Mapped mapped[kProducts];
    map_all(which, launch.of_rank[rank], mapped);
    for (int i = 0; i < kProducts; ++i) {
      MapPair& pair = all.maps[rank].of[i];
      encode_maps(which.element, mapped[i].form, mapped[i].problem, mapped[i].a_rows, mapped[i].b_rows,
                  &pair.a, &pair.b);
    }
  }
  return all;
}

}  // namespace

const void* kernel_of(const Which& which) {
  if (!which.hopper) return reinterpret_cast<const void*>(ampere_kernel(which));
  return which.is_backward ? reinterpret_cast<const void*>(hopper_backward(which))
                           : reinterpret_cast<const void*>(hopper_forward(which));
}

std::string name_of(const Which& which) {
  const char* const names[] = {"", ".relu", ".gelu", ".silu", ".swiglu"};
  return std::string("flashdmoe.") + (which.is_backward ? "backward" : "forward") +
         (which.hopper ? ".sm_90a" : ".sm_80") + (which.element == Element::kBf16 ? ".bf16" : ".fp16") +
         names[static_cast<int>(which.activation)];
}

const Path& path_of(const Which& which) {
  static const Path ampere = {ampere::kThreads, sizeof(AmpereShared), ampere::kColumns};
  static const Path hopper = {hopper::kThreads, sizeof(HopperShared), hopper::kColumns};
  return which.hopper ? hopper : ampere;
}

bool has_puts() { return peers::kHasPuts; }

void launch(const Which& which, const Launch& launch, int blocks, void* stream) {
  const Path& path = path_of(which);
  const Grid grid = {launch.ranks * blocks, path.threads, path.shared_bytes};
  if (!which.hopper) {
    Prepared(name_of(which), ampere_kernel(which), grid, stream).launch(launch);
  } else if (!which.is_backward) {
    const Prepared prepared(name_of(which), hopper_forward(which), grid, stream);
    prepared.launch(with_maps<3>(which, launch, map_forward));
  } else {
    const Prepared prepared(name_of(which), hopper_backward(which), grid, stream);
    prepared.launch(with_maps<5>(which, launch, map_backward));
  }
}

}  // namespace pmoe::flashdmoe

#include "hopper_boxes.cuh"
#include "instances.cuh"

namespace pmoe {

namespace {

template <int kCluster>
struct Find {
  template <Form kForm, Epilogue kEpilogue, Activation kActivation>
  KernelWithStoreMaps operator()() const {
    return hopper::grouped_gemm_by_boxes<bf16, kForm, kEpilogue, kActivation, kCluster>;
  }
};

}  // namespace

// Only weight gradients have a kernel whose blocks share B, and one that gathers the rows of B.
KernelWithStoreMaps hopper_boxes_bf16(const GroupedGemm& which) {
  if (which.b_gathered)
    return hopper::grouped_gemm_by_boxes<bf16, Form::kWeight, Epilogue::kPlain, Activation::kNone, 1, true>;
  if (which.cluster == 2) return Find<2>{}.operator()<Form::kWeight, Epilogue::kPlain, Activation::kNone>();
  return with_constants_of_boxes(which, Find<1>{});
}

}  // namespace pmoe

#include "hopper_boxes.cuh"
#include "instances.cuh"

namespace pmoe {

namespace {

template <int kCluster>
struct Find {
  template <Form kForm, Epilogue kEpilogue, Activation kActivation>
  BoxedKernel operator()() const {
    return hopper::grouped_gemm_by_boxes<fp16, kForm, kEpilogue, kActivation, kCluster>;
  }
};

}  // namespace

// Only weight gradients have a kernel whose blocks share B.
BoxedKernel hopper_boxes_fp16(const GroupedGemm& which) {
  if (which.cluster == 2) return Find<2>{}.operator()<Form::kWeight, Epilogue::kPlain, Activation::kNone>();
  return with_constants_of_boxes(which, Find<1>{});
}

}  // namespace pmoe

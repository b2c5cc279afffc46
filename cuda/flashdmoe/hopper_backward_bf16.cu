#include "flashdmoe/hopper_backward.cuh"
#include "flashdmoe/launch.h"
#include "grouped_gemm/instances.cuh"

namespace pmoe::flashdmoe {

namespace {

struct Find {
  template <Form, Epilogue, Activation kActivation>
  BackwardKernel operator()() const {
    return backward_sm90a<bf16, kActivation>;
  }
};

}  // namespace

BackwardKernel hopper_backward_bf16(Activation activation) {
  return with_activation<Form::kForward, Epilogue::kHidden>(activation, Find{});
}

}  // namespace pmoe::flashdmoe

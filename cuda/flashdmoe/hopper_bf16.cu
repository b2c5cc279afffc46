#include "flashdmoe/hopper.cuh"
#include "flashdmoe/launch.h"
#include "grouped_gemm/instances.cuh"

namespace pmoe::flashdmoe {

namespace {

struct Find {
  template <Form, Epilogue, Activation kActivation>
  ForwardKernel operator()() const {
    return forward_sm90a<bf16, kActivation>;
  }
};

}  // namespace

ForwardKernel hopper_bf16(Activation activation) {
  return with_activation<Form::kForward, Epilogue::kHidden>(activation, Find{});
}

}  // namespace pmoe::flashdmoe

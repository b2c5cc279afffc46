#include "flashdmoe/ampere.cuh"
#include "flashdmoe/launch.h"
#include "grouped_gemm/instances.cuh"

namespace pmoe::flashdmoe {

namespace {

struct Find {
  template <Form, Epilogue, Activation kActivation>
  PassKernel operator()() const {
    return forward_sm80<bf16, kActivation>;
  }
};

}  // namespace

PassKernel ampere_bf16(Activation activation) {
  return with_activation<Form::kForward, Epilogue::kHidden>(activation, Find{});
}

}  // namespace pmoe::flashdmoe

#include "comet/hopper.cuh"
#include "comet/instances.cuh"

namespace pmoe::comet {

namespace {

struct Find {
  template <Form kForm, Epilogue kEpilogue, Activation kActivation>
  FusedKernel operator()() const {
    return dispatch_gemm<bf16, kForm, kEpilogue, kActivation>;
  }
  template <Form kForm>
  FusedKernel combine() const {
    return gemm_combine<bf16, kForm>;
  }
};

}  // namespace

FusedKernel hopper_bf16(const Which& which) { return with_constants(which, Find{}); }

}  // namespace pmoe::comet

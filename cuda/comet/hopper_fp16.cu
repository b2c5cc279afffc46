#include "comet/hopper.cuh"
#include "comet/instances.cuh"

namespace pmoe::comet {

namespace {

struct Find {
  template <Form kForm, Epilogue kEpilogue, Activation kActivation>
  FusedKernel operator()() const {
    return dispatch_gemm<fp16, kForm, kEpilogue, kActivation>;
  }
  template <Form kForm>
  FusedKernel combine() const {
    return gemm_combine<fp16, kForm>;
  }
};

}  // namespace

FusedKernel hopper_fp16(const Which& which) { return with_constants(which, Find{}); }

}  // namespace pmoe::comet

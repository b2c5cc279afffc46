#include "comet/ampere.cuh"
#include "comet/instances.cuh"

namespace pmoe::comet {

namespace {

struct Find {
  template <Form kForm, Epilogue kEpilogue, Activation kActivation>
  FusedKernel operator()() const {
    return dispatch_gemm_sm80<bf16, kForm, kEpilogue, kActivation>;
  }
  template <Form kForm>
  FusedKernel combine() const {
    return gemm_combine_sm80<bf16, kForm>;
  }
};

}  // namespace

FusedKernel ampere_bf16(const Which& which) { return with_constants(which, Find{}); }

}  // namespace pmoe::comet

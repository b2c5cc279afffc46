#include "ampere.cuh"
#include "instances.cuh"

namespace pmoe {

namespace {

struct Find {
  template <Form kForm, Epilogue kEpilogue, Activation kActivation>
  AmpereKernel operator()() const {
    return ampere::grouped_gemm<bf16, kForm, kEpilogue, kActivation>;
  }
};

}  // namespace

AmpereKernel ampere_bf16(const GroupedGemm& which) { return with_constants(which, Find{}); }

}  // namespace pmoe

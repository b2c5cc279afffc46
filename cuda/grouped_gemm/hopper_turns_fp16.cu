#include "hopper_turns.cuh"
#include "instances.cuh"

namespace pmoe {

namespace {

struct Find {
  template <Form kForm, Epilogue kEpilogue, Activation kActivation>
  KernelWithStoreMaps operator()() const {
    return hopper::grouped_gemm_in_turns<fp16, kForm, kEpilogue, kActivation>;
  }
};

}  // namespace

KernelWithStoreMaps hopper_turns_fp16(const GroupedGemm& which) {
  return with_constants_of_turns(which, Find{});
}

}  // namespace pmoe

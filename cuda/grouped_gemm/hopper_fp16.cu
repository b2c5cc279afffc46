#include "hopper.cuh"
#include "instances.cuh"

namespace pmoe {

namespace {

struct Find {
  template <Form kForm, Epilogue kEpilogue, Activation kActivation>
  HopperKernel operator()() const {
    return hopper::grouped_gemm<fp16, kForm, kEpilogue, kActivation>;
  }
};

}  // namespace

HopperKernel hopper_fp16(const GroupedGemm& which) { return with_constants(which, Find{}); }

}  // namespace pmoe

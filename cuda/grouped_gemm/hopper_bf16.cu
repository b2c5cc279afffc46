#include "hopper.cuh"
#include "instances.cuh"

namespace pmoe {

namespace {

template <int kCluster>
struct Find {
  template <Form kForm, Epilogue kEpilogue, Activation kActivation>
  HopperKernel operator()() const {
    return hopper::grouped_gemm<bf16, kForm, kEpilogue, kActivation, kCluster>;
  }
};

}  // namespace

HopperKernel hopper_bf16(const GroupedGemm& which) {
  return which.cluster == 2 ? with_constants(which, Find<2>{}) : with_constants(which, Find<1>{});
}

}  // namespace pmoe

#include "comet/ampere.cuh"
#include "comet/hopper.cuh"
#include "comet/launch.h"

namespace pmoe::comet {

const Path hopper_path = {[](const Which& which) {
                            return which.element == Element::kBf16 ? hopper_bf16(which) : hopper_fp16(which);
                          },
                          hopper::kThreads,
                          sizeof(HopperShared),
                          hopper::kRows,
                          hopper::kColumns,
                          kBoardWords};

const Path ampere_path = {[](const Which& which) {
                            return which.element == Element::kBf16 ? ampere_bf16(which) : ampere_fp16(which);
                          },
                          ampere::kThreads,
                          sizeof(AmpereShared),
                          ampere::kRows,
                          ampere::kColumns,
                          kSmallBoardWords};

cudaError_t launch(const Path& path, const Which& which, Launch& launch, int ranks, const int64_t* a_rows,
                   cudaStream_t stream) {
  for (int i = 0; i < ranks && &path == &hopper_path; ++i) {
    Fused& f = launch.fused[i];
    if (!f.rank.computes) continue;
    const cudaError_t error =
        encode_maps(which.element, which.form, f.problem, a_rows[i], 0, &f.a_map, &f.b_map);
    if (error != cudaSuccess) return error;
  }
  const auto* const kernel = reinterpret_cast<const void*>(path.kernel(which));
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, path.shared_bytes);
  if (error != cudaSuccess) return error;
  void* arguments[] = {&launch};
  return cudaLaunchCooperativeKernel(kernel, dim3(static_cast<unsigned>(ranks * launch.blocks)),
                                     dim3(static_cast<unsigned>(path.threads)), arguments,
                                     static_cast<size_t>(path.shared_bytes), stream);
}

}  // namespace pmoe::comet

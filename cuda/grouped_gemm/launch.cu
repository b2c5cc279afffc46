#include <cudaTypedefs.h>

#include "ampere.cuh"
#include "hopper.cuh"
#include "instances.cuh"
#include "launch.h"

namespace pmoe {

namespace {

// The encoder lies in the driver, which a machine that compiles need not have: it is asked for at run time.
struct Encoder {
  PFN_cuTensorMapEncodeTiled_v12000 function = nullptr;
  cudaError_t error;

  Encoder() {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    if (error == cudaSuccess && (result != cudaDriverEntryPointSuccess || entry == nullptr))
      error = cudaErrorNotSupported;
    if (error == cudaSuccess) function = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }
};

struct Layout {  // of a tensor of 16-bit elements, innermost dimension first; boxes of 64 columns
  const void* base;
  int rank;
  uint64_t size[3];
  uint64_t stride;  // elements between lines; matrices of three dimensions follow each other without gaps
  uint32_t lines;   // of a box
};

cudaError_t encode(TensorMap* map, Element element, const Layout& layout) {
  static const Encoder encoder;
  if (encoder.error != cudaSuccess) return encoder.error;
  const cuuint64_t sizes[3] = {layout.size[0], larger<uint64_t>(layout.size[1], 1), layout.size[2]};
  const cuuint64_t strides[2] = {layout.stride * 2, layout.stride * 2 * sizes[1]};
  const cuuint32_t box[3] = {kBoxColumns, layout.lines, 1}, steps[3] = {1, 1, 1};
  const auto type =
      element == Element::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encoder.function(map, type, static_cast<cuuint32_t>(layout.rank), const_cast<void*>(layout.base), sizes,
                       strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

Layout rows_of(const void* base, int columns, int64_t rows, int64_t stride, uint32_t lines) {
  return {base,
          2,
          {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), 1},
          static_cast<uint64_t>(stride),
          lines};
}

Layout matrices(const void* base, int columns, int lines_each, int count, uint32_t lines) {
  return {base,
          3,
          {static_cast<uint64_t>(columns), static_cast<uint64_t>(lines_each), static_cast<uint64_t>(count)},
          static_cast<uint64_t>(columns),
          lines};
}

HopperKernel hopper_kernel(const GroupedGemm& which) {
  return which.element == Element::kBf16 ? hopper_bf16(which) : hopper_fp16(which);
}

AmpereKernel ampere_kernel(const GroupedGemm& which) {
  return which.element == Element::kBf16 ? ampere_bf16(which) : ampere_fp16(which);
}

cudaError_t launch_hopper(const GroupedGemm& which, const Problem& p, int64_t a_rows, int64_t b_rows,
                          int blocks, cudaStream_t stream) {
  TensorMap a_map = {}, b_map = {};
  cudaError_t error = encode_maps(which.element, which.form, p, a_rows, b_rows, &a_map, &b_map);
  if (error != cudaSuccess) return error;
  const HopperKernel kernel = hopper_kernel(which);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, hopper::kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute together;
  together.id = cudaLaunchAttributeClusterDimension;
  together.val.clusterDim = {static_cast<unsigned>(which.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks / which.cluster * which.cluster);
  config.blockDim = hopper::kThreads;
  config.dynamicSmemBytes = hopper::kSharedBytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a_map, b_map, p);
}

cudaError_t launch_ampere(const GroupedGemm& which, const Problem& p, int64_t, int64_t, int blocks,
                          cudaStream_t stream) {
  const AmpereKernel kernel = ampere_kernel(which);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ampere::kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, ampere::kThreads, ampere::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t encode_maps(Element element, Form form, const Problem& p, int64_t a_rows, int64_t b_rows,
                        TensorMap* a_map, TensorMap* b_map) {
  const bool by_weight = form == Form::kWeight;
  // Operands without rows are never loaded; a map must still point somewhere.
  const void* a = a_rows ? p.a : p.d;
  const void* b = by_weight && !b_rows ? p.d : p.b;
  const Layout of_a = by_weight ? rows_of(a, p.m, a_rows, p.a_stride, hopper::kDepth)
                                : rows_of(a, p.k, a_rows, p.a_stride, hopper::kRows);
  const Layout of_b = by_weight                ? rows_of(b, p.n, b_rows, p.b_stride, hopper::kDepth)
                      : form == Form::kForward ? matrices(b, p.k, p.n, p.experts, 128)
                                               : matrices(b, p.n, p.k, p.experts, hopper::kDepth);
  // What is gathered is not loaded by a map, and may lie as maps cannot say.
  const cudaError_t error = p.a_gathered ? cudaSuccess : encode(a_map, element, of_a);
  return error != cudaSuccess || p.b_gathered ? error : encode(b_map, element, of_b);
}

const GroupedGemmPath hopper_path = {
    [](const GroupedGemm& which) { return reinterpret_cast<const void*>(hopper_kernel(which)); },
    launch_hopper, hopper::kThreads, hopper::kSharedBytes};

const GroupedGemmPath ampere_path = {
    [](const GroupedGemm& which) { return reinterpret_cast<const void*>(ampere_kernel(which)); },
    launch_ampere, ampere::kThreads, ampere::kSharedBytes};

}  // namespace pmoe

#include "common/prepared.h"
#include "program/kernel.cuh"
#include "program/launch.h"

namespace pmoe::program {
namespace {

constexpr int64_t kMostBlocks = 1024;  // more would only be queued

Grid grid_of(int64_t count) {
  return {static_cast<int>(smaller(ceil_div(count, int64_t{kThreads}), kMostBlocks)), kThreads};
}

}  // namespace

void take_numbers(void* stream, const float* source, const int32_t* index, float* out, int64_t count) {
  Prepared("program.take", take_kernel, grid_of(count), stream).launch(source, index, out, count);
}

void put_numbers(void* stream, const float* source, const int32_t* index, float* out, int64_t count) {
  Prepared("program.put", put_kernel, grid_of(count), stream).launch(source, index, out, count);
}

void sum_parts(void* stream, int num_parts, const PartialSums& first, const PartialSums& second) {
  const Grid grid = grid_of(larger(first.count, second.count));
  Prepared("program.sum_parts", sum_parts_kernel, grid, stream)
      .launch(PairOfSums{{first, second}}, num_parts);
}

void list_kernels(std::vector<KernelInfo>& found) {
  found.push_back({"program.take", reinterpret_cast<const void*>(take_kernel), kThreads, 0});
  found.push_back({"program.put", reinterpret_cast<const void*>(put_kernel), kThreads, 0});
  found.push_back({"program.sum_parts", reinterpret_cast<const void*>(sum_parts_kernel), kThreads, 0});
}

}  // namespace pmoe::program

#include "common/prepared.h"
#include "program/kernel.cuh"
#include "program/launch.h"
#include "program/push.cuh"

namespace pmoe::program {
namespace {

constexpr int64_t kMostBlocks = 1024;  // more would only be queued

Grid grid_of(int64_t count) {
  return {static_cast<int>(smaller(ceil_div(count, int64_t{kThreads}), kMostBlocks)), kThreads};
}

template <class T>
struct Type {
  using type = T;
};

// One block on a multiprocessor is enough. Without this bound, nvcc 13.0 takes 64 registers for sm_120, and
// spills.
__global__ void __launch_bounds__(kPushThreads, 1) push_kernel(const __grid_constant__ Push push) {
  const int thread = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.x) * (kPushThreads / kWarp);
  push_channel(push, {thread % kWarp, kWarp, first + thread / kWarp, kMostChannels});
}

// Calls `use` with the type of the numbers.
template <class Use>
void with_type(Element type, const Use& use) {
  if (type == Element::kBf16)
    use(Type<bf16>{});
  else
    use(Type<fp16>{});
}

constexpr int kSumBytes = 2 * kThreads * static_cast<int>(sizeof(float));  // of bias_gradient_kernel

}  // namespace

void take_numbers(void* stream, const float* source, const int32_t* index, float* out, int64_t count,
                  uint32_t* cleared, int32_t num_cleared) {
  const Grid grid = grid_of(larger(count, int64_t{num_cleared}));
  Prepared("program.take", take_kernel, grid, stream).launch(source, index, out, count, cleared, num_cleared);
}

void put_numbers(void* stream, const float* source, const int32_t* index, float* out, int64_t count) {
  Prepared("program.put", put_kernel, grid_of(count), stream).launch(source, index, out, count);
}

void add_bias_dots(void* stream, Element type, const RowsByExpert& grad, const void* bias, float* dots) {
  with_type(type, [&](auto each) {
    using T = typename decltype(each)::type;
    Prepared("program.bias_dots", bias_dots_kernel<T>, grid_of(grad.rows * kWarp), stream)
        .launch(grad, static_cast<const uint32_t*>(bias), dots);
  });
}

void scale_rows(void* stream, Element type, const float* weight, void* grad, int64_t rows, int64_t words) {
  with_type(type, [&](auto each) {
    using T = typename decltype(each)::type;
    Prepared("program.scale", scale_kernel<T>, grid_of(rows * words), stream)
        .launch(weight, static_cast<uint32_t*>(grad), words, rows * words);
  });
}

void sum_rows(void* stream, Element type, const RowsByExpert& grad, float* total, bool adds) {
  const auto blocks = static_cast<int>(grad.experts * ceil_div(grad.words, int64_t{kWarp}));
  with_type(type, [&](auto each) {
    using T = typename decltype(each)::type;
    Prepared("program.bias_gradient", bias_gradient_kernel<T>, {blocks, kThreads, kSumBytes}, stream)
        .launch(grad, total, adds ? 1 : 0);
  });
}

void sum_parts(void* stream, int num_parts, const PartialSums& first, const PartialSums& second) {
  const Grid grid = grid_of(larger(first.count, second.count));
  Prepared("program.sum_parts", sum_parts_kernel, grid, stream)
      .launch(PairOfSums{{first, second}}, num_parts);
}

void push_rows(void* stream, const Push& push) {
  const int blocks = ceil_div(1 << channel_shift(most_bytes_of(push)), kPushThreads / kWarp);
  Prepared("program.push", push_kernel, {blocks, kPushThreads}, stream).launch(push);
}

void list_kernels(std::vector<KernelInfo>& found) {
  found.push_back({"program.take", reinterpret_cast<const void*>(take_kernel), kThreads, 0});
  found.push_back({"program.put", reinterpret_cast<const void*>(put_kernel), kThreads, 0});
  const auto add = [&](const char* name, const void* kernel, int shared_bytes) {
    found.push_back({name, kernel, kThreads, shared_bytes});
  };
  add("program.bias_dots.bf16", reinterpret_cast<const void*>(bias_dots_kernel<bf16>), 0);
  add("program.bias_dots.fp16", reinterpret_cast<const void*>(bias_dots_kernel<fp16>), 0);
  add("program.scale.bf16", reinterpret_cast<const void*>(scale_kernel<bf16>), 0);
  add("program.scale.fp16", reinterpret_cast<const void*>(scale_kernel<fp16>), 0);
  add("program.bias_gradient.bf16", reinterpret_cast<const void*>(bias_gradient_kernel<bf16>), kSumBytes);
  add("program.bias_gradient.fp16", reinterpret_cast<const void*>(bias_gradient_kernel<fp16>), kSumBytes);
  found.push_back({"program.push", reinterpret_cast<const void*>(push_kernel), kPushThreads, 0});
  found.push_back({"program.sum_parts", reinterpret_cast<const void*>(sum_parts_kernel), kThreads, 0});
}

}  // namespace pmoe::program

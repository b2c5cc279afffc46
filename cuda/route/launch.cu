#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "common/on_device.h"
#include "route/backward.cuh"
#include "route/kernel.cuh"
#include "route/launch.h"

namespace pmoe::route {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

int multiprocessors(int device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

// Blocks of this kernel that a multiprocessor of the current device holds. Asked once: it costs microseconds.
int blocks_resident(int device, const void* kernel, int threads, int shared_bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [found, is_new] = known.try_emplace({device, kernel, shared_bytes}, 0);
  if (!is_new) return found->second;
  try {
    const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
          "cudaFuncSetAttribute");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found->second, kernel, threads, shared_bytes),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  } catch (...) {
    known.erase(found);
    throw;
  }
  return found->second;
}

template <class Call>
struct Chosen {
  void (*kernel)(Call);
  int experts;  // the most that it takes
  int threads;
  int tokens;  // that a block has at a time
  int (*shared_words)(int num_experts, int top_k);
  const char* name;
};

template <class S>
int forward_words(int num_experts, int top_k) {
  return ForwardShared<S>::words(num_experts, top_k);
}

template <class S>
int words_of_backward(int, int top_k) {
  return backward_words<S>(top_k);
}

template <class S>
constexpr Chosen<Forward> forward_of(const char* name) {
  return {forward_kernel<S>, S::kExperts, S::kThreads, S::kTokens * S::kWarps, forward_words<S>, name};
}

template <class S>
constexpr Chosen<Backward> backward_of(const char* name) {
  return {backward_kernel<S>, S::kExperts, S::kThreads, S::kTokens * S::kWarps, words_of_backward<S>, name};
}

const Chosen<Forward> kForward[] = {
    forward_of<Kept<1, 8>>("route.8"),     forward_of<Kept<2, 8>>("route.16"),
    forward_of<Kept<4, 8>>("route.32"),    forward_of<Kept<8, 8>>("route.64"),
    forward_of<Kept<16, 8>>("route.128"),  forward_of<Kept<32, 8>>("route.256"),
    forward_of<Kept<32, 16>>("route.512"), forward_of<Kept<32, 32>>("route.1024"),
};

const Chosen<Backward> kBackward[] = {
    backward_of<Kept<1, 8>>("route_backward.8"),     backward_of<Kept<2, 8>>("route_backward.16"),
    backward_of<Kept<4, 8>>("route_backward.32"),    backward_of<Kept<8, 8>>("route_backward.64"),
    backward_of<Kept<16, 8>>("route_backward.128"),  backward_of<Kept<32, 8>>("route_backward.256"),
    backward_of<Kept<32, 16>>("route_backward.512"), backward_of<Kept<32, 32>>("route_backward.1024"),
};

template <class Call, int kCount>
const Chosen<Call>& choose_kernel(const Chosen<Call> (&kernels)[kCount], int64_t num_experts) {
  for (const auto& each : kernels)
    if (num_experts <= each.experts) return each;
  throw std::invalid_argument("pmoe._cuda: route: no kernel takes " + std::to_string(num_experts) +
                              " experts");
}

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("pmoe._cuda: route: " + why); }

void check_sizes(const Problem& p) {
  const std::string why = refusal(p.num_tokens, p.num_experts, p.top_k, p.num_chunks);
  if (!why.empty()) refuse(why);
}

std::string outside(const char* name, int64_t value, const std::string& rule) {
  return std::string(name) + " (" + std::to_string(value) + ") must be " + rule;
}

Rows rows_of(const void* first, const void* second, const Problem& p) {
  const auto bits = reinterpret_cast<uintptr_t>(first) | reinterpret_cast<uintptr_t>(second);
  return {p.num_tokens, static_cast<int32_t>(p.num_experts), bits % 16 == 0 && p.num_experts % 4 == 0};
}

float balance_scale(const Problem& p) {
  const double tokens = static_cast<double>(larger(p.num_tokens, int64_t{1}));
  return static_cast<float>(static_cast<double>(p.num_experts) /
                            (tokens * static_cast<double>(p.top_k) * tokens));
}

float z_scale(const Problem& p) {
  return static_cast<float>(p.z_loss_weight / static_cast<double>(larger(p.num_tokens, int64_t{1})));
}

template <class Call>
void launch(const Chosen<Call>& chosen, Call arguments, int blocks, int shared_bytes, bool meets,
            void* stream) {
  void* list[] = {&arguments};
  const auto on = static_cast<cudaStream_t>(stream);
  const auto* const kernel = reinterpret_cast<const void*>(chosen.kernel);
  if (meets)
    check(cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(chosen.threads), list, shared_bytes, on),
          "cudaLaunchCooperativeKernel");
  else
    check(cudaLaunchKernel(kernel, dim3(blocks), dim3(chosen.threads), list, shared_bytes, on),
          "cudaLaunchKernel");
}

template <class Call, int kCount>
void list(const Chosen<Call> (&kernels)[kCount], std::vector<KernelInfo>& found) {
  for (const auto& each : kernels)
    found.push_back({each.name, reinterpret_cast<const void*>(each.kernel), each.threads,
                     4 * each.shared_words(each.experts, smaller(each.experts, kMostChoices))});
}

// Blocks that own tokens: at most one a multiprocessor, and one more, which adds up, must be resident beside
// them.
int64_t most_blocks(int device, const Chosen<Forward>& chosen, int shared_bytes) {
  const int64_t processors = multiprocessors(device);
  const auto* const kernel = reinterpret_cast<const void*>(chosen.kernel);
  return smaller(processors, processors * blocks_resident(device, kernel, chosen.threads, shared_bytes) - 1);
}

}  // namespace

std::string refusal(int64_t num_tokens, int64_t num_experts, int64_t top_k, int64_t num_chunks) {
  if (num_experts < 1 || num_experts > kMostExperts)
    return outside("num_experts", num_experts, "1 to " + std::to_string(kMostExperts));
  const int64_t most_choices = smaller(num_experts, int64_t{kMostChoices});
  if (top_k < 1 || top_k > most_choices)
    return outside("top_k", top_k, "1 to " + std::to_string(most_choices));
  if (num_chunks < 1 || num_chunks > kMostChunks)
    return outside("num_chunks", num_chunks, "1 to " + std::to_string(kMostChunks));
  if (num_tokens < 0 || num_tokens > kMostSlots / top_k)
    return outside("num_tokens", num_tokens,
                   "0 to " + std::to_string(kMostSlots / top_k) + " with this top_k");
  return "";
}

int64_t most_chunks(int device, int64_t num_experts, int64_t top_k) {
  const OnDevice here(device);
  const auto& chosen = choose_kernel(kForward, num_experts);
  const int words = chosen.shared_words(static_cast<int>(num_experts), static_cast<int>(top_k));
  return smaller(most_blocks(device, chosen, 4 * words), int64_t{kMostChunks});
}

int64_t workspace_bytes(int device, int64_t num_experts) {
  return Workspace::bytes(multiprocessors(device), num_experts);
}

int64_t kept_workspace(int device, void* stream, int64_t bytes) {
  struct Kept {
    void* data = nullptr;
    int64_t bytes = 0;
  };
  static std::mutex mutex;
  static std::map<std::pair<int, void*>, Kept> all;
  const std::lock_guard<std::mutex> lock(mutex);
  Kept& kept = all[{device, stream}];
  if (kept.bytes < bytes) {  // the smaller one may still be in use, and stays
    const OnDevice here(device);
    void* data = nullptr;
    check(cudaMalloc(&data, static_cast<size_t>(bytes)), "cudaMalloc");
    check(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)),
          "cudaMemsetAsync");
    kept = {data, bytes};
  }
  return reinterpret_cast<int64_t>(kept.data);
}

void forward(const Problem& p, const ForwardTensors& t) {
  check_sizes(p);
  const OnDevice here(p.device);
  const int experts = static_cast<int>(p.num_experts), top_k = static_cast<int>(p.top_k);
  const auto& chosen = choose_kernel(kForward, experts);
  const int shared_bytes = 4 * chosen.shared_words(experts, top_k);
  const int64_t most = most_blocks(p.device, chosen, shared_bytes);
  if (p.num_chunks > most)
    refuse(outside("num_chunks", p.num_chunks, "at most " + std::to_string(most) + " on this device"));
  const int chunks = static_cast<int>(p.num_chunks);
  const Sizes sizes{p.num_tokens, experts, top_k, chunks,
                    chunk_blocks(p.num_tokens, chunks, chosen.tokens, most)};
  const int64_t needed = Workspace::bytes(sizes.blocks(), experts);
  if (t.workspace_bytes < needed)
    refuse(outside("workspace_bytes", t.workspace_bytes, "at least " + std::to_string(needed)));
  const Forward arguments{sizes,
                          rows_of(t.logits_TE, nullptr, p),
                          t.logits_TE,
                          p.normalize,
                          balance_scale(p),
                          z_scale(p),
                          t.weight_TK,
                          t.expert_TK,
                          t.position_TK,
                          t.slot_N,
                          t.counts_nE,
                          t.ends_nE,
                          t.l_aux,
                          Workspace::at(t.workspace, sizes.blocks(), experts)};
  launch(chosen, arguments, sizes.blocks() + 1, shared_bytes, true, p.stream);
}

void backward(const Problem& p, const BackwardTensors& t) {
  check_sizes(p);
  if (p.num_tokens == 0) return;
  const OnDevice here(p.device);
  const int experts = static_cast<int>(p.num_experts), top_k = static_cast<int>(p.top_k);
  const auto& chosen = choose_kernel(kBackward, experts);
  const int shared_bytes = 4 * chosen.shared_words(experts, top_k);
  const auto* const kernel = reinterpret_cast<const void*>(chosen.kernel);
  const int64_t resident =
      int64_t{blocks_resident(p.device, kernel, chosen.threads, shared_bytes)} * multiprocessors(p.device);
  const int64_t blocks = smaller(ceil_div(p.num_tokens, chosen.tokens), larger(resident, int64_t{1}));
  const Backward arguments{rows_of(t.logits_TE, t.grad_logits_TE, p),
                           top_k,
                           static_cast<int>(p.num_chunks),
                           t.logits_TE,
                           t.expert_TK,
                           t.weight_TK,
                           t.counts_nE,
                           p.normalize,
                           balance_scale(p),
                           z_scale(p),
                           t.grad_weight_TK,
                           t.partial_PN,
                           t.position_TK,
                           static_cast<int>(t.num_partials),
                           t.grad_l_aux,
                           t.grad_logits_TE};
  launch(chosen, arguments, static_cast<int>(blocks), shared_bytes, false, p.stream);
}

void list_kernels(std::vector<KernelInfo>& found) {
  list(kForward, found);
  list(kBackward, found);
}

}  // namespace pmoe::route

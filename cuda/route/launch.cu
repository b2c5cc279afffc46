#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "common/on_device.h"
#include "common/prepared.h"
#include "route/backward.cuh"
#include "route/halves.cuh"
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

// Returns how many blocks of a kernel can be resident on a multiprocessor of the current device. The result
// is cached, because the query takes microseconds.
int blocks_resident(int device, const void* kernel, int threads, int shared_bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find({device, kernel, shared_bytes});
  if (found != known.end()) return found->second;
  allow_shared(kernel, shared_bytes);
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return known[{device, kernel, shared_bytes}] = blocks;
}

// A kernel compiled for one Shape, and the numbers that its launch needs.
template <class Call>
struct Chosen {
  void (*kernel)(Call);
  int experts;  // largest number of experts that it takes
  int threads;
  int tokens;  // number of tokens that a block works on at the same time
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
constexpr Chosen<Forward> first_of(const char* name) {
  return {choose_kernel<S>, S::kExperts, S::kThreads, S::kTokens * S::kWarps, forward_words<S>, name};
}

template <class S>
constexpr Chosen<Forward> second_of(const char* name) {
  return {place_kernel<S>, S::kExperts, S::kThreads, S::kTokens * S::kWarps, forward_words<S>, name};
}

template <class S>
constexpr Chosen<Backward> backward_of(const char* name) {
  return {backward_kernel<S>, S::kExperts, S::kThreads, S::kTokens * S::kWarps, words_of_backward<S>, name};
}

const Chosen<Forward> kFirst[] = {
    first_of<Kept<1, 8>>("route_choose.8"),     first_of<Kept<2, 8>>("route_choose.16"),
    first_of<Kept<4, 8>>("route_choose.32"),    first_of<Kept<8, 8>>("route_choose.64"),
    first_of<Kept<16, 8>>("route_choose.128"),  first_of<Kept<32, 8>>("route_choose.256"),
    first_of<Kept<32, 16>>("route_choose.512"), first_of<Kept<32, 32>>("route_choose.1024"),
};

// The first forward kernel for 65 to 128 experts, if there are too many choices for merging lists
// (merge.cuh). It takes a whole warp for each token (whole_warp.cuh). A choice then takes 22 instructions,
// instead of 80 with 16 lanes for each token.
const Chosen<Forward> kFirstOfMany[] = {first_of<Kept<32, 4>>("route_choose.128.many")};

const Chosen<Forward> kSecond[] = {
    second_of<Kept<1, 8>>("route_place.8"),     second_of<Kept<2, 8>>("route_place.16"),
    second_of<Kept<4, 8>>("route_place.32"),    second_of<Kept<8, 8>>("route_place.64"),
    second_of<Kept<16, 8>>("route_place.128"),  second_of<Kept<32, 8>>("route_place.256"),
    second_of<Kept<32, 16>>("route_place.512"), second_of<Kept<32, 32>>("route_place.1024"),
};

const Chosen<Backward> kBackward[] = {
    backward_of<Kept<1, 8>>("route_backward.8"),     backward_of<Kept<2, 8>>("route_backward.16"),
    backward_of<Kept<4, 8>>("route_backward.32"),    backward_of<Kept<8, 8>>("route_backward.64"),
    backward_of<Kept<16, 8>>("route_backward.128"),  backward_of<Kept<32, 8>>("route_backward.256"),
    backward_of<Kept<32, 16>>("route_backward.512"), backward_of<Kept<32, 32>>("route_backward.1024"),
};

template <class Call, int kCount>
const Chosen<Call>& pick(const Chosen<Call> (&kernels)[kCount], int64_t num_experts) {
  for (const auto& each : kernels)
    if (num_experts <= each.experts) return each;
  throw std::invalid_argument("pmoe._cuda: route: there is no kernel for " + std::to_string(num_experts) +
                              " experts");
}

const Chosen<Forward>& pick_first(int64_t num_experts, int64_t top_k) {
  const bool is_of_many = top_k > kMostMerged && num_experts > 64 && num_experts <= 128;
  return is_of_many ? kFirstOfMany[0] : pick(kFirst, num_experts);
}

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("pmoe._cuda: route: " + why); }

std::string outside(const char* name, int64_t value, const std::string& rule) {
  return std::string(name) + " (" + std::to_string(value) + ") must be " + rule;
}

void check_sizes(const Problem& p) {
  const std::string why = refusal(p.num_tokens, p.num_experts, p.top_k, p.num_chunks);
  if (!why.empty()) refuse(why);
  if (p.sorted_chunks < 1 || p.num_chunks % p.sorted_chunks)
    refuse(outside("sorted_chunks", p.sorted_chunks,
                   "a divisor of num_chunks (" + std::to_string(p.num_chunks) + ")"));
  if (p.first_last < 0 || p.num_last < 0 || p.first_last + p.num_last > p.num_experts)
    refuse("the experts from " + std::to_string(p.first_last) + " to " +
           std::to_string(p.first_last + p.num_last) + ", whose rows come last, must be among the " +
           std::to_string(p.num_experts));
}

// Returns the arguments for writing the messages of row counts. The kernels read the counts and the fault for
// the messages from memory to which the same launch has written them.
counts::Pack pack_of(const Problem& p, const ForwardTensors& t) {
  counts::Pack pack = t.pack;
  const counts::Message& m = pack.message;
  if (pack.sent != nullptr &&
      (m.ranks < 1 || m.bins != p.num_chunks || int64_t{m.ranks} * m.experts != p.num_experts))
    refuse("messages for " + std::to_string(m.ranks) + " ranks of " + std::to_string(m.experts) +
           " experts, with " + std::to_string(m.bins) + " bins, must have the " +
           std::to_string(p.num_experts) + " experts and " + std::to_string(p.num_chunks) +
           " chunks of the routing");
  pack.counts = t.counts_nE;
  pack.fault = t.fault;
  return pack;
}

Rows rows_of(const void* first, const void* second, const Problem& p) {
  const auto bits = reinterpret_cast<uintptr_t>(first) | reinterpret_cast<uintptr_t>(second);
  return {p.num_tokens, static_cast<int32_t>(p.num_experts), bits % 16 == 0 && p.num_experts % 4 == 0};
}

template <class Call>
void launch(const Chosen<Call>& chosen, const Call& arguments, int64_t blocks, int shared_bytes,
            void* stream) {
  const Grid grid = {static_cast<int>(blocks), chosen.threads, shared_bytes};
  Prepared(chosen.name, chosen.kernel, grid, stream).launch(arguments);
}

template <class Call, int kCount>
void list(const Chosen<Call> (&kernels)[kCount], std::vector<KernelInfo>& found) {
  for (const auto& each : kernels)
    found.push_back({each.name, reinterpret_cast<const void*>(each.kernel), each.threads,
                     4 * each.shared_words(each.experts, smaller(each.experts, kMostChoices))});
}

// Returns the sizes of the forward launches. There are at most as many blocks as the device has
// multiprocessors: blocks with tokens, and in the second kernel one more, without tokens, that adds up the
// counts and the loss. But each chunk has at least one block, even if there are more chunks than
// multiprocessors. No block waits for another block, so blocks may run one after the other.
Sizes sizes_of(const Problem& p) {
  const int experts = static_cast<int>(p.num_experts), chunks = static_cast<int>(p.num_chunks);
  const int block_tokens = pick_first(experts, p.top_k).tokens;
  return {p.num_tokens,
          experts,
          static_cast<int>(p.top_k),
          chunks,
          chunk_blocks(p.num_tokens, chunks, block_tokens, multiprocessors(p.device) - 1),
          static_cast<int>(p.sorted_chunks),
          static_cast<int>(p.first_last),
          static_cast<int>(p.num_last)};
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

void prepare(int device, int64_t num_experts, int64_t top_k) {
  const OnDevice on_device(device);
  const int experts = static_cast<int>(num_experts), choices = static_cast<int>(top_k);
  const auto ready = [&](const auto& chosen) {
    const auto* const kernel = reinterpret_cast<const void*>(chosen.kernel);
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), chosen.name);
    allow_shared(kernel, 4 * chosen.shared_words(experts, choices));
  };
  ready(pick_first(experts, top_k)), ready(pick(kSecond, experts)), ready(pick(kBackward, experts));
}

int64_t workspace_bytes(const Problem& p) {
  check_sizes(p);
  return Workspace::bytes(sizes_of(p).blocks(), p.num_experts);
}

void forward(const Problem& p, const ForwardTensors& t) {
  check_sizes(p);
  const OnDevice on_device(p.device);
  const int experts = static_cast<int>(p.num_experts);
  const auto &first = pick_first(experts, p.top_k), &second = pick(kSecond, experts);
  const int shared_bytes = 4 * first.shared_words(experts, static_cast<int>(p.top_k));
  const Sizes sizes = sizes_of(p);
  const int64_t needed = Workspace::bytes(sizes.blocks(), experts);
  if (t.workspace_bytes < needed)
    refuse(outside("workspace_bytes", t.workspace_bytes, "at least " + std::to_string(needed)));
  const Forward arguments{sizes,
                          rows_of(t.logits_TE, nullptr, p),
                          t.logits_TE,
                          p.normalize,
                          balance_scale(p.num_tokens, p.num_experts, p.top_k),
                          z_scale(p.z_loss_weight, p.num_tokens),
                          t.weight_TK,
                          t.expert_TK,
                          t.position_TK,
                          t.slot_N,
                          t.counts_nE,
                          t.ends_nE,
                          t.l_aux,
                          Workspace::at(t.workspace, sizes.blocks(), experts),
                          t.fault,
                          t.not_finite,
                          pack_of(p, t)};
  launch(first, arguments, sizes.blocks(), shared_bytes, p.stream);
  launch(second, arguments, sizes.blocks() + 1, shared_bytes, p.stream);
}

void backward(const Problem& p, const BackwardTensors& t) {
  check_sizes(p);
  if (p.num_tokens == 0) return;
  const OnDevice on_device(p.device);
  const int experts = static_cast<int>(p.num_experts), top_k = static_cast<int>(p.top_k);
  const auto& chosen = pick(kBackward, experts);
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
                           balance_scale(p.num_tokens, p.num_experts, p.top_k),
                           z_scale(p.z_loss_weight, p.num_tokens),
                           t.grad_weight_TK,
                           t.partial_PN,
                           t.position_TK,
                           static_cast<int>(t.num_partials),
                           t.grad_l_aux,
                           t.grad_logits_TE};
  launch(chosen, arguments, blocks, shared_bytes, p.stream);
}

void halves(int device, void* stream, int64_t num_tokens, int64_t num_experts, int64_t columns,
            const HalvesTensors& t) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (num_experts < 1 || num_tokens < 0 || num_tokens > kMost / num_experts)
    refuse(outside("num_tokens", num_tokens, "0 to 2**30 / num_experts"));
  const auto bits = reinterpret_cast<uintptr_t>(t.weight_EM) | reinterpret_cast<uintptr_t>(t.twice);
  if (columns < 1 || columns > kMost / num_experts || num_experts * columns % 8 || bits % 16)
    refuse(outside("columns", columns, "1 to 2**30 / num_experts, for whole vectors of 16 bytes"));
  const OnDevice on_device(device);
  const Halves arguments{static_cast<int32_t>(num_experts),
                         static_cast<uint32_t>(num_tokens * num_experts),
                         static_cast<uint32_t>(num_experts * columns / 8),
                         t.grad_TE,
                         static_cast<bf16*>(t.halves),
                         static_cast<const uint8_t*>(t.weight_EM),
                         static_cast<uint8_t*>(t.twice)};
  const int64_t numbers = larger(arguments.gradients, arguments.weight_vectors);
  const int64_t blocks =
      smaller(ceil_div(numbers, int64_t{kHalvesThreads}), int64_t{4} * multiprocessors(device));
  const Grid grid = {static_cast<int>(blocks), kHalvesThreads};
  Prepared("route_halves", halves_kernel, grid, stream).launch(arguments);
}

void list_kernels(std::vector<KernelInfo>& found) {
  found.push_back({"route_halves", reinterpret_cast<const void*>(halves_kernel), kHalvesThreads, 0});
  list(kFirst, found);
  list(kFirstOfMany, found);
  list(kSecond, found);
  list(kBackward, found);
}

}  // namespace pmoe::route

#include <stdexcept>
#include <string>

#include "common/on_device.h"
#include "common/prepared.h"
#include "counts/kernel.cuh"
#include "counts/launch.h"

namespace pmoe::counts {
namespace {

void check_size(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    throw std::invalid_argument("pmoe._cuda: counts: " + std::string(name) + " (" + std::to_string(value) +
                                ") must be from " + std::to_string(least) + " to " + std::to_string(most));
}

void check_message(const Message& m) {
  check_size("ranks", m.ranks, 1, kMostRanks);
  check_size("bins", m.bins, 1, kMostBins);
  check_size("experts", m.experts, 1, INT32_MAX);
  check_size("numbers of all messages", int64_t{m.ranks} * (kHeader + int64_t{m.bins} * m.experts), 1,
             INT32_MAX / 2);
}

void check_divides(const char* name, int32_t value, int32_t bins) {
  if (value < 1 || bins % value)
    throw std::invalid_argument("pmoe._cuda: counts: " + std::string(name) + " (" + std::to_string(value) +
                                ") must divide the bins (" + std::to_string(bins) + ")");
}

template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), int64_t blocks, int shared_bytes, int device,
            void* stream, const Arguments& arguments) {
  const OnDevice on_device(device);
  Prepared(name, kernel, Grid{static_cast<int>(blocks), kThreads, shared_bytes}, stream).launch(arguments);
}

}  // namespace

void pack(int device, void* stream, const Pack& a) {
  check_message(a.message);
  const int64_t blocks = ceil_div(int64_t{a.message.ranks} * a.message.words(), int64_t{kThreads});
  launch("counts_pack", pack_kernel, smaller(blocks, int64_t{1024}), 0, device, stream, a);
}

void agree(int device, void* stream, const Agree& a) {
  check_message(a.message);
  check_size("degrees", a.degrees, 0, kMostDegrees);
  for (int d = 0; d < a.degrees; ++d) check_divides("a degree", a.degree[d], a.message.bins);
  launch("counts_agree", agree_kernel, 1, AgreeShared::bytes(a.message.bins), device, stream, a);
}

void order(int device, void* stream, const Order& a) {
  check_message(a.message);
  check_divides("chunks", a.chunks, a.message.bins);
  check_divides("joined", a.joined, a.chunk_bins());
  check_size("pieces", a.pieces, 0, a.chunks);
  launch("counts_order", order_kernel, a.blocks(), order_bytes(a.message.ranks), device, stream, a);
}

void list_kernels(std::vector<KernelInfo>& found) {
  found.push_back({"counts_pack", reinterpret_cast<const void*>(pack_kernel), kThreads, 0});
  found.push_back(
      {"counts_agree", reinterpret_cast<const void*>(agree_kernel), kThreads, AgreeShared::bytes(kMostBins)});
  found.push_back(
      {"counts_order", reinterpret_cast<const void*>(order_kernel), kThreads, order_bytes(kMostRanks)});
}

}  // namespace pmoe::counts

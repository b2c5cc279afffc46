// The arguments of a launch of COMET's fused kernels. In tests a process may run several ranks in one launch.
// Each rank has its own product and its own communication.
#pragma once
#include <cuda.h>

#include "comet/rank.h"
#include "grouped_gemm/problem.h"

namespace pmoe::comet {

using peers::kMostVirtual;

constexpr int kBoardWords = 2 * kMostExperts;
constexpr int kSendTableWords = kMostExperts + 1;

// The arguments of one rank in a launch: its tensor maps, its product, and its communication.
struct Fused {
  CUtensorMap a_map, b_map;
  Problem problem;
  Rank rank;
};

// All arguments of a launch.
struct Launch {
  Fused fused[kMostVirtual];
  int blocks = 0;  // blocks of each rank
};

static_assert(sizeof(Launch) <= 4096, "more bytes than a kernel's arguments may have");

}  // namespace pmoe::comet

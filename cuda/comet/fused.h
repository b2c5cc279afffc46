// The arguments of a fused launch: for each rank that this process runs, its product and its communication.
#pragma once
#include <cuda.h>

#include "comet/rank.h"
#include "grouped_gemm/problem.h"

namespace pmoe::comet {

using peers::kMostVirtual;

constexpr int kBoardWords = 2 * kMostExperts;
constexpr int kSendTableWords = kMostExperts + 1;

// One rank's part of a launch.
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

// One fused launch: of every rank that this process runs, its product and its part in the communication.
#pragma once
#include <cuda.h>

#include "comet/rank.h"
#include "grouped_gemm/problem.h"

namespace pmoe::comet {

// Ranks of one launch: one, or several virtual ones that share a device (for tests and measurements). The
// kernels see no difference but in how blocks are counted.
constexpr int kMostVirtual = 4;

constexpr int kBoardWords = 2 * kMostExperts;
constexpr int kSendsWords = kMostExperts + 1;

struct Fused {
  CUtensorMap a_map, b_map;
  Problem problem;
  Rank rank;
};

struct Launch {
  Fused fused[kMostVirtual];
  int blocks = 0;  // of each rank
};

static_assert(sizeof(Launch) <= 4096, "more than a kernel's arguments");

}  // namespace pmoe::comet

// A launch of the layer's forward pass: of every rank that this process runs, its pass and its two products.
#pragma once
#include "flashdmoe/pass.h"
#include "grouped_gemm/problem.h"

namespace pmoe::flashdmoe {

// Ranks of one launch: one, or several virtual ones that share a device (for tests and measurements).
constexpr int kMostVirtual = 4;

// Rows and results of the products' tiles are found by task; the hidden rows of a cell, activated and (where
// there is a `d`) not, stand in its C rows of (cells C, hidden).
struct Forward {
  Pass pass;
  Problem gemm[2];
};

struct Launch {
  Forward of_rank[kMostVirtual];
  int ranks = 1;
};
static_assert(sizeof(Launch) <= 4096, "more than a kernel's arguments");

}  // namespace pmoe::flashdmoe

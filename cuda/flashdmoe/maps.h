// A launch on Hopper: beside the ranks' passes, the maps by which the accelerator loads their operands. They
// are more than 4096 bytes, which devices from 7.0 on take from a driver of CUDA 12.1 or later.
#pragma once
#include <cuda.h>

#include "flashdmoe/experts.h"

namespace pmoe::flashdmoe {

struct MapPair {
  CUtensorMap a, b;
};

// Products that have maps, of forward and of backward.
enum MappedProduct {
  kFirstProduct,
  kSecondProduct,
  kGateProduct,
  kHiddenProduct = 1,
  kInputProduct,
  kOfW1,
  kOfW2
};

template <int kProducts>
struct Maps {
  MapPair of[kProducts];
};

template <int kProducts>
struct HopperLaunch {
  Maps<kProducts> maps[kMostVirtual];
  Launch launch;
};
static_assert(sizeof(HopperLaunch<5>) <= 32764, "more than a kernel's arguments");

}  // namespace pmoe::flashdmoe

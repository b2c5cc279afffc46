// The arguments of a launch on Hopper: those of the ranks' passes, and the tensor maps by which their
// operands are loaded.
//
// Together they may exceed 4096 bytes. Devices from compute capability 7.0 on accept that, with a driver of
// CUDA 12.1 or later.
#pragma once
#include <cuda.h>

#include "flashdmoe/experts.h"

namespace pmoe::flashdmoe {

struct MapPair {
  CUtensorMap a, b;
};

// Index of a product's tensor maps. Forward has the first three products. Backward has kFirstProduct and
// those from kHiddenProduct on, which are numbered from 1 again because the two passes do not share an array.
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
static_assert(sizeof(HopperLaunch<5>) <= 32764, "more bytes than a kernel's arguments may have");

}  // namespace pmoe::flashdmoe

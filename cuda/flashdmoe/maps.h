// The arguments of a launch on Hopper: those of the ranks' passes, and the tensor maps that load their
// operands.
//
// Together they exceed 4096 bytes. Devices from compute capability 7.0 on take that from a driver of CUDA
// 12.1 or later.
#pragma once
#include <cuda.h>

#include "flashdmoe/experts.h"

namespace pmoe::flashdmoe {

struct MapPair {
  CUtensorMap a, b;
};

// Index of a product's maps. Forward has the first three. Backward has kFirstProduct and those from
// kHiddenProduct on, which count from 1 again.
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

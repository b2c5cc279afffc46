// The arguments of a launch on Hopper: the arguments of each rank's pass, and the tensor maps by which the
// operands are loaded.
//
// All arguments together may exceed 4096 bytes, the limit of older CUDA versions. Devices from compute
// capability 7.0 on accept more with a driver of CUDA 12.1 or later.
#pragma once
#include <cuda.h>

#include "flashdmoe/experts.h"

namespace pmoe::flashdmoe {

struct MapPair {
  CUtensorMap a, b;
};

// Index of a product's tensor maps in the array of a launch. A forward launch has kFirstProduct,
// kSecondProduct and kGateProduct (0 to 2). A backward launch has kFirstProduct (0), kHiddenProduct (1) and
// the products after it (2 to 4).
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

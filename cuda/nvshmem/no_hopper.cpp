// The module pmoe._nvshmem has no kernels for Hopper. This file defines the functions that would return them.
// On Hopper, the module is meant to run its kernels with the instructions of sm_80. None of its kernels has
// ever run.
//
// FlashDMoE's kernels for Hopper divide registers among warps (setmaxnreg) and keep products in flight
// (wgmma). The compiler can do neither if it cannot see all code that a kernel calls. In relocatable device
// code, even a division of integers is a call into another translation unit. Tried with CUDA 13.0 and NVSHMEM
// 3.8:
//
//   relocatable device code, with or without puts    setmaxnreg ignored (C7504), wgmma serialized (C7509),
//                                                    1,512 to 1,784 bytes of spills a thread
//   NVSHMEM's functions in the kernel's own unit     wgmma serialized (C7510), no register allocation (C7600)
#include <stdexcept>

#include "flashdmoe/launch.h"

// The definitions have qualified names, so that the compiler refuses a definition whose parameters differ
// from those of its declaration.

pmoe::flashdmoe::ForwardKernel pmoe::flashdmoe::hopper_bf16(Activation) { return nullptr; }
pmoe::flashdmoe::ForwardKernel pmoe::flashdmoe::hopper_fp16(Activation) { return nullptr; }
pmoe::flashdmoe::BackwardKernel pmoe::flashdmoe::hopper_backward_bf16(Activation) { return nullptr; }
pmoe::flashdmoe::BackwardKernel pmoe::flashdmoe::hopper_backward_fp16(Activation) { return nullptr; }

// Called before a launch of a kernel for Hopper.
void pmoe::encode_maps(Element, Form, const Problem&, int64_t, int64_t, CUtensorMap*, CUtensorMap*, int) {
  throw std::invalid_argument("pmoe._nvshmem has no kernels for sm_90a: hopper must be False");
}

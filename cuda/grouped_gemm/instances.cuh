// From a GroupedGemm's values to the kernel compiled for them. A translation unit an element type and path
// defines one `instance`, so that they compile side by side.
#pragma once
#include "launch.h"

namespace pmoe {

// Calls use.template operator()<form, epilogue, gated>() with the values of `which` as constants.
template <class Use>
auto with_constants(const GroupedGemm& which, Use use) {
  const bool gated = which.gated;
  switch (which.epilogue) {
    case Epilogue::kHidden:
      return gated ? use.template operator()<Form::kForward, Epilogue::kHidden, true>()
                   : use.template operator()<Form::kForward, Epilogue::kHidden, false>();
    case Epilogue::kHiddenGradient:
      return gated ? use.template operator()<Form::kInput, Epilogue::kHiddenGradient, true>()
                   : use.template operator()<Form::kInput, Epilogue::kHiddenGradient, false>();
    default:
      break;
  }
  switch (which.form) {
    case Form::kForward:
      return use.template operator()<Form::kForward, Epilogue::kPlain, false>();
    case Form::kInput:
      return use.template operator()<Form::kInput, Epilogue::kPlain, false>();
    default:
      return use.template operator()<Form::kWeight, Epilogue::kPlain, false>();
  }
}

using HopperKernel = void (*)(TensorMap, TensorMap, Problem);
using AmpereKernel = void (*)(Problem);

HopperKernel hopper_bf16(const GroupedGemm&);
HopperKernel hopper_fp16(const GroupedGemm&);
AmpereKernel ampere_bf16(const GroupedGemm&);
AmpereKernel ampere_fp16(const GroupedGemm&);

}  // namespace pmoe

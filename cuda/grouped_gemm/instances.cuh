// Selects the compiled instance of a kernel template by the values in a GroupedGemm. Each element type and
// set of instructions has a file of its own (hopper_bf16.cu, ...), so that nvcc compiles them in parallel.
#pragma once
#include "boxes.cuh"
#include "launch.h"

namespace pmoe {

// Calls use.template operator()<kForm, kEpilogue, activation>(): turns the value `activation` into a template
// argument.
template <Form kForm, Epilogue kEpilogue, class Use>
auto with_activation(Activation activation, const Use& use) {
  switch (activation) {
    case Activation::kRelu:
      return use.template operator()<kForm, kEpilogue, Activation::kRelu>();
    case Activation::kGelu:
      return use.template operator()<kForm, kEpilogue, Activation::kGelu>();
    case Activation::kSilu:
      return use.template operator()<kForm, kEpilogue, Activation::kSilu>();
    default:
      return use.template operator()<kForm, kEpilogue, Activation::kSwiglu>();
  }
}

// Calls use.template operator()<form, epilogue, activation>(): turns the values in `which` into template
// arguments.
template <class Use>
auto with_constants(const GroupedGemm& which, const Use& use) {
  if (which.epilogue == Epilogue::kHidden)
    return with_activation<Form::kForward, Epilogue::kHidden>(which.activation, use);
  if (which.epilogue == Epilogue::kHiddenGradient)
    return with_activation<Form::kInput, Epilogue::kHiddenGradient>(which.activation, use);
  switch (which.form) {
    case Form::kForward:
      return use.template operator()<Form::kForward, Epilogue::kPlain, Activation::kNone>();
    case Form::kInput:
      return use.template operator()<Form::kInput, Epilogue::kPlain, Activation::kNone>();
    default:
      return use.template operator()<Form::kWeight, Epilogue::kPlain, Activation::kNone>();
  }
}

// Does what with_constants() does, for products that are computed in turns (can_take_turns() in storing.h).
template <class Use>
auto with_constants_of_turns(const GroupedGemm& which, const Use& use) {
  if (which.epilogue == Epilogue::kHiddenGradient)
    return use.template operator()<Form::kInput, Epilogue::kHiddenGradient, Activation::kSwiglu>();
  if (which.epilogue == Epilogue::kHidden)
    return use.template operator()<Form::kForward, Epilogue::kHidden, Activation::kSwiglu>();
  return which.form == Form::kForward
             ? use.template operator()<Form::kForward, Epilogue::kPlain, Activation::kNone>()
             : use.template operator()<Form::kInput, Epilogue::kPlain, Activation::kNone>();
}

// Does what with_constants() does, for products that are stored as boxes and not computed in turns
// (can_store_boxes() in storing.h).
template <class Use>
auto with_constants_of_boxes(const GroupedGemm& which, const Use& use) {
  if (which.epilogue == Epilogue::kHidden)
    return use.template operator()<Form::kForward, Epilogue::kHidden, Activation::kSwiglu>();
  if (which.form == Form::kWeight)
    return use.template operator()<Form::kWeight, Epilogue::kPlain, Activation::kNone>();
  return which.form == Form::kForward
             ? use.template operator()<Form::kForward, Epilogue::kPlain, Activation::kNone>()
             : use.template operator()<Form::kInput, Epilogue::kPlain, Activation::kNone>();
}

using HopperKernel = void (*)(TensorMap, TensorMap, Problem);
using KernelWithStoreMaps = void (*)(TensorMap, TensorMap, StoreMaps, Problem);
using AmpereKernel = void (*)(Problem);

HopperKernel hopper_bf16(const GroupedGemm&);
HopperKernel hopper_fp16(const GroupedGemm&);
KernelWithStoreMaps hopper_turns_bf16(const GroupedGemm&);
KernelWithStoreMaps hopper_turns_fp16(const GroupedGemm&);
KernelWithStoreMaps hopper_boxes_bf16(const GroupedGemm&);
KernelWithStoreMaps hopper_boxes_fp16(const GroupedGemm&);
AmpereKernel ampere_bf16(const GroupedGemm&);
AmpereKernel ampere_fp16(const GroupedGemm&);

}  // namespace pmoe

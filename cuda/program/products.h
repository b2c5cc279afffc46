// Grouped products of pass programs. The arguments that are the same in every pass are computed when a
// program is loaded. Each pass adds the addresses and the number of rows.
#pragma once

#include "grouped_gemm/launch.h"
#include "grouped_gemm/parts.h"
#include "grouped_gemm/sharing.h"
#include "program/interpreter.h"

namespace pmoe::program {

// The kernels that a backend over CUDA knows besides those of layout.h: pmoe.program.records.Kernel.
enum DeviceKernel : int64_t {
  kTake = 3,
  kPut = 4,
  kPlace = 5,
  kSum = 6,
  kHidden = 7,
  kOutput = 8,
  kRecompute = 9,
  kHiddenGradient = 10,
  kBiasDots = 11,
  kInputGradient = 12,
  kScale = 13,
  kWeightGradient = 14,
  kBiasGradient = 15,
};

// Facts of the device and of the experts that are not in a program's words.
struct Facts {
  int device;
  bool hopper;  // whether kernels for sm_90a are launched, else those for sm_80
  Element element;
  Activation activation;
  int spare;            // multiprocessors that products leave free
  int multiprocessors;  // of the device
};

inline bool is_product(int64_t kernel) {
  return (kernel >= kHidden && kernel <= kHiddenGradient) || kernel == kInputGradient ||
         kernel == kWeightGradient;
}

// The grouped product of a record.
struct Product {
  GroupedGemm which;
  Problem problem;
  int blocks = 0;
  int counter = -1;  // index of its tile counter among the counters of the pass
};

// Returns the product of a record, without the addresses and the number of rows, which change from pass to
// pass.
inline Product make_product(const Words& words, const Record& record, const Facts& facts) {
  const auto operand = [&](int i) -> const Operand& { return words.operand(record.operand_begin + i); };
  const auto columns = [&](int i) { return static_cast<int>(operand(i).columns); };
  const auto stride = [&](int i) { return operand(i).row_bytes / 2; };
  Product product;
  product.which = {facts.element, Form::kForward, Epilogue::kPlain, Activation::kNone};
  Problem& p = product.problem;
  p.experts = static_cast<int>(words.header().local_experts);
  p.top_k = Divisor(1);
  p.a_stride = stride(0);
  switch (record.kernel) {
    case kHidden:  // rows, w1, b1 -> T_M, active
      product.which.epilogue = Epilogue::kHidden;
      product.which.activation = facts.activation;
      p.active_stride = stride(4);
      [[fallthrough]];
    case kRecompute:  // rows, w1, b1 -> T_M
      p.k = columns(0), p.n = columns(3), p.d_stride = stride(3);
      break;
    case kOutput:  // active, w2, b2, weight, place -> out
      p.k = columns(0), p.n = columns(5), p.d_stride = stride(5);
      break;
    case kHiddenGradient:  // grad, w2, T_M, weight -> dT_M, active, dots
      product.which = {facts.element, Form::kInput, Epilogue::kHiddenGradient, facts.activation};
      p.k = columns(0), p.n = columns(5), p.d_stride = stride(4);
      p.hidden_stride = stride(2), p.active_stride = stride(5);
      p.weighs_active = static_cast<int>(record.flag);
      break;
    case kInputGradient:  // dT_M, w1, place -> out
      product.which.form = Form::kInput;
      p.k = columns(0), p.n = columns(3), p.d_stride = stride(3);
      break;
    case kWeightGradient:  // grad, rows -> sum, in float
      product.which.form = Form::kWeight;
      p.m = columns(0), p.n = columns(1), p.b_stride = stride(1), p.d_stride = p.n;
      p.wide = 1, p.accumulates = static_cast<int>(record.flag);
      break;
  }
  if (facts.hopper) share(product.which, p, Sharing::kByRule);
  product.blocks = num_blocks(product.which, p, facts.hopper, facts.multiprocessors, facts.spare);
  return product;
}

// Launches a product.
//
// call: the record's call.
// row_dots: memory for the gradients of the routing weights, or for partial sums of them (kHiddenGradient
//     only).
// counters: the tile counters of all products of the pass, which must be 0; null if products need no
//     counters.
inline void launch_product(const Product& product, const Call& call, bool hopper, float* row_dots,
                           uint32_t* counters) {
  const auto at = [&](int i) { return reinterpret_cast<void*>(call.operand[i].address); };
  Problem p = product.problem;
  p.rows = static_cast<int>(call.operand[0].rows);
  p.a = at(0), p.b = at(1);
  p.ends = static_cast<const int32_t*>(at(static_cast<int>(call.operands) - 1));
  p.next_tile = counters ? counters + product.counter : nullptr;
  switch (call.kernel) {
    case kHidden:
      p.active = at(4);
      [[fallthrough]];
    case kRecompute:
      p.bias = at(2), p.d = at(3);
      break;
    case kOutput:
      p.bias = at(2), p.weight = static_cast<const float*>(at(3));
      p.place = static_cast<const int32_t*>(at(4)), p.d = at(5);
      break;
    case kHiddenGradient:
      p.hidden = at(2), p.weight = static_cast<const float*>(at(3)), p.d = at(4), p.active = at(5);
      p.row_dots = row_dots;
      break;
    case kInputGradient:
      p.place = static_cast<const int32_t*>(at(2)), p.d = at(3);
      break;
    case kWeightGradient:
      p.d = at(2);
      break;
  }
  const GroupedGemmPath& path = hopper ? hopper_path : ampere_path;
  const int64_t b_rows = call.kernel == kWeightGradient ? p.rows : 0;
  path.launch(product.which, p, p.rows, b_rows, product.blocks, reinterpret_cast<void*>(call.stream));
}

}  // namespace pmoe::program

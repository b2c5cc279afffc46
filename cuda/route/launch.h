// Launches of the routing kernels. This header is plain C++: no CUDA header, no torch. Launches return
// without waiting. All addresses are of device memory.
//
// Letters: T tokens, E experts, K choices, N = T*K slots ((token, choice) pairs), n chunks, P partial sums of
// the gradient of each routing weight.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "counts/layout.h"
#include "kernel_info.h"

namespace pmoe::route {

// The arguments that both passes have in common.
//
// sorted_chunks, first_last, num_last: the order of rows (Sizes in layout.h); not used by backward.
struct Problem {
  int device;
  void* stream;
  int64_t num_tokens, num_experts, top_k, num_chunks;
  bool normalize;
  double z_loss_weight;
  int64_t sorted_chunks = 1, first_last = 0, num_last = 0;
};

// The tensors of the forward kernels. All but logits_TE are results.
//
// weight_TK, expert_TK: for each slot its routing weight and its expert; the choices of a token best first.
// position_TK: for each slot the index of its row in the sorted order.
// slot_N: for each sorted row its slot, an index among the N slots.
// counts_nE: number of rows of each expert in each chunk.
// ends_nE: the running sum of counts_nE over all chunks and experts.
// fault: receives not_finite if a logit is infinite or NaN, else 0.
// pack: the messages of row counts, with chunks in the place of bins. The launch reads only its fields
//     message, header and sent. No messages are written if sent is null.
struct ForwardTensors {
  const float* logits_TE;  // contiguous
  float* weight_TK;
  int32_t* expert_TK;
  int32_t* position_TK;
  int32_t* slot_N;
  int32_t* counts_nE;
  int32_t* ends_nE;
  float* l_aux;
  void* workspace;  // scratch memory
  int64_t workspace_bytes;
  int64_t* fault;
  int32_t not_finite;
  counts::Pack pack;
};

struct BackwardTensors {
  const float* logits_TE;  // contiguous
  const int32_t* expert_TK;
  const float* weight_TK;
  const int32_t* counts_nE;
  const float* grad_weight_TK;  // or null
  const float* partial_PN;      // used if grad_weight_TK is null; may be null too
  const int32_t* position_TK;   // needed with partial_PN
  int64_t num_partials;
  const float* grad_l_aux;  // or null
  float* grad_logits_TE;
};

// Returns why there is no kernel for these sizes; an empty string if there is one. It does not need a device.
std::string refusal(int64_t num_tokens, int64_t num_experts, int64_t top_k, int64_t num_chunks);

// Loads the kernels on a device. Throws std::runtime_error if the device cannot run them, because they were
// not compiled for it, or because it has too little shared memory.
void prepare(int device, int64_t num_experts, int64_t top_k);

// Returns the size in bytes of the scratch memory that forward() needs. The memory need not be initialised.
// Other work may use it only after the stream has finished forward().
int64_t workspace_bytes(const Problem& problem);

// Launches the two forward kernels. Throws std::invalid_argument, before launching, if refusal() gives a
// reason, the workspace is too small, or the messages have other sizes; throws std::runtime_error for an
// error of CUDA.
void forward(const Problem& problem, const ForwardTensors& tensors);

// Launches the backward kernel, unless there are no tokens. Throws std::invalid_argument, before launching,
// if refusal() gives a reason; throws std::runtime_error for an error of CUDA.
void backward(const Problem& problem, const BackwardTensors& tensors);

// The arguments of halves(): see halves.cuh. grad_TE is float32, the other tensors are bfloat16.
struct HalvesTensors {
  const float* grad_TE;
  void* halves;
  const void* weight_EM;
  void* twice;
};

// Launches the kernel that writes operands of the gate's matrix products in backward (halves.cuh). Throws
// std::invalid_argument, before launching, if a size is out of range or the weight does not consist of whole
// vectors of 16 bytes.
void halves(int device, void* stream, int64_t num_tokens, int64_t num_experts, int64_t columns,
            const HalvesTensors& tensors);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::route

// Plain C++: no CUDA header, no torch. Addresses are of device memory. Launches, never waits.
//
// Letters: T tokens, E experts, K choices, N = T*K slots, n chunks, P tiles.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernel_info.h"

namespace pmoe::route {

struct Problem {
  int device;
  void* stream;
  int64_t num_tokens, num_experts, top_k, num_chunks;
  bool normalize;
  double z_loss_weight;
};

struct ForwardTensors {
  const float* logits_TE;  // contiguous
  float* weight_TK;
  int32_t* expert_TK;
  int32_t* position_TK;
  int32_t* slot_N;
  int32_t* counts_nE;
  int32_t* ends_nE;
  float* l_aux;
  void* workspace;  // see workspace_bytes
  int64_t workspace_bytes;
};

struct BackwardTensors {
  const float* logits_TE;  // contiguous
  const int32_t* expert_TK;
  const float* weight_TK;
  const int32_t* counts_nE;
  const float* grad_weight_TK;  // or null
  const float* partial_PN;      // instead of grad_weight_TK, or null
  const int32_t* position_TK;   // with partial_PN
  int64_t num_partials;
  const float* grad_l_aux;  // or null
  float* grad_logits_TE;
};

// Why there is no kernel for these sizes, or an empty string. Asks no device.
std::string refusal(int64_t num_tokens, int64_t num_experts, int64_t top_k, int64_t num_chunks);

// Makes the kernels ready on a device. Throws std::runtime_error where it cannot run them: no code for it, or
// too little shared memory.
void prepare(int device, int64_t num_experts, int64_t top_k);

// Bytes that forward() writes and reads, of any content before; the stream's own until it has passed forward.
int64_t workspace_bytes(const Problem& problem);

// Two launches. Throws, before them, std::invalid_argument for what refusal() tells and for too little
// workspace; and std::runtime_error for an error of CUDA.
void forward(const Problem& problem, const ForwardTensors& tensors);

// One launch; none without tokens. Throws as forward does.
void backward(const Problem& problem, const BackwardTensors& tensors);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::route

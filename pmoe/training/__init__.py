"""Training a model with MoE layers.

expert_parallel         parallelize: expert parallelism beside DistributedDataParallel or FSDP2
gradient_mean           the mean of experts' gradients over ranks
sharded_experts         experts that FSDP2 shards over the ranks with copies of them
parallel                device meshes for DP x MP x EP x ESP, and reduction of gradients after backward
reducer                 GradientReducer: all-reduce of dense gradients during backward
gradient_partitioning   when the reducer sends which gradients
balance                 load-balance losses over sequences, batches, or several steps
attached_loss           losses whose gradients are computed in the backward pass of another tensor
clipping                gradient norm, clipping and loss scaling
parameter_kinds         parameter groups for optimizers
muon                    the Muon optimizer for stacked experts
frozen_experts          freezes some experts of a layer
lora                    low-rank adapters of experts; lora_files saves and loads them in PEFT's files
checkpoint              checkpoints; checkpoint_files and checkpoint_state have their files and tensors
export                  weights in the names and layout of other systems
bounded_steps           a bound on the rows of each step, and exact repetition of steps that exceed it
batch_invariant         makes the bits of a token's output independent of the rest of its batch
"""

"""Training a model with MoE layers.

expert_parallel         parallelize: expert parallelism beside DistributedDataParallel or FSDP2
parallel                device meshes for DP x MP x EP x ESP, and reduction of gradients after backward
reducer                 GradientReducer: all-reduce of dense gradients during backward
gradient_partitioning   which gradients the reducer sends when
clipping                gradient norm, clipping and loss scaling
parameter_kinds         parameter groups for optimizers
checkpoint              checkpoints; checkpoint_files and checkpoint_state have their files and tensors
upcycling               experts that start as copies of a dense network
"""

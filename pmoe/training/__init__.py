"""Training a model with MoE layers: parallelism, gradient reduction, clipping, checkpoints."""

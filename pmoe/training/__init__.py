"""Beside the layer in a training script: data parallelism, reducer, clipping, scaler, checkpoints."""

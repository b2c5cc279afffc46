"""The memory of a pass: reused device memory, and host memory for offloaded tensors."""

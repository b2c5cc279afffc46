"""The memory of a pass: ring slots on the device, and host memory for offloaded tensors."""

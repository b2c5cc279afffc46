"""The forward and the backward pass: the buffers of a pass, and a method for each kind of task."""

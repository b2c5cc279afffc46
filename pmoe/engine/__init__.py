"""The engine: runs a schedule on the lanes of a device, between the two passes of one autograd Function."""

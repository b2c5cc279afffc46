"""Features of some layers only: each is a pair of subclasses, of the forward and the backward pass."""

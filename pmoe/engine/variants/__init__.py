"""Features that only some layers have: each is a pair of subclasses, of the forward and the backward pass."""

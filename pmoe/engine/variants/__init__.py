"""Features that only some layers have: each is a subclass of the forward and one of the backward pass."""

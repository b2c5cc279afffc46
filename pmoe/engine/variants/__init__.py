"""Features that only some layers have.

Most features have two classes: a subclass of the forward pass, and a subclass of the backward pass.
"""

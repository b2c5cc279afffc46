"""The first steps on a GPU, each in a process of its own: ``python -m tests.gpu.ladder``."""

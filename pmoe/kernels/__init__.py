"""The Python face of cuda/. All of it imports without the extension; ``status()`` says why there is none."""

from pmoe.kernels.extension import status

__all__ = ["status"]

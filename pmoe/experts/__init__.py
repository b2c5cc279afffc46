"""Experts: the networks that rows are routed to, as grouped products. One kind a file."""

from pmoe.experts.base import Experts
from pmoe.experts.ffn import FFNExperts
from pmoe.experts.modules import ModuleExperts
from pmoe.experts.swiglu import SwiGLUExperts

__all__ = ["Experts", "FFNExperts", "ModuleExperts", "SwiGLUExperts"]

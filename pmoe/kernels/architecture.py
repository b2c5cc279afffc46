"""Which devices, and which build of the kernels, a measurement or a heap belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from pmoe.kernels import extension


@cache
def device_name(device: torch.device) -> str:
    """Example: "NVIDIA H200"; "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The best code that the driver has loaded of the kernels; versions are 0 where there is none.

    binary_version, ptx_version: see `pmoe.kernels.extension`. capability: 90 is 9.0.
    """

    binary_version: int
    ptx_version: int
    capability: int

    def __str__(self) -> str:
        major, minor = divmod(self.capability, 10)
        code = f"binary {self.binary_version} of PTX {self.ptx_version}" if self.binary_version else "none"
        return f"{code} on compute capability {major}.{minor}"


def loaded_architecture(device: torch.device) -> Architecture:
    """Of this CUDA device."""
    found = extension.ask_device(device.index or 0)
    loaded = [(each.binary_version, each.ptx_version) for each in found.kernels if each.refusal is None]
    binary, ptx = max(loaded, default=(0, 0))
    major, minor = found.capability
    return Architecture(binary_version=binary, ptx_version=ptx, capability=10 * major + minor)


@cache
def build_id() -> str:
    """Tells builds of the kernels apart: times of another build say nothing of this one's."""
    module = extension.load()
    if module is None:
        return "none"
    file = getattr(module, "__file__", None)
    content = f"{module.ARCHS} {module.NVCC}".encode() if file is None else Path(file).read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]

"""Whose profile would be measured here: the device, the group of ranks, and the versions."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import torch.distributed as dist

from pmoe.comm.ranks import Ranks
from pmoe.planner.profile import FORMAT, WIDTH, Identity, Versions


def identity(ranks: Ranks, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Identity:
    """Of the profile that `pmoe.measure.rates.measure` would take here. Not collective.

    Raises ValueError for a device that is neither a CPU nor CUDA, and a dtype that is not floating point.
    """
    device = torch.device(device)
    if device.type not in WIDTH:
        raise ValueError(f"device ({device}) must be one of the types {', '.join(WIDTH)}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype ({dtype}) must be floating point")
    return Identity(
        device=_full_name(device),
        device_type=device.type,
        num_ranks=ranks.size,
        backend=_backend(ranks, device),
        dtype=str(dtype).removeprefix("torch."),
        versions=Versions(torch=str(torch.__version__), cuda=torch.version.cuda, file=FORMAT),
    )


def _full_name(device: torch.device) -> str:
    """Of a CPU with the number of threads that compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
            break
    return f"{model}, {torch.get_num_threads()} threads"


def _backend(ranks: Ranks, device: torch.device) -> str:
    """Of the group, for tensors on ``device``."""
    if ranks.size == 1:
        return "none"
    config = dist.get_backend_config(ranks.group)  # "cpu:gloo,cuda:nccl"
    by_type = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_type.get(device.type, config)

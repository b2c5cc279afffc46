"""Where a step runs: a GPU, and in rehearsals the emulator in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels import extension


@dataclass(frozen=True, kw_only=True)
class Machine:
    """module: pmoe._cuda. hopper: whether the kernels for sm_90a are launched, else those for sm_80."""

    module: Any
    device: torch.device
    hopper: bool

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def put(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return values.to(self.device, dtype).contiguous()

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """By a copy: the device runs nothing but the kernels."""
        return self.put(torch.full(shape, float("nan"), dtype=dtype))

    def fetch(self, values: Tensor) -> Tensor:
        """On the CPU, in float32; the host waits, so that an error of a kernel is raised here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return values.cpu().float()


def this_machine(path: str) -> Machine:
    """path: "sm_90a" or "sm_80", whose kernels are launched. Raises RuntimeError where they are not there."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    found, reason = extension.path(device)
    if found is None:
        raise RuntimeError(f"no kernels of pmoe run here: {reason}")
    if path == "sm_90a" != found:
        raise RuntimeError(f"kernels for sm_90a were asked for, and {device} runs {found}")
    return Machine(module=extension.module(), device=device, hopper=path == "sm_90a")

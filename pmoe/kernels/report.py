"""`pmoe.kernels.status`: which kernels were built, what runs on each device, and why not."""

from __future__ import annotations

import collections
import re
import textwrap
from dataclasses import dataclass
from types import ModuleType

import torch

from pmoe.kernels import extension
from pmoe.kernels.extension import Device, LoadedKernel


@dataclass(frozen=True, kw_only=True)
class Status:
    """The CUDA kernels of this installation; ``str()`` of it is a page to read.

    reason: why the extension is not built, or cannot be imported.
    archs: what it was compiled for, as in "sm_80, sm_90a, ptx80". nvcc: the compiler's version.
    no_devices: why there are none.
    nvshmem: of which version, and its library; None where it is not built in.
    """

    built: bool
    reason: str | None
    archs: str | None
    nvcc: str | None
    kernels: tuple[str, ...]
    devices: tuple[Device, ...]
    no_devices: str | None
    nvshmem: str | None = None

    def __str__(self) -> str:
        if self.built:
            lines = [f"CUDA kernels: {len(self.kernels)}, built for {self.archs} by nvcc {self.nvcc}"]
            names = ", ".join(_by_operation(self.kernels))
            lines += textwrap.wrap(names, 110, initial_indent="  ", subsequent_indent="  ")
            lines.append(f"NVSHMEM: {self.nvshmem or 'not built in, its headers were not found'}")
        else:
            lines = [f"CUDA kernels: none, {self.reason}"]
        if self.no_devices is not None:
            lines.append(f"devices: none, {self.no_devices}")
        for device in self.devices:
            major, minor = device.capability
            lines += ["", f"device {device.index}: {device.name}, compute capability {major}.{minor}"]
            if device.reason is not None:
                lines.append(f"  no kernel runs: {device.reason}")
            lines += _kernel_lines(device.kernels)
        return "\n".join(lines)


def _by_operation(kernels: tuple[str, ...]) -> list[str]:
    """Example: "route.8", "route.16", "permute" -> "permute", "route (2)"."""
    variant = re.compile(r"\.(sm_\w+|bf16|fp16|fp32|\d+)(\.|$)")
    count = collections.Counter(variant.split(name, maxsplit=1)[0] for name in kernels)
    return [name if times == 1 else f"{name} ({times})" for name, times in sorted(count.items())]


def _kernel_lines(kernels: tuple[LoadedKernel, ...]) -> list[str]:
    if not kernels:
        return []
    rows = [["kernel", "threads", "registers", "shared bytes", "local bytes", "runs"]]
    for each in kernels:
        shared = each.shared_bytes + each.dynamic_shared_bytes
        numbers = [each.threads, each.registers, shared, each.local_bytes]
        runs = each.runs if each.refusal is None else f"refused: {each.refusal}"
        rows.append([each.name, *map(str, numbers), runs])
    from pmoe.text import table

    return textwrap.indent(table(rows, left=(0, 5)), "  ").splitlines()


def status() -> Status:
    """Asks the extension, and every device that torch sees; starts CUDA on those.

    Trouble is part of the answer and raises nothing.
    """
    module = extension.load()
    devices: tuple[Device, ...] = ()
    no_devices = None
    if torch.cuda.is_available():
        try:
            devices = tuple(map(extension.ask_device, range(torch.cuda.device_count())))
        except RuntimeError as error:  # from torch, as it starts CUDA
            no_devices = str(error)
    else:
        no_devices = f"torch {torch.__version__} sees no CUDA device"
    return Status(
        built=module is not None,
        reason=extension.why_missing(),
        archs=None if module is None else module.ARCHS,
        nvcc=None if module is None else module.NVCC,
        kernels=() if module is None else tuple(each["name"] for each in module.declared()),
        devices=devices,
        no_devices=no_devices,
        nvshmem=_nvshmem(module),
    )


def _nvshmem(module: ModuleType | None) -> str | None:
    version = getattr(module, "NVSHMEM", None)
    if version is None:
        return None
    library = extension.nvshmem_library()
    found = "its library is not found" if library is None else f"library {library}"
    return f"built for {version}, untested; {found}"

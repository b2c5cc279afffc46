"""``pmoe._cuda``: whether it is there, and what runs of it on each device.

What a device can run is read from the kernel as the driver loaded it, never from compute capability alone.
Its versions (90 is 9.0) tell code that nvcc compiled from what the driver made of PTX:

    binary  PTX
    80      80   the sm_80 code, on 8.x
    90      90   the sm_90a code: setup.py compiles nothing else of 9.0
    90      80   compiled by the driver from PTX, on 9.0 (CUDA_FORCE_PTX_JIT=1, or built without sm_90a)
    100     80   the same, on Blackwell, where no sm_90a code runs
"""

from __future__ import annotations

import collections
import importlib
import importlib.util
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pmoe.text import table

NAME = "pmoe._cuda"
HOW_TO_BUILD = (
    "with nvcc 12.5 or newer on PATH: pip install . (or, in place: python setup.py build_ext --inplace)"
)


def load() -> ModuleType | None:
    """The extension, or None; ``status().reason`` then says why. Does not start CUDA."""
    return _load()[0]


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module(NAME), None
    except ModuleNotFoundError as error:
        if error.name != NAME:
            return None, f"{NAME} cannot be imported: {error}"
    except ImportError as error:
        return None, f"{NAME} cannot be imported: {error}"
    others = sorted(path.name for path in Path(__file__).parents[1].glob("_cuda.*.so"))
    if others:
        here = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        return None, f"{NAME} is not built for {here}, there is {', '.join(others)}; {HOW_TO_BUILD}"
    return None, f"{NAME} is not built; {HOW_TO_BUILD}"


def binary_of(binary_version: int, ptx_version: int) -> str:
    """What a loaded kernel is, by the versions that cudaFuncGetAttributes gives.

    Example: (80, 80) -> "sm_80"; (90, 90) -> "sm_90a"; (90, 80) and (100, 80) -> "PTX of compute_80, compiled
    by the driver".
    """
    if binary_version != ptx_version:
        return f"PTX of compute_{ptx_version}, compiled by the driver"
    return "sm_90a" if binary_version == 90 else f"sm_{binary_version}"


def hopper_refusal(binary_version: int, ptx_version: int, capability: tuple[int, int]) -> str | None:
    """Why a kernel whose body is sm_90a code cannot run as loaded; None where it can. The capability does not
    decide, it words the reason."""
    if binary_version == ptx_version == 90:
        return None
    loaded = f"binary version {binary_version} of PTX version {ptx_version} was loaded, not 90 of 90"
    major, minor = capability
    if capability == (9, 0):
        return f"{loaded}: the driver took the PTX (CUDA_FORCE_PTX_JIT), or sm_90a was not compiled"
    return f"{loaded}: sm_90a code runs on compute capability 9.0 only, and this device has {major}.{minor}"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel as loaded on one device. Bytes and registers: shared a block, local and registers a thread."""

    name: str
    runs: str  # "sm_90a", "PTX of compute_80, compiled by the driver"
    refusal: str | None  # why it does not run here after all
    binary_version: int
    ptx_version: int
    threads: int
    registers: int
    shared_bytes: int
    dynamic_shared_bytes: int
    local_bytes: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """A CUDA device that torch sees, and the kernels there."""

    index: int
    name: str
    capability: tuple[int, int]
    kernels: tuple[Kernel, ...]
    reason: str | None  # why there are none


@dataclass(frozen=True, kw_only=True)
class Status:
    """What there is of the CUDA kernels; ``str()`` of it is a page to read."""

    built: bool
    reason: str | None  # why it is not built, or cannot be imported
    archs: str | None  # compiled for, as in "sm_80, sm_90a, ptx80"
    nvcc: str | None
    kernels: tuple[str, ...]
    devices: tuple[Device, ...]
    no_devices: str | None  # why there are none
    nvshmem: str | None = None  # of which version, and its library; None where it is not built in

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


def _kernel_lines(kernels: tuple[Kernel, ...]) -> list[str]:
    if not kernels:
        return []
    rows = [["kernel", "threads", "registers", "shared bytes", "local bytes", "runs"]]
    for each in kernels:
        shared = each.shared_bytes + each.dynamic_shared_bytes
        numbers = [each.threads, each.registers, shared, each.local_bytes]
        told = each.runs if each.refusal is None else f"refused: {each.refusal}"
        rows.append([each.name, *map(str, numbers), told])
    return textwrap.indent(table(rows, left=(0, 5)), "  ").splitlines()


def status() -> Status:
    """Asks the extension, and every device that torch sees; starts CUDA on those. Raises nothing that it can
    tell instead."""
    module, reason = _load()
    devices: tuple[Device, ...] = ()
    no_devices = None
    if torch.cuda.is_available():
        try:
            devices = tuple(_device(index, module, reason) for index in range(torch.cuda.device_count()))
        except RuntimeError as error:  # from torch, as it starts CUDA
            no_devices = str(error)
    else:
        no_devices = f"torch {torch.__version__} sees no CUDA device"
    return Status(
        built=module is not None,
        reason=reason,
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
    library = nvshmem_library()
    found = "its library is not found" if library is None else f"library {library}"
    return f"built for {version}, untested; {found}"


def nvshmem_library() -> str | None:
    """The path of NVSHMEM's host library: in $NVSHMEM_HOME, else in the package nvidia-nvshmem-cu12 or cu13.
    None where it is in neither; nothing is opened."""
    if home := os.environ.get("NVSHMEM_HOME"):
        places = [Path(home)]
    else:
        packages = importlib.util.find_spec("nvidia")
        found = (packages and packages.submodule_search_locations) or ()
        places = [Path(place, "nvshmem") for place in found]
    for place in places:
        for folder in ("lib", "lib64"):
            for library in sorted(place.joinpath(folder).glob("libnvshmem_host.so*")):
                return str(library)
    return None


@cache
def on_device(index: int) -> Device:
    """The kernels as this CUDA device has them, asked for once."""
    module, reason = _load()
    return _device(index, module, reason)


def _device(index: int, module: ModuleType | None, reason: str | None) -> Device:
    capability = torch.cuda.get_device_capability(index)
    kernels: tuple[Kernel, ...] = ()
    if module is not None:
        try:
            kernels = tuple(_kernel(capability, **each) for each in module.kernels(index))
        except RuntimeError as error:  # one device's trouble is told beside the other devices
            reason = str(error)
    return Device(
        index=index,
        name=torch.cuda.get_device_name(index),
        capability=capability,
        kernels=kernels,
        reason=reason,
    )


def _kernel(
    capability: tuple[int, int], *, hopper: bool, binary_version: int, ptx_version: int, **found: Any
) -> Kernel:
    return Kernel(
        runs=binary_of(binary_version, ptx_version),
        refusal=hopper_refusal(binary_version, ptx_version, capability) if hopper else None,
        binary_version=binary_version,
        ptx_version=ptx_version,
        **found,
    )

"""``pmoe._cuda``, the extension with the CUDA kernels: loads it, and finds what each device can run.

What a device can run is read from the kernel as the driver loaded it, and never derived from the compute
capability alone. A loaded kernel has two versions (90 means 9.0). They tell code that nvcc compiled from code
that the driver compiled from PTX:

    binary  PTX
    80      80   the sm_80 code, on 8.x
    90      90   the sm_90a code: setup.py compiles no other code for 9.0
    90      80   compiled by the driver from PTX, on 9.0 (CUDA_FORCE_PTX_JIT=1, or built without sm_90a)
    100     80   the same, on Blackwell, where no sm_90a code runs

All kernels are compiled for the same architectures, so the versions of one kernel (PROBE) stand for all. The
other kernels are loaded when they are first launched. On a device that takes the PTX, loading all of them
would compile all of them, which takes minutes.
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

from pmoe.kernels.operands import cuda_index

NAME = "pmoe._cuda"
PROBE = "heap.raise_flag"
HOW_TO_BUILD = (
    "with nvcc 12.5 or newer on PATH: pip install . (or, in place: python setup.py build_ext --inplace)"
)


def load() -> ModuleType | None:
    """Returns the extension, or None if it cannot be loaded (`why_missing` says why). Does not start CUDA."""
    return _load()[0]


def why_missing() -> str | None:
    """Returns why the extension is not loaded; None if it is."""
    return _load()[1]


def module() -> Any:
    """Returns the extension. The caller must know that it is loaded."""
    loaded = load()
    assert loaded is not None, "the extension is not loaded: ask refusal() before a launch"
    return loaded


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    """Returns (the extension, None), or (None, why it cannot be loaded)."""
    try:
        return importlib.import_module(NAME), None
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != NAME:
            return None, f"{NAME} cannot be imported: {error}"
    other_builds = sorted(path.name for path in Path(__file__).parents[1].glob("_cuda.*.so"))
    if other_builds:
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        return None, f"{NAME} is not built for {python}, only as {', '.join(other_builds)}; {HOW_TO_BUILD}"
    return None, f"{NAME} is not built; {HOW_TO_BUILD}"


def binary_of(binary_version: int, ptx_version: int) -> str:
    """Returns what a loaded kernel is, from the two versions that cudaFuncGetAttributes gives.

    Example: (80, 80) -> "sm_80"; (90, 90) -> "sm_90a"; (90, 80) and (100, 80) -> "PTX of compute_80, compiled
    by the driver".
    """
    if binary_version != ptx_version:
        return f"PTX of compute_{ptx_version}, compiled by the driver"
    return "sm_90a" if binary_version == 90 else f"sm_{binary_version}"


def hopper_refusal(binary_version: int, ptx_version: int, capability: tuple[int, int]) -> str | None:
    """Returns why a kernel that needs sm_90a code cannot run as it was loaded; None if it can.

    The versions alone decide. The compute capability only chooses the words of the reason.
    """
    if binary_version == ptx_version == 90:
        return None
    loaded = f"binary version {binary_version} of PTX version {ptx_version} was loaded, not 90 of 90"
    major, minor = capability
    if capability == (9, 0):
        return f"{loaded}: the driver compiled the PTX (CUDA_FORCE_PTX_JIT=1), or there is no sm_90a code"
    return f"{loaded}: sm_90a code runs on compute capability 9.0 only, and this device has {major}.{minor}"


@dataclass(frozen=True, kw_only=True)
class LoadedKernel:
    """A kernel as the driver loaded it on one device.

    runs: "sm_90a", "sm_80" or "PTX of compute_80, compiled by the driver"; see `binary_of`.
    refusal: why it cannot run on this device; None if it can.
    threads: of a block. registers, local_bytes: of a thread.
    shared_bytes, dynamic_shared_bytes: of a block.
    """

    name: str
    runs: str
    refusal: str | None
    binary_version: int
    ptx_version: int
    threads: int
    registers: int
    shared_bytes: int
    dynamic_shared_bytes: int
    local_bytes: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """A CUDA device that torch sees, and the kernels that were loaded on it.

    capability: (9, 0) is 9.0.
    kernels: all of them, or PROBE alone.
    reason: why there are no kernels; None if there are.
    """

    index: int
    name: str
    capability: tuple[int, int]
    kernels: tuple[LoadedKernel, ...]
    reason: str | None


@cache
def on_device(index: int) -> Device:
    """Returns the device with PROBE as its only kernel. Asks the driver once for each device."""
    return ask_device(index, PROBE)


def path(device: torch.device) -> tuple[str | None, str | None]:
    """Returns (which code of the kernels a device runs, None), or (None, why it runs none).

    The code is "sm_90a" or "sm_80"; the latter also stands for code that the driver compiled from PTX.
    """
    if device.type != "cuda":
        return None, f"device {device.type}: the kernels are for CUDA"
    if load() is None:
        return None, why_missing()
    probed = on_device(cuda_index(device))
    if not probed.kernels:
        return None, f"device {probed.index}: {probed.reason}"
    return "sm_90a" if probed.kernels[0].runs == "sm_90a" else "sm_80", None


def ask_device(index: int, only: str = "") -> Device:
    """Returns a device with all its kernels, or with the one that ``only`` names.

    A device that fails is returned without kernels, and its reason says why.
    """
    capability = torch.cuda.get_device_capability(index)
    module, reason = _load()
    kernels: list[LoadedKernel] = []
    if module is not None:
        try:
            for facts in module.kernels(index, only):
                versions = facts["binary_version"], facts["ptx_version"]
                refusal = hopper_refusal(*versions, capability) if facts.pop("hopper") else None
                kernels.append(LoadedKernel(runs=binary_of(*versions), refusal=refusal, **facts))
        except RuntimeError as error:
            reason = str(error)
    return Device(
        index=index,
        name=torch.cuda.get_device_name(index),
        capability=capability,
        kernels=tuple(kernels),
        reason=reason,
    )


def nvshmem_library() -> str | None:
    """Returns the path of NVSHMEM's host library; None if it is not found. Opens nothing.

    Looks in $NVSHMEM_HOME, or else in the package nvidia-nvshmem-cu12 or nvidia-nvshmem-cu13.
    """
    if home := os.environ.get("NVSHMEM_HOME"):
        places = [Path(home)]
    else:
        packages = importlib.util.find_spec("nvidia")
        locations = (packages and packages.submodule_search_locations) or ()
        places = [Path(place, "nvshmem") for place in locations]
    for place in places:
        for folder in ("lib", "lib64"):
            for library in sorted(place.joinpath(folder).glob("libnvshmem_host.so*")):
                return str(library)
    return None


# ---- names of a device and of the build of its kernels; measurements and heaps record them


@cache
def device_name(device: torch.device) -> str:
    """Returns the name by which measurements know a device. Example: "NVIDIA H200"; "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The code that the driver loads of the kernels on a device; both versions are 0 if it loads none.

    binary_version, ptx_version: see `pmoe.kernels.extension`.
    capability: 10 times the compute capability; 90 is 9.0.
    """

    binary_version: int
    ptx_version: int
    capability: int

    def __str__(self) -> str:
        major, minor = divmod(self.capability, 10)
        code = f"binary {self.binary_version} of PTX {self.ptx_version}" if self.binary_version else "none"
        return f"{code} on compute capability {major}.{minor}"


def loaded_architecture(device: torch.device) -> Architecture:
    """Returns the architecture of the code that a CUDA device has loaded."""
    probed = ask_device(device.index or 0, PROBE)
    binary, ptx = next(((kernel.binary_version, kernel.ptx_version) for kernel in probed.kernels), (0, 0))
    major, minor = probed.capability
    return Architecture(binary_version=binary, ptx_version=ptx, capability=10 * major + minor)


# ---- the status: which kernels were built, what runs on each device, and why not


@dataclass(frozen=True, kw_only=True)
class Status:
    """The CUDA kernels of this installation. ``str()`` gives a page to read.

    built: whether the extension is loaded.
    reason: why it is not built or cannot be imported; None if it is loaded.
    archs: what it was compiled for, for example "sm_80, sm_90a, ptx80".
    nvcc: the compiler's version.
    kernels: the names of all kernels.
    devices: the CUDA devices that torch sees, each with its kernels.
    no_devices: why there are no devices; None if there are.
    nvshmem: the version of NVSHMEM and where its library is; None if it is not built in.
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
    """Returns the operations with the number of their kernels.

    Example: "route.8", "route.16", "permute" -> "permute", "route (2)".
    """
    variant = re.compile(r"\.(sm_\w+|bf16|fp16|fp32|\d+)(\.|$)")
    count = collections.Counter(variant.split(name, maxsplit=1)[0] for name in kernels)
    return [name if times == 1 else f"{name} ({times})" for name, times in sorted(count.items())]


def _kernel_lines(kernels: tuple[LoadedKernel, ...]) -> list[str]:
    """Returns a table of kernels as lines: threads, registers, bytes, and what runs."""
    if not kernels:
        return []
    rows = [["kernel", "threads", "registers", "shared bytes", "local bytes", "runs"]]
    for kernel in kernels:
        shared = kernel.shared_bytes + kernel.dynamic_shared_bytes
        numbers = [kernel.threads, kernel.registers, shared, kernel.local_bytes]
        runs = kernel.runs if kernel.refusal is None else f"refused: {kernel.refusal}"
        rows.append([kernel.name, *map(str, numbers), runs])
    from pmoe.text import table

    return textwrap.indent(table(rows, left=(0, 5)), "  ").splitlines()


def status() -> Status:
    """Returns which kernels this installation has, and what runs of them on every device that torch sees.

    Starts CUDA on these devices. Failures are part of the answer; nothing is raised.
    """
    module = load()
    devices: tuple[Device, ...] = ()
    no_devices = None
    if torch.cuda.is_available():
        try:
            devices = tuple(map(ask_device, range(torch.cuda.device_count())))
        except RuntimeError as error:  # torch failed to start CUDA
            no_devices = str(error)
    else:
        no_devices = f"torch {torch.__version__} sees no CUDA device"
    return Status(
        built=module is not None,
        reason=why_missing(),
        archs=None if module is None else module.ARCHS,
        nvcc=None if module is None else module.NVCC,
        kernels=() if module is None else tuple(kernel["name"] for kernel in module.declared()),
        devices=devices,
        no_devices=no_devices,
        nvshmem=_nvshmem(module),
    )


def _nvshmem(module: ModuleType | None) -> str | None:
    """Returns the version of NVSHMEM and the state of its library; None if it is not built in."""
    version = getattr(module, "NVSHMEM", None)
    if version is None:
        return None
    library = nvshmem_library()
    state = "its library is not found" if library is None else f"library {library}"
    return f"built for {version}, untested; {state}"

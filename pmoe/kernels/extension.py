"""Loads the compiled extension `pmoe._cuda`, and finds out which CUDA kernels each device can run.

A kernel may be compiled for a device by nvcc, or by the driver from PTX (nvcc's portable intermediate code).
The compute capability does not say which of the two was used. So the driver is asked (cudaFuncGetAttributes).
For each kernel it gives two versions, of the binary code and of the PTX (90 means 9.0):

    binary  PTX   code that the device runs
    80      80    nvcc's sm_80 code, on compute capability 8.x
    90      90    nvcc's sm_90a code (setup.py compiles no other code for 9.0)
    90      80    compiled from PTX, on 9.0 (if CUDA_FORCE_PTX_JIT=1, or if the extension has no sm_90a code)
    100     100   nvcc's sm_100 code, on 10.x (Blackwell), which cannot run sm_90a code
    120     120   nvcc's sm_120 code, on 12.x
    100     80    compiled from PTX, on 10.x, if the extension has no sm_100 code

All kernels are compiled for the same architectures, so the versions of one kernel (`PROBE`) are also the
versions of all others. The other kernels are loaded at their first launch, because compiling all kernels from
PTX at once would take the driver minutes.
"""

from __future__ import annotations

import collections
import ctypes
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
from pmoe.text import table

NAME = "pmoe._cuda"
PROBE = "heap.raise_flag"
HOW_TO_BUILD = (
    "with nvcc 12.5 or newer on PATH: pip install . (or, in place: python setup.py build_ext --inplace)"
)
PUTS_NAME = "pmoe._nvshmem"
HOW_TO_BUILD_PUTS = "pip install nvidia-nvshmem-cu13, then PMOE_NVSHMEM=1 pip install ."
NO_NVSHMEM_LIBRARY = (
    "libnvshmem_host is neither in $NVSHMEM_HOME/lib nor in a package nvidia-nvshmem: install NVSHMEM, or "
    "set NVSHMEM_HOME to its folder"
)


def load() -> ModuleType | None:
    """Returns the extension module, or None if it cannot be loaded (`why_missing` gives the reason).

    The function does not start CUDA.
    """
    return _load()[0]


def why_missing() -> str | None:
    """Returns why the extension cannot be loaded; None if it can."""
    return _load()[1]


def module() -> Any:
    """Returns the extension module, for callers that have already checked that it can be loaded."""
    loaded = load()
    assert loaded is not None, "the extension is not loaded: ask refusal() before a launch"
    return loaded


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    """Tries to import the extension. Returns (extension module, None), or (None, why it cannot be loaded)."""
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
    """Returns a name for the code of a loaded kernel, from the two versions that the driver reports.

    Example: (80, 80) -> "sm_80"; (90, 90) -> "sm_90a"; (90, 80) and (100, 80) -> "PTX of compute_80, compiled
    by the driver".
    """
    if binary_version != ptx_version:
        return f"PTX of compute_{ptx_version}, compiled by the driver"
    return "sm_90a" if binary_version == 90 else f"sm_{binary_version}"


def hopper_refusal(binary_version: int, ptx_version: int, capability: tuple[int, int]) -> str | None:
    """Returns why a kernel that needs sm_90a code cannot run with the code that was loaded; None if it can.

    binary_version, ptx_version: versions of the loaded code, as the driver reports them. Only these decide
        whether the kernel can run.
    capability: the device's compute capability, (major, minor); used only in the text of the reason.
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
    """Properties of a kernel after the driver has loaded it on one device.

    name: the kernel's name.
    runs: the code that was loaded: "sm_90a", "sm_80" or "PTX of compute_80, compiled by the driver".
    refusal: why the kernel cannot run on this device; None if it can.
    binary_version, ptx_version: versions of the loaded code, as the driver reports them; 90 means 9.0.
    threads: threads of a block.
    registers, local_bytes: registers and bytes of local memory of a thread.
    shared_bytes, dynamic_shared_bytes: static and dynamic shared memory of a block.
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
    """A CUDA device that torch sees, with properties of pmoe's kernels on this device.

    index, name: torch's index and name of the device.
    capability: its compute capability; (9, 0) means 9.0.
    kernels: the properties of the kernels that were loaded: all kernels, or only the kernel `PROBE`. Empty if
        loading failed.
    reason: why ``kernels`` is empty; None if it is not.
    """

    index: int
    name: str
    capability: tuple[int, int]
    kernels: tuple[LoadedKernel, ...]
    reason: str | None


@cache
def on_device(index: int) -> Device:
    """Returns a description of a CUDA device, with the properties of a single kernel, `PROBE`.

    If the device can run this kernel, it can run all kernels, because all are compiled for the same
    architectures. Loading one kernel is faster than loading all. The result is cached.

    index: torch's index of the device.
    """
    return ask_device(index, PROBE)


def path(device: torch.device) -> tuple[str | None, str | None]:
    """Returns (name of the kernel code that a device runs, None), or (None, why it runs no kernel).

    The name is "sm_90a" or "sm_80". "sm_80" also stands for code that the driver compiled from PTX.
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
    """Loads kernels on a CUDA device and returns the device's description with these kernels' properties.

    index: torch's index of the device.
    only: name of the only kernel to load; "" loads all kernels.

    If loading fails, the result has no kernels, and its ``reason`` says why. No error is raised.
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


# ---- NVSHMEM: its host library, and the extension whose kernels call its device functions


def nvshmem_library() -> str | None:
    """Returns the path of NVSHMEM's host library; None if it is not found. The library is not opened.

    The search looks in $NVSHMEM_HOME if that is set, otherwise in the Python packages nvidia-nvshmem-cu12 and
    nvidia-nvshmem-cu13.
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


def nvshmem_version(path: str) -> str:
    """Opens NVSHMEM's host library, and returns its version: "3.8.0".

    Every later load in this process gets the same library. Raises RuntimeError if it cannot be opened, or is
    too old to tell its version.

    path: the library's path, from `nvshmem_library`.
    """
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        read_version = library.nvshmemx_vendor_get_version_info
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"NVSHMEM's library cannot be opened: {error}") from error
    numbers = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    read_version(*map(ctypes.byref, numbers))
    return ".".join(str(number.value) for number in numbers)


def version_refusal(built: str, library: str) -> str | None:
    """Returns why code that was built with one version of NVSHMEM cannot use a library of another version.

    Returns None if it can. NVSHMEM needs a library of the same major version that is not older. Otherwise its
    own start would end the process.

    built, library: the two versions, such as "3.8.0".
    """
    built_numbers = [int(part) for part in built.split(".")[:2]]
    library_numbers = [int(part) for part in library.split(".")[:2]]
    if built_numbers[0] == library_numbers[0] and built_numbers <= library_numbers:
        return None
    return (
        f"{PUTS_NAME} was built with NVSHMEM {built}, and the library has version {library}: it must have "
        f"the same first number and must not be older; install NVSHMEM {built}, or build again"
    )


def load_puts() -> ModuleType | None:
    """Returns the extension `pmoe._nvshmem`; None if it cannot be loaded (`why_no_puts` gives the reason).

    It has FlashDMoE's kernels that also send rows to ranks whose memory cannot be mapped, by NVSHMEM's puts
    (messages that write into another rank's memory).
    """
    return _load_puts()[0]


def why_no_puts() -> str | None:
    """Returns why the extension `pmoe._nvshmem` cannot be loaded; None if it can."""
    return _load_puts()[1]


def puts_module() -> Any:
    """Returns the extension `pmoe._nvshmem`, for callers that have a heap which needs puts."""
    loaded = load_puts()
    assert loaded is not None, "the extension is not loaded: a heap that needs puts was made without it"
    return loaded


@cache
def _load_puts() -> tuple[ModuleType | None, str | None]:
    """Tries to import the extension with puts. Returns (extension module, None), or (None, why not)."""
    if importlib.util.find_spec(PUTS_NAME) is None:
        return None, f"{PUTS_NAME} is not built: {HOW_TO_BUILD_PUTS}"
    library = nvshmem_library()
    if library is None:
        return None, NO_NVSHMEM_LIBRARY
    try:
        version = nvshmem_version(library)  # opened before, because the extension does not know its path
        loaded = importlib.import_module(PUTS_NAME)
    except (ImportError, RuntimeError) as error:
        return None, f"{PUTS_NAME} cannot be imported: {error}"
    why = version_refusal(loaded.NVSHMEM, version)
    return (loaded, None) if why is None else (None, why)


# ---- the name of a device, and the kernel code that is loaded on it


@cache
def device_name(device: torch.device) -> str:
    """Returns the device name under which measured times are stored.

    Example: "NVIDIA H200" for a CUDA device, "cpu" for the CPU.
    """
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The code of pmoe's kernels that the driver loaded on a device. It must be the same on all ranks.

    binary_version, ptx_version: versions of the binary code and of the PTX, as the driver reports them; 90
        means 9.0. Both are 0 if no kernel could be loaded.
    capability: 10 times the device's compute capability; 90 means 9.0.
    """

    binary_version: int
    ptx_version: int
    capability: int

    def __str__(self) -> str:
        major, minor = divmod(self.capability, 10)
        code = f"binary {self.binary_version} of PTX {self.ptx_version}" if self.binary_version else "none"
        return f"{code} on compute capability {major}.{minor}"


def loaded_architecture(device: torch.device) -> Architecture:
    """Loads one kernel (`PROBE`) on a CUDA device and returns the versions of its code."""
    probed = ask_device(cuda_index(device), PROBE)
    binary, ptx = next(((kernel.binary_version, kernel.ptx_version) for kernel in probed.kernels), (0, 0))
    major, minor = probed.capability
    return Architecture(binary_version=binary, ptx_version=ptx, capability=10 * major + minor)


# ---- the status: which kernels were built, what runs on each device, and why not


@dataclass(frozen=True, kw_only=True)
class Status:
    """The CUDA kernels of this installation, as `status` returns them. ``str()`` gives a readable page.

    built: whether the extension could be loaded.
    reason: why it could not be loaded; None if it could.
    archs: the architectures that it was compiled for, such as "sm_80, sm_90a, ptx80"; None without the
        extension.
    nvcc: the version of the compiler; None without the extension.
    kernels: names of all kernels.
    devices: the CUDA devices that torch sees, each with the properties of its kernels.
    no_devices: why ``devices`` is empty; None if it is not.
    nvshmem: the NVSHMEM version that the extension was built with, and the path of NVSHMEM's library; None if
        it was built without NVSHMEM.
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
            if self.nvshmem is not None:
                lines.append(f"NVSHMEM's puts: {why_no_puts() or 'built, untested'}")
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
    """Groups kernel names by operation, and returns each operation with the number of its kernels.

    Example: ("route.8", "route.16", "permute") -> ["permute", "route (2)"].
    """
    variant = re.compile(r"\.(sm_\w+|bf16|fp16|fp32|\d+)(\.|$)")
    count = collections.Counter(variant.split(name, maxsplit=1)[0] for name in kernels)
    return [name if times == 1 else f"{name} ({times})" for name, times in sorted(count.items())]


def _kernel_lines(kernels: tuple[LoadedKernel, ...]) -> list[str]:
    """Returns the lines of a table of kernels: their threads, registers, bytes, and the code that runs.

    If a kernel cannot run, the last column has the reason.
    """
    if not kernels:
        return []
    rows = [["kernel", "threads", "registers", "shared bytes", "local bytes", "runs"]]
    for kernel in kernels:
        shared = kernel.shared_bytes + kernel.dynamic_shared_bytes
        numbers = [kernel.threads, kernel.registers, shared, kernel.local_bytes]
        runs = kernel.runs if kernel.refusal is None else f"refused: {kernel.refusal}"
        rows.append([kernel.name, *map(str, numbers), runs])
    return textwrap.indent(table(rows, left=(0, 5)), "  ").splitlines()


def status() -> Status:
    """Returns which kernels this installation has, and which of them each CUDA device can run.

    The function starts CUDA on all devices that torch sees. If something fails, the result has the reason,
    and no error is raised.
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
    """Returns a text about NVSHMEM: the version that the extension was built with, and its library's path.

    Returns None if the extension is missing or was built without NVSHMEM.

    module: the extension, or None.
    """
    version = getattr(module, "NVSHMEM", None)
    if version is None:
        return None
    library = nvshmem_library()
    state = "its library is not found" if library is None else f"library {library}"
    return f"built for {version}, untested; {state}"

"""Memory of symmetric heaps: where it comes from, how peers open it, and tensors on addresses.

Addresses are integers. torch's own pool does not serve: another process opens whole allocations of CUDA's.
"""

from __future__ import annotations

import ctypes
import math
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels import extension


class DeviceMemory:
    """Where the memory of heaps comes from: CUDA's, opened by other processes through CUDA IPC.

    They are on the same device, or on one that reaches it. Each method raises RuntimeError, with a sentence,
    if it cannot.
    """

    collective = False
    """Whether allocate and free are so by themselves: all ranks call them, or none."""

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """The address of memory that holds zeros, and nothing else's."""
        try:
            return self._allocate(device, num_bytes)
        except RuntimeError:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()  # what torch holds without using it may be what is missing
            return self._allocate(device, num_bytes)

    def _allocate(self, device: torch.device, num_bytes: int) -> int:
        return int(loaded_extension().heap_allocate(device.index, num_bytes))

    def free(self, device: torch.device, base: int) -> None:
        loaded_extension().heap_free(device.index, base)

    def handle(self, device: torch.device, base: int) -> bytes:
        """By which another process of the node opens this memory."""
        return bytes(loaded_extension().heap_handle(device.index, base))

    def open(self, device: torch.device, handle: bytes) -> int:
        """The address at which this process sees another one's memory."""
        return int(loaded_extension().heap_open(device.index, handle))

    def close(self, device: torch.device, peer: int) -> None:
        loaded_extension().heap_close(device.index, peer)

    def place(self, device: torch.device) -> tuple[str, str]:
        """The code that the driver has loaded there (see `Architecture`), and what tells nodes apart."""
        return str(extension.loaded_architecture(device)), host_name()


def loaded_extension() -> Any:
    """The extension; RuntimeError, with the reason, where it is not there."""
    module = extension.load()
    if module is None:
        raise RuntimeError(f"a symmetric heap needs pmoe._cuda: {extension.why_missing()}")
    return module


def synchronize(device: torch.device) -> None:
    """The host waits for a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_name() -> str:
    """A name alone does not tell nodes apart, and one node's containers have several."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
    return f"boot {boot}"


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor on that memory, without a copy. The memory must outlive it: nobody keeps it.

    Example: tensor_at(base + 4096, (n, 64), torch.bfloat16, device) begins 4096 bytes behind base.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cuda":
        interface = {"data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 2}
        flat = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
    else:
        flat = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
    if flat.data_ptr() != address:
        raise RuntimeError(f"memory at {address:#x} is not of {device}: torch made a copy of it")
    return flat.view(dtype).view(shape)

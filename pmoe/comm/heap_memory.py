"""Memory of symmetric heaps: where it comes from, how peers open it, and tensors on addresses.

Addresses are integers. torch's own pool does not serve: another process opens whole allocations of CUDA's.
"""

from __future__ import annotations

import ctypes
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.ranks import Ranks
from pmoe.kernels import extension
from pmoe.kernels.registry import Machine


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is. kernels: the code that the driver has loaded there, see `Architecture`. host: tells
    nodes apart. device: tells devices apart, of all processes of a node."""

    kernels: str
    host: str
    device: str


class Memory(Protocol):
    """Each raises RuntimeError, with a sentence, where that is not to be had.

    collective: whether allocate and free are so by themselves: all ranks call them, or none.
    """

    collective: bool

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """The address of memory that holds zeros, and nothing else's."""
        ...

    def free(self, device: torch.device, base: int) -> None: ...

    def handle(self, device: torch.device, base: int) -> bytes:
        """By which another process of the node opens this memory."""
        ...

    def open(self, device: torch.device, handle: bytes) -> int:
        """The address at which this process sees another one's memory."""
        ...

    def close(self, device: torch.device, peer: int) -> None: ...

    def place(self, device: torch.device) -> Place: ...


class DeviceMemory:
    """CUDA's, opened by other processes through CUDA IPC: on the same device, or on one that reaches it."""

    collective = False

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        _check_cuda(device)
        try:
            return self._allocate(device, num_bytes)
        except RuntimeError:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()  # what torch holds without using it may be what is missing
            return self._allocate(device, num_bytes)

    def _allocate(self, device: torch.device, num_bytes: int) -> int:
        base: int = needed().heap_allocate(device.index, num_bytes)
        return base

    def free(self, device: torch.device, base: int) -> None:
        needed().heap_free(device.index, base)

    def handle(self, device: torch.device, base: int) -> bytes:
        found: bytes = needed().heap_handle(device.index, base)
        return found

    def open(self, device: torch.device, handle: bytes) -> int:
        peer: int = needed().heap_open(device.index, handle)
        return peer

    def close(self, device: torch.device, peer: int) -> None:
        needed().heap_close(device.index, peer)

    def place(self, device: torch.device) -> Place:
        _check_cuda(device)
        kernels = Machine().architecture(device)
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", device.index)
        return Place(kernels=str(kernels), host=host_name(), device=str(uuid))


def _check_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise RuntimeError(f"device {device}: a symmetric heap is in the memory of a CUDA device")


_nvshmem_members: list[int] | None = None
"""The global ranks with which NVSHMEM was started in this process: it starts once."""


class NvshmemMemory:
    """NVSHMEM's, of one group of ranks: see `pmoe.comm.heap.nvshmem_heap`."""

    collective = True

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.members = [0] if ranks.group is None else dist.get_process_group_ranks(ranks.group)
        self.base = 0

    def place(self, device: torch.device) -> Place:
        if not hasattr(needed(), "NVSHMEM"):
            raise RuntimeError(
                "NVSHMEM is not built in; with its headers at hand: PMOE_NVSHMEM=1 pip install ."
            )
        if extension.nvshmem_library() is None:
            raise RuntimeError("libnvshmem_host is not in $NVSHMEM_HOME/lib, nor in a package nvidia-nvshmem")
        if _nvshmem_members not in (None, self.members):
            raise RuntimeError(
                f"NVSHMEM serves ranks {_nvshmem_members} in this process, and not {self.members}, too"
            )
        return DeviceMemory().place(device)

    def give_id(self) -> bytes:
        """By which NVSHMEM's ranks find each other: that of the first is taken."""
        needed().nvshmem_open(extension.nvshmem_library())
        found: bytes = needed().nvshmem_unique_id() if self.ranks.rank == 0 else b""
        return found

    def start(self, device: torch.device, given_id: bytes) -> None:
        """Collective."""
        global _nvshmem_members
        found = needed().nvshmem_init(device.index, given_id, self.ranks.rank, self.ranks.size)
        if found != (self.ranks.rank, self.ranks.size):
            raise RuntimeError(
                f"NVSHMEM runs as rank {found[0]} of {found[1]} in this process, and not {self.ranks}"
            )
        _nvshmem_members = self.members

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        self.base = needed().nvshmem_allocate(device.index, num_bytes)
        return self.base

    def free(self, device: torch.device, base: int) -> None:
        needed().nvshmem_free(device.index, base)

    def handle(self, device: torch.device, base: int) -> bytes:
        return str(self.ranks.rank).encode()

    def open(self, device: torch.device, handle: bytes) -> int:
        peer: int = needed().nvshmem_pointer(device.index, self.base, int(handle))
        if not peer:
            raise RuntimeError(
                "it is beyond loads and stores (no NVLink there), and the kernels write by stores"
            )
        return peer

    def close(self, device: torch.device, peer: int) -> None:
        """It is open as long as it is there."""


def needed() -> Any:
    """The extension; RuntimeError, with the reason, where it is not there."""
    module = extension.load()
    if module is None:
        raise RuntimeError(f"a symmetric heap needs pmoe._cuda: {extension.status().reason}")
    return module


def host_name() -> str:
    """A name alone does not tell nodes apart, and one node's containers have several."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
    return f"boot {boot}"


class _CudaArray:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 2,
        }


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor on that memory, which nothing copies, and nobody keeps: it must outlive the tensor.

    Example: tensor_at(base + 4096, (n, 64), torch.bfloat16, device) begins 4096 bytes behind base.
    """
    elements = 1
    for size in shape:
        elements *= size
    num_bytes = elements * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cuda":
        flat = torch.as_tensor(_CudaArray(address, num_bytes), device=device)
    else:
        flat = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
    if flat.data_ptr() != address:
        raise RuntimeError(f"memory at {address:#x} is not of {device}: torch made a copy of it")
    return flat.view(dtype).view(shape)

"""Memory of symmetric heaps from NVSHMEM, for ranks of several nodes. Run by one process alone."""

from __future__ import annotations

import torch

from pmoe.comm.ranks import Ranks
from pmoe.kernels import extension
from pmoe.kernels import heap as heap_module
from pmoe.kernels.heap import DeviceMemory

_members: list[int] | None = None
"""The global ranks with which NVSHMEM was started in this process: it starts once."""


class NvshmemMemory(DeviceMemory):
    """NVSHMEM's, of one group of ranks: see `pmoe.comm.heap.providers.nvshmem_heap`."""

    members: list[int]
    base: int

    collective = True

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.members = ranks.members or [0]
        self.base = 0

    def place(self, device: torch.device) -> tuple[str, str]:
        if not hasattr(heap_module.loaded_extension(), "NVSHMEM"):
            raise RuntimeError(
                "NVSHMEM is not built in; with its headers at hand: PMOE_NVSHMEM=1 pip install ."
            )
        if extension.nvshmem_library() is None:
            raise RuntimeError("libnvshmem_host is not in $NVSHMEM_HOME/lib, nor in a package nvidia-nvshmem")
        if _members not in (None, self.members):
            raise RuntimeError(
                f"NVSHMEM serves ranks {_members} in this process, and not {self.members}, too"
            )
        return super().place(device)

    def give_id(self) -> bytes:
        """By which NVSHMEM's ranks find each other: that of the first is taken."""
        heap_module.loaded_extension().nvshmem_open(extension.nvshmem_library())
        return bytes(heap_module.loaded_extension().nvshmem_unique_id()) if self.ranks.rank == 0 else b""

    def start(self, device: torch.device, given_id: bytes) -> None:
        """Collective."""
        global _members
        found = heap_module.loaded_extension().nvshmem_init(
            device.index, given_id, self.ranks.rank, self.ranks.size
        )
        if found != (self.ranks.rank, self.ranks.size):
            raise RuntimeError(
                f"NVSHMEM runs as rank {found[0]} of {found[1]} in this process, and not {self.ranks}"
            )
        _members = self.members

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        self.base = heap_module.loaded_extension().nvshmem_allocate(device.index, num_bytes)
        return self.base

    def free(self, device: torch.device, base: int) -> None:
        heap_module.loaded_extension().nvshmem_free(device.index, base)

    def handle(self, device: torch.device, base: int) -> bytes:
        return str(self.ranks.rank).encode()

    def open(self, device: torch.device, handle: bytes) -> int:
        peer: int = heap_module.loaded_extension().nvshmem_pointer(device.index, self.base, int(handle))
        if not peer:
            raise RuntimeError(
                "it is beyond loads and stores (no NVLink there), and the kernels write by stores"
            )
        return peer

    def close(self, device: torch.device, peer: int) -> None:
        """It is open as long as it is there."""

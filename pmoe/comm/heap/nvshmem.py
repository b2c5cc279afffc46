"""Memory of symmetric heaps from NVSHMEM.

Kernels read and write the memory of other ranks by loads and stores. If a rank's memory cannot be mapped for
this, FlashDMoE's kernels send rows to it by NVSHMEM's puts. So far this code has been run with a single
process only.
"""

from __future__ import annotations

import torch

from pmoe.comm.ranks import Ranks
from pmoe.kernels import extension
from pmoe.kernels import heap as heap_module
from pmoe.kernels.heap import DeviceMemory

_members: list[int] | None = None
"""Global ranks with which NVSHMEM was started in this process; None before the start.

NVSHMEM can be started only once in a process.
"""


PROBE_BYTES = 1024
"""Bytes of the memory with which ranks find out whose memory they can map."""


class NvshmemMemory(DeviceMemory):
    """Memory that NVSHMEM allocates for a symmetric heap of one group of ranks.

    members: global ranks of the group.
    base: address of this rank's memory after `allocate`; 0 before.
    """

    members: list[int]
    base: int

    collective = True

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.members = ranks.members or [0]
        self.base = 0

    def place(self, device: torch.device) -> tuple[str, str]:
        """Checks that NVSHMEM can be used. Returns two texts, which ranks compare.

        The first text names the device code that is loaded and the version of NVSHMEM's library, which must
        be the same on all ranks. The second text is this node's name.

        Raises RuntimeError if NVSHMEM is missing, or was started for another group of ranks in this process.
        """
        if not hasattr(heap_module.loaded_extension(), "NVSHMEM"):
            raise RuntimeError(f"NVSHMEM is not built in: {extension.HOW_TO_BUILD_PUTS}")
        library = extension.nvshmem_library()
        if library is None:
            raise RuntimeError(extension.NO_NVSHMEM_LIBRARY)
        if _members not in (None, self.members):
            raise RuntimeError(
                f"NVSHMEM serves ranks {_members} in this process; it cannot serve {self.members}, too"
            )
        code, node = super().place(device)
        return f"{code} with NVSHMEM {extension.nvshmem_version(library)}", node

    def give_id(self) -> bytes:
        """Loads NVSHMEM's library, and returns the id by which the ranks of a job find each other.

        Only rank 0 makes an id; the other ranks return b"".
        """
        heap_module.loaded_extension().nvshmem_open(extension.nvshmem_library())
        return bytes(heap_module.loaded_extension().nvshmem_unique_id()) if self.ranks.rank == 0 else b""

    def start(self, device: torch.device, given_id: bytes) -> None:
        """Starts NVSHMEM on all ranks of the group, with the id of rank 0. Collective.

        given_id: the id that `give_id` has returned on rank 0.

        Raises RuntimeError if NVSHMEM gives this process another rank than the group does.
        """
        global _members
        place = heap_module.loaded_extension().nvshmem_init(
            device.index, given_id, self.ranks.rank, self.ranks.size
        )
        if place != (self.ranks.rank, self.ranks.size):
            raise RuntimeError(
                f"NVSHMEM runs as rank {place[0]} of {place[1]} in this process, but the group "
                f"has it as {self.ranks}"
            )
        _members = self.members

    def start_puts(self, device: torch.device) -> None:
        """Gives NVSHMEM's state to the kernels that send by puts. `start` must come first."""
        extension.puts_module().nvshmem_start(device.index)

    def mapped(self, device: torch.device) -> list[bool]:
        """Returns, for each rank of the group, whether loads and stores of this device reach its memory.

        Collective: NVSHMEM answers for allocated memory only, so some is allocated and freed.
        """
        module = heap_module.loaded_extension()
        probe = module.nvshmem_allocate(device.index, PROBE_BYTES)
        try:
            return [
                rank == self.ranks.rank or module.nvshmem_pointer(device.index, probe, rank) != 0
                for rank in range(self.ranks.size)
            ]
        finally:
            module.nvshmem_free(device.index, probe)

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        self.base = heap_module.loaded_extension().nvshmem_allocate(device.index, num_bytes)
        return self.base

    def free(self, device: torch.device, base: int) -> None:
        heap_module.loaded_extension().nvshmem_free(device.index, base)

    def handle(self, device: torch.device, base: int) -> bytes:
        return str(self.ranks.rank).encode()

    def open(self, device: torch.device, handle: bytes) -> int:
        """Returns the address at which kernels on this device can read and write a peer's memory.

        device: this rank's device.
        handle: the peer's rank, as text.

        Raises RuntimeError if this device cannot read and write the peer's memory by loads and stores.
        """
        peer: int = heap_module.loaded_extension().nvshmem_pointer(device.index, self.base, int(handle))
        if not peer:
            why = extension.why_no_puts() or "these kernels do not send by NVSHMEM's puts"
            raise RuntimeError(
                "loads and stores do not reach it (there is no NVLink), and the kernels write by stores: "
                f"{why}"
            )
        return peer

    def close(self, device: torch.device, peer: int) -> None:
        """Does nothing: NVSHMEM has no step that closes a peer's memory. The peer frees it."""

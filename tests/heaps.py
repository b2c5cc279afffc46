"""Symmetric heaps on the CPU: memory in files, which other processes map, and a layout where there is no
extension."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

from pmoe.kernels import extension
from pmoe.kernels import heap as heap_module

CPU = torch.device("cpu")


@dataclass
class FileMemory:
    """Each piece is a file that is mapped. refuses: a method that raises. log: what was called."""

    refuses: str | None = None
    where: tuple[str, str] = ("binary 90 of PTX 90 on compute capability 9.0", "a")
    collective: bool = False
    log: list[str] = field(default_factory=list)
    mapped: dict[int, tuple[mmap.mmap, str]] = field(default_factory=dict)

    def _called(self, name: str) -> None:
        if self.refuses == name:
            raise RuntimeError(f"cannot {name}")
        self.log.append(name)

    def _map(self, path: str) -> int:
        with open(path, "r+b") as file:
            pages = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.mapped[address] = pages, path
        return address

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        self._called("allocate")
        handle, path = tempfile.mkstemp(prefix="pmoe-heap-")
        os.truncate(handle, num_bytes)
        os.close(handle)
        return self._map(path)

    def free(self, device: torch.device, base: int) -> None:
        os.unlink(self.mapped[base][1])
        self.close(device, base, "free")

    def handle(self, device: torch.device, base: int) -> bytes:
        self._called("handle")
        return self.mapped[base][1].encode()

    def open(self, device: torch.device, handle: bytes) -> int:
        self._called("open")
        return self._map(handle.decode())

    def close(self, device: torch.device, peer: int, name: str = "close") -> None:
        self._called(name)
        self.mapped.pop(peer)[0].close()

    def place(self, device: torch.device) -> tuple[str, str]:
        self._called("place")
        return self.where


def simple_places(
    ranks: int, experts: int, rows: int, home_rows: int, row_bytes: int, *cell: int
) -> Mapping[str, int]:
    """Not that of the kernels, but with regions of these names that do not overlap.

    cell: what only the heaps of persistent kernels have; not used.
    """
    sizes = {
        "counters": 1024,
        "weights": 4 * rows,
        "links": 16 * rows,
        "dots": 4 * home_rows,
        "inbox": rows * row_bytes,
        "home": home_rows * row_bytes,
    }
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = end
        end += -(-size // 1024) * 1024
    return {**places, "bytes": end}


def use_layout(patch: pytest.MonkeyPatch) -> None:
    """That of the extension where it is built."""
    if extension.load() is None:
        patch.setattr(heap_module, "_places", simple_places)

"""Ring slots as numbers: how large each buffer of a pass is, and where its slot lies (MPipeMoE, III.D).

A slot is as large as the largest buffer that takes a turn in it, and starts at a multiple of ALIGNMENT bytes.

Letters: n chunks, M = d_model, H = d_hidden; T_DI, T_M, T_DO as in MPipeMoE.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pmoe.schedule.restore import Restore

ALIGNMENT = 256
"""Bytes; every slot starts at a multiple of it."""


@dataclass(frozen=True, kw_only=True)
class HiddenColumns:
    """Columns of what experts hold for a row between their products; 0 where experts do not say.

    hidden: of T_M and of its gradient.
    active: of the activated hidden, where it has memory of its own in forward.
    scratch: of the activated hidden; scratch_rows: the rows of a block that is worked on at a time.
    staged: of the widest product that is computed elsewhere and then copied to its place.
    graph: of all that autograd holds while it differentiates a block, at most.
    """

    hidden: int = 0
    active: int = 0
    scratch: int = 0
    scratch_rows: int = 0
    staged: int = 0
    graph: int = 0


@dataclass(frozen=True, kw_only=True)
class ChunkRows:
    """Rows of one pass, a number a chunk.

    send: rows to other ranks. received: rows from them, in the order that the experts read.
    local: rows that stay on this rank. home: rows of the chunk's tokens, and one for all dropped rows.
    regrouped: whether received rows must be sorted by expert.
    arrived, gathered: rows that S brought, and AG behind it; None where they are those received.
    inside: ranks that share each expert.
    """

    send: tuple[int, ...]
    received: tuple[int, ...]
    local: tuple[int, ...]
    home: tuple[int, ...]
    regrouped: tuple[bool, ...]
    arrived: tuple[int, ...] | None = None
    gathered: tuple[int, ...] | None = None
    inside: int = 1


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """Rows and columns of every buffer of a pass.

    restore: None where nothing is kept. rearranged: as in `pmoe.schedule.rings`.
    """

    direction: str
    extent: ChunkRows
    d_model: int
    columns: HiddenColumns
    restore: Restore | None
    rearranged: bool = False

    def shape(self, buffer: str) -> tuple[int, int]:
        """Example: "T_M_L.3" -> (rows of chunk 3 that stay, H). Buffers that this pass or rank makes no use
        of have no rows."""
        name, _, chunk = buffer.rpartition(".")
        i = int(chunk)
        stays = name.endswith("_L")
        name = name.removesuffix("_L")
        rows = self.extent.local[i] if stays else self.extent.received[i]
        if name in ("send", "send_again"):
            return self.extent.send[i], self.d_model
        name = name.removesuffix("_again")
        if name in ("arrived", "leaving", "copies", "parts"):
            return self._inside_rows(name, i), self.d_model
        if name in ("home", "dhome"):
            return (0 if stays else self.extent.home[i]), self.d_model  # rows that stay are a part of it
        if name.endswith("_sorted"):
            return (rows if self.extent.regrouped[i] else 0), self.d_model
        if name == "T_DI" and not stays and self._stays_where_it_arrived(i):
            return 0, self.d_model
        by_link = name in ("T_DO", "dT_DO", "dT_DI") or (name == "T_DI" and self._restores_by_link)
        if by_link and not stays and self.extent.gathered is not None:
            return self.extent.gathered[i], self.d_model
        if name in ("T_M", "dT_M"):
            return rows, self.columns.hidden
        if name == "active":
            return rows, self._active_columns
        if name == "scratch":
            used = self._expendable
            return (min(rows, self.columns.scratch_rows) if used else 0), self.columns.scratch
        return rows, self.d_model

    def _stays_where_it_arrived(self, i: int) -> bool:
        """Forward's T_DI is kept, and arrives in expert order: no slot holds it."""
        kept = self.restore is not None and self.restore.dispatched == "keep"
        return self.direction == "forward" and kept and not self.extent.regrouped[i]

    def _inside_rows(self, name: str, i: int) -> int:
        """Between S and AG, and between RS and R. copies, parts: what AG is sent from, and what RS sums."""
        arrived, inside = (self.extent.arrived or self.extent.received)[i], self.extent.inside
        if name == "copies":
            return arrived * inside if inside > 2 else 0
        return arrived * inside if name == "parts" else arrived

    @property
    def _restores_by_link(self) -> bool:
        """Whether T_DI is what a collective brings: in forward, and where backward sends it again."""
        if self.direction == "forward":
            return True
        return self.restore is not None and self.restore.dispatched == "communicate"

    @property
    def _expendable(self) -> bool:
        """Whether backward may put the activated hidden into T_M's place."""
        return self.restore is not None and (self.restore.hidden != "keep" or self.rearranged)

    @property
    def _active_columns(self) -> int:
        if self.direction == "forward":
            in_place = self.restore is None or self.restore.hidden == "recompute"
        else:
            in_place = self._expendable
        return self.columns.active if in_place else self.columns.scratch


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def slot_elements(slots: Mapping[str, str], sizes: BufferSizes) -> dict[str, int]:
    """Elements of each ring slot: as many as the largest of its buffers."""
    largest: dict[str, int] = collections.defaultdict(int)
    for buffer, slot in slots.items():
        largest[slot] = max(largest[slot], math.prod(sizes.shape(buffer)))
    return dict(largest)


def arena_elements(slots: Mapping[str, int], element_size: int) -> tuple[dict[str, int], int]:
    """(where each slot starts, elements of all), each slot aligned."""
    step = max(ALIGNMENT // element_size, 1)
    starts, total = {}, 0
    for slot, elements in slots.items():
        starts[slot] = total
        total += -(-elements // step) * step
    return starts, total

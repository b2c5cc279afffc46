"""Ring slots as numbers: how large each buffer of a pass is, and where its slot lies (MPipeMoE, III.D).

A slot is as large as the largest buffer that takes a turn in it, and starts at a multiple of ALIGNMENT bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Schedule

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

    send: Sequence[int]
    received: Sequence[int]
    local: Sequence[int]
    home: Sequence[int]
    regrouped: Sequence[bool]
    arrived: Sequence[int] | None = None
    gathered: Sequence[int] | None = None
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
    _known: dict[str, tuple[Sequence[int], int]] = field(default_factory=dict, init=False, compare=False)

    def shape(self, buffer: str) -> tuple[int, int]:
        """Example: "T_M_L.3" -> (rows of chunk 3 that stay, H). Buffers that this pass or rank makes no use
        of have no rows."""
        name, _, chunk = buffer.rpartition(".")
        rows, columns = self.of(name)
        return rows[int(chunk)], columns

    def of(self, name: str) -> tuple[Sequence[int], int]:
        """Of the buffers of this name: the rows of each chunk's, and their columns."""
        if name not in self._known:
            self._known[name] = self._rows_and_columns(name)
        return self._known[name]

    def _rows_and_columns(self, name: str) -> tuple[Sequence[int], int]:
        extent, width = self.extent, self.d_model
        stays = name.endswith("_L")
        rows, none = (extent.local if stays else extent.received), (0,) * len(extent.received)
        name = name.removesuffix("_L").removesuffix("_again")
        match name:
            case "send":
                return extent.send, width
            case "arrived" | "leaving" | "copies" | "parts":
                return self._inside_rows(name), width
            case "home" | "dhome":
                return (none if stays else extent.home), width  # rows that stay are a part of it
            case "T_M" | "dT_M":
                return rows, self.columns.hidden
            case "active":
                return rows, self._active_columns
            case "scratch":
                scratch_rows = self.columns.scratch_rows if self._expendable else 0
                return [min(each, scratch_rows) for each in rows], self.columns.scratch
        by_link = name in ("T_DO", "dT_DO", "dT_DI") or (name == "T_DI" and self._restores_by_link)
        if by_link and not stays and extent.gathered is not None:
            rows = extent.gathered
        if name.endswith("_sorted") or (name == "T_DI" and not stays and self.keeps_what_arrives):
            return [of * sorts for of, sorts in zip(rows, extent.regrouped, strict=True)], width
        return rows, width

    @property
    def keeps_what_arrives(self) -> bool:
        """Forward's T_DI is kept: where it arrives in expert order, no slot holds it."""
        kept = self.restore is not None and self.restore.dispatched == "keep"
        return self.direction == "forward" and kept

    def _inside_rows(self, name: str) -> Sequence[int]:
        """Between S and AG, and between RS and R. copies, parts: what AG is sent from, and what RS sums."""
        arrived, inside = self.extent.arrived or self.extent.received, self.extent.inside
        if name == "copies":
            inside = inside if inside > 2 else 0
        return [rows * inside for rows in arrived] if name in ("copies", "parts") else arrived

    @property
    def _restores_by_link(self) -> bool:
        """Whether T_DI is what a collective brings: in forward, and where backward sends it again."""
        sends_again = self.restore is not None and self.restore.dispatched == "communicate"
        return self.direction == "forward" or sends_again

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


def slot_elements(schedule: Schedule, sizes: BufferSizes) -> dict[str, int]:
    """Elements of each ring slot: as many as the largest of its buffers."""
    largest: dict[str, int] = {}
    for name, turns in schedule.turns.items():
        rows, columns = sizes.of(name)
        for _, chunk, slot in turns:
            largest[slot] = max(largest.get(slot, 0), rows[chunk] * columns)
    return largest


def arena_elements(slots: Mapping[str, int], element_size: int) -> tuple[dict[str, int], int]:
    """(elements from each slot to the next, elements of all), each slot aligned."""
    step = max(ALIGNMENT // element_size, 1)
    spans = {slot: -(-elements // step) * step for slot, elements in slots.items()}
    return spans, sum(spans.values())

"""The sizes of the buffers of a pass, and of the ring slots that hold them (MPipeMoE, section III.D).

A slot is as large as the largest buffer that takes a turn in it. All slots of a pass lie in one piece of
memory, each at a multiple of `ALIGNMENT` bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Schedule

ALIGNMENT = 256
"""Bytes. Every slot starts at a multiple of it."""


@dataclass(frozen=True, kw_only=True)
class HiddenColumns:
    """Columns of the tensors that experts hold for a row between their products; 0 if experts do not say.

    hidden: columns of T_M and of its gradient.
    active: columns of the activated hidden, if it has memory of its own in forward.
    scratch: columns of the activated hidden.
    scratch_rows: rows of a block that the experts process at a time.
    staged: columns of the widest product that is computed in other memory and then copied to its place.
    graph: columns of all tensors together that autograd holds while it differentiates a block, at most.
    """

    hidden: int = 0
    active: int = 0
    scratch: int = 0
    scratch_rows: int = 0
    staged: int = 0
    graph: int = 0


@dataclass(frozen=True, kw_only=True)
class ChunkRows:
    """Numbers of rows of one pass, one for each chunk.

    send: rows to other ranks.
    received: rows that the experts compute, from other ranks.
    local: rows that stay on this rank.
    home: rows of the chunk's tokens, and one row for all dropped slots.
    regrouped: whether received rows must be sorted by expert.
    arrived: rows that S brings; None if they are those received.
    gathered: rows that AG brings; None if they are those received.
    esp_size: the number of ranks that share each expert; not a sequence.
    """

    send: Sequence[int]
    received: Sequence[int]
    local: Sequence[int]
    home: Sequence[int]
    regrouped: Sequence[bool]
    arrived: Sequence[int] | None = None
    gathered: Sequence[int] | None = None
    esp_size: int = 1


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """The rows and columns of every buffer of a pass.

    direction: "forward" or "backward".
    extent: the numbers of rows by chunk.
    d_model: M.
    columns: the columns of the experts' tensors.
    restore: the restore pair; None if nothing is kept.
    rearranged: whether backward has other chunks than forward.
    """

    direction: str
    extent: ChunkRows
    d_model: int
    columns: HiddenColumns
    restore: Restore | None
    rearranged: bool = False
    _known: dict[str, tuple[Sequence[int], int]] = field(default_factory=dict, init=False, compare=False)

    def shape(self, buffer: str) -> tuple[int, int]:
        """Returns (rows, columns) of a buffer; 0 rows for one that this pass or rank does not use.

        Example: "T_M_L.3" -> (rows of chunk 3 that stay, H).
        """
        name, _, chunk = buffer.rpartition(".")
        rows, columns = self.of(name)
        return rows[int(chunk)], columns

    def of(self, name: str) -> tuple[Sequence[int], int]:
        """Returns the rows of each chunk's buffer of this name, and their columns."""
        if name not in self._known:
            self._known[name] = self._rows_and_columns(name)
        return self._known[name]

    def _rows_and_columns(self, name: str) -> tuple[Sequence[int], int]:
        """Works out the result of `of`."""
        extent = self.extent
        width = self.d_model
        stays = name.endswith("_L")
        rows = extent.local if stays else extent.received
        no_rows = (0,) * len(extent.received)
        name = name.removesuffix("_L").removesuffix("_again")
        match name:
            case "send":
                return extent.send, width
            case "arrived" | "leaving" | "copies" | "parts":
                return self._inside_rows(name), width
            case "home" | "dhome":
                return (no_rows if stays else extent.home), width  # "home" holds the rows that stay too
            case "T_M" | "dT_M":
                return rows, self.columns.hidden
            case "active":
                return rows, self._active_columns
            case "scratch":
                scratch_rows = self.columns.scratch_rows if self._expendable else 0
                return [min(count, scratch_rows) for count in rows], self.columns.scratch
        by_link = name in ("T_DO", "dT_DO", "dT_DI") or (name == "T_DI" and self._restores_by_link)
        if by_link and not stays and extent.gathered is not None:
            rows = extent.gathered
        if name.endswith("_sorted") or (name == "T_DI" and not stays and self.keeps_what_arrives):
            return [
                number * is_sorted for number, is_sorted in zip(rows, extent.regrouped, strict=True)
            ], width
        return rows, width

    @property
    def keeps_what_arrives(self) -> bool:
        """Whether this is forward and T_DI is kept. Then T_DI that arrives in expert order needs no slot."""
        kept = self.restore is not None and self.restore.dispatched == "keep"
        return self.direction == "forward" and kept

    def _inside_rows(self, name: str) -> Sequence[int]:
        """Returns the rows of each chunk's buffer between S and AG, or between RS and R.

        name: "arrived" or "leaving"; "copies", from which AG sends; or "parts", which RS sums.
        """
        arrived = self.extent.arrived or self.extent.received
        esp_size = self.extent.esp_size
        if name == "copies":
            esp_size = esp_size if esp_size > 2 else 0
        return [rows * esp_size for rows in arrived] if name in ("copies", "parts") else arrived

    @property
    def _restores_by_link(self) -> bool:
        """Whether a collective brings T_DI: in forward, and in backward if it is sent again."""
        sends_again = self.restore is not None and self.restore.dispatched == "communicate"
        return self.direction == "forward" or sends_again

    @property
    def _expendable(self) -> bool:
        """Whether backward may overwrite T_M with the activated hidden."""
        return self.restore is not None and (self.restore.hidden != "keep" or self.rearranged)

    @property
    def _active_columns(self) -> int:
        """The columns of the buffer of the activated hidden."""
        if self.direction == "forward":
            in_place = self.restore is None or self.restore.hidden == "recompute"
        else:
            in_place = self._expendable
        return self.columns.active if in_place else self.columns.scratch


def aligned(num_bytes: int) -> int:
    """Returns a number of bytes rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def slot_elements(schedule: Schedule, sizes: BufferSizes) -> dict[str, int]:
    """Returns the elements of each ring slot: those of the largest buffer that takes a turn in it."""
    largest: dict[str, int] = {}
    for name, turns in schedule.turns.items():
        rows, columns = sizes.of(name)
        for _, chunk, slot in turns:
            largest[slot] = max(largest.get(slot, 0), rows[chunk] * columns)
    return largest


def arena_elements(slots: Mapping[str, int], element_size: int) -> tuple[dict[str, int], int]:
    """Returns (elements from the start of each slot to the next, elements of all slots), each aligned."""
    step = max(ALIGNMENT // element_size, 1)
    spans = {slot: -(-elements // step) * step for slot, elements in slots.items()}
    return spans, sum(spans.values())

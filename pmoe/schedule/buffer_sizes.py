"""The sizes of the buffers of a pass, and of the ring slots that hold them (MPipeMoE, section III.D).

A ring slot is memory in which buffers of different chunks take turns. It is as large as the largest of these
buffers. All slots of a pass lie in one allocation, each at a multiple of `ALIGNMENT` bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Schedule

ALIGNMENT = 256
"""Every ring slot starts at a multiple of this number of bytes."""

SORTED_RESULTS = ("T_DO_sorted", "dT_DI_sorted")
"""The names of the buffers in which results are sorted by expert.

The results are then copied from these buffers to buffers in the order in which the rows arrived.
"""


class HiddenColumns(NamedTuple):
    """Widths, in columns, of the tensors that experts need between their two products.

    T_M is the hidden activation before the nonlinearity. The "activated hidden" is the hidden activation
    after the nonlinearity. Experts that do not know their widths, such as a user's own modules, have 0 in all
    fields.

    hidden: width of T_M and of T_M's gradient.
    active: width of the buffer "active", which holds the activated hidden, in passes that may overwrite T_M.
        It is 0 if experts write the activated hidden over T_M, because they then need no such buffer.
    scratch: width of the activated hidden. The buffer "active" has this width in passes that must not
        overwrite T_M. The buffer "scratch", which holds a block of rows, always has it.
    scratch_rows: a number of rows, not a width: backward computes some steps for a block of at most this many
        rows at a time.
    staged: width of the widest product that is computed in temporary memory and then copied to its buffer; 0
        if products are written to their buffers directly.
    graph: sum of the widths of the tensors that autograd needs at the same time while it differentiates the
        experts for one block of rows.
    adapter: width of the product of a row and an adapter's first matrix: the adapter's rank; 0 without
        adapters.
    """

    hidden: int = 0
    active: int = 0
    scratch: int = 0
    scratch_rows: int = 0
    staged: int = 0
    graph: int = 0
    adapter: int = 0


class ChunkRows(NamedTuple):
    """Numbers of rows of the buffers of one pass. Each sequence has one number for each chunk.

    The engine passes tuples, because `slot_layout` hashes these numbers to look up a layout in its cache.

    send: rows that this rank sends to other ranks.
    received: rows that other ranks send to this rank's experts. If one row is for several of these experts,
        it counts once for each of them.
    local: rows that stay on this rank, because their expert is on it. If chunks do not share buffers, the
        sequence has one number for each task that computes such rows (`pmoe.schedule.tasks.piece_of`).
    home: rows of the buffer "home": one result for each row that was sent or stayed and, if choices may be
        dropped, one row of zeros that all dropped choices share.
    regrouped: whether received rows must be sorted by expert before the experts compute them.
    arrived: rows that the dispatch all-to-all brings; None if the numbers are equal to ``received``.
    gathered: rows after the all-gather inside the node, if experts are sharded; None if the numbers are equal
        to ``received``.
    esp_size: the number of ranks that share each expert, one number for all chunks; below 2 if experts are
        not sharded.
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

    A buffer has a name and the index of a chunk, such as "T_M_L.3". In names, "d" marks a gradient, "_L"
    rows that stay on this rank, "_sorted" rows sorted by expert, and "_again" rows of T_DI that backward
    sends again:

        send              rows that the dispatch all-to-all sends
        T_DI, T_M, T_DO   the experts' input, hidden activation and output
        active, scratch   the hidden activation after the nonlinearity, and a block of its rows
        home              results that the combine all-to-all brings back
        arrived           with sharded experts: rows that the dispatch all-to-all brings
        copies            with sharded experts: the rows of "arrived", once for each rank that shares the
                          experts; the all-gather inside the node sends them
        parts             with sharded experts: partial results of all ranks that share the experts
        leaving           with sharded experts: the sums of these partial results

    direction: "forward" or "backward".
    extent: the numbers of rows by chunk.
    d_model: columns of a token row.
    columns: columns of the tensors inside the experts.
    restore: the restore pair: whether T_DI and T_M are kept, offloaded, or made again in backward; None if no
        backward pass follows.
    rearranged: whether backward has another number of chunks than forward.
    places: whether the experts store the results of sorted rows in the order in which the rows arrived, so
        that no chunk needs memory for sorted results.
    """

    direction: str
    extent: ChunkRows
    d_model: int
    columns: HiddenColumns
    restore: Restore | None
    rearranged: bool = False
    places: bool = False
    _known: dict[str, tuple[Sequence[int], int]] = field(default_factory=dict, init=False, compare=False)

    def shape(self, buffer: str) -> tuple[int, int]:
        """Returns (rows, columns) of the buffer of one chunk; 0 rows if this pass or rank does not use it.

        buffer: the name and the chunk, such as "T_M_L.3": the hidden activation (T_M) of those rows of chunk
            3 that stay on this rank (_L). Its shape is (number of these rows, columns of T_M).
        """
        name, _, chunk = buffer.rpartition(".")
        rows, columns = self.of(name)
        return rows[int(chunk)], columns

    def of(self, name: str) -> tuple[Sequence[int], int]:
        """Returns (number of rows of each chunk, number of columns) of the buffers called ``name``.

        The buffers of all chunks have the same number of columns.

        name: a name without a chunk, such as "T_DI".
        """
        if name not in self._known:
            self._known[name] = self._rows_and_columns(name)
        return self._known[name]

    def _rows_and_columns(self, name: str) -> tuple[Sequence[int], int]:
        """Computes the result of `of`, which caches it.

        A buffer that this pass or rank does not use has 0 rows.

        name: a name without a chunk, such as "T_DI".
        """
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
                return (no_rows if stays else extent.home), width  # "home" has room for "home_L", too
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
        if name.endswith("_sorted") or (name == "T_DI" and not stays):
            return self._rows_in_slots(name, rows), width
        return rows, width

    def _rows_in_slots(self, name: str, rows: Sequence[int]) -> Sequence[int]:
        """Returns ``rows``, with 0 for each chunk that needs no ring slot for its buffer ``name``.

        name: the buffer:

            "T_DI"              0 for chunks whose rows stay in the memory in which they arrive
            ends in "_sorted"   rows or results sorted by expert: 0 for chunks whose rows need not be
                                sorted. Sorted results (`SORTED_RESULTS`) have 0 for all chunks if experts
                                store their results directly in the order of arrival (``places``)

        rows: the number of rows of each chunk.
        """
        if name in SORTED_RESULTS and self.places:
            return (0,) * len(rows)
        if name == "T_DI":
            return tuple(0 if self.stays_as_it_arrives(i) else number for i, number in enumerate(rows))
        return [number * is_sorted for number, is_sorted in zip(rows, self.extent.regrouped, strict=True)]

    def stays_as_it_arrives(self, i: int) -> bool:
        """Whether chunk i's rows of T_DI stay until backward in the memory in which they arrive.

        This memory belongs to these rows only; it is no ring slot. The result is True only in forward, in two
        cases:

        - The fate of T_DI is "message": the messages that arrived are kept.
        - The fate is "keep", and the rows arrive sorted by expert. Rows that are not sorted arrive in a ring
          slot, and their sorted copy is kept.

        i: index of the chunk.
        """
        if self.direction != "forward" or self.restore is None:
            return False
        fate = self.restore.dispatched
        return fate == "message" or (fate == "keep" and not self.extent.regrouped[i])

    def _inside_rows(self, name: str) -> Sequence[int]:
        """Returns how many rows each chunk has in a buffer that a collective inside the node reads or writes.

        These collectives run only if experts are sharded over the ranks of a node: an all-gather before the
        experts, and a reduce-scatter after them.

        name: the buffer:

            arrived   rows that the dispatch all-to-all brings
            copies    what the all-gather sends. It runs as an all-to-all, so this buffer has the arrived
                      rows once for each rank that shares the experts. If two ranks share the experts, it
                      has 0 rows: the rows are sent to the other rank directly from "arrived"
            parts     partial results that the reduce-scatter gets from each rank that shares the experts
            leaving   the sums of the partial results
        """
        arrived = self.extent.arrived or self.extent.received
        esp_size = self.extent.esp_size
        if name == "copies":
            esp_size = esp_size if esp_size > 2 else 0
        return [rows * esp_size for rows in arrived] if name in ("copies", "parts") else arrived

    @property
    def _restores_by_link(self) -> bool:
        """Whether other ranks send T_DI, the experts' input, in this pass.

        They do in forward, and in backward if the fate of T_DI is "communicate".
        """
        sends_again = self.restore is not None and self.restore.dispatched == "communicate"
        return self.direction == "forward" or sends_again

    @property
    def _expendable(self) -> bool:
        """Whether backward may overwrite T_M, the hidden activation, with its values after the nonlinearity.

        It may if T_M is in reused memory (a ring slot), because backward has copied it from the host,
        recomputed it, unpacked it from e4m3, or copied it from forward's chunks to chunks of another size. A
        T_M that was kept from forward must not change.
        """
        return self.restore is not None and (self.restore.hidden != "keep" or self.rearranged)

    @property
    def _active_columns(self) -> int:
        """The columns of the buffer "active", which holds hidden activations after the nonlinearity.

        T_M is the hidden activation before the nonlinearity. If the pass may overwrite T_M, the buffer has
        `HiddenColumns.active` columns: 0 if experts write the values after the nonlinearity over T_M. If T_M
        must not change, the buffer has `HiddenColumns.scratch` columns.
        """
        if self.direction == "forward":
            in_place = self.restore is None or self.restore.hidden == "recompute"
        else:
            in_place = self._expendable
        return self.columns.active if in_place else self.columns.scratch


def aligned(num_bytes: int) -> int:
    """Returns a number of bytes rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def slot_elements(schedule: Schedule, sizes: BufferSizes) -> dict[str, int]:
    """Returns the number of elements of each ring slot, by the slot's name.

    A ring slot is memory in which buffers take turns, so it is as large as the largest of these buffers.

    schedule: the tasks of a pass, with the slot of each buffer.
    sizes: rows and columns of each buffer.
    """
    largest: dict[str, int] = {}
    for name, turns in schedule.turns.items():
        rows, columns = sizes.of(name)
        for _, chunk, slot in turns:
            largest[slot] = max(largest.get(slot, 0), rows[chunk] * columns)
    return largest


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """The places of a pass's ring slots in one common allocation, and the slot and shape of each buffer.

    A ring slot is memory in which buffers of different chunks take turns. A buffer is a view of its slot with
    the shape (rows, columns). Buffers of equal shape that take turns in a slot are the same view.

    spans: for each slot, the number of elements that it takes in the allocation. The slots lie one after
        another in this order.
    total: the number of elements of the allocation, the sum of ``spans``.
    views: the views, each as (index of its slot in ``spans``, rows, columns).
    view_of_buffer: the index in ``views`` of each buffer that has rows, by the buffer's name and chunk, such
        as {"T_DI.2": 0}.
    """

    spans: list[int]
    total: int
    views: list[tuple[int, int, int]]
    view_of_buffer: dict[str, int]


MOST_LAYOUTS = 16
"""The largest number of layouts that `slot_layout` caches for a schedule."""


def slot_layout(schedule: Schedule, sizes: BufferSizes, element_size: int) -> SlotLayout:
    """Returns the layout of a pass's ring slots in one allocation.

    Calls often have the same numbers of rows as an earlier call, for example on one rank, or if rows are
    padded. So the layouts of a schedule are cached (`Schedule.layouts`).

    schedule: the tasks of the pass, with the slot of each buffer.
    sizes: rows and columns of each buffer.
    element_size: bytes of an element.
    """
    key = (sizes, element_size)
    layout = schedule.layouts.get(key)
    if layout is None:
        if len(schedule.layouts) >= MOST_LAYOUTS:
            schedule.layouts.pop(next(iter(schedule.layouts)), None)  # the oldest
        layout = schedule.layouts[key] = _new_layout(schedule, sizes, element_size)
    return layout


def _new_layout(schedule: Schedule, sizes: BufferSizes, element_size: int) -> SlotLayout:
    """Computes the result of `slot_layout`."""
    spans, total = arena_elements(slot_elements(schedule, sizes), element_size)
    slot_index = {slot: index for index, slot in enumerate(spans)}
    view_index: dict[tuple[int, int, int], int] = {}
    view_of_buffer: dict[str, int] = {}
    for name, turns in schedule.turns.items():
        rows, columns = sizes.of(name)
        for buffer, chunk, slot in turns:
            if rows[chunk]:
                view = (slot_index[slot], rows[chunk], columns)
                view_of_buffer[buffer] = view_index.setdefault(view, len(view_index))
    return SlotLayout(
        spans=list(spans.values()), total=total, views=list(view_index), view_of_buffer=view_of_buffer
    )


def arena_elements(slots: Mapping[str, int], element_size: int) -> tuple[dict[str, int], int]:
    """Returns the number of elements that each ring slot takes in one common allocation, and their sum.

    Every slot starts at a multiple of `ALIGNMENT` bytes, so the numbers are rounded up.

    slots: the number of elements of each slot, by the slot's name.
    element_size: bytes of an element.
    """
    step = max(ALIGNMENT // element_size, 1)
    spans = {slot: -(-elements // step) * step for slot, elements in slots.items()}
    return spans, sum(spans.values())

"""Wires: the number formats in which dispatched rows are sent, and the sizes of messages and buffers.

The message of a row is what the dispatch all-to-all sends for it. A wire makes the message shorter than the
row itself. The buffers that the all-to-all reads and writes then hold messages. Bytes of a message for M =
d_model columns, rounded up to whole elements of the rows' dtype:

    None         M * element_size                          the row as it is
    "bfloat16"   2 * M                                     each number rounded to bfloat16
    "e4m3"       M, rounded up to 4, + 4 * ceil(M / 128)   float8 numbers, then float32 scales

With "e4m3" each block of 128 columns has a scale, so that the largest number of the block becomes 448, the
largest number of e4m3 (a float8 type with 4 bits of exponent and 3 of mantissa). `pmoe.comm.wire` packs and
unpacks rows.

Example: M = 1024 in bfloat16 -> 2048 bytes as they are, 1024 + 32 = 1056 bytes as e4m3, 0.516 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pmoe.schedule.buffer_sizes import BufferSizes

WireName = Literal["e4m3", "bfloat16"]
"""The number formats that MoELayer's arguments ``wire`` and ``wire_backward`` accept, apart from None."""

BLOCK_COLUMNS = 128
"""Columns of a row that share one scale in e4m3. The last block of a row may have fewer."""

SCALE_BYTES = 4
"""Bytes of a scale, a float32."""


def number_bytes(d_model: int) -> int:
    """Returns the bytes of a row's e4m3 numbers, up to a multiple of 4, so that a float32 scale may follow.

    d_model: M, columns of the row; each is one byte.
    """
    return -(-d_model // SCALE_BYTES) * SCALE_BYTES


def message_bytes(wire: WireName | None, d_model: int, element_size: int) -> int:
    """Returns the bytes of the message of one row, a multiple of ``element_size``.

    wire: the format in which the row is sent; None sends it as it is.
    d_model: M, columns of the row.
    element_size: bytes of an element of the row.
    """
    if wire is None:
        return d_model * element_size
    if wire == "bfloat16":
        num_bytes = 2 * d_model
    else:
        num_bytes = number_bytes(d_model) + SCALE_BYTES * -(-d_model // BLOCK_COLUMNS)
    return -(-num_bytes // element_size) * element_size


@dataclass(frozen=True, kw_only=True)
class Wires:
    """The number formats in which a layer dispatches rows, one for each pass. None sends rows as they are.

    rows: format of the rows that forward sends to experts (T_DI), also if backward sends them again.
    gradients: format of the gradients that backward sends to experts (dT_DO).
    """

    rows: WireName | None = None
    gradients: WireName | None = None

    @property
    def by_option(self) -> dict[str, WireName | None]:
        """The two formats by the names of the layer's options, "wire" and "wire_backward"."""
        return {"wire": self.rows, "wire_backward": self.gradients}

    def of(self, direction: str) -> WireName | None:
        """Returns the format of the rows that a pass dispatches.

        direction: "forward" or "backward".
        """
        return self.rows if direction == "forward" else self.gradients


AS_THEY_ARE = Wires()
"""The formats of a layer that sends all rows in their own dtype."""


@dataclass(frozen=True, kw_only=True)
class MessageSizes(BufferSizes):
    """The sizes (rows, columns) of every buffer of a pass that sends rows in a narrower number format.

    A message is a row in that format. It lies in a buffer of the rows' dtype, so a buffer of messages has as
    many columns as a message has elements of that dtype. Such buffers are "send", "arrived", "copies", and
    T_DI or dT_DO as they arrive. Messages are unpacked into the buffers "T_DI_sorted" and "dT_DO_sorted",
    which the experts read. Every chunk has these two buffers, even if its rows arrive sorted by expert.

    wires: the formats in which rows are sent.
    element_size: bytes of an element of the rows.
    """

    wires: Wires
    element_size: int

    @property
    def keeps_what_arrives(self) -> bool:
        # Backward cannot compute with messages, so the unpacked rows are kept, in memory of their own.
        return self.wires.rows is None and super().keeps_what_arrives

    def _rows_and_columns(self, name: str) -> tuple[Sequence[int], int]:
        rows, columns = super()._rows_and_columns(name)
        wire = self._wire_of(name)
        if wire is None:
            return rows, columns
        if name.endswith("_sorted"):
            return self.extent.received, columns
        return rows, message_bytes(wire, self.d_model, self.element_size) // self.element_size

    def _wire_of(self, name: str) -> WireName | None:
        """Returns the number format of the messages in a buffer, or of those that are unpacked into it.

        None if the buffer has nothing to do with messages, or if rows are sent as they are.

        name: name of the buffer, without a chunk, such as "T_DI_sorted".
        """
        match name.removesuffix("_again").removesuffix("_sorted"):
            case "T_DI":
                return self.wires.rows if self._restores_by_link else None
            case "dT_DO":
                return self.wires.gradients
            case "send" | "arrived" | "copies":
                return self.wires.of("forward" if name.endswith("_again") else self.direction)
        return None

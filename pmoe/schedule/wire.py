"""Wires: the number formats in which rows and results are sent, and the sizes of messages and buffers.

An all-to-all sends a message for each row. A wire makes the message shorter than the row itself. The buffers
that the all-to-all reads and writes then hold messages. Bytes of a message for M = d_model columns, rounded
up to whole elements of the rows' dtype:

    None         M * element_size                          the row as it is
    "bfloat16"   2 * M                                     each number rounded to bfloat16
    "e4m3"       M, rounded up to 4, + 4 * ceil(M / 128)   float8 numbers, then float32 scales

With "e4m3" the numbers of each block of 128 columns are divided by a scale. The largest absolute value of the
block then becomes 448, the largest number of e4m3 (a float8 type with 4 bits of exponent and 3 of mantissa).
`pmoe.comm.wire` packs rows into messages and unpacks them.

Example: a bfloat16 row with M = 1024 has 2048 bytes. Its "e4m3" message has 1024 + 32 = 1056 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pmoe.schedule.buffer_sizes import BufferSizes

WireName = Literal["e4m3", "bfloat16"]
"""The values of MoELayer's arguments ``wire``, ``wire_backward`` and ``wire_combine``, apart from None."""

BLOCK_COLUMNS = 128
"""Columns of a row that share one scale in e4m3. The last block of a row may have fewer."""

SCALE_BYTES = 4
"""Bytes of a scale, a float32."""


def number_bytes(d_model: int) -> int:
    """Returns the bytes of a row's e4m3 numbers, rounded up to a multiple of 4: float32 scales follow them.

    d_model: M, columns of the row. The number of each column takes one byte.
    """
    return -(-d_model // SCALE_BYTES) * SCALE_BYTES


def message_bytes(wire: WireName | None, d_model: int, element_size: int) -> int:
    """Returns the bytes of the message of one row, a multiple of ``element_size``.

    wire: the format in which the row is sent; None if the row itself is sent.
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
    """The number formats in which a layer sends rows and results. None sends them in their own dtype.

    rows: format of the rows that forward sends to experts (T_DI), and that backward may send again.
    gradients: format of the gradients that backward sends to experts (dT_DO).
    results: format of the results that passes send back to the tokens' ranks: T_DO in forward, dT_DI in
        backward.
    """

    rows: WireName | None = None
    gradients: WireName | None = None
    results: WireName | None = None

    @property
    def by_option(self) -> dict[str, WireName | None]:
        """The formats as a dict {name of the layer's option: format}."""
        return {"wire": self.rows, "wire_backward": self.gradients, "wire_combine": self.results}

    @property
    def dispatches(self) -> bool:
        """Whether forward's rows or backward's gradients are sent to the experts in a narrower format."""
        return self.rows is not None or self.gradients is not None

    def of(self, direction: str) -> WireName | None:
        """Returns the format of the rows that a pass dispatches: ``rows`` or ``gradients``.

        direction: "forward" or "backward".
        """
        return self.rows if direction == "forward" else self.gradients


RESULT_MESSAGES = ("leaving_messages", "home_messages")
"""The buffers that hold results as messages.

"leaving_messages" holds the results that this rank sends back to the tokens' ranks. "home_messages" holds the
results that this rank gets back for its own tokens.
"""

AS_THEY_ARE = Wires()
"""The formats of a layer that sends all rows in their own dtype."""


@dataclass(frozen=True, kw_only=True)
class MessageSizes(BufferSizes):
    """The sizes (rows, columns) of every buffer of a pass that sends rows in a narrower number format.

    The buffers "send", "arrived", "copies", "T_DI" and "dT_DO" hold one message in each row, if the rows are
    sent in a narrower format. The columns of such a buffer are counted in elements of the rows' dtype:

        columns = bytes of the message / element_size

    Messages are unpacked into the buffers "T_DI_sorted" and "dT_DO_sorted", which the experts read. Every
    chunk has these two buffers, even if its rows arrive sorted by expert. If results are sent in a narrower
    format, there are two more buffers for messages (`RESULT_MESSAGES`).

    wires: the formats in which rows are sent.
    element_size: bytes of an element of the rows.
    """

    wires: Wires
    element_size: int

    def stays_as_it_arrives(self, i: int) -> bool:
        # Backward cannot compute with messages. So "keep" keeps the unpacked rows, in memory of their own.
        keeps_rows = self.restore is not None and self.restore.dispatched == "keep"
        return not (keeps_rows and self.wires.rows) and super().stays_as_it_arrives(i)

    def _rows_and_columns(self, name: str) -> tuple[Sequence[int], int]:
        if name in RESULT_MESSAGES:
            extent = self.extent
            arrived = extent.received if extent.arrived is None else extent.arrived
            rows = arrived if name == "leaving_messages" else extent.send
            num_bytes = message_bytes(self.wires.results, self.d_model, self.element_size)
            return rows, num_bytes // self.element_size
        rows, columns = super()._rows_and_columns(name)
        wire = self._wire_of(name)
        if wire is None:
            return rows, columns
        if name.endswith("_sorted"):
            return self.extent.received, columns
        return rows, message_bytes(wire, self.d_model, self.element_size) // self.element_size

    def _wire_of(self, name: str) -> WireName | None:
        """Returns the number format of the messages that a buffer holds, or from which its rows are unpacked.

        Returns None for a buffer that has nothing to do with messages, and if rows are sent in their own
        dtype.

        name: name of the buffer, without a chunk, such as "T_DI_sorted".
        """
        match name.removesuffix("_again").removesuffix("_sorted"):
            case "T_DI":
                is_packed = self._restores_by_link or (
                    self.restore is not None and self.restore.dispatched == "message"
                )
                return self.wires.rows if is_packed else None
            case "dT_DO":
                return self.wires.gradients
            case "send" | "arrived" | "copies":
                return self.wires.of("forward" if name.endswith("_again") else self.direction)
        return None

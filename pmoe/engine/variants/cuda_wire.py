"""Passes on a GPU that send rows in a narrower number format, which CUDA kernels pack and unpack.

This number format is called a wire. One launch gathers the rows of a chunk from the tokens, and packs each
row into a message: the bytes in which the row is sent. On the receiving rank another launch unpacks the
messages and sorts the rows by expert. This second launch is a cost of the wire: without one, rows that arrive
sorted need no launch, nor do rows that the experts' first product sorts while it loads them. If the kernels
cannot pack or unpack, PyTorch operations do so (`pmoe.engine.variants.wire`), and a warning gives the reason
once.
"""

from __future__ import annotations

import functools

from torch import Tensor

from pmoe.engine.variants.cuda_kernels import is_readable
from pmoe.engine.variants.wire import WiredBackward, WiredForward, WiredPass
from pmoe.kernels import wire as wire_kernels
from pmoe.kernels.permute.row_moves import RowMoves
from pmoe.kernels.wire import MessageKernels
from pmoe.schedule.wire import WireName
from pmoe.warn import warn_once


class _WiredOnCuda(WiredPass):
    """A pass in which pmoe's CUDA kernels pack and unpack the messages, if they support the format.

    moves: launches the kernels that copy and sum rows; None if these kernels cannot read the rows of this
        pass (`pmoe.engine.variants.cuda_kernels`).
    """

    moves: RowMoves | None

    @functools.cached_property
    def kernels(self) -> dict[WireName | None, MessageKernels | None]:
        """Maps each number format of messages to the object that launches the kernels for this format.

        The value is None for a format that the kernels do not support.
        """
        found: dict[WireName | None, MessageKernels | None] = {}
        for wire in (self.wires.rows, self.wires.of(self.direction)):
            if wire is None or wire in found:
                continue
            reason = wire_kernels.refusal(wire, self.source_TM)
            found[wire] = None if reason else MessageKernels(wire, self.source_TM)
            if reason is not None:
                message = f"PyTorch operations pack rows for wire={wire!r}, without pmoe's kernels: {reason}"
                warn_once(message, for_each_reason=True)
        return found

    def pack_messages(self, wire: WireName, source_TM: Tensor, message_NC: Tensor, i: int) -> None:
        kernels = self.kernels[wire]
        if kernels is None:
            self.pack_gathered(wire, source_TM, message_NC, i)
        elif self.moves is not None and is_readable(source_TM):
            chunk = self.pass_plan.chunks[i]
            kernels.pack(source_TM[chunk.tokens], self.positions[i], chunk.sent.start, message_NC)
        else:  # the order is a user's, or a token is sent once to each rank: other operations gather its rows
            rows_NM = self.new(message_NC.shape[0], source_TM.shape[1])
            self.gather_rows(source_TM, rows_NM, i)
            kernels.pack(rows_NM, None, 0, message_NC)

    def unpack_messages(
        self, wire: WireName, message_NC: Tensor, index: Tensor | None, out_NM: Tensor
    ) -> None:
        kernels = self.kernels[wire]
        if kernels is None:
            super().unpack_messages(wire, message_NC, index, out_NM)
        else:
            kernels.unpack(message_NC, index, out_NM)


class WiredForwardOnCuda(_WiredOnCuda, WiredForward):
    """A forward pass on a GPU that packs rows into shorter messages before it sends them to the experts."""


class WiredBackwardOnCuda(_WiredOnCuda, WiredBackward):
    """A backward pass on a GPU that packs gradients, and T_DI if it is sent again, into shorter messages."""

"""Passes that send rows to the experts in a narrower number format (``wire`` and ``wire_backward``).

``wire`` is the format of the dispatched rows in forward, ``wire_backward`` that of the gradients which
backward dispatches (dT_DO). Packing and unpacking are parts of two tasks of each chunk: the gather (G) copies
rows and packs them into messages, and the experts' task (C) unpacks the messages and sorts the rows by
expert. The all-to-all (S) between them sends messages:

    T_I  -G-> rows, packed into send  -S-> T_DI, messages  -C-> T_DI_sorted, rows  -C-> T_DO

A message is a row of bytes (`pmoe.comm.wire`), so any all-to-all can send it. Rows that stay on their rank
are not packed. The experts' results are sent back in their own dtype. If backward sends T_DI again, the same
rows are packed into the same bytes as in forward.

Packing rounds the rows. The gradient of this rounding is taken to be the identity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.wire import check_wires, pack_rows, unpack_rows
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Pass
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import PassModules
from pmoe.schedule.buffer_sizes import BufferSizes
from pmoe.schedule.wire import MessageSizes, WireName, Wires


class WiredPass(Pass):
    """A pass that packs rows into shorter messages, for example in float8, before it dispatches them."""

    @functools.cached_property
    def wires(self) -> Wires:
        """The formats in which the layer sends rows to the experts, one for each pass."""
        wires = self.plan.modules.wires
        assert wires is not None
        check_wires(wires, self.source_TM.dtype)
        return wires

    @property
    def sizes_type(self) -> Callable[..., BufferSizes]:  # type: ignore[override]
        return functools.partial(MessageSizes, wires=self.wires, element_size=self.source_TM.element_size())

    def gather(self, i: int) -> None:
        self.gather_packed(self.wires.of(self.direction), self.source_TM, "send", i)

    def gather_packed(self, wire: WireName | None, source_TM: Tensor, name: str, i: int) -> None:
        """Copies the rows that chunk i sends from the tokens to a buffer, and packs them into messages.

        wire: the format in which the rows are sent; None sends them in their own dtype.
        source_TM: (T, M), T tokens with M = d_model columns; in backward, the gradients of their outputs.
        name: name of the buffer that the all-to-all will send.
        i: number of the chunk.
        """
        messages = self.buffer(name, i)
        if wire is None:
            self.gather_rows(source_TM, messages, i)
            return
        self.pack(wire, source_TM, messages.view(torch.uint8), i)

    def pack(self, wire: WireName, source_TM: Tensor, message_NC: Tensor, i: int) -> None:
        """Writes the messages of the N rows that chunk i sends.

        wire: the format of the messages.
        source_TM: (T, M), the tokens that the rows are copied from; in backward, the gradients of their
            outputs.
        message_NC: (N, C) uint8, memory for the messages, C bytes each.
        i: number of the chunk.
        """
        rows_NM = self.new(message_NC.shape[0], source_TM.shape[1])
        self.gather_rows(source_TM, rows_NM, i)
        pack_rows(wire, rows_NM, message_NC)

    def send_rows(self, name: str, received: str, i: int) -> dist.Work | None:
        wire = self.wires.rows if name == "send_again" else self.wires.of(self.direction)
        if wire is None:
            return super().send_rows(name, received, i)
        # The buffers have the rows' dtype but hold messages, so the all-to-all gets them as bytes.
        chunk = self.pass_plan.chunks[i]
        sent, arrived = (self.buffer(each, i).view(torch.uint8) for each in (name, received))
        return self.plan.modules.dispatch.exchange(
            sent, chunk.send_rows, arrived, chunk.recv_rows, chunk.relayed[0]
        )

    def in_expert_order(self, name: str, i: int, arrived: Tensor) -> Tensor:
        wire = self.wires.rows if name == "T_DI" else self.wires.gradients
        if wire is None:
            return super().in_expert_order(name, i, arrived)
        rows_NM = self.temporary(f"{name}_sorted", i)
        self.unpack(wire, arrived.view(torch.uint8), self.regroup[i], rows_NM)
        return rows_NM

    def unpack(self, wire: WireName, message_NC: Tensor, index: Tensor | None, out_NM: Tensor) -> None:
        """Unpacks arrived messages to rows, sorted by expert (`pmoe.comm.wire.unpack_rows`)."""
        unpack_rows(wire, message_NC, index, out_NM)


class WiredForward(WiredPass, Forward):
    """A forward pass that packs rows into shorter messages before it sends them to the experts."""


class WiredBackward(WiredPass, Backward):
    """A backward pass that packs what it sends to the experts: gradients, and T_DI if it is sent again."""

    def gather_again(self, i: int) -> None:
        self.gather_packed(self.wires.rows, self.saved.inputs.x_TM, "send_again", i)


def check_wired(modules: PassModules, wires: Wires) -> None:
    """Raises ValueError if a layer cannot send rows in these formats.

    A format must suit the dtype of the experts' parameters. With callbacks that have hooks inside the layer,
    both formats must be None, because hooks see and replace the rows that are sent.

    modules: the layer's modules.
    wires: the formats for both passes.
    """
    parameter = next((each for each in modules.experts.parameters() if each.is_floating_point()), None)
    if parameter is not None:
        check_wires(wires, parameter.dtype)
    if modules.hooks is not None:
        name, value = next(item for item in wires.by_option.items() if item[1] is not None)
        raise ValueError(
            f"{name} ({value!r}) must be None if callbacks have hooks inside the layer: they see and replace "
            "the rows that are sent"
        )

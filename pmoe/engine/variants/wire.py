"""Passes that send rows to the experts in fewer bytes (``wire`` and ``wire_backward``).

Task G copies the rows of a chunk and packs them into messages, and task C unpacks what arrived while it sorts
it by expert:

    T_I  -G-> rows, packed into send  -S-> T_DI, messages  -C-> T_DI_sorted, rows  -C-> T_DO

The messages are bytes (`pmoe.comm.wire`), so every exchange carries them. Rows that stay on this rank are
not packed, and results return as they are. Backward treats the dispatch of the gradients (dT_DO) as
``wire_backward`` says. If it sends T_DI again, the same rows are packed into the same bytes.

The gradient of packing and unpacking counts as the identity, as in a layer whose experts get rounded rows.
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


class _Wired(Pass):
    """A pass that sends rows to the experts as messages."""

    @functools.cached_property
    def wires(self) -> Wires:
        """The forms in which rows are sent."""
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
        """Copies the tokens that chunk i sends to a buffer, and packs them.

        wire: the form in which they are sent; None leaves them as they are.
        source_TM: (T, M), T tokens with M = d_model columns; in backward, the gradients of their outputs.
        name: the buffer that is sent.
        """
        messages = self.buffer(name, i)
        if wire is None:
            self.gather_rows(source_TM, messages, i)
            return
        rows_NM = self.new(self.pass_plan.chunks[i].num_sent, source_TM.shape[1])
        self.gather_rows(source_TM, rows_NM, i)
        pack_rows(wire, rows_NM, messages.view(torch.uint8))

    def send_rows(self, name: str, received: str, i: int) -> dist.Work | None:
        wire = self.wires.rows if name == "send_again" else self.wires.of(self.direction)
        if wire is None:
            return super().send_rows(name, received, i)
        # Sent as bytes, because an exchange must not take them for numbers of the rows' type.
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
        unpack_rows(wire, arrived.view(torch.uint8), self.regroup[i], rows_NM)
        return rows_NM


class WiredForward(_Wired, Forward):
    """A forward pass that sends rows to the experts as messages."""


class WiredBackward(_Wired, Backward):
    """A backward pass that sends gradients, and T_DI if it is sent again, to the experts as messages."""

    def gather_again(self, i: int) -> None:
        self.gather_packed(self.wires.rows, self.saved.inputs.x_TM, "send_again", i)


def check_wired(modules: PassModules, wires: Wires) -> None:
    """Raises ValueError if a layer must not send rows in these forms.

    modules: the layer's modules.
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

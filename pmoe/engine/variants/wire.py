"""Passes that send rows in a narrower number format (``wire``, ``wire_backward`` and ``wire_combine``).

The options name the formats of three kinds of rows:

    wire            rows that forward dispatches
    wire_backward   gradients that backward dispatches (dT_DO)
    wire_combine    results that both passes send back

The gather (G) packs each token into a message, and copies the messages to the send buffer, one for each of
the token's rows. The all-to-all (S) sends the messages. The experts' task (C) unpacks the messages and sorts
the rows by expert:

    T_I  -G-> messages of tokens  -G-> send  -S-> T_DI, messages  -C-> T_DI_sorted, rows  -C-> T_DO

If the pass has few tokens, the first chunk packs all of them: in a small pass the host's time for each
operator matters more than memory. Otherwise each chunk packs its own tokens, or, if it sends fewer rows than
it has tokens, each of these rows.

A message is a row of bytes (`pmoe.comm.wire`), so any all-to-all can send it. Rows that stay on their rank
are not packed. If backward sends T_DI again, the rows are packed into the same bytes as in forward. If the
messages are kept (the fate "message"), backward unpacks the kept messages, and T_DI is not sent again.

With ``wire_combine``, the experts' task also packs their results, and the task that sums the rows of each
token (O) unpacks them:

    T_DO  -C-> leaving_messages  -R-> home_messages  -O-> home, rows  -O-> T_O

Packing rounds the rows. The gradient of this rounding is taken to be the identity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.wire import are_packed_at_once, check_wires, pack_copies, pack_rows, unpack_rows, unpack_to_new
from pmoe.engine.buffers.arena import LARGE_BYTES
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Pass, SavedUnit, Unit
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import PassModules, length
from pmoe.experts.base import Runs
from pmoe.ordering.sorted import copies_bytes
from pmoe.schedule.buffer_sizes import BufferSizes
from pmoe.schedule.wire import RESULT_MESSAGES, MessageSizes, WireName, Wires, message_bytes


@dataclass
class TokenMessages:
    """The messages of all tokens of a pass. Each token is packed once, for all of its rows.

    message_TC: (T, C) uint8, the messages of T tokens, C bytes each.
    num_chunks: the number of chunks that have yet to copy their rows from the messages.
    """

    message_TC: Tensor
    num_chunks: int


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
        self.pack_messages(wire, source_TM, messages.view(torch.uint8), i)

    def pack_messages(self, wire: WireName, source_TM: Tensor, message_NC: Tensor, i: int) -> None:
        """Writes the messages of the N rows that chunk i sends.

        wire: the format of the messages.
        source_TM: (T, M), the tokens that the rows are copied from; in backward, the gradients of their
            outputs.
        message_NC: (N, C) uint8, memory for the messages, C bytes each.
        i: number of the chunk.
        """
        order = self.plan.modules.order
        if not copies_bytes(order):
            self.pack_gathered(wire, source_TM, message_NC, i)
            return
        token_N = self.pass_plan.sent_tokens[i]
        tokens = self.pass_plan.chunks[i].tokens
        if are_packed_at_once(*source_TM.shape):
            order.order(self.message_of_each_token(wire, source_TM), token_N, message_NC)
        elif token_N.shape[0] < length(tokens):
            pack_copies(wire, source_TM, token_N, message_NC)
        else:
            token_messages = self.packed(wire, source_TM[tokens])
            order.order(token_messages, token_N - tokens.start if tokens.start else token_N, message_NC)

    def pack_gathered(self, wire: WireName, source_TM: Tensor, message_NC: Tensor, i: int) -> None:
        """Copies the tokens of chunk i to rows, and packs the rows.

        The arguments are those of `pack_messages`.
        """
        rows_NM = self.new(message_NC.shape[0], source_TM.shape[1])
        self.gather_rows(source_TM, rows_NM, i)
        pack_rows(wire, rows_NM, message_NC, expendable=True)

    def message_of_each_token(self, wire: WireName, source_TM: Tensor) -> Tensor:
        """Returns the messages of all tokens of the pass, which the first chunk packs for all chunks.

        The last chunk frees them.

        wire: the format of the messages.
        source_TM: (T, M), the tokens; in backward, the gradients of their outputs.
        """
        kind = "rows" if source_TM is not self.source_TM or self.direction == "forward" else "gradients"
        messages = self.token_messages.get(kind)
        if messages is None:
            messages = TokenMessages(self.packed(wire, source_TM), len(self.pass_plan.chunks))
            self.token_messages[kind] = messages
        messages.num_chunks -= 1
        if not messages.num_chunks:
            del self.token_messages[kind]
        return messages.message_TC

    @functools.cached_property
    def token_messages(self) -> dict[str, TokenMessages]:
        """The messages of all tokens by kind: "rows" of the layer's input, "gradients" of its output."""
        return {}

    def packed(self, wire: WireName, rows_NM: Tensor) -> Tensor:
        """Returns the messages (N, C) of N rows in new memory, C bytes each. The rows do not change.

        wire: the format of the messages.
        rows_NM: (N, M), the rows with M = d_model columns.
        """
        size = rows_NM.element_size()
        columns = message_bytes(wire, rows_NM.shape[1], size) // size
        message_NC = self.new(rows_NM.shape[0], columns).view(torch.uint8)
        pack_rows(wire, rows_NM, message_NC)
        return message_NC

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

    def in_source_order(self, i: int, rows_NM: Tensor) -> None:
        super().in_source_order(i, rows_NM)
        if self.wires.results is not None:
            messages = self.own_buffer("leaving_messages", i)
            self.own_buffer("home_messages", i)  # here, on the compute lane: R uses it on another lane
            pack_rows(self.wires.results, self.leaving_buffer(i), messages.view(torch.uint8), expendable=True)

    def combine(self, i: int) -> dist.Work | None:
        if self.wires.results is None:
            return super().combine(i)
        chunk = self.pass_plan.chunks[i]
        leaving, home = (self.own_buffer(name, i).view(torch.uint8) for name in RESULT_MESSAGES)
        return self.plan.modules.combine.exchange(
            leaving, chunk.recv_rows, home, chunk.send_rows, chunk.relayed[1]
        )

    def output(self, i: int) -> None:
        if self.wires.results is not None:
            _, home = (self.own.pop(f"{name}.{i}") for name in RESULT_MESSAGES)
            rows_NM = self.home_rows(i, self.pass_plan.chunks[i].sent)
            unpack_rows(self.wires.results, home.view(torch.uint8), None, rows_NM)
        super().output(i)

    def in_expert_order(self, name: str, i: int, arrived: Tensor) -> Tensor:
        wire = self.wires.rows if name == "T_DI" else self.wires.gradients
        if wire is None:
            return super().in_expert_order(name, i, arrived)
        message_NC = arrived.view(torch.uint8)
        key = f"{name}_sorted.{i}"
        rows, columns = self.sizes.shape(key)
        is_large = rows * columns * self.source_TM.element_size() >= LARGE_BYTES
        if self.source_TM.is_cuda or is_large or key in self.arena.buffers:
            rows_NM = self.temporary(f"{name}_sorted", i)
            self.unpack_messages(wire, message_NC, self.regroup[i], rows_NM)
            return rows_NM
        return unpack_to_new(wire, message_NC, self.regroup[i], columns, self.source_TM.dtype)

    def unpack_messages(
        self, wire: WireName, message_NC: Tensor, index: Tensor | None, out_NM: Tensor
    ) -> None:
        """Unpacks arrived messages to rows, sorted by expert (`pmoe.comm.wire.unpack_rows`)."""
        unpack_rows(wire, message_NC, index, out_NM)


class WiredForward(WiredPass, Forward):
    """A forward pass that packs rows into shorter messages before it sends them to the experts."""

    def kept_for_backward(self, unit: Unit, kept: SavedUnit, rows_NM: Tensor, changed: bool) -> SavedUnit:
        kept = super().kept_for_backward(unit, kept, rows_NM, changed)
        i, place = unit
        if self.plan.restore.dispatched == "message" and not place:
            return kept._replace(rows_NM=self.buffer(self.received, i))
        return kept


class WiredBackward(WiredPass, Backward):
    """A backward pass that sends gradients, and T_DI if it is sent again, to the experts as messages.

    If forward kept the messages of T_DI, the pass unpacks these messages and T_DI is not sent again.
    """

    def gather_again(self, i: int) -> None:
        self.gather_packed(self.wires.rows, self.saved.inputs.x_TM, "send_again", i)

    def arrived_again(self, i: int) -> Tensor:
        if self.plan.restore.dispatched != "message":
            return super().arrived_again(i)
        messages = self.kept[i, ""].rows_NM
        assert messages is not None
        return messages

    def rows_of(self, unit: Unit) -> Tensor:
        i, place = unit
        joined = self.plan.joined
        is_kept = self.plan.restore.dispatched == "message"
        if unit not in self.rows and is_kept and joined is not None and not place:
            self.rows[unit] = self.unpacked_from(joined.received[i], i)
        return super().rows_of(unit)

    def unpacked_from(self, parts: Sequence[tuple[int, Runs]], i: int) -> Tensor:
        """Returns the rows (T_DI) of chunk i of backward, sorted by expert, from the messages of forward.

        Used if the two passes have different chunks.

        parts: numbers of forward's chunks, and which of their rows are which rows of chunk i.
        i: number of the chunk.
        """
        assert self.wires.rows is not None
        rows_NM = self.temporary("T_DI_sorted", i)
        for chunk, runs in parts:
            messages = self.kept[chunk, ""].rows_NM
            assert messages is not None
            message_NC = messages.view(torch.uint8)
            regroup = self.plan.forward.chunks[chunk].regroup
            for forward_rows, backward_rows in runs:
                if regroup is None:
                    self.unpack_messages(
                        self.wires.rows, message_NC[forward_rows], None, rows_NM[backward_rows]
                    )
                else:
                    self.unpack_messages(
                        self.wires.rows, message_NC, regroup[forward_rows], rows_NM[backward_rows]
                    )
        return rows_NM


def check_wired(modules: PassModules, wires: Wires) -> None:
    """Raises ValueError if a layer cannot send rows in these formats.

    The error is raised in three cases:

    - A format does not suit the dtype of the experts' parameters.
    - Callbacks have hooks inside the layer: such hooks read and replace the rows that are sent.
    - Experts are sharded, and results are to be sent in a narrower format: the ranks of a node sum partial
      results before they are sent.

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
    if wires.results is not None and modules.grid.is_sharded:
        raise ValueError(
            f"wire_combine ({wires.results!r}) must be None if experts are sharded over the ranks of a node: "
            "they sum their results before these are sent back"
        )

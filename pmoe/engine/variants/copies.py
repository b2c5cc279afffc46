"""Passes of a call in which ranks host copies of busy experts: their weights and gradients travel as tasks.

    V     sends the weights of busy experts to the ranks of their copies: whole, or in parts if an expert has
          several copies
    VR    ranks with copies of one expert send each other the parts that V brought
    C     computes own experts and copies (`pmoe.experts.with_copies`)
    KW    gradients of the copies' parameters
    VGR   ranks with copies of one expert send each other parts of their gradients
    VG    sends the gradients of copies home
    VA    adds them to the gradients of the experts, expert by expert

An expert travels as one row of P numbers: its parameters, one behind the other. `HostedCopies` says who sends
which part of which expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.base import all_to_all
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import ForwardState, Inputs, Pass, Unit
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.copies import ExpertPart, HostedCopies
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import Hidden, Runs
from pmoe.experts.products import GradientSum
from pmoe.experts.with_copies import ExpertsWithCopies


@dataclass(frozen=True)
class _Messages:
    """The buffers of the messages that bring weights to the copies.

    sent, arrived: what V sends and brings.
    relay_sent, relay_arrived: what VR sends and brings; None if V brings whole experts.
    """

    sent: Tensor
    arrived: Tensor
    relay_sent: Tensor | None = None
    relay_arrived: Tensor | None = None


class _WithCopies(Pass):
    """A pass in which this rank hosts copies, or sends weights of its experts to other ranks' copies.

    copied: (C, P), the weights of the C copies that this rank hosts.
    messages: the messages of V and VR until the first task has read the copies' weights; None afterwards, and
        if copies were kept from forward.
    experts: the rank's experts and its copies.
    """

    copied: Tensor
    experts: ExpertsWithCopies
    messages: _Messages | None = None

    @property
    def hosted(self) -> HostedCopies:
        """The copies of the call."""
        copies = self.plan.modules.copies
        assert copies is not None
        return copies

    @functools.cached_property
    def expert_elements(self) -> int:
        """P, the number of an expert's parameters."""
        return sum(parameter[:1].numel() for parameter in self.parameters)

    def buffer_for(self, parts: Sequence[ExpertPart]) -> Tensor:
        """Returns new memory for a message that consists of these parts."""
        sizes = self.hosted.elements_by_peer(parts, self.expert_elements)
        return self.pool.new(self.parameters[0], sum(sizes))

    def new_messages(self) -> _Messages:
        """Returns memory for the messages of V and VR. Called on the compute lane (see `Pass.__init__`)."""
        hosted = self.hosted
        sent = self.buffer_for(hosted.scattered)
        if not hosted.relays:
            return _Messages(sent, self.copied.view(-1))
        others = map(self.buffer_for, (hosted.gathered, hosted.relayed, hosted.completed))
        return _Messages(sent, *others)

    def use_copies(self, copied: Tensor) -> None:
        """Lets the passes compute with the rank's experts and its copies.

        copied: (C, P), memory for the weights of the copies, or the weights.
        """
        self.copied = copied
        self.experts = ExpertsWithCopies(self.plan.modules.experts, parameters_in(copied, self.parameters))

    def exchange_parts(
        self,
        sent: Tensor,
        send_parts: Sequence[ExpertPart],
        arrived: Tensor,
        recv_parts: Sequence[ExpertPart],
    ) -> dist.Work:
        """Starts the all-to-all of parts of experts. Every rank starts it, also without copies.

        sent, arrived: the messages, with the parts in the order of the lists.
        """
        hosted = self.hosted
        modules = self.plan.modules
        send_sizes = hosted.elements_by_peer(send_parts, self.expert_elements)
        recv_sizes = hosted.elements_by_peer(recv_parts, self.expert_elements)
        modules.traffic.weights += sent.nbytes
        group = modules.grid.all.group
        assert group is not None
        return all_to_all(sent, send_sizes, arrived, recv_sizes, group)

    def pack(
        self, parts: Sequence[ExpertPart], of_expert: Callable[[int], Sequence[Tensor]], out: Tensor
    ) -> None:
        """Copies parts of experts to a message.

        of_expert: returns the P numbers of an expert, in one or several tensors.
        out: the message.
        """
        pieces: list[Tensor] = []
        for part in parts:
            wanted = part.of(self.expert_elements)
            first = 0
            for values in of_expert(part.expert):
                pieces.append(values.reshape(-1)[max(wanted.start - first, 0) : max(wanted.stop - first, 0)])
                first += values.numel()
        if pieces:
            torch.cat(pieces, out=out)

    def unpack(
        self, message: Tensor, parts: Sequence[ExpertPart], of_expert: Callable[[int], Tensor]
    ) -> None:
        """Copies a message that has arrived to the experts of its parts.

        of_expert: returns the memory of an expert's P numbers, (P,).
        """
        first = 0
        for part in parts:
            target = of_expert(part.expert)[part.of(self.expert_elements)]
            target.copy_(message[first : first + target.numel()])
            first += target.numel()

    def own_weights(self, expert: int) -> list[Tensor]:
        """Returns the parameters of one of this rank's experts, P numbers together."""
        place = expert - self.hosted.rank * self.hosted.num_local
        return [parameter[place] for parameter in self.parameters]

    def of_copy(self, expert: int) -> Tensor:
        """Returns the weights of one of this rank's copies, (P,)."""
        return self.copied[self.hosted.hosted.index(expert)]

    def copy_weights(self, _: int) -> dist.Work | None:
        """Starts to send the weights of busy experts to the ranks of their copies (task V)."""
        hosted = self.hosted
        messages = self.messages
        assert messages is not None
        self.pack(hosted.scattered, self.own_weights, messages.sent)
        return self.exchange_parts(messages.sent, hosted.scattered, messages.arrived, hosted.gathered)

    def relay_weights(self, _: int) -> dist.Work | None:
        """Starts to send parts that V brought to other ranks with copies of the same experts (task VR)."""
        hosted = self.hosted
        messages = self.messages
        assert messages is not None and messages.relay_sent is not None
        assert messages.relay_arrived is not None
        self.unpack(messages.arrived, hosted.gathered, self.of_copy)
        self.pack(hosted.relayed, lambda expert: [self.of_copy(expert)], messages.relay_sent)
        return self.exchange_parts(
            messages.relay_sent, hosted.relayed, messages.relay_arrived, hosted.completed
        )

    def complete_copies(self) -> None:
        """Makes the copies' weights ready for the first task that reads them, on the compute lane."""
        messages = self.messages
        if messages is None:
            return
        self.messages = None
        if messages.relay_arrived is not None:
            self.unpack(messages.relay_arrived, self.hosted.completed, self.of_copy)
        self.experts.take_copies()


class CopiesForward(_WithCopies, Forward):
    """A forward pass with copies of busy experts."""

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, inputs, keep)
        hosted = self.hosted
        if self.stages.copies == "present":
            assert hosted.kept is not None and hosted.kept.weights is not None
            self.use_copies(hosted.kept.weights)
            self.experts.take_copies()
        else:
            self.use_copies(self.pool.new(self.parameters[0], len(hosted.hosted), self.expert_elements))
            self.messages: _Messages | None = self.new_messages()
        if keep and self.stages.copies != "communicate":
            self.saved.inputs = replace(inputs, parameters=[*inputs.parameters, self.copied])

    def compute(self, i: int) -> None:
        self.complete_copies()
        if self.hosted.kept is not None:
            self.hosted.kept.weights = self.copied
        super().compute(i)


class CopiesBackward(_WithCopies, Backward):
    """A backward pass with copies of busy experts.

    copy_sums: for each parameter, the gradients of the copies' parameters, summed over chunks; () if the
        experts are frozen, like all that follows.
    chunks_left: the number of chunks whose gradients are not in these sums yet.
    copied_gradients: (C, P), the gradients of the C copies.
    relay_sent, relay_arrived: the messages of VGR; None if no expert has several copies.
    home_sent, home_arrived: the messages of VG.
    """

    copy_sums: list[GradientSum]
    chunks_left: int
    copied_gradients: Tensor
    relay_sent: Tensor | None = None
    relay_arrived: Tensor | None = None
    home_sent: Tensor
    home_arrived: Tensor

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        # Forward has put the copies' weights behind the parameters, so that autograd keeps and checks them.
        is_kept = plan.modules.stages.copies != "communicate"
        *parameters, copied = saved.inputs.parameters
        if is_kept:
            saved.inputs = replace(saved.inputs, parameters=parameters)
        super().__init__(plan, grad_TM, saved)
        hosted = self.hosted
        new = self.pool.new
        shape = (len(hosted.hosted), self.expert_elements)
        self.use_copies(copied if is_kept else new(self.parameters[0], *shape))
        if is_kept:
            self.experts.take_copies()
        else:
            self.messages: _Messages | None = self.new_messages()
        self.copy_sums = []
        self.chunks_left = len(self.pass_plan.chunks)
        if self.stages.frozen_copies:
            return
        of_copies = parameters_in(self.copied, self.parameters)
        self.copy_sums = [GradientSum(each, self.chunks_left, new) for each in of_copies]
        self.copied_gradients = new(self.parameters[0], *shape)
        self.home_sent = self.copied_gradients.view(-1)
        if hosted.relays:
            self.relay_sent = self.buffer_for(hosted.completed)
            self.relay_arrived = self.buffer_for(hosted.relayed)
            self.home_sent = self.buffer_for(hosted.gathered)
        self.home_arrived = self.buffer_for(hosted.scattered)

    def compute(self, i: int) -> None:
        self.complete_copies()
        super().compute(i)

    def recompute(self, i: int, place: str = "") -> None:
        if not place:
            self.complete_copies()
        super().recompute(i, place)

    def joined(self, saved: Sequence[tuple[Hidden, Runs]], unit: Unit) -> Hidden:
        """Returns the hidden activation T_M of one task (`OffloadingBackward.joined`)."""
        return self.experts.join(saved, self.groups(unit).num_rows, space=self.space(unit))

    def copy_wgrad(self, i: int) -> None:
        """Computes the gradients of the copies' parameters from the rows of chunk i, and adds them (task KW).

        After the last chunk the gradients of each copy are put into one row.
        """
        unit = (i, "")
        self.experts.copy_gradient(self.pending[unit], self.groups(unit), self.copy_sums)
        self.chunks_left -= 1
        if self.chunks_left == 0:
            for target in parameters_in(self.copied_gradients, self.parameters):
                target.copy_(self.copy_sums.pop(0).result())

    def gradient_of_copy(self, expert: int) -> Tensor:
        """Returns the gradient of one of this rank's copies, (P,)."""
        return self.copied_gradients[self.hosted.hosted.index(expert)]

    def relay_gradients(self, _: int) -> dist.Work | None:
        """Starts to send other ranks with copies of the same experts their parts of gradients (task VGR)."""
        hosted = self.hosted
        assert self.relay_sent is not None and self.relay_arrived is not None
        self.pack(hosted.completed, lambda expert: [self.gradient_of_copy(expert)], self.relay_sent)
        return self.exchange_parts(self.relay_sent, hosted.completed, self.relay_arrived, hosted.relayed)

    def copy_gradients(self, _: int) -> dist.Work | None:
        """Starts to send the gradients of copies to the ranks of their experts (task VG).

        If an expert has several copies, this rank sends the sum of all their gradients for its own part.
        """
        hosted = self.hosted
        if self.relay_arrived is not None:
            self._sum_own_parts(self.relay_arrived)
        return self.exchange_parts(self.home_sent, hosted.gathered, self.home_arrived, hosted.scattered)

    def _sum_own_parts(self, arrived: Tensor) -> None:
        """Adds up this rank's parts of the gradients of all copies, in order of rank, for the message of VG.

        arrived: the message that VGR has brought.
        """
        hosted = self.hosted
        wide = torch.promote_types(arrived.dtype, torch.float32)
        num_elements = self.expert_elements
        sums: dict[int, Tensor] = {}
        for part in hosted.gathered:
            own = self.gradient_of_copy(part.expert)[part.of(num_elements)]
            sums[part.expert] = own.to(wide, copy=True)
        first = 0
        for part in hosted.relayed:
            total = sums[part.expert]
            total.add_(arrived[first : first + total.numel()])
            first += total.numel()
        if sums:
            self.home_sent.copy_(torch.cat([sums[part.expert] for part in hosted.gathered]))

    def add_gradients(self, _: int) -> None:
        """Adds the gradients of copies to those of this rank's experts, expert by expert (task VA)."""
        hosted = self.hosted
        sizes = [part.of(self.expert_elements) for part in hosted.scattered]
        messages = self.home_arrived.split_with_sizes([of.stop - of.start for of in sizes])
        row = self.home_arrived.new_empty(1, self.expert_elements)
        gradients = parameters_in(row, self.parameters)
        for expert in hosted.sent_experts:
            for part, of_expert, message in zip(hosted.scattered, sizes, messages, strict=True):
                if part.expert == expert:
                    row[0, of_expert] = message
            place = expert - hosted.rank * hosted.num_local
            for total, gradient in zip(self.sums, gradients, strict=True):
                if total is not None:
                    total.add_expert(place, gradient[0])


def parameters_in(rows: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the parameters of experts as views of their rows.

    rows: (C, P), a row of P numbers for each of C experts.
    parameters: (E_local, ...) each, tensors whose shapes the parameters have, apart from the first dimension.

    Returns (C, ...) for each parameter.
    """
    views = []
    first = 0
    for parameter in parameters:
        shape = parameter.shape[1:]
        count = shape.numel()
        views.append(rows[:, first : first + count].view(rows.shape[0], *shape))
        first += count
    return views

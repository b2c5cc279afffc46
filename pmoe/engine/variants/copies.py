"""Forward and backward passes in which other ranks compute with copies of busy experts (``balance``).

The rank that owns a busy expert sends the expert's weights to its hosts: the ranks with a copy. In backward,
the hosts send back the gradients of the copies. Sending and adding are tasks of the pass:

    V     the owner sends an expert's weights to the host, if the expert has one copy. If it has several
          copies, the owner sends a different part of the weights to each host
    VR    the hosts of one expert send each other their parts of the weights
    L     computes rows that stay on this rank, for its copies
    C     computes received rows, for the rank's own experts and its copies (`pmoe.experts.with_copies`)
    LKW   computes the gradients of the copies' parameters from rows that stay
    KW    computes the gradients of the copies' parameters from received rows
    VGR   the hosts of one expert send each other parts of their gradients
    VG    the hosts send the gradients to the owner
    VA    the owner adds these gradients to the gradients of its experts

An expert is sent as one row of P numbers: all its parameters, one after the other. `HostedCopies` lists the
parts of experts that each rank sends and receives. Parameters that all experts share, such as a shared
adapter, are not sent, because every rank has them. The row of an expert's gradients has only the parameters
that are trained.

Letters: C copies that this rank hosts, P numbers in an expert's parameters, G numbers in its gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from pmoe.schedule.tasks import Kind


@dataclass(frozen=True)
class _Messages:
    """The buffers of the messages that bring experts' weights to the ranks that host copies.

    sent, arrived: the messages of task V: weights from the owners of experts to the hosts of copies.
    relay_sent, relay_arrived: the messages of task VR: parts of weights that hosts send each other. None if
        no expert has several copies, because V then sends whole experts.
    """

    sent: Tensor
    arrived: Tensor
    relay_sent: Tensor | None = None
    relay_arrived: Tensor | None = None


class _WithCopies(Pass):
    """A pass with copies of busy experts: this rank may host copies, or own experts that other ranks host.

    copied: (C, P), the weights of the C copies that this rank hosts, P numbers each.
    messages: the buffers of the messages that bring these weights. None after the weights have been copied
        from the buffers to ``copied``. Also None if no weights are sent, because an earlier pass or call has
        kept them.
    experts: the rank's experts and its copies.
    """

    copied: Tensor
    experts: ExpertsWithCopies
    messages: _Messages | None = None

    @property
    def hosted(self) -> HostedCopies:
        """The plan of copies of this call: which ranks host which experts, and which parts ranks exchange."""
        copies = self.plan.modules.copies
        assert copies is not None
        return copies

    @functools.cached_property
    def stacked(self) -> list[int]:
        """The indices in ``parameters`` of tensors with a value for each expert. Experts share the rest."""
        experts = self.plan.modules.experts
        shared = {at for at, name in enumerate(experts.call_names) if name in experts.replicated_dims}
        return [at for at in range(len(self.parameters)) if at not in shared]

    def stacked_parameters(self) -> list[Tensor]:
        """Returns the parameters that have a value for each expert, (E_local, ...) each."""
        return [self.parameters[at] for at in self.stacked]

    @functools.cached_property
    def expert_elements(self) -> int:
        """P, the number of elements that all parameters of one expert have together."""
        return sum(shape.numel() for shape in self.value_shapes())

    def value_shapes(self) -> list[torch.Size]:
        """Returns the shapes of one expert's parameters, in the order in which they are sent."""
        return [parameter.shape[1:] for parameter in self.stacked_parameters()]

    def buffer_for(self, parts: Sequence[ExpertPart], num_elements: int) -> Tensor:
        """Allocates the buffer of a message that consists of parts of experts' weights, or of gradients.

        num_elements: how many elements are sent for a whole expert: those of its weights, or, if gradients
            are sent, those of its gradients.
        """
        sizes = self.hosted.elements_by_peer(parts, num_elements)
        return self.pool.new(self.parameters[0], sum(sizes))

    def new_messages(self) -> _Messages:
        """Returns memory for the messages that bring weights to the copies of busy experts.

        There is a message from the owners of experts to the hosts of copies (task V). If some expert has
        several copies, there is also a message between hosts (task VR). The method must be called on the
        compute lane, because all memory of a pass is allocated there (`Pass.__init__`).
        """
        hosted = self.hosted
        sent = self.buffer_for(hosted.scattered, self.expert_elements)
        if not hosted.relays:
            return _Messages(sent, self.copied.view(-1))
        parts = (hosted.gathered, hosted.relayed, hosted.completed)
        return _Messages(sent, *(self.buffer_for(each, self.expert_elements) for each in parts))

    def use_copies(self, copied: Tensor) -> None:
        """Sets the memory of the copies' weights, and creates the experts with which the pass computes.

        copied: (C, P), memory for the weights of C copies, P numbers each. It may be filled later, before the
            first task that computes with the copies.
        """
        self.copied = copied
        copies = list(self.parameters)
        for at, of_copies in zip(self.stacked, parameters_in(copied, self.value_shapes()), strict=True):
            copies[at] = of_copies
        self.experts = ExpertsWithCopies(self.plan.modules.experts, copies)

    def exchange_parts(
        self,
        sent: Tensor,
        send_parts: Sequence[ExpertPart],
        arrived: Tensor,
        recv_parts: Sequence[ExpertPart],
        num_elements: int,
    ) -> dist.Work:
        """Starts the all-to-all that sends parts of experts' weights or gradients; returns its Work.

        Every rank must call it, even if it sends nothing.

        sent: the message of this rank, in which ``send_parts`` lie one after another.
        send_parts: the parts that this rank sends.
        arrived: memory for the message that arrives, in which ``recv_parts`` lie one after another.
        recv_parts: the parts that this rank receives.
        num_elements: how many elements are sent for a whole expert: those of its weights, or, if gradients
            are sent, those of its gradients.
        """
        hosted = self.hosted
        modules = self.plan.modules
        send_sizes = hosted.elements_by_peer(send_parts, num_elements)
        recv_sizes = hosted.elements_by_peer(recv_parts, num_elements)
        modules.traffic.weights += sent.nbytes
        group = modules.grid.ep.group
        assert group is not None
        return all_to_all(sent, send_sizes, arrived, recv_sizes, group)

    def pack(
        self,
        parts: Sequence[ExpertPart],
        of_expert: Callable[[int], Sequence[Tensor]],
        out: Tensor,
        num_elements: int,
    ) -> None:
        """Copies parts of experts' weights, or of gradients, one after the other to the buffer of a message.

        parts: the parts, in the order of the message.
        of_expert: function from an expert's index to its weights or gradients, in one or several tensors.
        out: the buffer of the message.
        num_elements: how many elements are sent for a whole expert: those of its weights, or, if gradients
            are sent, those of its gradients.
        """
        pieces: list[Tensor] = []
        for part in parts:
            wanted = part.of(num_elements)
            first = 0
            for values in of_expert(part.expert):
                pieces.append(values.reshape(-1)[max(wanted.start - first, 0) : max(wanted.stop - first, 0)])
                first += values.numel()
        if pieces:
            torch.cat(pieces, out=out)

    def unpack(
        self, message: Tensor, parts: Sequence[ExpertPart], of_expert: Callable[[int], Tensor]
    ) -> None:
        """Copies the parts of experts' weights in a message that has arrived to the memory of these experts.

        message: the message, in which ``parts`` lie one after another.
        parts: the parts.
        of_expert: function from an expert's index to the memory of its P weights, (P,).
        """
        first = 0
        for part in parts:
            target = of_expert(part.expert)[part.of(self.expert_elements)]
            target.copy_(message[first : first + target.numel()])
            first += target.numel()

    def own_weights(self, expert: int) -> list[Tensor]:
        """Returns the parameters of one of this rank's experts, without those that all experts share.

        expert: the expert's index among all experts.
        """
        place = expert - self.hosted.rank * self.hosted.num_local
        return [parameter[place] for parameter in self.stacked_parameters()]

    def of_copy(self, expert: int) -> Tensor:
        """Returns the weights, (P,) for P numbers, of a copy that this rank hosts.

        expert: the index, among all experts, of the expert that was copied.
        """
        return self.copied[self.hosted.hosted.index(expert)]

    def copy_weights(self, _: int) -> dist.Work | None:
        """Starts the all-to-all that sends weights of busy experts to the hosts of their copies (task V).

        If an expert has several copies, each host gets a different part of the expert's weights. Task VR then
        brings each host the other parts.
        """
        hosted = self.hosted
        messages = self.messages
        assert messages is not None
        elements = self.expert_elements
        self.pack(hosted.scattered, self.own_weights, messages.sent, elements)
        return self.exchange_parts(
            messages.sent, hosted.scattered, messages.arrived, hosted.gathered, elements
        )

    def relay_weights(self, _: int) -> dist.Work | None:
        """Starts the all-to-all in which hosts of copies of one expert send each other its weights (task VR).

        Each host has received one part of the weights from the expert's owner. The host sends this part to
        all other hosts of the expert.
        """
        hosted = self.hosted
        messages = self.messages
        assert messages is not None and messages.relay_sent is not None
        assert messages.relay_arrived is not None
        elements = self.expert_elements
        self.unpack(messages.arrived, hosted.gathered, self.of_copy)
        self.pack(hosted.relayed, lambda expert: [self.of_copy(expert)], messages.relay_sent, elements)
        return self.exchange_parts(
            messages.relay_sent, hosted.relayed, messages.relay_arrived, hosted.completed, elements
        )

    def complete_copies(self) -> None:
        """Copies weights that have arrived to the copies of busy experts, before a task computes with them.

        Called on the compute lane. Only the first call does something.
        """
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
            self.saved.inputs = inputs._replace(parameters=[*inputs.parameters, self.copied])

    def complete_copies(self) -> None:
        super().complete_copies()
        if self.hosted.kept is not None:
            self.hosted.kept.weights = self.copied

    def local(self, j: int) -> None:
        if self.pass_plan.pieces[j].of_copies:
            self.complete_copies()
        super().local(j)

    def compute(self, i: int) -> None:
        self.complete_copies()
        super().compute(i)


class CopiesBackward(_WithCopies, Backward):
    """A backward pass with copies of busy experts.

    If no rank trains its experts, ``copy_sums`` is empty, and the attributes after `tasks_left` are not set.
    The four messages are only allocated after the last task that adds gradients of copies.

    copy_sums: for each parameter, the gradients of the copies, summed over chunks. The entry is None for a
        parameter that no rank trains. For a parameter that all experts share, the entry is the sum to which
        this rank's own experts add their gradients, too.
    tasks_left: the number of tasks (KW and LKW) whose gradients are not in ``copy_sums`` yet.
    copied_gradients: (C, G), the gradients of the C copies that this rank hosts, G numbers each.
    relay_sent, relay_arrived: the messages in which hosts of the same expert send each other parts of their
        gradients (task VGR). None if no expert has several copies.
    home_sent, home_arrived: the messages in which hosts send gradients to the owners of experts (task VG).
    """

    copy_sums: list[GradientSum | None]
    tasks_left: int
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
            saved.inputs = saved.inputs._replace(parameters=parameters)
        super().__init__(plan, grad_TM, saved)
        hosted = self.hosted
        shape = (len(hosted.hosted), self.expert_elements)
        self.use_copies(copied if is_kept else self.pool.new(self.parameters[0], *shape))
        if is_kept:
            self.experts.take_copies()
        else:
            self.messages: _Messages | None = self.new_messages()
        self.copy_sums = []
        kinds = (Kind.COPY_WGRAD, Kind.LOCAL_COPY_WGRAD)
        self.tasks_left = sum(task.kind in kinds for task in self.schedule.tasks)
        if not self.stages.frozen_copies:
            self._make_sums()

    @functools.cached_property
    def trained(self) -> list[int]:
        """The indices in ``parameters`` of the parameters whose gradients are sent to the experts' owners."""
        return [at for at in self.stacked if self.hosted.trained[at]]

    def gradient_shapes(self) -> list[torch.Size]:
        """Returns the shapes of one expert's gradients that are sent to its owner, in their order."""
        return [self.parameters[at].shape[1:] for at in self.trained]

    @functools.cached_property
    def gradient_elements(self) -> int:
        """G, the number of elements of an expert's gradients that are sent to the expert's owner."""
        return sum(shape.numel() for shape in self.gradient_shapes())

    def _make_sums(self) -> None:
        """Allocates the gradients of the copies, and the sums over chunks from which they are computed.

        After the last chunk the sums are copied to the gradients. On the CPU a sum of the same dtype as the
        gradient is made in the gradient's memory, and nothing is copied.
        """
        new = self.pool.new
        self.copied_gradients = new(self.parameters[0], len(self.hosted.hosted), self.gradient_elements)
        self.copy_sums = self.sums_that_stay()
        for at, view in self.summed_gradients():
            memory = new if view.is_cuda else functools.partial(_reuse_memory, view)
            self.copy_sums[at] = GradientSum(view, self.tasks_left, memory)

    def sums_that_stay(self) -> list[GradientSum | None]:
        """Returns the initial `copy_sums`: only the sums of parameters that all experts share, else None."""
        stacked = set(self.stacked)
        return [None if at in stacked else total for at, total in enumerate(self.sums)]

    def summed_gradients(self) -> list[tuple[int, Tensor]]:
        """Returns pairs (index in `copy_sums`, view of `copied_gradients`), one for each sum that is sent."""
        views = parameters_in(self.copied_gradients, self.gradient_shapes())
        return list(zip(self.trained, views, strict=True))

    def local(self, j: int) -> None:
        is_of_copies = self.pass_plan.pieces[j].of_copies
        if is_of_copies:
            self.complete_copies()
        super().local(j)
        if is_of_copies and self.stages.frozen_copies:  # no task LKW will free the operands
            self._free((j, "_L"))

    def compute(self, i: int) -> None:
        self.complete_copies()
        super().compute(i)

    def recompute(self, i: int, place: str = "") -> None:
        if not place:
            self.complete_copies()
        super().recompute(i, place)

    def joined(self, saved: Sequence[tuple[Hidden, Runs]], unit: Unit) -> Hidden:
        """Returns one task's hidden activation T_M, of experts and copies, copied from forward's chunks.

        saved: for each forward chunk its T_M, and the pairs (slice of its rows, slice of the task's rows) to
            copy.
        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        """
        return self.experts.join(saved, self.groups(unit).num_rows, space=functools.partial(self.place, unit))

    def _free(self, unit: Unit) -> None:
        """Frees the operands of the gradients of copies' parameters from rows that stay.

        unit: (j, "_L") for block j of these rows.
        """
        del self.pending[unit]
        self.rows.pop(unit, None)

    def copy_wgrad(self, i: int, place: str = "") -> None:
        """Computes the gradients of the copies' parameters from the rows of one task (KW), and adds them up.

        After the last of these tasks, the method writes the sums to `copied_gradients`, one row for each
        copy, and allocates the messages in which they are sent.

        i: the number of a chunk; with place="_L", the number of a block of rows.
        place: "" for the rows that this rank received in chunk i; "_L" for block i of the rows that are not
            sent, because copies of their experts are on this rank.
        """
        unit = (i, place)
        self.experts.copy_gradient(self.pending[unit], self.groups(unit), self.copy_sums)
        if place:  # rows for copies only: no task for the rank's own experts will free the operands
            self._free(unit)
        self.tasks_left -= 1
        if self.tasks_left:
            return
        for at, target in self.summed_gradients():
            total = self.copy_sums[at]
            assert total is not None
            gradient = total.result()
            if gradient.data_ptr() != target.data_ptr():
                target.copy_(gradient)
            self.copy_sums[at] = None
        hosted = self.hosted
        elements = self.gradient_elements
        self.home_sent = self.copied_gradients.view(-1)
        if hosted.relays:
            self.relay_sent = self.buffer_for(hosted.completed, elements)
            self.relay_arrived = self.buffer_for(hosted.relayed, elements)
            self.home_sent = self.buffer_for(hosted.gathered, elements)
        self.home_arrived = self.buffer_for(hosted.scattered, elements)

    def gradient_of_copy(self, expert: int) -> Tensor:
        """Returns the gradient, (G,) for G numbers, of a copy that this rank hosts.

        expert: the index, among all experts, of the expert that was copied.
        """
        return self.copied_gradients[self.hosted.hosted.index(expert)]

    def relay_gradients(self, _: int) -> dist.Work | None:
        """Starts the all-to-all in which hosts of copies of one expert send each other gradients (task VGR).

        Each host sums one part of the expert's gradient over all hosts. So each host receives this part of
        the gradient from all other hosts.
        """
        hosted = self.hosted
        assert self.relay_sent is not None and self.relay_arrived is not None
        elements = self.gradient_elements
        self.pack(hosted.completed, lambda expert: [self.gradient_of_copy(expert)], self.relay_sent, elements)
        return self.exchange_parts(
            self.relay_sent, hosted.completed, self.relay_arrived, hosted.relayed, elements
        )

    def copy_gradients(self, _: int) -> dist.Work | None:
        """Starts the all-to-all that sends gradients of copies to the ranks that own the experts (task VG).

        A host is a rank that has a copy of another rank's expert. If an expert has several copies, its
        gradient is cut into one part for each host. Each host sums one part over all copies, and sends only
        the sum of this part.
        """
        hosted = self.hosted
        if self.relay_arrived is not None:
            self._sum_own_parts(self.relay_arrived)
        return self.exchange_parts(
            self.home_sent, hosted.gathered, self.home_arrived, hosted.scattered, self.gradient_elements
        )

    def _sum_own_parts(self, arrived: Tensor) -> None:
        """Sums gradients of copies over all hosts of an expert, and writes the sums into the owner's message.

        Each host of an expert's copies sums one part of the expert's gradient. The host adds the other hosts'
        gradients to its own in order of rank, in float32 or a wider dtype.

        arrived: the message that task VGR received: the other hosts' gradients for the parts that this rank
            sums.
        """
        hosted = self.hosted
        wide = torch.promote_types(arrived.dtype, torch.float32)
        num_elements = self.gradient_elements
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
        """Adds the gradients of copies to the gradients of this rank's own experts (task VA)."""
        hosted = self.hosted
        sizes = [part.of(self.gradient_elements) for part in hosted.scattered]
        messages = self.home_arrived.split_with_sizes([of.stop - of.start for of in sizes])
        of_host = {
            (part.expert, part.peer): message
            for part, message in zip(hosted.scattered, messages, strict=True)
        }
        for expert in hosted.sent_experts:
            place = expert - hosted.rank * hosted.num_local
            for group in hosted.groups[expert]:
                parts = [of_host[expert, rank] for rank in group]
                row = parts[0] if len(parts) == 1 else torch.cat(parts)
                gradients = parameters_in(row.view(1, -1), self.gradient_shapes())
                self.add_to_expert(place, [gradient[0] for gradient in gradients])

    def add_to_expert(self, place: int, gradients: Sequence[Tensor]) -> None:
        """Adds gradients of copies to those of one of this rank's own experts.

        place: the expert's index on this rank.
        gradients: one for each shape of `gradient_shapes`.
        """
        for at, gradient in zip(self.trained, gradients, strict=True):
            total = self.sums[at]
            if total is not None:
                total.add_expert(place, gradient)


def _reuse_memory(memory: Tensor, _: Tensor, *shape: int) -> Tensor:
    """Returns ``memory``. It replaces the function by which `GradientSum` allocates new memory.

    memory: the memory.
    _: a tensor with the dtype and device of the memory.
    shape: the shape of the memory.
    """
    assert memory.shape == shape
    return memory


def parameters_in(rows: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Returns each parameter of C experts as a view (C, ...) of a matrix with one line for each expert.

    rows: (C, P), the matrix: the line of an expert has its parameters one after the other, P numbers.
    shapes: the shapes of the parameters of one expert.
    """
    views = []
    first = 0
    for shape in shapes:
        count = shape.numel()
        views.append(rows[:, first : first + count].view(rows.shape[0], *shape))
        first += count
    return views

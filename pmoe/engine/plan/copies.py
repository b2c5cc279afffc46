"""The copies of busy experts in one call: which ranks host them, and which rank sends which weights.

With ``balance``, the rows of a busy expert are computed by its owner (the rank to which the expert belongs)
and by its hosts (other ranks with a copy of the expert). An expert's weights are sent as one row of numbers:
all its parameters, one after the other. With C copies the row is cut into C parts. The owner sends each host
a different part (task V). Then each host sends its part to all other hosts (task VR). So no rank sends or
receives more than about twice the size of the row:

    C = 2        owner   host a   host b
    V            a b     a        b          the owner sends part a to host a, part b to host b
    VR                   a b      a b        host a sends part a to host b, and b sends b to a

Usually all hosts of an expert are one group. For at most one expert of each owner there may be two groups:
the hosts on the owner's node, and the hosts on one other node (`pmoe.planner.copy_groups`). The owner then
sends the whole row to each group, and only hosts of the same group send each other parts.

Gradients are sent in the opposite direction. Each host has a gradient of the whole expert, from its own rows.
First each host sends part a of its gradient to host a, part b to host b, and so on (task VGR). Then host a
sums all parts a and sends the sum to the owner; each other host does so with its own part (task VG). The
owner adds the gradients of all groups.

Letters: W ranks, E_local experts that a rank owns, P numbers of an expert's parameters.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pmoe.planner.copies import CopyPlan
from pmoe.planner.copy_groups import host_groups
from pmoe.planner.copy_rows import RankNodes, row_cuts, shares_of_source
from pmoe.schedule.restore import CopiesFate, Restore, fate_of_copies
from pmoe.schedule.tasks import Stages


class ExpertPart(NamedTuple):
    """A part of an expert's weights, or of its gradient, that is sent between this rank and another.

    All weights of an expert form one row of numbers. The row is cut into ``of_all`` parts, whose sizes differ
    by at most one number.

    peer: the other rank.
    expert: the expert's index among all experts.
    number: the number of this part, from 0 to ``of_all`` - 1.
    of_all: the number of parts.
    """

    peer: int
    expert: int
    number: int
    of_all: int

    def of(self, num_elements: int) -> slice:
        """Returns the slice of an expert's row of weights, or of gradients, that is this part.

        num_elements: P, the number of elements in the whole row.
        """
        start = num_elements * self.number // self.of_all
        return slice(start, num_elements * (self.number + 1) // self.of_all)


@dataclass(kw_only=True)
class KeptCopies:
    """The weights of the copies of busy experts that a rank hosts, kept from one call to the next.

    Later calls use these weights instead of sending them again, as long as no rank's experts change
    (`pmoe.decide.unchanged_experts`).

    pairs: all copies of all ranks, as pairs (expert, rank). The set is the same on every rank.
    sent_experts: this rank's experts that have copies on other ranks.
    dtype: dtype of the copies.
    state: checksums of the weights of ``sent_experts``, made in the call that sent them. A later call
        computes the checksums again: if they are equal, the weights have not changed.
    weights: (C, P), the weights of the C copies that this rank hosts, with P numbers each; None before they
        have arrived.
    """

    pairs: frozenset[tuple[int, int]]
    sent_experts: list[int]
    dtype: torch.dtype
    state: Hashable
    weights: Tensor | None = None

    @property
    def per_rank(self) -> int:
        """The number of copies on the rank that hosts the most."""
        return max(Counter(rank for _, rank in self.pairs).values())


@dataclass(frozen=True, kw_only=True)
class HostedCopies:
    """The copies of busy experts in one call: what this rank hosts, sends and receives.

    In a call with copies, one numbering covers experts and copies ("common indices"). Each rank has E_local +
    `per_rank` indices: first its own experts, then the copies that it hosts, sorted by expert. A rank that
    hosts fewer than `per_rank` copies does not use its last indices.

    An expert's weights are sent as one row of P numbers. If the expert has several copies, the row is cut
    into parts: the owner sends each host a different part (task V), and each host sends its part to all other
    hosts (task VR).

    plan: which ranks host copies of which experts, the same on all ranks.
    rank: this rank.
    num_ranks: W, the number of all ranks.
    num_local: E_local, the experts that each rank owns.
    trained: for each tensor with which experts compute (`Experts.operands`), whether any rank needs its
        gradient.
    fate: how backward gets the copies' weights: "keep" keeps them on their ranks after forward, "communicate"
        sends them again, "present" uses the weights that an earlier call has kept.
    stay: whether the weights stay on their ranks until backward with every restore pair, because later calls
        use them, or because the experts are a user's modules.
    nodes: (W,) the node of each rank; () if all ranks are on one node.
    kept: the record in which the copies' weights are kept for later calls; None if they are not kept. With
        fate="present" the record has the weights already.
    near_first: for each expert with copies, the part of its rows, in 1024ths, that is divided near first
        (`pmoe.planner.copy_rows`); 0 for experts that are not in the dict.
    """

    plan: CopyPlan
    rank: int
    num_ranks: int
    num_local: int
    trained: tuple[bool, ...] = ()
    fate: CopiesFate = "keep"
    stay: bool = False
    nodes: tuple[int, ...] = ()
    kept: KeptCopies | None = field(default=None, compare=False)
    near_first: Mapping[int, int] = field(default_factory=dict)

    def with_fate(self, restore: Restore) -> HostedCopies:
        """Returns the copies with the field ``fate`` of a call with a restore pair.

        restore: the restore pair: how backward gets the experts' input and hidden activation.
        """
        fate = fate_of_copies(restore, stay=self.stay, are_present=self.fate == "present")
        return self if fate == self.fate else replace(self, fate=fate)

    @property
    def are_frozen(self) -> bool:
        """Whether no rank needs gradients of the experts' parameters."""
        return not any(self.trained)

    @functools.cached_property
    def hosted_by(self) -> list[list[int]]:
        """A list for each rank: the indices of the experts of which it hosts copies, in rising order."""
        hosted: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for expert in sorted(self.plan.hosts):
            for rank, _ in self.plan.hosts[expert][1:]:
                hosted[rank].append(expert)
        return hosted

    @functools.cached_property
    def hosted(self) -> list[int]:
        """The indices of the experts of which this rank hosts a copy, in rising order."""
        return self.hosted_by[self.rank]

    @functools.cached_property
    def per_rank(self) -> int:
        """The number of copies on the rank that hosts the most."""
        return max(map(len, self.hosted_by))

    @functools.cached_property
    def relays(self) -> bool:
        """Whether some group has several hosts, which then send each other the weights of an expert."""
        return any(len(group) > 1 for groups in self.groups.values() for group in groups)

    @functools.cached_property
    def rank_nodes(self) -> RankNodes:
        """The nodes of all ranks."""
        return RankNodes(self.nodes or (0,) * self.num_ranks)

    @functools.cached_property
    def groups(self) -> dict[int, list[list[int]]]:
        """The groups of the hosts of each expert that has copies (`pmoe.planner.copy_groups`)."""
        return host_groups(self.plan.hosts, self.rank_nodes.of_rank)

    @property
    def num_sent(self) -> int:
        """The number of times that this rank sends one of its experts: once to each group of hosts."""
        return sum(len(self.groups[expert]) for expert in self.sent_experts)

    @functools.cached_property
    def sent_experts(self) -> list[int]:
        """The indices of this rank's own experts that have copies on other ranks, in rising order."""
        first = self.rank * self.num_local
        return [expert for expert in range(first, first + self.num_local) if expert in self.plan.hosts]

    def in_stages(self, stages: Stages, *, rotates: bool) -> Stages:
        """Returns a layer's stages with the stages of these copies added.

        stages: the stages of the layer without copies.
        rotates: whether chunks take turns in ring slots (buffers of fixed size). If they do, a rank also
            sends to itself the rows of its own tokens for copies that it hosts: ring slots have room for
            these rows among the rows that the rank receives, but not beside them.
        """
        return replace(
            stages,
            copies=self.fate,
            relays_copies=self.relays,
            frozen_copies=self.are_frozen,
            local_copies=stages.local and not rotates,
        )

    def _own_group(self, expert: int) -> list[int]:
        """Returns the group of hosts to which this rank belongs.

        expert: an expert of which this rank hosts a copy.
        """
        return next(group for group in self.groups[expert] if self.rank in group)

    @functools.cached_property
    def scattered(self) -> list[ExpertPart]:
        """The parts of weights that this rank, as owner of experts, sends to the hosts of copies (task V).

        They have the same order as in the message.
        """
        parts = []
        for expert in self.sent_experts:
            for group in self.groups[expert]:
                parts += [ExpertPart(rank, expert, index, len(group)) for index, rank in enumerate(group)]
        return sorted(parts)

    @functools.cached_property
    def gathered(self) -> list[ExpertPart]:
        """The parts of weights that this rank, as host of copies, receives from experts' owners (task V).

        They have the same order as in the message.
        """
        parts = []
        for expert in self.hosted:
            group = self._own_group(expert)
            parts.append(ExpertPart(expert // self.num_local, expert, group.index(self.rank), len(group)))
        return sorted(parts)

    @functools.cached_property
    def relayed(self) -> list[ExpertPart]:
        """The parts of weights that this rank, as host of copies, sends to other hosts of the same experts.

        The experts' owners have sent these parts to this rank (task V). Task VR sends the parts to the other
        hosts of a group. The parts are in the order of the message that task VR sends.
        """
        parts = []
        for expert in self.hosted:
            group = self._own_group(expert)
            own = group.index(self.rank)
            parts += [ExpertPart(rank, expert, own, len(group)) for rank in group if rank != self.rank]
        return sorted(parts)

    @functools.cached_property
    def completed(self) -> list[ExpertPart]:
        """The parts of weights that this rank receives from other hosts of the same experts (task VR).

        Together with the parts from the experts' owners, they are the complete weights of this rank's copies.
        The parts are in the order of the message that task VR receives.
        """
        parts = []
        for expert in self.hosted:
            group = self._own_group(expert)
            numbered = [(rank, index) for index, rank in enumerate(group) if rank != self.rank]
            parts += [ExpertPart(rank, expert, index, len(group)) for rank, index in numbered]
        return sorted(parts)

    def elements_by_peer(self, parts: Iterable[ExpertPart], num_elements: int) -> list[int]:
        """Returns how many elements of a sent message go to each rank, or of a received message come from it.

        The result has W numbers, one for each rank, in the form that an all-to-all needs.

        parts: all parts of experts' weights or gradients in the message.
        num_elements: P, the number of elements of an expert.
        """
        elements = [0] * self.num_ranks
        for part in parts:
            of_part = part.of(num_elements)
            elements[part.peer] += of_part.stop - of_part.start
        return elements

    def numbered_hosts(self, num_experts: int) -> tuple[list[int], list[int]]:
        """Returns how this rank's rows for each expert are divided among the expert and its copies.

        Each row of an expert gets a position u in 0 ... 2**32 - 1. The range of positions is cut into
        intervals: one for the expert itself and one for each copy (`pmoe.planner.copy_rows.row_cuts`). The
        result is two lists with an entry for each interval, in the order of experts and positions:

            bounds   expert * 2**32 + first position of the interval. These rise from entry to entry, so that
                     a row at position u of expert e belongs to the last entry that is at most e * 2**32 + u
            numbers  the index of the expert or copy that computes the interval's rows, in the numbering that
                     covers experts and copies (`HostedCopies`)

        num_experts: the number of experts of all ranks, without copies.

        Example: 2 ranks own one expert each, and a rank hosts at most one copy. So each rank has two indices:
        first its expert, then its copy. Rank 0 has indices 0 and 1; rank 1 has indices 2 and 3. The copy of
        expert 0 on rank 1 gets half of the rows of expert 0:

            interval                      bound   number
            expert 0, first half of rows  0       0  (expert 0)
            expert 0, other half of rows  2**31   3  (copy of expert 0)
            expert 1, all rows            2**32   2  (expert 1)
        """
        width = self.num_local + self.per_rank
        bounds = []
        numbers = []
        for expert in range(num_experts):
            owner, place = divmod(expert, self.num_local)
            bounds.append(expert << 32)
            numbers.append(owner * width + place)
            hosts = self.plan.hosts.get(expert, ())
            if not hosts:
                continue
            near_first = self.near_first.get(expert, 0)
            cuts = row_cuts(shares_of_source(hosts, self.rank, self.rank_nodes, near_first))
            for (rank, _), cut in zip(hosts[1:], cuts[1:], strict=False):
                bounds.append((expert << 32) + cut)
                numbers.append(rank * width + self.num_local + self.hosted_by[rank].index(expert))
        return bounds, numbers


def trained_share(tensors: Sequence[Tensor], trained: Sequence[bool]) -> float:
    """Returns the share of the experts' weights that need gradients, as a fraction of their elements.

    tensors: the tensors with which experts compute (`Experts.operands`).
    trained: for each of these tensors, whether its gradient is needed.
    """
    num_elements = sum(tensor.numel() for tensor in tensors)
    num_trained = sum(
        tensor.numel() for tensor, is_trained in zip(tensors, trained, strict=True) if is_trained
    )
    return num_trained / max(num_elements, 1)

"""Row counts of a layer with ``balance``, in which other ranks compute a part of busy experts' rows.

    1. the gate routes the rank's tokens
    2. the ranks sum the loads of all experts: one reduction of E + 4 numbers
    3. each rank makes the same plan of copies (`pmoe.planner.copies`)
    4. rows of an expert with copies are divided among its hosts, and experts and copies get new numbers
    5. row counts are exchanged, as in any call, for the new numbers

If no copy pays in a call, steps 4 and 5 are those of a layer without ``balance``.

The new numbers of a rank are those of its own experts, then those of its copies. Example: 2 ranks with 2
experts each; expert 0 has a copy on rank 1:

    expert or copy   0    1    -    2    3    copy of 0
    rank             0    0    0    1    1    1
    new number       0    1    2    3    4    5

Letters: T tokens, K choices, E experts of all ranks, W ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice, BalanceReport, Decision
from pmoe.call.modules import LayerModules
from pmoe.call.routed import RoutedBatch
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.comm.agreement import summed
from pmoe.comm.counts import TYPES, RankCounts
from pmoe.comm.failures import publishing_failures
from pmoe.decide.exact_counts import ExactCounts, in_chunks
from pmoe.decide.route import route_batch
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.copies import HostedCopies
from pmoe.engine.plan.make_plan import SortedSlots
from pmoe.engine.plan.plan import Plan
from pmoe.measure.profile import profile_of
from pmoe.ordering.sorted import Tokens, count_rows
from pmoe.planner.copies import GOLDEN, CopyLimits, CopyPlan, plan_copies
from pmoe.planner.degree import Choice
from pmoe.planner.profile import Profile
from pmoe.warn import warn_once

LEAST_GAIN = 0.03
"""Copies are made if the largest time of a rank is predicted to be less by more than this fraction."""


class BalancedCounts(ExactCounts):
    """The source of a call's row counts that gives busy experts copies on other ranks.

    agreed_plan  the plan of copies and the numbers from which all ranks have made it
    copies       the copies of the call, as this rank sees them; None if there are none
    counts_E     (E,) int64 on the device, how many rows of this rank's tokens go to each expert
    """

    agreed_plan: AgreedPlan
    copies: HostedCopies | None
    counts_E: Tensor

    def __init__(self, call: Call, degrees: tuple[int, ...] | None = None) -> None:
        """Routes the call, sums the loads of experts, plans copies, and starts the exchange of row counts.

        call, degrees: as in `ExactCounts`.
        """
        routed = route_batch(call)
        routing = routed.gated.routing
        num_experts = call.modules.options.num_experts
        with hidden_from_checkpoints(), publishing_failures(call.modules.ranks, "the loads of experts"):
            count = routing.expert.shape[0] if routing.token is None else routed.num_tokens
            tokens = Tokens(count, routing.token)
            self.counts_E = count_rows(routing.expert, routing.keep, 1, num_experts, tokens)[0]
            self.agreed_plan = call.replay.once(lambda: agreed_plan(call, routed, self.counts_E), "copies")
            self.copies = hosted_copies(call.modules, self.agreed_plan)
            orders = None
            if self.copies is not None:
                expert_TK = numbered(self.copies, routing.expert, routing.keep, self.counts_E)
                orders = SlotsOfHosts(self.with_copies(call.scheduled), expert_TK, routing.keep, tokens)
        super().__init__(call, degrees, routed, orders)

    def with_copies(self, modules: LayerModules) -> LayerModules:
        """Returns the modules of the layer with the copies of the call, if it has any."""
        return modules if self.copies is None else replace(modules, copies=self.copies)

    def finish_exchange(self) -> RankCounts:
        counts = super().finish_exchange()
        copies = self.copies
        if copies is None:
            return counts
        return replace(
            counts,
            hosted_copies=len(copies.hosted),
            copied_experts=len(copies.sent_experts),
            relays_copies=copies.relays,
        )

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        return super().agree(self.with_copies(modules), inputs)

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Cuts the sorted rows into chunks, and returns the decision to run them on the pipeline engine.

        modules, inputs, agreed: as in `ExactCounts.decision`.
        """
        counts = agreed.counts
        assert counts is not None and agreed.choice is not None
        self.orders.modules = self.with_copies(modules)
        decision = in_chunks(
            self,
            inputs,
            self.orders,
            counts,
            agreed.choice,
            max_tokens=counts.max_tokens,
            kept_device_E=self.counts_E,
        )
        expert_bytes = sum(parameter[:1].nbytes for parameter in inputs.parameters)
        return replace(decision, balance=self.agreed_plan.report(modules, expert_bytes))


@dataclass(frozen=True, kw_only=True)
class AgreedPlan:
    """The plan of copies of a call, and the numbers that the ranks have summed. It is the same on all ranks.

    loads      rows of each of the E experts, from all ranks together
    plan       the copies; without hosts if none pays
    is_frozen  whether no rank needs gradients of the experts' parameters
    """

    loads: tuple[int, ...]
    plan: CopyPlan
    is_frozen: bool

    def report(self, modules: LayerModules, expert_bytes: int) -> BalanceReport:
        """Returns how uneven the ranks' rows are without and with the copies, and what the copies cost.

        modules: the layer's modules and options.
        expert_bytes: bytes of one expert's parameters.
        """
        num_ranks = modules.ranks.size
        owners = owners_of(modules)
        without = CopyPlan(hosts={}, before=0, after=0)
        before, after = (plan.rows_of_ranks(self.loads, owners, num_ranks) for plan in (without, self.plan))
        num_copies = len(self.plan.pairs)
        return BalanceReport(
            before=_imbalance(before),
            after=_imbalance(after),
            copies=num_copies,
            weight_bytes=num_copies * expert_bytes,
        )


def _imbalance(rows: Sequence[int]) -> float:
    """Returns the largest number over the mean; 1 if all are 0. Example: (3, 1) -> 1.5."""
    total = sum(rows)
    return max(rows) * len(rows) / total if total else 1.0


def owners_of(modules: LayerModules) -> list[int]:
    """Returns the rank of each of the E experts."""
    num_local = modules.experts.num_local_experts
    return [expert // num_local for expert in range(modules.options.num_experts)]


def hosted_copies(modules: LayerModules, agreed: AgreedPlan) -> HostedCopies | None:
    """Returns the copies of a call as this rank sees them; None for none."""
    if not agreed.plan.hosts:
        return None
    return HostedCopies(
        plan=agreed.plan,
        rank=modules.ranks.rank,
        num_ranks=modules.ranks.size,
        num_local=modules.experts.num_local_experts,
        are_frozen=agreed.is_frozen,
    )


class SlotsOfHosts(SortedSlots):
    """The routing of a call with copies, in which each (token, choice) slot has the number of a host.

    The number stands for an expert or for a copy. Kernels that route and sort know only experts, so their
    order is not taken.
    """

    def plan(self, counts: RankCounts, choice: Choice) -> Plan:
        """Returns the plan of the call. The copies' weights are kept until backward if T_DI is kept.

        counts, choice: as in `SortedSlots.plan`.
        """
        copies = self.modules.copies
        assert copies is not None
        fate = choice.restore.dispatched
        orders = copy.copy(self)
        orders.modules = replace(
            self.modules, copies=replace(copies, fate="communicate" if fate == "communicate" else "keep")
        )
        return SortedSlots.plan(orders, counts, choice)


def numbered(copies: HostedCopies, expert_TK: Tensor, keep_TK: Tensor | None, counts_E: Tensor) -> Tensor:
    """Returns the new number of the host of each (token, choice) slot, of the shape of expert_TK.

    Rows of one expert are counted in the order of the slots. `pmoe.planner.copies.row_cuts` says which host
    gets a row of a certain number.

    copies: the copies of the call.
    expert_TK: (T, K) int64, the experts that the gate chose.
    keep_TK: (T, K) bool, False for slots without a row; None if all have one.
    counts_E: (E,) int64, the rows of this rank for each expert.
    """
    num_experts = counts_E.shape[0]
    bounds, numbers = copies.numbered_hosts(num_experts)
    expert = expert_TK.reshape(-1)
    key = expert if keep_TK is None else torch.where(keep_TK.reshape(-1), expert, num_experts)
    order = key.argsort(stable=True)
    # The place of each slot among the kept slots of its expert. That of a dropped slot has no meaning.
    first = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])
    row = torch.empty_like(key)
    row[order] = torch.arange(key.numel(), device=key.device) - first[key[order]]
    position = (row + copies.rank) * GOLDEN % 2**32
    numbers_H = torch.tensor(numbers, device=key.device)
    bounds_H = torch.tensor(bounds, device=key.device)
    host = torch.searchsorted(bounds_H, expert * 2**32 + position, right=True) - 1
    return numbers_H[host].view_as(expert_TK)


def agreed_plan(call: Call, routed: RoutedBatch, counts_E: Tensor) -> AgreedPlan:
    """Sums the loads of experts over the ranks, and returns the plan of copies. Collective.

    call: the call.
    routed: its routed tokens.
    counts_E: (E,) int64, the rows of this rank for each expert.
    """
    modules = call.modules
    ranks = modules.ranks
    learns = torch.is_grad_enabled() and (
        any(parameter.requires_grad for parameter in modules.experts_module.parameters())
        or modules.experts.asks_for_gradients()
    )
    # n numbers are all equal if and only if n * sum(x**2) = sum(x)**2.
    kind = TYPES.index(routed.dtype) if routed.dtype in TYPES else len(TYPES)
    flags = torch.tensor([learns, routed.needs_grad, kind, kind**2], device=counts_E.device)
    numbers = torch.cat([counts_E, flags])
    modules.traffic.counts += numbers.nbytes
    *loads, num_learning, num_training, kinds, squares = summed(
        ranks, numbers, stage="summing the loads of experts"
    )
    plan = CopyPlan(hosts={}, before=0, after=0)
    if ranks.size * squares == kinds**2:  # else the exchange of row counts raises an error on all ranks
        limits = limits_of(modules, routed, num_rows=sum(loads), trains=num_training > 0)
        planned = plan_copies(loads, owners_of(modules), [0] * ranks.size, limits)
        plan = planned if planned.before > (1 + LEAST_GAIN) * planned.after else plan
    return AgreedPlan(loads=tuple(loads), plan=plan, is_frozen=num_learning == 0)


def limits_of(modules: LayerModules, routed: RoutedBatch, *, num_rows: int, trains: bool) -> CopyLimits:
    """Returns how many copies a rank may host, and the price of a copy in rows, the same on all ranks.

    A number in ``balance`` asks for copies at any price: it is 0. With ``balance=True`` the
    price follows from the profile, the measured rates of products and messages.

    modules: the modules and options of the layer.
    routed: the routed tokens, of which the dtype and the device count.
    num_rows: rows of all ranks together.
    trains: whether a backward pass follows.
    """
    options = modules.options
    if routed.x_TM.is_cuda:
        warn_once(f"balance ({options.balance}) makes no copies of busy experts on a GPU yet")
        return CopyLimits(per_rank=0)
    per_rank = options.most_copies(modules.ranks.size)
    if options.balance is not True:
        return CopyLimits(per_rank=per_rank)
    # A measurement takes no more memory than a pass, whose buffers hold these rows more than twice.
    most_bytes = 2 * num_rows / modules.ranks.size * options.row_columns * routed.dtype.itemsize
    profile = profile_of(modules.ranks, routed.x_TM.device, routed.dtype, most_bytes)
    columns = modules.experts.columns(routed.x_TM.device.type)
    price = copy_price(
        profile,
        expert_elements=options.row_columns * (columns.hidden + columns.scratch),
        d_model=options.row_columns,
        element_size=routed.dtype.itemsize,
        num_ranks=modules.ranks.size,
        trains=trains,
    )
    return CopyLimits(per_rank=per_rank, near=price, far=price)


def copy_price(
    profile: Profile, *, expert_elements: int, d_model: int, element_size: int, num_ranks: int, trains: bool
) -> int:
    """Returns the price of a copy: the rows that a rank could compute while the copy's weights are sent.

    A row takes the time of its products, or that of its messages if they take longer. Gradients of weights
    count as a second message. The time of a copy is that of its messages alone, as if nothing hid them.

    profile: measured rates.
    expert_elements: elements of an expert's weights: a row has as many multiply-adds.
    d_model: M, the columns of a row.
    element_size: bytes of an element.
    num_ranks: number of ranks. A row stays on its rank in one of so many cases.
    trains: whether a backward pass follows.
    """
    passes = 2 if trains else 1
    products = expert_elements * profile.compute.beta_seconds * (3 if trains else 1)
    crossing = (num_ranks - 1) / num_ranks
    messages = 2 * passes * d_model * element_size * profile.message.beta_seconds * crossing
    copy_seconds = passes * profile.message(expert_elements * element_size)
    row_seconds = max(products, messages)
    return math.ceil(copy_seconds / row_seconds) if row_seconds else 0

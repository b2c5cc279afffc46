"""Row counts of a layer with ``balance``, in which other ranks compute a part of busy experts' rows.

For one call, a busy expert gets copies on other ranks. The ranks that compute its rows, its own rank and
those with copies, are its hosts.

    1. the gate routes the rank's tokens
    2. the ranks sum the loads (numbers of rows) of all experts: one reduction of E + 4 numbers
    3. each rank makes the same plan of copies (`pmoe.planner.copies`)
    4. the rows of an expert with copies are divided among its hosts. For this, experts and copies are
       numbered together
    5. the ranks exchange row counts by these numbers, as in any call by the numbers of experts

If copies would not make a call faster, there are none, and steps 4 and 5 are those of a layer without
``balance``.

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
"""Least gain for which copies are made, as a fraction.

The largest predicted time of a rank without copies must be more than (1 + `LEAST_GAIN`) times that with
copies.
"""


class BalancedCounts(ExactCounts):
    """Routes a call, decides which busy experts get copies on other ranks, and exchanges the row counts.

    agreed_plan  the plan of copies, and the loads from which all ranks have made it
    copies       the copies of the call: what this rank hosts, sends and receives; None if there are none
    counts_E     (E,) int64 on the device, how many rows of this rank's tokens go to each expert
    """

    agreed_plan: AgreedPlan
    copies: HostedCopies | None
    counts_E: Tensor

    def __init__(self, call: Call, degrees: tuple[int, ...] | None = None) -> None:
        """Routes the call, sums the loads of experts, plans copies, and starts the exchange of row counts.

        call: the call: the layer's modules and the input.
        degrees: the numbers of chunks that may be chosen for the call; None for those that the options allow.
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
        """Returns the layer's modules with the copies of the call added; unchanged if there are no copies."""
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

        modules: the modules and options of the layer.
        inputs: the rows and parameters of the call.
        agreed: the row counts and the choice (numbers of chunks, restore pair) on which the ranks agreed.
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
    """The plan of copies of a call, and the numbers on which it depends. It is the same on all ranks.

    loads      rows of each of the E experts, from all ranks together
    plan       which ranks host copies of which experts; empty if copies would not make the call faster
    is_frozen  whether no rank needs gradients of the experts' parameters
    """

    loads: tuple[int, ...]
    plan: CopyPlan
    is_frozen: bool

    def report(self, modules: LayerModules, expert_bytes: int) -> BalanceReport:
        """Returns how unevenly rows are spread over ranks without and with copies, and the copies' bytes.

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
    """Returns the largest number divided by the mean; 1 if all are 0. Example: (3, 1) -> 1.5.

    rows: the number of rows of each rank.
    """
    total = sum(rows)
    return max(rows) * len(rows) / total if total else 1.0


def owners_of(modules: LayerModules) -> list[int]:
    """Returns for each of the E experts the rank to which it belongs."""
    num_local = modules.experts.num_local_experts
    return [expert // num_local for expert in range(modules.options.num_experts)]


def hosted_copies(modules: LayerModules, agreed: AgreedPlan) -> HostedCopies | None:
    """Returns what this rank hosts, sends and receives by the plan of copies; None if there are no copies.

    modules: the modules and options of the layer.
    agreed: the plan of copies.
    """
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
    """The routing of a call with copies: each (token, choice) slot has the number of an expert or of a copy.

    The order in which kernels that route have sorted the rows is not used, because these kernels know only
    experts.
    """

    def plan(self, counts: RankCounts, choice: Choice) -> Plan:
        """Returns the plan of the call: how many rows of each chunk go where, and how copies are sent.

        If the restore pair sends the dispatched rows (T_DI) again in backward, the weights of copies are sent
        again too. Otherwise they are kept.

        counts: the row counts of the call.
        choice: the numbers of chunks and the restore pair.
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
    """Returns for each (token, choice) slot the number of the expert or copy that computes its row, (T, K).

    This is the step in which the rows of an expert are divided among its hosts. The rows of this rank for
    one expert are counted in the order of the slots, and `pmoe.planner.copies.row_cuts` says which host gets
    a row with a given number.

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
    # The number of each slot's row among this rank's rows for the same expert. Numbers of dropped slots have
    # no meaning.
    first = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])
    row = torch.empty_like(key)
    row[order] = torch.arange(key.numel(), device=key.device) - first[key[order]]
    position = (row + copies.rank) * GOLDEN % 2**32
    numbers_H = torch.tensor(numbers, device=key.device)
    bounds_H = torch.tensor(bounds, device=key.device)
    host = torch.searchsorted(bounds_H, expert * 2**32 + position, right=True) - 1
    return numbers_H[host].view_as(expert_TK)


def agreed_plan(call: Call, routed: RoutedBatch, counts_E: Tensor) -> AgreedPlan:
    """Sums the loads of experts over the ranks, and plans copies from them. Collective.

    call: the call: the layer's modules and the input.
    routed: the routed tokens of the call.
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
    # If the dtypes differ between ranks, no copies are planned: the exchange of row counts will raise an
    # error on all ranks.
    if ranks.size * squares == kinds**2:
        limits = limits_of(modules, routed, num_rows=sum(loads), trains=num_training > 0)
        planned = plan_copies(loads, owners_of(modules), [0] * ranks.size, limits)
        plan = planned if planned.before > (1 + LEAST_GAIN) * planned.after else plan
    return AgreedPlan(loads=tuple(loads), plan=plan, is_frozen=num_learning == 0)


def limits_of(modules: LayerModules, routed: RoutedBatch, *, num_rows: int, trains: bool) -> CopyLimits:
    """Returns the limits of copies: how many a rank may host, and how many rows one must save to be made.

    The second number is the price of a copy (`copy_price`). With ``balance=True`` it is computed from a
    profile, the measured rates of products and messages. If ``balance`` is a number, the price is 0, so that
    copies are made even if they save little. The limits are equal on all ranks.

    modules: the modules and options of the layer.
    routed: the routed tokens. Only their dtype and device are used.
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
    most_bytes = 2 * num_rows / modules.ranks.size * options.d_model * routed.dtype.itemsize
    profile = profile_of(modules.ranks, routed.x_TM.device, routed.dtype, most_bytes)
    columns = modules.experts.columns(routed.x_TM.device.type)
    price = copy_price(
        profile,
        expert_elements=options.d_model * (columns.hidden + columns.scratch),
        d_model=options.d_model,
        element_size=routed.dtype.itemsize,
        num_ranks=modules.ranks.size,
        trains=trains,
    )
    return CopyLimits(per_rank=per_rank, near=price, far=price)


def copy_price(
    profile: Profile, *, expert_elements: int, d_model: int, element_size: int, num_ranks: int, trains: bool
) -> int:
    """Returns the price of copying an expert to another rank, as a number of rows.

    A rank could compute so many rows while the expert's weights are sent:

        price = seconds of a copy / seconds of a row, rounded up

    The seconds of a copy are those of sending its weights and, if a backward pass follows, its gradients. It
    is assumed that no computation hides them. The seconds of a row are those of its matrix products, or of
    its messages if these take longer.

    profile: measured rates of products and messages.
    expert_elements: elements of an expert's weights. A row needs as many multiply-adds.
    d_model: M, the columns of a row.
    element_size: bytes of an element.
    num_ranks: number of ranks. One of ``num_ranks`` rows is taken to stay on its rank, without a message.
    trains: whether a backward pass follows.
    """
    passes = 2 if trains else 1
    products = expert_elements * profile.compute.beta_seconds * (3 if trains else 1)
    crossing = (num_ranks - 1) / num_ranks
    messages = 2 * passes * d_model * element_size * profile.message.beta_seconds * crossing
    copy_seconds = passes * profile.message(expert_elements * element_size)
    row_seconds = max(products, messages)
    return math.ceil(copy_seconds / row_seconds) if row_seconds else 0

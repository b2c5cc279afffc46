"""Row counts of a layer with ``balance``, in which other ranks compute a part of busy experts' rows.

An expert to which many rows are routed is busy. The weights of a busy expert are copied to other ranks. Each
of these ranks computes a part of the expert's rows. The hosts of an expert are the ranks that compute its
rows: the rank that owns the expert, and the ranks with a copy. One call takes these steps:

    1. The gate routes the rank's tokens.
    2. The ranks exchange row counts, as in any call. The exchange also brings the loads of all E experts: the
       number of rows that all ranks together routed to each expert.
    3. Each rank plans the copies (`pmoe.planner.copies`). All ranks make the same plan, because all have the
       same loads.
    4. The rows of an expert with copies are divided among its hosts. For this, experts and copies are
       numbered together.
    5. The ranks exchange row counts a second time: how many rows each expert and each copy gets.

If no copy would save enough time, steps 4 and 5 are left out.

The numbering reserves the same number of places for copies on every rank: the largest number of copies that
any rank hosts. First come rank 0's experts and its places, then rank 1's experts and its places, and so on.
Example: 2 ranks have 2 experts each. Rank 1 hosts a copy of expert 0, so each rank has one place. Rank 0's
place is empty:

    expert or copy   0    1    -    2    3    copy of 0
    rank             0    0    0    1    1    1
    number           0    1    2    3    4    5

Letters: T tokens, K choices, E experts of all ranks, W ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice, BalanceReport, Decision
from pmoe.call.modules import LayerModules
from pmoe.call.routed import RoutedBatch
from pmoe.choose.choose import choose
from pmoe.comm.agreement import digest, gathered
from pmoe.comm.counts import CountsExchange, Fault, Loads, RankCounts
from pmoe.comm.failures import publishing_failures
from pmoe.comm.topology import find_topology
from pmoe.decide.exact_counts import ExactCounts, in_chunks
from pmoe.decide.solver_counts import SolverCounts
from pmoe.decide.unchanged_experts import ExpertsState, state_of, sums_of_bits
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.copies import HostedCopies, KeptCopies, trained_share
from pmoe.engine.plan.make_plan import SortedSlots
from pmoe.engine.plan.plan import Plan
from pmoe.engine.variants.send_once import DeduplicatedSlots
from pmoe.experts.architecture import architecture_of, first_difference, why_not_copied
from pmoe.experts.copied_modules import values_of
from pmoe.measure.profile import profile_of
from pmoe.planner.cluster import links_of
from pmoe.planner.copies import CopyLimits, CopyPlan, plan_copies
from pmoe.planner.copy_price import copy_prices
from pmoe.planner.copy_rows import GOLDEN, RankNodes, near_first_parts
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import KEEP
from pmoe.warn import warn_once

LEAST_GAIN = 0.03
"""The least gain in time that copies of experts must bring, as a fraction.

The time of a pass is predicted for each rank, with copies and without. Copies are made only if the slowest
rank's time without copies is more than (1 + `LEAST_GAIN`) times the slowest rank's time with copies.
"""

TRAINED_MARKS = 8
"""The number of marks that each rank sends (`trained_marks`). A mark says whether one tensor is trained.

Eight marks are enough for experts of two weights with biases and adapters.
"""


class BalancedCounts(ExactCounts):
    """Routes a call, decides which busy experts get copies on other ranks, and exchanges the row counts.

    A copy is a busy expert's weights, copied to another rank. That rank computes some of the expert's rows.

    orders      sorts the (token, choice) slots of the call by chunk and expert, for any number of chunks
    copies      the copies of all ranks in this call, and which of them this rank sends and hosts; None if
                there are none, or before `agree`
    rows_E      (E,) on the device, how many rows of this rank's tokens go to each of E experts; None without
                copies
    is_planned  whether the copies of this call are decided already
    may_stay    whether this rank allows two things: this call uses copies of an earlier call, and later calls
                use copies of this one. Ranks use and keep copies only if all of them allow it
    state       a record of this rank's experts. If the next call has a different record, the experts have
                changed. None means that there is no record; the experts then count as changed
    """

    orders: SortedSlots
    copies: HostedCopies | None
    rows_E: Tensor | None
    is_planned: bool
    may_stay: bool
    state: ExpertsState | None

    def __init__(self, call: Call, degrees: tuple[int, ...] | None = None) -> None:
        """Routes the call, and starts the exchange of row counts, which also brings the loads of experts.

        The load of an expert is the number of rows that all ranks together routed to it.

        call: has the layer's modules and the input.
        degrees: the numbers of chunks that may be chosen for the call; None for those that the options allow.
        """
        self.copies = None
        self.rows_E = None
        self.is_planned = False
        # Activation checkpointing runs a call twice. Without pmoe's contexts the second pass must come to the
        # same plan of copies as the first. So the plan depends on the loads only, not on copies of other
        # calls.
        self.may_stay = not (call.may_run_again and torch.is_grad_enabled())
        self.state = None
        super().__init__(call, degrees)

    def _begin_exchange(self, fault: Tensor | Fault) -> CountsExchange:
        """Starts an exchange of row counts. The first exchange of a call also brings the loads of experts.

        The load of an expert is its number of rows from all ranks. A copy of an expert is its weights, copied
        to another rank. A later call may use the copy again if the weights have not changed.

        In the first exchange each rank also answers five questions with numbers (marks). Every rank gets the
        maximum of each mark over all ranks, so one "yes" (1) of any rank counts:

        - Have this rank's experts changed since the last call?
        - Must this rank discard the copies of earlier calls, for example because they have another dtype?
        - Must this rank discard the copies of this call (not `may_stay`)?
        - Does this rank need a gradient of tensor i of its experts? There is one mark for each i
          (`trained_marks`).
        - Can this rank's experts not be copied, or do they differ from those of other ranks? The marks are
          used only for experts that are a user's modules (`architecture_marks`).

        fault: a `Fault` that says what is wrong with this rank's call, or its number as an int64 scalar on
            the device. The exchange reports it to the other ranks. `Fault.NONE` if nothing is wrong.
        """
        modules = self.call.modules
        cache = modules.cache
        self.loads = None
        if not self.is_planned:
            self.state = state_of(modules)
            kept = cache.kept_copies
            has_changed = self.state is None or self.state != cache.experts_state
            is_useless = (
                has_changed
                or not self.may_stay
                or kept is None
                or kept.weights is None
                or kept.weights.is_inference() > torch.is_inference_mode_enabled()
                or kept.dtype != (self.routed.autocast or self.routed.x_TM.dtype)
                or kept.state != sums_of_bits(modules, own_places(modules, kept.sent_experts))
            )
            marks = (
                int(has_changed),
                int(is_useless),
                int(not self.may_stay),
                *architecture_marks(modules),
                *trained_marks(modules),
            )
            self.loads = Loads(
                own_place=modules.grid.ep.rank, num_experts=modules.options.num_experts, marks=marks
            )
        exchange = super()._begin_exchange(fault)
        # With ring slots, this rank's rows for a copy on this rank go through the all-to-all, too. Only rows
        # for the rank's own experts stay where they are.
        if self.copies is not None:
            exchange.num_staying = len(self.orders.modules.staying)
        return exchange

    def sort_early(self) -> None:
        """Sorts the rows while counts are exchanged, unless the call will probably have copies of experts.

        Copies change the order of the rows. This call will probably have copies if the last call had any.
        """
        if not self.call.modules.cache.had_copies or self.copies is not None:
            super().sort_early()

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Waits for the loads of experts, plans copies of busy experts, chooses n and the restore pair.

        n is the number of chunks of a pass. The restore pair says how backward gets two activations back: the
        rows that the experts received, and the hidden activation. If there are copies, row counts are
        exchanged a second time, for the experts and the copies. All ranks choose the same n and restore pair.

        modules: the layer's modules, with the experts to compute. A tool such as PEFT may have replaced the
            layer's own experts by these.
        inputs: the rows and parameters of the call.
        """
        own_modules = self.call.modules
        self.orders.modules = modules
        counts = self.finish_exchange()
        self.is_planned = True
        own_modules.cache.experts_state = self.state
        tensors = inputs.parameters
        copies = planned_copies(own_modules, self.routed, counts, tensors)
        own_modules.cache.had_copies = copies is not None
        if copies is not None:
            with publishing_failures(own_modules.ranks, "the exchange of row counts with copies"):
                self.use_copies(modules, copies)
                bins = self._counts_FE.shape[0]
                self._counts_FE = self.orders.count(bins)
                self._once_FP = self.orders.count_once(bins)
                exchange = self._begin_exchange(Fault.NONE)
                self.sort_early()
            loads = counts.loads
            counts = replace(exchange.finish(), loads=loads)
        agreed = self.chosen(counts, inputs)
        if copies is not None:
            assert agreed.counts is not None
            counts = replace(
                agreed.counts,
                loads=loads,
                hosted_copies=len(copies.hosted),
                expert_messages=copies.num_sent,
                relays_copies=copies.relays,
                copies_stay=copies.stay,
            )
            agreed = agreed._replace(counts=counts, copies=copies)
        return agreed

    def chosen(self, counts: RankCounts, inputs: Inputs) -> AgreedChoice:
        """Chooses n for both passes and the restore pair, and returns them with the row counts.

        n is the number of chunks. The restore pair says how backward gets the experts' input and hidden
        activation.

        counts: the row counts, also of the copies of busy experts on other ranks.
        inputs: the rows and parameters of the call.
        """
        return AgreedChoice(counts=counts, choice=choose(self.call.modules, counts, inputs, self.orders))

    def use_copies(self, modules: LayerModules, copies: HostedCopies) -> None:
        """Divides the rows of experts with copies among the ranks that compute these experts.

        A copy is a busy expert's weights, copied to another rank. Each row gets the index of the expert or
        copy that computes the row. Experts and copies are numbered together: first the experts of rank 0,
        then the copies of rank 0, then the experts of rank 1, and so on. Afterwards ``orders`` sorts the rows
        by these indices.

        modules: the layer's modules and options, in which no copies are recorded yet.
        copies: the copies of all ranks in this call.
        """
        self.copies = copies
        orders = self.orders
        self.rows_E = orders.count(1)[0]
        host_TK = indices_of_rows(copies, orders.expert_TK, orders.keep_TK, self.rows_E)
        slots = DeduplicatedSlotsOfHosts if modules.options.send_once else SlotsOfHosts
        self.orders = slots(replace(modules, copies=copies), host_TK, orders.keep_TK, orders.tokens)

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Cuts the sorted rows into chunks, and returns the decision to run them on the pipeline engine.

        modules: the modules and options of the layer.
        inputs: the rows and parameters of the call.
        agreed: the row counts and the choice (numbers of chunks, restore pair) on which the ranks agreed.
        """
        counts = agreed.counts
        assert counts is not None and agreed.choice is not None
        if agreed.copies is not None and self.copies is None:  # second pass of activation checkpointing
            self.use_copies(modules, agreed.copies)
        self.orders.modules = replace(modules, copies=agreed.copies)
        decision = in_chunks(
            self,
            inputs,
            self.orders,
            counts,
            agreed.choice,
            max_tokens=counts.max_tokens,
            kept_device_E=self.rows_E,
        )
        expert_bytes = bytes_of_copy(modules, inputs.parameters)
        return decision._replace(balance=balance_report(modules, counts.loads, agreed.copies, expert_bytes))


class BalancedSolverCounts(BalancedCounts, SolverCounts):
    """Gets the row counts of a layer with ``balance`` (copies of busy experts) and ``pipeline="solve"``.

    A call has one number of chunks for forward and one for backward. The layer expects the same two numbers
    as in its last call, and counts the rows for both. If the solver then chooses other numbers, the rows are
    counted again and the counts are exchanged again.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call, call.modules.counted_degrees)

    def chosen(self, counts: RankCounts, inputs: Inputs) -> AgreedChoice:
        self._counts = counts
        choice = choose(self.call.modules, counts, inputs, self.orders, rows_for=self.rows_for)
        agreed = self.counted(AgreedChoice(choice=choice))
        assert agreed.counts is not None
        return agreed._replace(counts=replace(agreed.counts, loads=counts.loads))


def trained_marks(modules: LayerModules) -> list[int]:
    """Returns marks: mark i is 1 if this rank needs a gradient of tensor i of the experts, else 0.

    The tensors are the weights and biases of the experts' products (`Experts.operands`). The list has
    `TRAINED_MARKS` marks; the last one is for all tensors that remain. Two kinds of experts differ:

    - experts that are a user's modules: mark i is 1 if parameter i of any expert needs a gradient;
    - experts whose tensors are computed from other parameters, or that a tool has wrapped: the mark of a
      tensor is 1 if any parameter of the experts needs a gradient.

    modules: the modules of the layer.
    """
    if not torch.is_grad_enabled():
        return [0] * TRAINED_MARKS
    experts = modules.experts
    is_wrapped = modules.experts_module is not experts
    parameters = {} if is_wrapped else dict(experts.named_parameters())
    learns = experts.asks_for_gradients() or (
        is_wrapped and any(parameter.requires_grad for parameter in modules.experts_module.parameters())
    )
    marks = [0] * TRAINED_MARKS
    if experts.are_modules and not is_wrapped:
        for expert in experts.as_modules():
            for at, parameter in enumerate(expert.parameters()):
                marks[min(at, TRAINED_MARKS - 1)] |= parameter.requires_grad
        return marks
    for at, name in enumerate(experts.call_names or ("",) * TRAINED_MARKS):
        needs_gradient = parameters[name].requires_grad if name in parameters else learns
        marks[min(at, TRAINED_MARKS - 1)] |= needs_gradient
    return marks


LARGEST_DIGEST = 2**48
"""A number that is larger than every digest of an architecture."""


def architecture_marks(modules: LayerModules) -> tuple[int, int, int]:
    """Returns three numbers by which ranks notice that experts cannot be copied, or differ between ranks.

    - 1 if this rank's experts cannot be copied, else 0
    - the digest (hash) of the experts' architecture
    - `LARGEST_DIGEST` minus this digest

    The exchange computes the maximum of each number over all ranks. The second maximum is the largest digest.
    The third one gives the smallest digest. If both digests are equal, all ranks have the same architecture.

    Only experts that are a user's modules have these numbers (`pmoe.experts.architecture`); for other experts
    all three are 0.

    modules: the modules of the layer.
    """
    if not modules.experts.are_modules:
        return 0, 0, 0
    experts = modules.experts.as_modules()
    if why_not_copied(experts):
        return 1, 0, LARGEST_DIGEST
    architecture = digest(architecture_of(experts[0]))
    return 0, architecture, LARGEST_DIGEST - architecture


def may_be_copied(modules: LayerModules, marks: Sequence[int]) -> bool:
    """Returns whether experts can be copied in this call. All ranks get the same answer.

    Experts that are a user's modules cannot be copied if they have hooks or dropout. pmoe then warns once.
    The function is a collective if experts differ between ranks.

    modules: the modules of the layer.
    marks: the maxima over all ranks of the three numbers of `architecture_marks`: 1 if a rank's experts
        cannot be copied, the digest of their architecture, and `LARGEST_DIGEST` minus this digest.

    Raises ValueError on every rank if the ranks' experts have different architectures.
    """
    are_refused, largest, above_smallest = marks
    balance = modules.options.balance
    if are_refused:
        reason = why_not_copied(modules.experts.as_modules()) or "another rank's experts cannot be copied"
        warn_once(f"balance ({balance}) makes no copies of busy experts: {reason}")
        return False
    if modules.experts.are_modules and largest != LARGEST_DIGEST - above_smallest:
        raise ValueError(unlike_experts(modules))
    return True


def unlike_experts(modules: LayerModules) -> str:
    """Returns the error message for ranks whose experts have different architectures.

    The function is a collective: it collects the architectures of all ranks.

    modules: the modules of the layer.
    """
    own = architecture_of(modules.experts.as_modules()[0])
    of_ranks = gathered(modules.ranks, own, stage="showing the experts' architecture")
    differences = [first_difference(of_ranks[0], other) for other in of_ranks]
    rank = next(rank for rank, difference in enumerate(differences) if difference is not None)
    lines = differences[rank]
    assert lines is not None
    return (
        f"balance ({modules.options.balance}) must be False where experts are modules that differ between "
        f"ranks in more than parameters and buffers: rank 0 has {lines[0]}, rank {rank} has {lines[1]}. "
        "Build the experts of all ranks alike"
    )


def balance_report(
    modules: LayerModules, loads: Sequence[int], copies: HostedCopies | None, expert_bytes: int
) -> BalanceReport:
    """Returns how unevenly rows are spread over ranks without and with copies, and what the copies cost.

    modules: the layer's modules and options.
    loads: (E,) rows of each of E experts, from all ranks together.
    copies: the copies of the call; None for none.
    expert_bytes: bytes of one expert's parameters.
    """
    owners = owners_of(modules)
    without = CopyPlan(hosts={}, before=0, after=0)
    plan = without if copies is None else copies.plan
    before, after = (each.rows_of_ranks(loads, owners, modules.grid.ep.size) for each in (without, plan))
    used = [expert for expert, hosts in plan.hosts.items() for _, rows in hosts[1:] if rows]
    is_sent = copies is not None and copies.fate != "present"
    return BalanceReport(
        before=_imbalance(before),
        after=_imbalance(after),
        copies=len(used),
        weight_bytes=is_sent * len(plan.pairs) * expert_bytes,
    )


def _imbalance(rows: Sequence[int]) -> float:
    """Returns the largest number of rows of a rank divided by the mean; 1 if all are 0.

    Example: (3, 1) -> 1.5

    rows: the number of rows of each rank.
    """
    total = sum(rows)
    return max(rows) * len(rows) / total if total else 1.0


def bytes_of_copy(modules: LayerModules, tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of the weights of one copy of an expert.

    modules: the modules of the layer.
    tensors: the tensors with which experts compute.
    """
    if not modules.experts.are_modules:
        return sum(tensor[:1].nbytes for tensor in tensors)
    return sum(value.nbytes for value in values_of(modules.experts.as_modules()[0]))


def owners_of(modules: LayerModules) -> list[int]:
    """Returns the rank that owns each expert, by the expert's index. Rank 0 owns the first experts."""
    num_local = modules.experts.num_local_experts
    return [expert // num_local for expert in range(modules.options.num_experts)]


def planned_copies(
    modules: LayerModules,
    routed: RoutedBatch,
    counts: RankCounts,
    tensors: Sequence[Tensor],
) -> HostedCopies | None:
    """Decides which experts get copies in a call, and on which ranks; returns None if no expert gets any.

    All ranks decide the same. The result also says which copies this rank sends and hosts.

    The copies of an earlier call are used again if no expert has changed since then. They are replaced only
    if other copies would save clearly more time.

    The function is a collective if it must measure how fast this machine computes products and sends
    messages.

    modules: the modules and options of the layer.
    routed: the routed tokens. Only their dtype and device are used.
    counts: the row counts of the exchange, with the loads of experts.
    tensors: the tensors with which experts compute.
    """
    loads = counts.loads
    has_changed, are_useless, must_go, *marks = counts.marks
    may_copy = may_be_copied(modules, marks[:3])
    copied = modules.experts.copied_parameters(tensors)
    trained = tuple(bool(marks[3 + min(at, TRAINED_MARKS - 1)]) for at in range(len(copied)))
    cache = modules.cache
    # Calls since the last change of the experts are counted. In training, reentrant activation checkpointing
    # runs each call a first time without gradients. That pass is not counted as a call of its own.
    is_counted = counts.needs_grad or not modules.ranks.any_trains
    since, before = cache.calls_alike
    cache.calls_alike = (is_counted, since) if has_changed else (since + is_counted, before)
    evaluates = not (counts.needs_grad or modules.ranks.any_trains)
    are_used_again = evaluates or max(cache.calls_alike) > 1
    for_later_calls = are_used_again and not must_go and modules.options.budget is None
    stay = for_later_calls or modules.experts.are_modules
    limits = CopyLimits(per_rank=0)
    if may_copy:
        limits = limits_of(modules, routed, counts, trained_share(copied, trained), stay=stay)
    kept = cache.kept_copies
    if kept is not None and (are_useless or kept.per_rank > limits.per_rank or modules.options.budget):
        kept = cache.kept_copies = None
    if not limits.per_rank:
        return None
    owners = owners_of(modules)
    nodes = node_of_ranks(modules)
    num_ranks = modules.grid.ep.size

    def hosted_copies(plan: CopyPlan) -> HostedCopies:
        return HostedCopies(
            plan=plan,
            rank=modules.grid.ep.rank,
            num_ranks=num_ranks,
            num_local=modules.experts.num_local_experts,
            trained=trained,
            stay=stay,
            nodes=nodes,
            near_first=near_first_parts(plan, counts.deviations, RankNodes(nodes), sum(loads)),
        )

    if kept is not None:
        # The price of other copies is raised by `LEAST_GAIN` of a rank's mean number of rows. So the kept
        # copies are replaced only for a clear gain.
        margin = math.ceil(LEAST_GAIN * sum(loads) / num_ranks)
        sticky = replace(limits, near=limits.near + margin, far=limits.far + margin)
        plan = plan_copies(loads, owners, nodes, sticky, kept.pairs)
        if plan.pairs <= kept.pairs:
            if not pays(plan):
                return None
            hosted = hosted_copies(with_pairs(plan, loads, owners, kept.pairs))
            return replace(hosted, fate="present", stay=True, kept=kept)
    plan = plan_copies(loads, owners, nodes, limits)
    if not pays(plan):
        return None
    hosted = hosted_copies(plan)
    cache.kept_copies = None
    if for_later_calls:
        cache.kept_copies = KeptCopies(
            pairs=plan.pairs,
            sent_experts=hosted.sent_experts,
            dtype=routed.autocast or routed.x_TM.dtype,
            state=sums_of_bits(modules, own_places(modules, hosted.sent_experts)),
        )
    return replace(hosted, kept=cache.kept_copies)


def pays(plan: CopyPlan) -> bool:
    """Returns whether a plan has copies, and makes a pass faster by more than the fraction `LEAST_GAIN`."""
    return bool(plan.hosts) and plan.before > (1 + LEAST_GAIN) * plan.after


def own_places(modules: LayerModules, experts: Sequence[int]) -> list[int]:
    """Returns the index that each expert has among this rank's experts.

    modules: the modules of the layer.
    experts: experts of this rank, by their indices among the experts of all ranks.

    Example: with 4 experts on each rank, rank 1 has the experts 4 to 7, and expert 6 has index 2.
    """
    return [expert % modules.experts.num_local_experts for expert in experts]


def with_pairs(
    plan: CopyPlan, loads: Sequence[int], owners: Sequence[int], pairs: Collection[tuple[int, int]]
) -> CopyPlan:
    """Returns a plan with more copies of experts on other ranks. The added copies get no rows to compute.

    Copies that were kept from an earlier call stay in memory, so a plan must list all of them. Those that the
    plan does not need get 0 rows.

    plan: the plan without the additional copies.
    loads: (E,) rows of each of E experts, from all ranks together.
    owners: (E,) the rank that owns each expert.
    pairs: the copies that the plan must have, as pairs (expert, rank).
    """
    hosts = dict(plan.hosts)
    for expert, rank in sorted(set(pairs) - plan.pairs):
        hosts[expert] = (*hosts.get(expert, ((owners[expert], loads[expert]),)), (rank, 0))
    return replace(plan, hosts=hosts)


class SlotsOfHosts(SortedSlots):
    """The routing of a call in which busy experts have copies on other ranks.

    For each (token, choice) slot it has the index of the expert or copy that computes the slot's row. The
    rows are sorted by these indices.
    """

    def plan(self, counts: RankCounts, choice: Choice) -> Plan:
        """Returns the plan of the call, which also says how backward gets the weights of experts' copies.

        If the restore pair sends the experts' input rows a second time in backward, the weights of the copies
        are sent a second time, too. Otherwise the ranks that have the copies keep the weights until backward.
        They also keep the weights in two other cases:

        - later calls use the copies again;
        - the experts are a user's modules, whose autograd graphs refer to the weights.

        counts: the row counts of the call.
        choice: the numbers of chunks and the restore pair.
        """
        copies = self.modules.copies
        assert copies is not None
        orders = copy.copy(self)
        orders.modules = replace(self.modules, copies=copies.with_fate(choice.restore))
        return super(SlotsOfHosts, orders).plan(counts, choice)


class DeduplicatedSlotsOfHosts(SlotsOfHosts, DeduplicatedSlots):
    """The routing of a call in which busy experts have copies and a token goes to each rank only once.

    The class is for layers with ``send_once``: a rank that has several of a token's experts gets the token
    once.
    """


def indices_of_rows(
    copies: HostedCopies, expert_TK: Tensor, keep_TK: Tensor | None, counts_E: Tensor
) -> Tensor:
    """Returns (T, K), the index of the expert or copy that computes the row of each (token, choice) slot.

    Experts and copies are numbered together (`HostedCopies`). The hosts of an expert are the ranks that
    compute its rows. This rank's rows for one expert are numbered in the order of the slots. The number of a
    row decides which host computes the row (`pmoe.planner.copy_rows.row_cuts`).

    copies: the copies of the call.
    expert_TK: (T, K) int64 or int32, the K experts that the gate chose for each of T tokens.
    keep_TK: (T, K) bool, False for slots that were dropped and have no row; None if no slot was dropped.
    counts_E: (E,) int64, the rows of this rank for each of E experts.
    """
    num_experts = counts_E.shape[0]
    bounds, numbers = copies.numbered_hosts(num_experts)
    expert = expert_TK.reshape(-1).long()
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


def node_of_ranks(modules: LayerModules) -> tuple[int, ...]:
    """Returns the node (machine) of each rank, as an index. Collective in the first call of a layer.

    If each expert is split over several ranks of a node (`Grid.esp`), these ranks have a single index in the
    result.

    modules: the modules of the layer, and the layer's argument ``nodes``.

    Raises ValueError or TypeError on every rank if ``nodes`` is invalid, or differs between ranks.
    """
    cache = modules.cache
    if not cache.node_of_ranks:
        grid = modules.grid
        topology = find_topology(grid.all, modules.nodes)
        cache.node_of_ranks = tuple(topology.node(rank) for rank in grid.order[: grid.ep.size])
    return cache.node_of_ranks


def limits_of(
    modules: LayerModules, routed: RoutedBatch, counts: RankCounts, learned: float, *, stay: bool
) -> CopyLimits:
    """Returns how many copies of experts a rank may host, and the price of a copy in rows.

    Sending a copy's weights takes time. The price is the number of rows that a rank could compute in this
    time. All ranks get the same results, which depend on the options:

    - With ``memory_budget`` the copies must fit into the budget.
    - If ``balance`` is a number of copies, the price is 0: copies are made even if they save little.
    - With ``balance=True`` the price follows from the measured rates of products and messages. There are two
      prices if the rates were measured within a node and also between nodes.
    - On a GPU the number of copies is 0: copies are not implemented there yet.

    modules: the modules and options of the layer.
    routed: the routed tokens. Only their shape, dtype and device are used.
    counts: the row counts of the exchange, with the loads of experts.
    learned: the fraction of the experts' weights that are trained, counted in elements and not in tensors. A
        weight is trained if at least one rank needs its gradient.
    stay: whether new copies stay on their ranks until backward with every restore pair.
    """
    options = modules.options
    if routed.x_TM.is_cuda:
        warn_once(f"balance ({options.balance}) makes no copies of busy experts on a GPU yet")
        return CopyLimits(per_rank=0)
    per_rank = options.most_copies(modules.grid.ep.size)
    if options.budget is not None and per_rank:
        from pmoe.choose.open_choice import copies_within_budget

        per_rank = copies_within_budget(modules, routed.x_TM, counts.max_tokens, per_rank)
        if not per_rank:
            warn_once(
                f"memory_budget ({options.memory_budget!r}) leaves no room for copies of busy experts "
                f"(balance={options.balance}) in calls of {counts.max_tokens} tokens: they have none"
            )
    if options.balance is not True or not per_rank:
        return CopyLimits(per_rank=per_rank)
    # A measurement takes no more memory than a pass, whose buffers hold these rows more than twice.
    mean_rows = sum(counts.loads) / modules.grid.ep.size
    most_bytes = 2 * mean_rows * options.row_columns * routed.dtype.itemsize
    profile = profile_of(modules.ranks, routed.x_TM.device, routed.dtype, most_bytes)
    columns = modules.experts.columns(routed.x_TM.device.type)
    expert_elements = options.row_columns * (columns.hidden + columns.scratch)
    if modules.experts.are_modules:
        expert_elements = sum(value.numel() for value in modules.experts.copied_parameters(()))
    # If pmoe chooses the restore pair, it does so after the plan of copies: weights and rows then count once,
    # unless all pairs send them again.
    all_send_again = all(pair.dispatched == "communicate" for pair in modules.pairs)
    restore = modules.pairs[0] if modules.pairs and all_send_again else KEEP
    near, far = copy_prices(
        profile,
        links_of(profile),
        multiply_adds=expert_elements,
        row_bytes=options.row_columns * routed.dtype.itemsize,
        expert_bytes=expert_elements * routed.dtype.itemsize,
        num_ranks=modules.grid.ep.size,
        trains=counts.needs_grad,
        learned=learned,
        restore=restore,
        stay=stay,
    )
    return CopyLimits(per_rank=per_rank, near=near, far=far)

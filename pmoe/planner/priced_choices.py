"""Predicts the seconds and bytes of choices of n and the restore pair, and takes the best choice.

n is the number of chunks. The restore pair says how backward gets the experts' inputs and hidden activations.
Nothing runs in this file: it needs only sizes, schedules and a profile (measured rates). A layer asks for the
fastest choice within its memory budget. The answer follows from numbers that all ranks of the layer share, so
all ranks choose the same. `pmoe plan` uses the same functions to give advice before anything runs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pmoe.comm import ExchangeName
from pmoe.comm.counts import num_bins, slack_with_copies, slot_rows, with_two
from pmoe.planner.cost_model import cheapest_pair, eq10_seconds, work_seconds
from pmoe.planner.degree import DEGREES, Choice, all_choices
from pmoe.planner.layer_seconds import simulated_step, step_seconds
from pmoe.planner.layer_sizes import CallRows, LayerSizes
from pmoe.planner.memory import PredictedMemory, predict
from pmoe.planner.profile import Profile
from pmoe.planner.rows_per_pass import worst_rows
from pmoe.planner.simulator import makespan
from pmoe.planner.timed_rounds import PassTimes
from pmoe.planner.timeline import Span, overlap, simulated_bars
from pmoe.schedule.restore import AllowName, Restore, pairs_to_choose
from pmoe.warn import log


@dataclass(frozen=True, kw_only=True)
class PricedChoice(Choice):
    """A choice of n and the restore pair, with its predicted seconds and bytes.

    The restore pair says what is kept, offloaded or made again between the passes.

    seconds: seconds of a forward and a backward pass, if tokens are evenly routed; 0 if no profile was given.
    work: seconds that both passes would take if nothing ran at the same time (`work_seconds`); 0 if no
        profile was given.
    memory: predicted bytes for the routing that needs most memory.
    """

    seconds: float
    work: float = 0.0
    memory: PredictedMemory = field(hash=False)

    def __str__(self) -> str:
        """Returns the choice and its price in words.

        Example: "n=4 keep/recompute: 3.2 ms, 120.5 MiB at most". There are no milliseconds if none were
        predicted, as for the only choice of a layer.
        """
        degrees = f"n={self.forward}" + f"/{self.backward}" * self.rearranged
        milliseconds = f"{self.seconds * 1e3:.3g} ms, " if self.seconds else ""
        return f"{degrees} {self.restore}: {milliseconds}{self.memory.promised / 2**20:.1f} MiB at most"


@functools.lru_cache(maxsize=1024)
def bound(
    sizes: LayerSizes, call: CallRows, choice: Choice, slack: float, bins: int | None = None
) -> PredictedMemory:
    """Returns an upper bound of a layer's bytes for one choice: no routing needs more memory.

    Args:
        sizes: sizes of the layer.
        call: numbers of rows of the rank with most tokens.
        choice: number of chunks of each pass, and the restore pair (what is kept, offloaded or made again).
        slack: a ring slot (a reused buffer of fixed size) holds ceil(slack * T * K / n) rows, for T tokens
            with K experts each and n chunks. If a chunk has more rows, the batch is cut into more chunks.
        bins: number of equal parts of the batch in which rows are counted. A chunk has at least one part, so
            the number of parts is the largest possible number of chunks. None: the number of parts that a
            layer uses if it has only this choice.
    """
    degrees = (choice.forward, choice.backward)
    top_k = sizes.top_k * sizes.esp_size
    checked: tuple[int, ...] = degrees
    slot_slack = slack
    slack_of_bins = 1.0
    if sizes.copies.limits_rows:
        slot_slack = slack_with_copies(slack, sizes.ep_size, bypass_local=sizes.bypass_local)
        slack_of_bins = slot_slack
        checked = with_two(degrees)
    if bins is None:
        bins = num_bins(checked, sizes.num_ranks, sizes.num_experts, slack_of_bins)
    most_in_slot = functools.partial(slot_rows, slot_slack, top_k, call.tokens)
    most_with_staying = functools.partial(slot_rows, slack, top_k, call.tokens)

    def worst(degrees: tuple[int, int]) -> PredictedMemory:
        forward, backward = (
            worst_rows(
                sizes,
                call,
                n,
                bins,
                most_in_slot(n),
                staying_rows=most_with_staying(n) - most_in_slot(n),
            )
            for n in degrees
        )
        return predict(sizes, call, forward, backward, choice.restore, rearranged=choice.rearranged)

    at_most = worst(degrees)
    if not (sizes.rotates and sizes.copies.limits_rows and 1 in degrees):
        return at_most
    # If the rows of a single chunk exceed their limit, the batch is cut as if n were 2. So the bound of n = 2
    # counts, too.
    return _largest(at_most, worst((max(choice.forward, 2), max(choice.backward, 2))))


def _largest(one: PredictedMemory, other: PredictedMemory) -> PredictedMemory:
    """Returns a prediction in which each number of bytes is the larger of those of two predictions."""
    return replace(
        one,
        saved=max(one.saved, other.saved),
        temporary=max(one.temporary, other.temporary),
        gradients=max(one.gradients, other.gradients),
        host=max(one.host, other.host),
        peak=max(one.peak, other.peak),
        searching_peak=max(one.searching_peak, other.searching_peak),
        forward_peak=max(one.forward_peak, other.forward_peak),
        backward_peak=max(one.backward_peak, other.backward_peak),
        promised=max(one.promised, other.promised),
        tensors={name: max(size, other.tensors.get(name, 0)) for name, size in one.tensors.items()},
    )


def evaluate(
    sizes: LayerSizes,
    num_tokens: int,
    choices: Iterable[Choice],
    *,
    profile: Profile | None,
    slack: float,
    bins: int | None = None,
) -> list[PricedChoice]:
    """Returns every choice with its predicted seconds and bytes.

    sizes: sizes of the layer.
    num_tokens: tokens of the rank with most tokens.
    choices: a choice has a number of chunks for each pass, and a restore pair (what is kept, offloaded or
        made again).
    profile: measured rates of the machine. With None all seconds are 0.
    slack: rows that a ring slot (a reused buffer) holds, as a multiple of a chunk's rows under even routing.
    bins: number of equal parts of the batch in which rows are counted. If a chunk has too many rows for a
        ring slot, the batch is cut into more chunks. A chunk has at least one part, so the number of parts is
        the largest possible number of chunks, and the predicted bytes depend on it. None: for each choice,
        the number of parts that a layer uses if it has only this choice.
    """
    return [
        PricedChoice(
            **vars(choice),
            seconds=0.0 if profile is None else step_seconds(sizes, profile, num_tokens, choice),
            work=0.0 if profile is None else work_seconds(sizes, profile, num_tokens, choice.restore),
            memory=bound(sizes, sizes.call(num_tokens), choice, slack, bins),
        )
        for choice in choices
    ]


def within_budget(candidates: Sequence[PricedChoice], budget: int) -> PricedChoice:
    """Returns the fastest candidate that stays within a memory budget for any routing.

    Of several equally fast candidates, those that do not round T_M to e4m3 are preferred, then the candidate
    with the least work (`work_seconds`), then the candidate with the fewest bytes (`PRICE`).

    budget: bytes. A candidate's upper bound (``memory.promised``) may be at most this number.

    Raises ValueError if no candidate stays within the budget. The error names the smallest budget that would
    be enough.
    """
    fitting = [candidate for candidate in candidates if candidate.memory.promised <= budget]
    if not fitting:
        smallest = min(candidates, key=lambda candidate: candidate.memory.promised)
        raise ValueError(
            f"memory_budget ({budget} bytes) must be at least {smallest.memory.promised} for these tokens, "
            f"with any routing (n={smallest.forward}, {smallest.restore})"
        )
    return min(fitting, key=PRICE)


# ---- the answer of `pmoe plan`


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice of `pmoe plan` for one layer: the choice to take, the reason, and all alternatives.

    A choice is a number of chunks (n) and a restore pair (what is kept, offloaded or made again between the
    passes).

    sizes: sizes of the layer.
    profile: rates of the machine.
    num_tokens: tokens of each rank.
    slack: rows that a ring slot (a reused buffer) holds, as a multiple of a chunk's rows under even routing.
    dispatch: name of the all-to-all that the profile's message costs are for.
    candidates: every n with every restore pair that was asked for.
    eq10: seconds of a step by restore pair, by MPipeMoE's Eq. 10.
    decision: the candidate to take.
    why: the reason for the decision, in words.
    fastest: the fastest candidate, even if it exceeds the memory budget.
    """

    sizes: LayerSizes
    profile: Profile
    num_tokens: int
    slack: float
    dispatch: str
    candidates: Sequence[PricedChoice]
    eq10: dict[Restore, float]
    decision: PricedChoice
    why: str
    fastest: PricedChoice

    @property
    def choice_fields(self) -> dict[str, Any]:
        """The decided options of the layer, and the predicted seconds of a step, as a dict.

        Keys: dispatch, esp (number of ranks that share each expert), n, restore, seconds.
        """
        choice = self.decision
        place = {"dispatch": self.dispatch, "esp": self.sizes.esp_size}
        return {**place, "n": choice.forward, "restore": str(choice.restore), "seconds": choice.seconds}

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a step in which rows are sent between ranks while nothing is computed."""
        return overlap(step_bars(self.sizes, self.profile, self.num_tokens, self.decision)).exposed

    @property
    def even_bytes(self) -> int:
        """Upper bound of the layer's bytes with the advised choice (``decision``), if routing is even.

        If routing is even, each rank receives as many rows as it sends.
        """
        sizes = self.sizes
        # Sizes of a layer on one rank (or on the ranks that share an expert), which sends all rows to itself.
        # With any routing it receives as many rows as it sends, so its bound is the bound of even routing.
        even = replace(sizes, num_ranks=sizes.esp_size, bypass_local=sizes.num_ranks == 1)
        return bound(even, even.call(self.num_tokens), self.decision, self.slack).promised


def advise(
    sizes: LayerSizes,
    profile: Profile,
    num_tokens: int,
    *,
    budget: int | None = None,
    slack: float = 1.25,
    pairs: Sequence[Restore] | None = None,
    dispatch: ExchangeName = "flat",
    allow: AllowName | None = None,
) -> Advice:
    """Chooses n and the restore pair for a layer with ``num_tokens`` evenly routed tokens on each rank.

    n is the number of chunks. The restore pair says what is kept, offloaded or made again between the passes.
    With a budget, the function takes the fastest candidate whose bytes stay within the budget for any
    routing; the simulator predicts the seconds. Without a budget, it first takes the cheapest of MPipeMoE's
    four restore pairs, S1 to S4, by the paper's Eq. 10, and then the n with the least simulated time.
    ``allow`` adds restore pairs that keep a tensor in fewer bytes (`pairs_to_choose`).

    Args:
        sizes: sizes of the layer.
        profile: rates of the machine.
        num_tokens: tokens of each rank.
        budget: bytes that must be enough for any routing; None for no limit.
        slack: rows that a ring slot (a reused buffer) holds, as a multiple of a chunk's rows under even
            routing.
        pairs: restore pairs of the candidates; None for all that ``allow`` permits. Without a budget, they
            must include S1 to S4 and the pairs that ``allow`` adds.
        dispatch: name of the all-to-all that the profile's message costs are for.
        allow: "e4m3" also permits pairs that keep fewer bytes: T_DI in the number format in which it arrived,
            or T_M rounded to e4m3.

    Raises ValueError, with the smallest budget that would be enough, if no candidate stays within the budget.
    """
    among = planned_pairs(sizes, allow, has_budget=False)
    pairs = planned_pairs(sizes, allow, has_budget=True) if pairs is None else pairs
    choices = all_choices([(n, n) for n in DEGREES], pairs)
    candidates = evaluate(sizes, num_tokens, choices, profile=profile, slack=slack)
    if budget is None:
        pair, _ = cheapest_pair(sizes, profile, num_tokens, among)
        decision = min((candidate for candidate in candidates if candidate.restore == pair), key=PRICE)
        names = "S1 to S4" if allow is None else ", ".join(each.strategy or str(each) for each in among)
        why = f"{pair.strategy or pair} is the cheapest of {names} by Eq. 10, "
        why += f"and n={decision.forward} its fastest"
    else:
        decision = within_budget(candidates, budget)
        why = f"the fastest that needs at most {budget} bytes for any routing"
    return Advice(
        sizes=sizes,
        profile=profile,
        num_tokens=num_tokens,
        slack=slack,
        dispatch=dispatch,
        candidates=candidates,
        eq10={pair: eq10_seconds(sizes, profile, num_tokens, pair) for pair in pairs},
        decision=decision,
        why=why,
        fastest=min(candidates, key=PRICE),
    )


def planned_pairs(sizes: LayerSizes, allow: AllowName | None, *, has_budget: bool) -> tuple[Restore, ...]:
    """Returns the restore pairs among which pmoe chooses for a layer of these sizes.

    A pair that keeps messages is left out if no rows arrive as messages. A pair that rounds to e4m3 is left
    out for rows of float64.

    sizes: sizes of the layer.
    allow: "e4m3" also permits pairs that keep fewer bytes; None permits only exact pairs.
    has_budget: whether a memory budget limits the choice. If so, pairs that keep T_DI or T_M are added.
    """
    pairs = pairs_to_choose(allow, has_budget=has_budget, has_messages=sizes.wires.rows is not None)
    return tuple(pair for pair in pairs if not pair.rounds or sizes.element_size <= 4)


def step_bars(sizes: LayerSizes, profile: Profile, num_tokens: int, chosen: PricedChoice) -> list[Span]:
    """Returns the start and end of each task of a simulated step: the forward pass, then the backward pass.

    The result can be drawn as a timeline.

    sizes: sizes of the layer.
    profile: rates of the machine.
    num_tokens: tokens of each rank, evenly routed.
    chosen: number of chunks of each pass, and the restore pair (what is kept, offloaded or made again).
    """
    drawn: list[Span] = []
    origin = 0.0
    for direction, ran in simulated_step(sizes, profile, num_tokens, chosen).items():
        drawn += simulated_bars(direction, ran, origin)
        origin += makespan(ran)
    return drawn


# ---- a layer's own choices


T = TypeVar("T")
PRICE = operator.attrgetter("seconds", "restore.rounds", "work", "memory.promised")
"""Sort key of candidates: seconds, then whether T_M is rounded, then work, then bytes.

So of two candidates that are equally fast, one that rounds nothing is taken.
"""
NEAR = 1.25
"""Trials measure a choice only if its predicted seconds are at most NEAR times those of the fastest choice.

MPipeMoE's Eq. 10 predicts the seconds of restore pairs. A pair that is slower by this equation may really be
faster, because the equation counts only the slowest of computation, communication and copies.
"""

MOST_PAIRS = 3
"""Within a memory budget, trials compare at most this many restore pairs for each number of chunks."""

Measured = Sequence[PassTimes] | None
"""Measured times of each choice, the same on every rank.

The times of a choice that cannot run are `OUT_OF_MEMORY`. None stands for no measurement: the layer allows no
trials, or no trial could run.
"""
TriedBy = Callable[[Sequence[T]], Measured]
"""A function that measures the given choices by trials on the batch of the call."""


class Chooser:
    """Chooses n and the restore pair for one layer, and remembers its choices by number of tokens.

    All numbers that the object uses are the same on all ranks of the layer, so all ranks choose the same.

    pairs: restore pairs to choose from. A pair says what is kept, offloaded or made again between the passes.
    budget: bytes that must be enough for any routing; None for no limit.
    slack: rows that a ring slot (a reused buffer) holds, as a multiple of a chunk's rows under even routing.
    bins: number of equal parts of the batch in which rows are counted. If a chunk has too many rows for a
        ring slot, the batch is cut into more chunks. A chunk has at least one part, so the number of parts is
        the largest possible number of chunks, and the predicted bytes depend on it. None: for each choice,
        the number of parts that a layer uses if it has only this choice.
    """

    pairs: tuple[Restore, ...]
    budget: int | None
    slack: float
    bins: int | None

    def __init__(
        self, *, pairs: Sequence[Restore], budget: int | None, slack: float, bins: int | None = None
    ) -> None:
        self.pairs = tuple(pairs)
        self.budget = budget
        self.slack = slack
        self.bins = bins
        self._known: dict[tuple[object, ...], Choice | None] = {}
        self._pairs: dict[tuple[object, ...], Restore] = {}

    def pair(
        self, sizes: LayerSizes, max_tokens: int, profile: Callable[[], Profile], tried: TriedBy[Restore]
    ) -> Restore:
        """Returns the restore pair that takes least time, by MPipeMoE's Eq. 10 and by trials.

        A restore pair says what is kept, offloaded or made again between the passes. The pair that is fastest
        by the equation is taken, unless trials show that another pair is clearly faster. If trials are
        allowed, they compare all pairs whose seconds by the equation are at most `NEAR` times the seconds of
        the fastest pair. If the profile describes the machine badly (`Profile.doubt`), they compare all.

        Args:
            sizes: sizes of the layer.
            max_tokens: tokens of the rank with most tokens.
            profile: returns the machine's rates. It is called only if there are several pairs and no earlier
                choice is remembered, because measuring the rates takes seconds.
            tried: measures the seconds of given pairs by trials; its result is None if trials are not
                allowed.
        """
        if len(self.pairs) == 1 or max_tokens == 0:
            return self.pairs[0]
        tokens = rounded_up(max_tokens)
        key = (sizes, tokens, self.pairs)
        if key not in self._pairs:
            rates = profile()
            cheapest, seconds = cheapest_pair(sizes, rates, tokens, self.pairs)
            ordered = sorted(self.pairs, key=lambda pair: seconds[pair])
            limit = math.inf if rates.doubt else NEAR * seconds[cheapest]
            near = [pair for pair in ordered if seconds[pair] <= limit]
            times = tried(near) if len(near) > 1 else None
            if times is not None:
                cheapest = _fastest(near, times, trusts_order=not rates.doubt)
            if cheapest not in self._pairs.values():
                listed = ", ".join(f"{pair}: {time * 1e3:.3g} ms" for pair, time in seconds.items())
                log.info(
                    "memory_reuse=True takes %s for %d tokens a rank (Eq. 10: %s)",
                    cheapest,
                    max_tokens,
                    listed,
                )
            self._pairs[key] = cheapest
        return self._pairs[key]

    def predicted_pair(self, sizes: LayerSizes, max_tokens: int, profile: Callable[[], Profile]) -> Restore:
        """Returns the restore pair that is the fastest by MPipeMoE's Eq. 10, without trials.

        If `pair` has chosen a pair for about the same number of tokens, that pair is returned.

        Args:
            sizes: sizes of the layer.
            max_tokens: tokens of the rank with most tokens.
            profile: returns the machine's rates. It is called only if there are several pairs and no earlier
                choice is remembered, because measuring the rates takes seconds.
        """
        if len(self.pairs) == 1 or max_tokens == 0:
            return self.pairs[0]
        tokens = rounded_up(max_tokens)
        key = (sizes, tokens, self.pairs)
        if key in self._pairs:
            return self._pairs[key]
        return cheapest_pair(sizes, profile(), tokens, self.pairs)[0]

    def fitting(
        self,
        sizes: LayerSizes,
        max_tokens: int,
        choices: Sequence[Choice],
        profile: Callable[[], Profile],
        tried: TriedBy[PricedChoice],
        *,
        host_is_full: bool = False,
    ) -> Choice:
        """Returns the fastest choice whose bytes stay within the memory budget for any routing.

        Args:
            sizes: sizes of the layer.
            max_tokens: tokens of the rank with most tokens.
            choices: a choice has a number of chunks for each pass, and a restore pair (what is kept,
                offloaded or made again).
            profile: returns the machine's rates.
            tried: measures the seconds of a few choices by trials; its result is None if trials are not
                allowed.
            host_is_full: whether to exclude choices that offload T_DI (the rows that experts received) to the
                host. If all choices offload T_DI, they are changed: T_DI is sent again in backward instead.

        Raises ValueError, with the smallest budget that would be enough, if no choice stays within the
        budget.
        """
        if host_is_full:
            choices = without_offload(choices)
        # A choice that stays within the budget for more tokens also stays within it for fewer tokens. So the
        # number of tokens is rounded up, and decisions are needed for few numbers only. If no choice stays
        # within the budget for the rounded number (remembered as None), the number is rounded up less.
        for tokens in roundings_up(max_tokens):
            case = (sizes, tokens, tuple(choices))
            if case not in self._known:
                has_fitting = self.fits(sizes, tokens, choices)
                self._known[case] = self._fit(*case, profile, tried) if has_fitting else None
            if (choice := self._known[case]) is not None:
                return choice
        assert self.budget is not None
        candidates = evaluate(sizes, max_tokens, choices, profile=None, slack=self.slack, bins=self.bins)
        return within_budget(candidates, self.budget)  # raises ValueError: even the exact number does not fit

    def fits(self, sizes: LayerSizes, tokens: int, choices: Sequence[Choice]) -> bool:
        """Returns whether any choice stays within the memory budget for any routing.

        sizes: sizes of the layer.
        tokens: tokens of the rank with most tokens.
        choices: a choice has a number of chunks for each pass, and a restore pair (what is kept, offloaded or
            made again).
        """
        budget = self.budget
        assert budget is not None
        call = sizes.call(tokens)
        peaks = (bound(sizes, call, choice, self.slack, self.bins).promised for choice in choices)
        return any(peak <= budget for peak in peaks)

    def _fit(
        self,
        sizes: LayerSizes,
        tokens: int,
        choices: Sequence[Choice],
        profile: Callable[[], Profile],
        tried: TriedBy[PricedChoice],
    ) -> Choice:
        """Returns the fastest choice within the memory budget.

        If trials are allowed, they decide between the few choices that are predicted to be the fastest.
        Otherwise predicted seconds decide. Raises ValueError if no choice stays within the budget.

        sizes: sizes of the layer.
        tokens: number of tokens of the rank with most tokens.
        choices: a choice has a number of chunks for each pass, and a restore pair (what is kept, offloaded or
            made again).
        profile: returns the machine's rates.
        tried: measures the seconds of a few choices by trials; its result is None if trials are not allowed.
        """
        assert self.budget is not None
        rates = profile() if len(choices) > 1 else None
        candidates = evaluate(sizes, tokens, choices, profile=rates, slack=self.slack, bins=self.bins)
        best = within_budget(candidates, self.budget)
        if rates is not None:
            fitting = [candidate for candidate in candidates if candidate.memory.promised <= self.budget]
            shortlist = _worth_trying(fitting, limit=math.inf if rates.doubt else NEAR)
            times = tried(shortlist) if len(shortlist) > 1 else None
            if times is not None:
                best = _fastest(shortlist, times, trusts_order=not rates.doubt)
            rivals = _with_rivals(best, fitting, shortlist) if rates.doubt else []
            times = tried(rivals) if len(rivals) > 1 else None
            if times is not None:
                best = _fastest(rivals, times, trusts_order=False)
        log.info("memory_budget=%d takes %s for up to %d tokens a rank", self.budget, best, tokens)
        return best


def without_offload(choices: Sequence[Choice]) -> list[Choice]:
    """Returns the choices that do not offload T_DI, the rows that experts received, to the host.

    If all choices offload T_DI, they are changed so that backward sends T_DI again.
    """
    return [choice for choice in choices if choice.restore.dispatched != "offload"] or [
        replace(choice, restore=Restore("communicate", choice.restore.hidden)) for choice in choices
    ]


def _fastest(few: Sequence[T], times: Sequence[PassTimes], *, trusts_order: bool) -> T:
    """Returns the choice that was fastest in trials.

    Often the measured seconds of several choices differ only by the noise of the machine. If predictions can
    be trusted, the function then returns the choice with the fewest predicted seconds among them.

    few: the choices that were compared, in order of their predicted seconds.
    times: the measured times of these choices.
    trusts_order: whether the predicted seconds can be trusted.
    """
    fastest = min(times, key=lambda timed: timed.step)
    if not trusts_order:
        return few[times.index(fastest)]
    return next(choice for choice, timed in zip(few, times, strict=True) if not timed.is_slower_than(fastest))


def _worth_trying(candidates: Iterable[PricedChoice], limit: float) -> list[PricedChoice]:
    """Returns the few candidates that trials should compare.

    They are few because each trial costs training steps. For each number of chunks, the result has the
    candidate that is predicted to be the fastest with this number. If all candidates have the same numbers of
    chunks, the result has the three candidates that are predicted to be the fastest (`MOST_PAIRS`).

    candidates: choices with their predicted seconds.
    limit: a number. Candidates whose predicted seconds are more than ``limit`` times those of the fastest
        candidate are left out, but never the first two. Not used if all have the same numbers of chunks.
    """
    ordered = sorted(candidates, key=PRICE)
    fastest_by_degrees: dict[tuple[int, int], PricedChoice] = {}
    for candidate in ordered:
        fastest_by_degrees.setdefault((candidate.forward, candidate.backward), candidate)
    if len(fastest_by_degrees) == 1:
        return ordered[:MOST_PAIRS]
    few = list(fastest_by_degrees.values())
    return [
        candidate for candidate in few if candidate in few[:2] or candidate.seconds <= limit * few[0].seconds
    ]


def _with_rivals(
    best: PricedChoice, candidates: Iterable[PricedChoice], compared: Collection[PricedChoice]
) -> list[PricedChoice]:
    """Returns a choice and its rivals: choices with the same numbers of chunks and other restore pairs.

    The first trials compared only one restore pair for each number of chunks: the pair that was predicted to
    be the fastest. If the prediction is wrong, another pair may be faster. A choice is no rival if some other
    candidate has the same numbers of chunks and a restore pair that does less (`_does_less`): it keeps a
    tensor that this choice restores, and is otherwise equal. Such a choice is never the fastest.

    best: the choice that won the first trials.
    candidates: all choices within the budget, with their predicted seconds.
    compared: the choices that the first trials compared.
    """
    alike = [each for each in sorted(candidates, key=PRICE) if each.degrees == best.degrees]
    pairs = [candidate.restore for candidate in alike]
    rivals = [
        candidate
        for candidate in alike
        if candidate not in compared and not any(_does_less(pair, candidate.restore) for pair in pairs)
    ]
    return [best, *rivals[: MOST_PAIRS - 1]]


def _does_less(pair: Restore, other: Restore) -> bool:
    """Whether a restore pair keeps more tensors than ``other`` and treats the other tensors as it does."""
    dispatched = pair.dispatched in ("keep", other.dispatched)
    hidden = pair.hidden in ("keep", other.hidden)
    return pair != other and dispatched and hidden


def rounded_up(tokens: int, digits: int = 3) -> int:
    """Returns a number of tokens, rounded up to some significant binary digits: three by default.

    A choice is remembered by this number, so batches of similar size share it. Example: 1000 -> 1024, 1100 ->
    1280.
    """
    step = 1 << max(tokens.bit_length() - digits, 0)
    return -(-tokens // step) * step


def roundings_up(tokens: int) -> list[int]:
    """Returns a number of tokens rounded up to 3, 4, 5 and more binary digits, at last the number itself.

    A choice is remembered for the first of these numbers that fits into the memory budget. Many numbers of
    tokens share it, so few choices are made even if batches are just below the most tokens that fit.

    Example: 1100 -> [1280, 1152, 1120, 1104, 1100].
    """
    digits = range(3, max(tokens.bit_length(), 3) + 1)
    return list(dict.fromkeys(rounded_up(tokens, number) for number in digits))

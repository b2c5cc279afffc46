"""Candidates: the ways to run a layer, with predicted seconds and bytes, and the choice among them.

Nothing runs here: sizes, schedules and a profile are enough. A layer asks for the fastest choice within its
budget, with numbers that all its ranks share, so that all ranks choose the same. `pmoe plan` asks for
advice.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pmoe.comm import ExchangeName
from pmoe.comm.counts import num_bins, slot_rows
from pmoe.planner.cost_model import cheapest_pair, eq10_seconds
from pmoe.planner.degree import DEGREES, Choice, all_choices
from pmoe.planner.layer_seconds import simulated_step, step_seconds
from pmoe.planner.layer_sizes import CallRows, LayerSizes
from pmoe.planner.memory import PredictedMemory, predict
from pmoe.planner.profile import Profile
from pmoe.planner.rows_per_pass import worst_rows
from pmoe.planner.simulator import makespan
from pmoe.planner.timeline import Span, overlap, simulated_bars
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore
from pmoe.warn import log


@dataclass(frozen=True, kw_only=True)
class PricedChoice(Choice):
    """A way to run a layer (n and restore pair), with its predicted price.

    seconds: of a forward and a backward pass, for evenly routed tokens.
    memory: bytes for the worst routing.
    """

    seconds: float
    memory: PredictedMemory = field(hash=False)

    def __str__(self) -> str:
        """Returns the choice and its price in words.

        Example: "n=4 keep/recompute: 3.2 ms, 120.5 MiB at most".
        """
        degrees = f"n={self.forward}" + f"/{self.backward}" * self.rearranged
        return (
            f"{degrees} {self.restore}: {self.seconds * 1e3:.3g} ms, "
            f"{self.memory.promised / 2**20:.1f} MiB at most"
        )


@functools.lru_cache(maxsize=1024)
def bound(
    sizes: LayerSizes, call: CallRows, choice: Choice, slack: float, bins: int | None = None
) -> PredictedMemory:
    """Returns the most bytes that any routing needs.

    Args:
        call: rows of the rank that has most tokens.
        slack: a ring slot holds ceil(slack * T * K / n) rows. Chunks are cut finer until their rows fit.
        bins: number of bins in which rows are counted. None takes the number for the degrees of ``choice``.
    """
    degrees = (choice.forward, choice.backward)
    bins = num_bins(degrees, sizes.num_ranks, sizes.num_experts) if bins is None else bins
    limit = functools.partial(slot_rows, slack, sizes.top_k * sizes.esp_size, call.tokens)
    forward, backward = (worst_rows(sizes, call, n, bins, limit(n)) for n in degrees)
    return predict(sizes, call, forward, backward, choice.restore, rearranged=choice.rearranged)


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

    profile: rates of the machine. Without one all seconds are 0.
    slack, bins: as in `bound`.
    """
    return [
        PricedChoice(
            **vars(choice),
            seconds=0.0 if profile is None else step_seconds(sizes, profile, num_tokens, choice),
            memory=bound(sizes, sizes.call(num_tokens), choice, slack, bins),
        )
        for choice in choices
    ]


def within_budget(candidates: Sequence[PricedChoice], budget: int) -> PricedChoice:
    """Returns the fastest candidate within the budget; of equals that of fewest bytes.

    budget: bytes. A candidate's promised bytes may be at most these.

    Raises ValueError, with the smallest budget that would do, if there is none.
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
    """The advice of `pmoe plan`: the choice for a layer, and its alternatives.

    sizes, profile, num_tokens, slack: the arguments of `advise`.
    dispatch: the all-to-all that the profile's messages are for.
    candidates: every n with every pair that was asked for.
    eq10: seconds of a step by pair, by Eq. 10.
    decision: the candidate to take.
    why: the reason, in words.
    fastest: the fastest of all candidates, even if it exceeds the budget.
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
    def way(self) -> dict[str, Any]:
        """The decision by the names of a layer's options, and the predicted seconds of a step."""
        choice = self.decision
        place = {"dispatch": self.dispatch, "esp": self.sizes.esp_size}
        return {**place, "n": choice.forward, "restore": str(choice.restore), "seconds": choice.seconds}

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a step in which something travels and nothing is computed."""
        return overlap(step_bars(self.sizes, self.profile, self.num_tokens, self.decision)).exposed

    @property
    def even_bytes(self) -> int:
        """Promised bytes if routing is even, so that a rank receives as many rows as it sends."""
        sizes = self.sizes
        even = replace(sizes, num_ranks=sizes.esp_size, bypass_local=sizes.num_ranks == 1)
        return bound(even, even.call(self.num_tokens), self.decision, self.slack).promised


def advise(
    sizes: LayerSizes,
    profile: Profile,
    num_tokens: int,
    *,
    budget: int | None = None,
    slack: float = 1.25,
    pairs: Sequence[Restore] = ALL_PAIRS,
    dispatch: ExchangeName = "flat",
) -> Advice:
    """Chooses n and the restore pair for a layer with ``num_tokens`` evenly routed tokens on each rank.

    With a budget it takes the fastest candidate, by the simulator, that keeps to the budget for any
    routing. Without one it takes the cheapest pair of S1 to S4 by Eq. 10, and the n for it with the least
    simulated time.

    Args:
        budget: bytes, or None.
        slack: as in `bound`.
        pairs: pairs of the candidates. S1 to S4 must be among them if budget is None.
        dispatch: name of the all-to-all that the profile's messages are for.

    Raises ValueError, with the smallest budget that would do, if no candidate keeps to the budget.
    """
    choices = all_choices([(n, n) for n in DEGREES], pairs)
    candidates = evaluate(sizes, num_tokens, choices, profile=profile, slack=slack)
    if budget is None:
        pair, _ = cheapest_pair(sizes, profile, num_tokens, STRATEGIES.values())
        decision = min((candidate for candidate in candidates if candidate.restore == pair), key=PRICE)
        why = f"{pair.strategy} is the cheapest of S1 to S4 by Eq. 10, and n={decision.forward} its fastest"
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


def step_bars(sizes: LayerSizes, profile: Profile, num_tokens: int, chosen: PricedChoice) -> list[Span]:
    """Returns when each task of a step would run: the forward pass, and the backward pass right after it."""
    drawn: list[Span] = []
    origin = 0.0
    for direction, ran in simulated_step(sizes, profile, num_tokens, chosen).items():
        drawn += simulated_bars(direction, ran, origin)
        origin += makespan(ran)
    return drawn


# ---- a layer's own choices


T = TypeVar("T")
PRICE = operator.attrgetter("seconds", "memory.promised")
"""Sort key of candidates: seconds, then bytes."""
NEAR = 1.25
"""Factor by which a pair may be slower than the cheapest by Eq. 10 and still be measured in trials.

Eq. 10 knows only the slowest lane, so such a pair may really be faster.
"""

Measured = list[tuple[float, float]] | None
"""Measured seconds of (forward, backward) for each choice, the same on every rank.

None if the layer allows no trials.
"""
TriedBy = Callable[[Sequence[T]], Measured]
"""Measures some choices by trials on the batch of the call."""


class Chooser:
    """Chooses n and the restore pair for one layer, and remembers what it chose for how many tokens.

    It uses only numbers that all ranks of the layer share, so all ranks choose the same.

    pairs: restore pairs to choose from.
    budget: bytes that must suffice for any routing, or None.
    slack, bins: as in `bound`.
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
        """Returns the cheapest restore pair by Eq. 10. Trials decide among those that are about as cheap.

        Args:
            max_tokens: tokens of the rank that has most.
            profile: gives the machine's rates. It is called only if there is something to choose, as it may
                have to measure.
            tried: measures pairs.
        """
        if len(self.pairs) == 1 or max_tokens == 0:
            return self.pairs[0]
        tokens = _rounded_up(max_tokens)
        key = (sizes, tokens, self.pairs)
        if key not in self._pairs:
            cheapest, seconds = cheapest_pair(sizes, profile(), tokens, self.pairs)
            near = [pair for pair in self.pairs if seconds[pair] <= NEAR * seconds[cheapest]]
            cheapest = _fastest_tried(near, tried) or cheapest
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
        """Returns the fastest choice within the budget.

        Args:
            max_tokens: tokens of the rank that has most.
            choices: to choose from.
            profile: gives the machine's rates.
            tried: measures a few choices.
            host_is_full: excludes choices that offload T_DI. If all do, T_DI is sent again instead.

        Raises ValueError, with the smallest budget that would do, if no choice keeps to the budget.
        """
        if host_is_full:
            choices = [candidate for candidate in choices if candidate.restore.dispatched != "offload"] or [
                replace(candidate, restore=Restore("communicate", candidate.restore.hidden))
                for candidate in choices
            ]
        # A choice that fits more tokens fits fewer too. So numbers of tokens are rounded up, and few are ever
        # decided on. If nothing fits the rounded number (None), the exact number may still fit.
        for tokens in (_rounded_up(max_tokens), max_tokens):
            case = (sizes, tokens, tuple(choices))
            if case not in self._known:
                try:
                    self._known[case] = self._fit(*case, profile, tried)
                except ValueError:
                    if tokens == max_tokens:
                        raise
                    self._known[case] = None
            if (choice := self._known[case]) is not None:
                return choice
        raise AssertionError("unreachable: the last number of tokens fits or raises")

    def _fit(
        self,
        sizes: LayerSizes,
        tokens: int,
        choices: Sequence[Choice],
        profile: Callable[[], Profile],
        tried: TriedBy[PricedChoice],
    ) -> Choice:
        """Chooses for this number of tokens. Raises ValueError if nothing keeps to the budget."""
        assert self.budget is not None
        rates = profile() if len(choices) > 1 else None
        candidates = evaluate(sizes, tokens, choices, profile=rates, slack=self.slack, bins=self.bins)
        best = within_budget(candidates, self.budget)
        if rates is not None:
            shortlist = _worth_trying(
                [candidate for candidate in candidates if candidate.memory.promised <= self.budget]
            )
            best = _fastest_tried(shortlist, tried) or best
        log.info("memory_budget=%d takes %s for up to %d tokens a rank", self.budget, best, tokens)
        return best


def _fastest_tried(few: Sequence[T], tried: TriedBy[T]) -> T | None:
    """Returns the choice that was fastest in trials.

    None if there is only one choice, or if the layer allows no trials.
    """
    seconds = tried(few) if len(few) > 1 else None
    return None if seconds is None else few[min(range(len(few)), key=lambda at: sum(seconds[at]))]


def _worth_trying(candidates: Iterable[PricedChoice]) -> list[PricedChoice]:
    """Returns the candidates that trials should compare.

    They are the fastest of each number of chunks. If there is one number of chunks only, they are its three
    fastest.
    """
    ordered = sorted(candidates, key=PRICE)
    fastest_by_degrees: dict[tuple[int, int], PricedChoice] = {}
    for candidate in ordered:
        fastest_by_degrees.setdefault((candidate.forward, candidate.backward), candidate)
    return list(fastest_by_degrees.values()) if len(fastest_by_degrees) > 1 else ordered[:3]


def _rounded_up(tokens: int) -> int:
    """Returns the number rounded up to three significant bits.

    Example: 1000 -> 1024, 1100 -> 1280.
    """
    step = 1 << max(tokens.bit_length() - 3, 0)
    return -(-tokens // step) * step

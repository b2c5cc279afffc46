"""Which n and which restore pair: from predicted bytes, predicted seconds, and a budget.

Nothing runs here: sizes, the schedules and a profile are enough (`pmoe plan`). A layer asks the same
functions, with numbers that all its ranks share, so that all decide alike.

Letters: B the largest number of tokens of a rank, K choices, W ranks, M = d_model, H = d_hidden, n chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from pmoe.comm.counts import num_bins, slot_rows
from pmoe.planner.cost_model import Direction, lane_seconds
from pmoe.planner.degree import Choice
from pmoe.planner.footprint import Memory, Shape, predict, worst_rows
from pmoe.planner.profile import Profile
from pmoe.planner.simulator import Simulated, makespan, simulate
from pmoe.schedule.restore import Restore
from pmoe.schedule.rings import rotating
from pmoe.schedule.tasks import Kind, Lane, Task

log = logging.getLogger("pmoe")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a layer, with what it is predicted to take: seconds of a step, and bytes for the worst
    routing."""

    forward: int
    backward: int
    restore: Restore
    seconds: float
    memory: Memory

    def __str__(self) -> str:
        degrees = f"n={self.forward}" + f"/{self.backward}" * (self.backward != self.forward)
        return (
            f"{degrees} {self.restore}: {self.seconds * 1e3:.3g} ms, "
            f"{self.memory.promised / 2**20:.1f} MiB at most"
        )


def task_seconds(shape: Shape, profile: Profile, num_tokens: int, n: int, task: Task) -> float:
    """How long a task takes alone, for evenly routed rows: products by their multiply-adds, messages and
    copies by their bytes. What only moves rows inside the device costs nothing here."""
    rows = num_tokens * shape.top_k / n
    ranks, size = shape.num_across, shape.element_size
    travelling = (ranks - 1) / ranks if shape.bypass_local else 1.0
    stays = task.kind.name.startswith("LOCAL")
    share = rows * ((1 - travelling) if stays else travelling)
    hidden, active = shape.columns.hidden, shape.columns.scratch
    kind = Kind[task.kind.name.removeprefix("LOCAL_")] if stays and task.kind is not Kind.LOCAL else task.kind
    gathered = share * shape.inside
    if kind in (Kind.LOCAL, Kind.COMPUTE, Kind.WGRAD):
        return profile.compute(gathered * shape.d_model * (hidden + active))
    if kind is Kind.RECOMPUTE:
        return profile.compute(gathered * shape.d_model * hidden)
    if kind in (Kind.DISPATCH, Kind.DISPATCH_AGAIN, Kind.COMBINE):
        crossing = (ranks - 1) / ranks  # what a rank sends to itself crosses no link
        return profile.message(rows * crossing * shape.d_model * size)
    if kind in (Kind.ALL_GATHER, Kind.ALL_GATHER_AGAIN, Kind.REDUCE_SCATTER):
        return profile.message(rows * (shape.inside - 1) * shape.d_model * size)
    if kind in (Kind.WEIGHTS, Kind.SHARE_WEIGHTS):
        return profile.message(n * share * shape.weight_size)
    if task.lane in (Lane.COPY_OUT, Lane.COPY_IN):
        columns = shape.d_model if "ROWS" in kind.name else hidden
        copies = profile.copy_out if task.lane is Lane.COPY_OUT else profile.copy_in
        return copies(gathered * columns * size)
    return 0.0


def simulated_pass(
    shape: Shape,
    profile: Profile,
    num_tokens: int,
    n: int,
    direction: str,
    restore: Restore,
    rearranged: bool,
) -> list[Simulated[Task]]:
    """The schedule of a pass on the lanes of ``profile``, slowed by what they do to each other (Fig. 3)."""
    schedule = rotating(direction, n, shape.stages, restore=restore, rearranged=rearranged)
    speed = _speeds(profile, {task.lane for task in schedule.tasks})
    return simulate(
        schedule.tasks,
        lambda task: task_seconds(shape, profile, num_tokens, n, task) / speed[task.lane],
    )


def _speeds(profile: Profile, lanes: set[Lane]) -> dict[Lane, float]:
    copies = bool(lanes & {Lane.COPY_OUT, Lane.COPY_IN})
    sigma, mu, eta = profile.interference.speeds(
        compute=True, communicate=Lane.COMMUNICATE in lanes, copy=copies
    )
    links = dict.fromkeys((Lane.COMMUNICATE, Lane.INTRA_NODE), mu)
    return {Lane.COMPUTE: sigma, **links, Lane.COPY_OUT: eta, Lane.COPY_IN: eta}


def step_seconds(
    shape: Shape, profile: Profile, num_tokens: int, forward: int, backward: int, restore: Restore
) -> float:
    """Forward and backward of one layer, by the simulator."""
    return sum(
        makespan(simulated_pass(shape, profile, num_tokens, n, direction, restore, forward != backward))
        for direction, n in (("forward", forward), ("backward", backward))
    )


def eq10_seconds(shape: Shape, profile: Profile, num_tokens: int, restore: Restore) -> float:
    """Forward and backward by MPipeMoE's Eq. 10."""
    return sum(max(lanes) for lanes in _eq10_lanes(shape, profile, num_tokens, restore))


def _eq10_lanes(
    shape: Shape, profile: Profile, num_tokens: int, restore: Restore
) -> list[tuple[float, float, float]]:
    """Eq. 10's three terms, of forward and of backward."""
    travelling = (shape.num_ranks - 1) / shape.num_ranks if shape.bypass_local else float(shape.travels)
    travelling /= shape.inside  # b counts rows once they are gathered
    return [
        lane_seconds(
            restore,
            direction,
            b=num_tokens * shape.top_k * shape.inside,
            M=shape.d_model,
            H=shape.columns.scratch,
            rates=profile.rates(shape.element_size),
            interference=profile.interference,
            swiglu=shape.columns.hidden > shape.columns.scratch,
            travelling=travelling,
        )
        for direction in get_args(Direction)
    ]


def cheapest_pair(
    shape: Shape, profile: Profile, num_tokens: int, pairs: Iterable[Restore]
) -> tuple[Restore, dict[Restore, float]]:
    """The pair of least time by Eq. 10, and the seconds of all.

    Pairs often are equal, for the slowest lane alone counts. Of equals the one with the least work on all
    lanes together is taken: what fills and empties the pipeline is a part of that. Then the first.
    """
    lanes = {pair: _eq10_lanes(shape, profile, num_tokens, pair) for pair in pairs}
    seconds = {pair: sum(max(each) for each in terms) for pair, terms in lanes.items()}
    work = {pair: sum(sum(each) for each in terms) for pair, terms in lanes.items()}
    return min(seconds, key=lambda pair: (seconds[pair], work[pair])), seconds


def bound(
    shape: Shape,
    num_tokens: int,
    forward: int,
    backward: int,
    restore: Restore,
    slack: float,
    bins: int | None = None,
) -> Memory:
    """Bytes for the worst routing. bins: into which rows are counted, by default as for these two degrees."""
    bins = num_bins((forward, backward), shape.num_ranks) if bins is None else bins
    rows = {
        n: worst_rows(shape, num_tokens, n, bins, slot_rows(slack, shape.top_k * shape.inside, num_tokens, n))
        for n in (forward, backward)
    }
    return predict(shape, num_tokens, rows[forward], rows[backward], restore, rearranged=forward != backward)


def evaluate(
    shape: Shape,
    num_tokens: int,
    *,
    degrees: Iterable[tuple[int, int]],
    pairs: Sequence[Restore],
    profile: Profile | None,
    slack: float,
    bins: int | None = None,
) -> list[Candidate]:
    """Every combination of degrees (forward, backward) and pairs. Without a profile
    all seconds are 0."""
    return [
        Candidate(
            forward=forward,
            backward=backward,
            restore=pair,
            seconds=0.0
            if profile is None
            else step_seconds(shape, profile, num_tokens, forward, backward, pair),
            memory=bound(shape, num_tokens, forward, backward, pair, slack, bins),
        )
        for forward, backward in degrees
        for pair in pairs
    ]


def within_budget(candidates: Sequence[Candidate], budget: int) -> Candidate:
    """The fastest that holds ``budget`` bytes for any routing; of equals the one of fewest bytes.

    Raises ValueError that says what the least budget would be.
    """
    fitting = [each for each in candidates if each.memory.promised <= budget]
    if not fitting:
        least = min(candidates, key=lambda each: each.memory.promised)
        raise ValueError(
            f"memory_budget ({budget} bytes) must be at least {least.memory.promised} for these tokens, "
            f"whatever their routing (n={least.forward}, {least.restore})"
        )
    return min(fitting, key=lambda each: (each.seconds, each.memory.promised))


class Chooser:
    """Chooses for one layer, from numbers that all ranks share, and remembers by B.

    pairs: to choose from. budget: bytes for any routing, or None. bins: into which rows are counted.
    """

    def __init__(
        self, *, pairs: Sequence[Restore], budget: int | None, slack: float, bins: int | None = None
    ) -> None:
        self.pairs, self.budget, self.slack, self.bins = tuple(pairs), budget, slack, bins
        self._known: dict[tuple[object, ...], Choice | None] = {}

    def pair(self, shape: Shape, max_tokens: int, profile: Callable[[], Profile]) -> Restore:
        """The cheapest by Eq. 10."""
        if len(self.pairs) == 1 or max_tokens == 0:
            return self.pairs[0]
        tokens = _rounded_up(max_tokens)
        key = (shape, tokens, self.pairs)
        known = self._known.get(key)
        if known is None:
            found, seconds = cheapest_pair(shape, profile(), tokens, self.pairs)
            told = ", ".join(f"{pair}: {time * 1e3:.3g} ms" for pair, time in seconds.items())
            if all(choice is None or choice.restore != found for choice in self._known.values()):
                log.info(
                    "memory_reuse=True takes %s for %d tokens a rank (Eq. 10: %s)", found, max_tokens, told
                )
            known = self._known[key] = Choice(forward=0, backward=0, restore=found)
        return known.restore

    def fitting(
        self,
        shape: Shape,
        max_tokens: int,
        degrees: Sequence[tuple[int, int]],
        profile: Callable[[], Profile],
        *,
        host_is_full: bool = False,
    ) -> Choice:
        """The fastest within the budget; none that offloads T_DI where the host is full.

        Raises ValueError that says what the least budget would be.
        """
        pairs = self.pairs
        if host_is_full:
            pairs = tuple(pair for pair in pairs if pair.dispatched != "offload") or tuple(
                Restore("communicate", pair.hidden) for pair in pairs
            )
        # What holds for more tokens holds for fewer: few numbers are decided on. None where nothing holds.
        for tokens in (_rounded_up(max_tokens), max_tokens):
            key = (shape, tokens, tuple(degrees), pairs)
            if key not in self._known:
                try:
                    self._known[key] = self._fit(shape, tokens, degrees, pairs, profile)
                except ValueError:
                    if tokens == max_tokens:
                        raise
                    self._known[key] = None
            found = self._known[key]
            if found is not None:
                return found
        raise AssertionError("unreachable: the last number of tokens fits or raises")

    def _fit(
        self,
        shape: Shape,
        tokens: int,
        degrees: Sequence[tuple[int, int]],
        pairs: Sequence[Restore],
        profile: Callable[[], Profile],
    ) -> Choice:
        assert self.budget is not None
        several = len(pairs) * len(degrees) > 1
        candidates = evaluate(
            shape,
            tokens,
            degrees=degrees,
            pairs=pairs,
            profile=profile() if several else None,
            slack=self.slack,
            bins=self.bins,
        )
        best = within_budget(candidates, self.budget)
        log.info("memory_budget=%d takes %s for up to %d tokens a rank", self.budget, best, tokens)
        return Choice(forward=best.forward, backward=best.backward, restore=best.restore)


def _rounded_up(tokens: int) -> int:
    """To three significant bits.

    Example: 1000 -> 1024, 1100 -> 1280.
    """
    step = 1 << max(tokens.bit_length() - 3, 0)
    return -(-tokens // step) * step

"""Searches for n on known curves of seconds with noise: pmoe's, and MPipeMoE's Algorithm 1 as printed."""

from __future__ import annotations

import bisect
import itertools
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import LineCost
from pmoe.planner.degree import DEGREES, Choice
from pmoe.planner.degree_trials import times_by_trials
from pmoe.planner.granularity import GranularityTable, PassDegrees
from pmoe.planner.layer_seconds import step_seconds
from pmoe.planner.layer_sizes import LayerSizes, sizes_from_options
from pmoe.planner.profile import FORMAT, Profile, Versions
from pmoe.planner.timed_rounds import PassTimes, timed_rounds
from pmoe.schedule.restore import KEEP, STRATEGIES, Restore

Curves = Callable[[int, int], float]
"""Function that returns the seconds of a step without noise, by n and by tokens of a rank (B)."""

FORWARD_SHARE = 0.35
"""Share of a step's seconds that its forward pass takes. Only the sum matters, as n is equal in both."""

PRINTED_RUNS = 3
"""Number of runs of each n in a search of the printed algorithm; their median counts.

The paper does not say how searchBestGran(B) measures.
"""


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the relative errors of measured seconds.

    run: of the error that each run has of its own. Repeats of a run show it.
    search: of the error that all runs of one n have in common in one search. Repeats do not show it.
    """

    run: float
    search: float = 0.0

    def __str__(self) -> str:
        return f"{self.run:.0%} of a run" + (f", {self.search:.0%} of a search" if self.search else "")


class PrintedAlgorithm1:
    """MPipeMoE's Algorithm 1, line by line, with its two misprints corrected (papers/ERRATA.md)."""

    def __init__(self) -> None:
        self.S: dict[PassDegrees, tuple[int, int]] = {}  # n -> (lower, upper)
        self.cache_table: dict[int, PassDegrees] = {}

    def lookup(self, B: int) -> PassDegrees | None:
        """Lines 4 to 8: returns the answer of the hash table, or of the range that contains B; None if there
        is none.
        """
        if B in self.cache_table:
            return self.cache_table[B]
        return next((n for n, (lower, upper) in self.S.items() if lower <= B <= upper), None)

    def record(self, B: int, n: PassDegrees) -> PassDegrees:
        """Lines 11 to 22: makes a range for n, or extends the range of n to B. Returns n."""
        lower, upper = self.S.get(n, (B, B))
        self.S[n] = (min(B, lower), max(B, upper))
        self.cache_table[B] = n
        return n


@dataclass
class Outcome:
    """The results of a run over many batches.

    searches: number of searches.
    regrets: for each batch, (seconds of the chosen n) / (seconds of the fastest n) - 1, without noise.
    steps: for each search, the seconds of all its runs, over the seconds of a step with the fastest n.
    """

    searches: int = 0
    regrets: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    @property
    def regret(self) -> float:
        """Mean of the regrets of all batches."""
        return statistics.fmean(self.regrets)


class NoisyMachine:
    """A simulated machine: a step takes the seconds of a curve, with noise."""

    def __init__(self, curves: Curves, noise: Noise, draw: random.Random) -> None:
        self.curves = curves
        self.noise = noise
        self.draw = draw
        self.B = 0
        self.ran_seconds = 0.0
        self.biases: dict[int, float] = {}

    def begin_search(self, B: int) -> None:
        self.B = B
        self.ran_seconds = 0.0
        self.biases = {n: max(1 + self.draw.gauss(0, self.noise.search), 0.5) for n in DEGREES}

    def run_round(self, tried: Sequence[PassDegrees]) -> list[tuple[float, float]]:
        """Runs a step with each of the degrees once. Returns the seconds of (forward, backward) of each."""
        passes = []
        for degrees in tried:
            alone = self.curves(degrees.forward, self.B)
            self.ran_seconds += alone
            seconds = alone * self.biases[degrees.forward] * max(1 + self.draw.gauss(0, self.noise.run), 0.5)
            passes.append((FORWARD_SHARE * seconds, (1 - FORWARD_SHARE) * seconds))
        return passes

    def measure(self, tried: Sequence[PassDegrees], most_rounds: int) -> Mapping[PassDegrees, PassTimes]:
        return timed_rounds(tried, self.run_round, most_rounds)


def search_by_pmoe(table: GranularityTable, machine: NoisyMachine) -> PassDegrees:
    """Runs the search of a layer for which no profile is stored, so that every n may be tried."""
    times = times_by_trials(table, machine.B, DEGREES, machine.measure, apart=False)
    return table.record(machine.B, times)


def search_as_printed(table: PrintedAlgorithm1, machine: NoisyMachine) -> PassDegrees:
    tried = [PassDegrees(n, n) for n in DEGREES]
    machine.run_round(tried)  # not timed, as in pmoe
    rounds = [machine.run_round(tried) for _ in range(PRINTED_RUNS)]
    medians = [statistics.median(sum(passes) for passes in runs) for runs in zip(*rounds, strict=True)]
    return table.record(machine.B, min(zip(medians, tried, strict=True))[1])


def train(
    curves: Curves, batches: Sequence[int], noise: Noise, seed: int, *, printed: bool = False
) -> Outcome:
    """Runs over batches of these sizes, with searches where no n is known. Returns the outcome.

    printed: whether the printed Algorithm 1 searches, instead of pmoe's search.
    """
    machine = NoisyMachine(curves, noise, random.Random(f"noise {seed}"))
    ours, theirs = GranularityTable(), PrintedAlgorithm1()
    outcome = Outcome()
    for B in batches:
        degrees = theirs.lookup(B) if printed else ours.lookup(B)
        fastest = min(curves(n, B) for n in DEGREES)
        if degrees is None:
            machine.begin_search(B)
            degrees = search_as_printed(theirs, machine) if printed else search_by_pmoe(ours, machine)
            outcome.searches += 1
            outcome.steps.append(machine.ran_seconds / fastest)
        outcome.regrets.append(curves(degrees.forward, B) / fastest - 1)
    return outcome


def random_batches(lowest: int, highest: int, count: int, seed: int) -> list[int]:
    draw = random.Random(f"batches {seed}")
    return [draw.randint(lowest, highest) for _ in range(count)]


# ---- curves


def stored_curves(path: Path) -> tuple[Curves, int, int]:
    """Returns the curves that bench_choices measured, and the smallest and the largest B of its batches.

    Between the measured batches the seconds are interpolated linearly in B.
    """
    stored = json.loads(path.read_text(encoding="utf-8"))["batches"]["found"]
    sizes = sorted(map(int, stored))
    seconds = {n: [stored[str(B)]["times"][f"n={n}"]["median_s"] for B in sizes] for n in DEGREES}

    def curve(n: int, B: int) -> float:
        at = min(max(bisect.bisect(sizes, B) - 1, 0), len(sizes) - 2)
        part = (B - sizes[at]) / (sizes[at + 1] - sizes[at])
        return seconds[n][at] + part * (seconds[n][at + 1] - seconds[n][at])

    return curve, sizes[0], sizes[-1]


SIZES = sizes_from_options(160, 640, 8, num_ranks=2)
"""Sizes of bench_choices' layer."""
BASE_TOKENS = 4096
MULTIPLY_ADDS_A_SECOND = 2e10


def machine_profile(*, link: float, message: float, product: float, copies: float = 0.1) -> Profile:
    """Returns the profile of an assumed machine.

    The first three arguments are relative to the seconds of the products in a forward pass of 4096 tokens:

    link: seconds of a pass's messages.
    message: seconds of a message of no bytes.
    product: seconds of a product of no rows.
    copies: seconds of a copy of T_DI, over the seconds of one of the two products.
    """
    forward = BASE_TOKENS * 2 * SIZES.d_model * SIZES.columns.hidden / MULTIPLY_ADDS_A_SECOND
    row_bytes = BASE_TOKENS * SIZES.d_model * SIZES.element_size
    copy = LineCost(1e-5, copies * forward / 2 / row_bytes)
    return Profile(
        device="assumed",
        device_type="cpu",
        num_ranks=2,
        backend="none",
        dtype="float32",
        versions=Versions(torch=torch.__version__, cuda=None, file=FORMAT),
        compute=LineCost(product * forward, 1 / MULTIPLY_ADDS_A_SECOND),
        message=LineCost(message * forward, link * forward / row_bytes),  # half of the rows travel, twice
        copy_out=copy,
        copy_in=copy,
        interference=Interference(),
        seconds=0.0,
        when="never",
    )


def simulated_curves(profile: Profile, sizes: LayerSizes = SIZES, restore: Restore = KEEP) -> Curves:
    """Returns the curves of a layer on a machine: the seconds that the simulator predicts from a profile."""
    known: dict[tuple[int, int], float] = {}

    def curve(n: int, B: int) -> float:
        if (n, B) not in known:
            choice = Choice(forward=n, backward=n, restore=restore)
            known[n, B] = step_seconds(sizes, profile, B, choice)
        return known[n, B]

    return curve


GROWING = machine_profile(link=0.7, message=0.02, product=0.0005)
GROWING_SIZES = sizes_from_options(160, 640, 16, num_ranks=8)
"""A machine and a layer with which the fastest n grows with the batch, as in MPipeMoE's Fig. 12.

n = 2 at 1,024 tokens of a rank, 4 at 2,048 and 8 from 8,192 on."""


def losses_between_pairs(machines: int, near: float, seed: int = 0) -> list[float]:
    """Returns how much longer a step with one restore pair takes if n is the best one of another pair.

    The results are fractions, for random machines and numbers of tokens, and for every two of the pairs S1 to
    S4 that take at most ``near`` times as long as the fastest pair. Only among these does memory_reuse=True
    change from one to another.
    """
    draw = random.Random(seed)
    losses = []
    for _ in range(machines):
        B = int(2048 * 6 ** draw.random())
        profile = machine_profile(
            link=3 ** draw.uniform(-1, 1.2),
            message=draw.uniform(0, 0.05),
            product=draw.uniform(0.001, 0.01),
            copies=10 ** draw.uniform(-1.5, 0.5),
        )
        seconds = {}
        for pair in STRATEGIES.values():
            curve = simulated_curves(profile, restore=pair)
            seconds[pair] = {n: curve(n, B) for n in DEGREES}
        fastest = min(min(by_n.values()) for by_n in seconds.values())
        close = [by_n for by_n in seconds.values() if min(by_n.values()) <= near * fastest]
        for known, other in itertools.permutations(close, 2):
            losses.append(other[min(known, key=known.__getitem__)] / min(other.values()) - 1)
    return losses

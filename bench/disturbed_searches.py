"""First searches of layers with pipeline=True, on a simulated machine that other work disturbs.

    python bench/disturbed_searches.py         # about a minute; no processes, no timing

The search is pmoe's own code (`pmoe.choose`). Only the batch and the runs are simulated:

    seconds of a run = stored seconds * (1 + noise) * (1, or in some runs `Disturbance.factor`)

The stored seconds are those of bench_choices. A search for a restore pair also has a profile: measured rates
of the machine. For half of these searches the rates are wrong, as if other work had disturbed their
measurement, and the profile says that it describes the machine badly.

It prints a row for each kind of layer:

    `pipeline=True`                     chooses n, without reuse, and has no profile
    `pipeline=True, memory_reuse=True`  chooses n and the restore pair
    the same with a `memory_budget`     chooses n and the restore pair within the budget

The columns:

    regret     seconds of a step with the choice / seconds of the fastest choice - 1, over all searches
    steps      seconds of all runs of a search / seconds of a step with the fastest choice
    pairs      those of these steps in which restore pairs were compared with one n
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.choices import BUDGET_SHARE
from bench.searches import BASE_TOKENS, SIZES, machine_profile
from bench.timing import OUT, table, write_json
from pmoe.choose import open_choice, part_of_batch, search
from pmoe.comm.counts import num_bins
from pmoe.planner import priced_choices
from pmoe.planner.costs import LineCost
from pmoe.planner.degree import DEGREES, Choice
from pmoe.planner.granularity import GranularityTable
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.memory import bytes_before_rows, peak_of_passes, predict
from pmoe.planner.priced_choices import bound
from pmoe.planner.profile import Profile
from pmoe.planner.rows_per_pass import PassRows
from pmoe.planner.timed_rounds import MOST_ROUNDS, PassTimes, timed_rounds
from pmoe.schedule.buffer_sizes import ChunkRows
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES

STORED = Path(__file__).resolve().parent / "results" / "choices_modelled.json"
COUNT = 304
"""Number of searches: 38 with each case of bench_choices."""
SLACK = 1.25
FASTER = 0.55
"""Seconds of a product on the machine of the stored seconds, over those of `machine_profile`."""


@dataclass(frozen=True)
class Disturbance:
    """The errors of the seconds of a run.

    noise: relative standard deviation of a run.
    share: fraction of the runs that other work slows.
    factor: how many times as long a slowed run takes.
    first: how many times as long the first run of a choice takes, because it allocates buffers.
    """

    noise: float = 0.03
    share: float = 0.05
    factor: float = 2.0
    first: float = 1.5


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a search.

    regret: (stored seconds of the taken choice) / (stored seconds of the fastest choice) - 1.
    took: what the search took, as a text.
    runs: number of runs of both passes.
    steps: seconds of all runs, over the seconds of a step with the fastest choice.
    pair_steps: the part of ``steps`` in which restore pairs were compared with one number of chunks.
    """

    regret: float
    took: str
    runs: int
    steps: float
    pair_steps: float


class StoredMachine:
    """A machine on which runs take stored seconds, with noise and disturbances.

    screened: the seconds of every choice, by its name in the file of bench_choices.
    reuses: whether chunks share buffers; otherwise no restore pair matters.
    """

    def __init__(
        self, screened: Mapping[str, Any], disturbance: Disturbance, draw: random.Random, reuses: bool = True
    ) -> None:
        self.screened = screened
        self.reuses = reuses
        self.disturbance = disturbance
        self.draw = draw
        self.runs = 0
        self.seconds = 0.0
        self.pair_seconds = 0.0  # those of self.seconds in which all choices had the same number of chunks

    def passes(self, choice: Choice, tokens: int) -> tuple[float, float]:
        """Returns the undisturbed seconds of (forward, backward).

        On a part of the batch, the fixed seconds of the chunks stay, and all other seconds shrink. The fixed
        seconds of a chunk follow from the difference between 8 and 16 chunks.
        """
        share = tokens / BASE_TOKENS
        seconds = []
        for direction, n in (("forward", choice.forward), ("backward", choice.backward)):
            pair = f" {choice.restore}" if self.reuses else ""
            whole = {m: self.screened[f"n={m}{pair}"][direction]["median_s"] for m in (8, 16, n)}
            of_chunks = min(n * max((whole[16] - whole[8]) / 8, 0.0), whole[n] / 2)
            seconds.append((whole[n] - of_chunks) * share + of_chunks)
        return seconds[0], seconds[1]

    def measure_trials(
        self, batch: SimulatedBatch, choices: Sequence[Choice], most_rounds: int = MOST_ROUNDS
    ) -> dict[Choice, PassTimes]:
        """Stands in for `pmoe.choose.trials.measure_trials`."""
        ran: set[Choice] = set()
        compares_pairs = len(choices) > 1 and len({choice.degrees for choice in choices}) == 1

        def run(choice: Choice) -> tuple[float, float]:
            times = max(self.draw.gauss(1, self.disturbance.noise), 0.5)
            times *= self.disturbance.factor if self.draw.random() < self.disturbance.share else 1
            times *= 1 if choice in ran else self.disturbance.first
            ran.add(choice)
            forward, backward = self.passes(choice, batch.counts.max_tokens)
            self.runs += 1
            self.seconds += times * (forward + backward)
            self.pair_seconds += compares_pairs * times * (forward + backward)
            return times * forward, times * backward

        return timed_rounds(choices, lambda tried: [run(choice) for choice in tried], most_rounds)


@dataclass(frozen=True, eq=False)
class SimulatedOptions:
    """The options that a search reads, of a layer with pipeline=True."""

    budget: int | None
    pipeline_backward: None = None
    fixed_degree: None = None
    solves: bool = False
    slack: float = SLACK
    degrees: tuple[int, ...] = DEGREES


NO_REUSE = replace(SIZES, rotates=False)
"""The sizes of a layer whose chunks have memory of their own."""


class SimulatedBatch:
    """Stands in for a routed batch (`pmoe.choose.trials.TrialBatch`). Routing is even."""

    degrees = DEGREES
    may_try = True

    def __init__(self, profile: Profile | None, modules: Any, tokens: int, sizes: LayerSizes = SIZES) -> None:
        self.known_profile = profile
        self.modules = modules
        self.sizes = sizes
        self.counts = SimpleNamespace(max_tokens=tokens, needs_grad=True, host_shortage=False)
        self.inputs = SimpleNamespace(x_TM=torch.empty(tokens, SIZES.d_model, device="meta"))

    def profile(self) -> Profile:
        assert self.known_profile is not None
        return self.known_profile

    def stored_profile(self) -> Profile | None:
        return self.known_profile

    def counted_for(self, choices: Sequence[Choice]) -> SimulatedBatch:
        return self

    def first_tokens(self, share: float) -> SimulatedBatch:
        count = int(share * self.counts.max_tokens)
        return SimulatedBatch(self.known_profile, self.modules, count, self.sizes)


# ---- predictions that replace the slower ones of the planner


@functools.cache
def even_peak(sizes: LayerSizes, tokens: int, choice: Choice) -> float:
    """Returns the bytes of a step on 2 ranks with evenly routed tokens."""

    def rows_of(n: int) -> PassRows:
        crossing = (tokens // (2 * n),) * n
        home = (2 * crossing[0],) * n
        return PassRows(
            extent=ChunkRows(
                send=crossing, received=crossing, local=crossing, home=home, regrouped=(False,) * n
            ),
            received=sum(crossing),
            local=sum(crossing),
            sent=sum(crossing),
            exact=True,
        )

    rows = rows_of(choice.forward)
    memory = predict(sizes, sizes.call(tokens), rows, rows_of(choice.backward), choice.restore)
    return float(peak_of_passes(memory))


def predicted_peaks(batch: SimulatedBatch, choices: Sequence[Choice]) -> list[float]:
    return [even_peak(batch.sizes, batch.counts.max_tokens, choice) for choice in choices]


def own_gradients(batch: SimulatedBatch, choices: Sequence[Choice]) -> list[float]:
    return [float(batch.sizes.trained_parameters * batch.sizes.element_size)] * len(choices)


def routing_bytes(batch: SimulatedBatch) -> int:
    return bytes_before_rows(batch.sizes, batch.sizes.call(batch.counts.max_tokens))


def lane_seconds(sizes: LayerSizes, profile: Profile, tokens: int, choice: Choice) -> float:
    """Returns the seconds of a step on 2 ranks: of each pass, those of the slowest lane.

    A lane is a queue of tasks: products, messages or copies. Each lane waits for the first task of another.
    """
    restore = choice.restore
    columns = (restore.dispatched == "offload") * sizes.d_model
    columns += (restore.hidden == "offload") * sizes.columns.hidden
    seconds = 0.0
    for is_backward, n in ((False, choice.forward), (True, choice.backward)):
        rows = tokens * sizes.top_k / n
        message = profile.message(rows / 2 * sizes.d_model * sizes.element_size)
        products = 1 + is_backward + (is_backward and restore.hidden == "recompute") / 2
        product = profile.compute(rows / 2 * sizes.multiply_adds * products)
        copy = profile.slower_copy(rows * columns * sizes.element_size) if columns else 0.0
        messages = 2 + (is_backward and restore.dispatched == "communicate")
        computing = 2 * n * product + message * (not is_backward)  # weight gradients hide the last message
        seconds += max(computing, messages * n * message + product, n * copy + message)
    return seconds


# ---- searches


@contextlib.contextmanager
def simulated(machine: StoredMachine) -> Iterator[None]:
    """Makes `pmoe.choose` run its trials on a simulated machine within the context."""
    with contextlib.ExitStack() as stack:
        for module, name, stand_in in (
            (part_of_batch, "predicted_peaks", predicted_peaks),
            (part_of_batch, "own_peaks", predicted_peaks),
            (part_of_batch, "own_gradients", own_gradients),
            (part_of_batch, "routing_bytes", routing_bytes),
            (part_of_batch, "_smallest_of_ranks", lambda batch, number: number),
            (part_of_batch, "first_tokens", SimulatedBatch.first_tokens),
            (part_of_batch, "measure_trials", machine.measure_trials),
            (search, "with_enough_memory", lambda batch, measured: measured),
            (search, "step_seconds", lane_seconds),
            (priced_choices, "step_seconds", lane_seconds),
            (open_choice, "pool", mock.MagicMock()),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


def with_wrong_rates(profile: Profile, draw: random.Random) -> Profile:
    """Returns a profile whose rates are wrong by some ten percent, and which says that it fits badly."""

    def line(cost: LineCost) -> LineCost:
        alpha = cost.alpha_seconds * math.exp(draw.gauss(0, 0.8))
        return LineCost(alpha, cost.beta_seconds * math.exp(draw.gauss(0, 0.4)))

    names = ("compute", "message", "copy_out", "copy_in")
    lines = {name: line(getattr(profile, name)) for name in names}
    return replace(profile, **lines, r_squared=draw.uniform(0, 0.7))


def search_once(number: int, disturbance: Disturbance, *, has_budget: bool) -> Outcome:
    """Searches once for n and the restore pair, with the stored seconds of a case of bench_choices.

    number: selects the case, the profile, the noise and the disturbances.
    has_budget: whether the layer has a memory budget, that of bench_choices.
    """
    stored = _stored()
    case = stored["cases"][number % len(stored["cases"])]
    draw = random.Random(f"search {number}")
    profile = machine_profile(
        link=FASTER * case["link"],
        message=FASTER * case["latency"],
        product=FASTER * 0.003,
        copies=FASTER * (case["copies"] or 0.05),
    )
    compute = LineCost(profile.compute.alpha_seconds, FASTER * profile.compute.beta_seconds)
    profile = replace(profile, compute=compute)
    if number // len(stored["cases"]) % 2:
        profile = with_wrong_rates(profile, draw)
    pairs = ALL_PAIRS if has_budget else tuple(STRATEGIES.values())
    bins = num_bins(DEGREES, SIZES.num_ranks, SIZES.num_experts)
    choices = [Choice(forward=n, backward=n, restore=pair) for n in DEGREES for pair in pairs]
    budget = None
    if has_budget:
        call = SIZES.call(BASE_TOKENS)
        promised = {choice: bound(SIZES, call, choice, SLACK, bins).promised for choice in choices}
        whole = promised[Choice(forward=1, backward=1, restore=KEEP)]
        budget = max(int(BUDGET_SHARE * whole), min(promised.values()))
        choices = [choice for choice in choices if promised[choice] <= budget]
    modules = SimpleNamespace(
        options=SimulatedOptions(budget),
        pairs=pairs,
        cache=SimpleNamespace(choosers={}),
        bins_for=lambda degrees: bins,
    )
    machine = StoredMachine(stored["results"][case["name"]]["screened"], disturbance, draw)
    batch: Any = SimulatedBatch(profile, modules, BASE_TOKENS)
    with simulated(machine):
        taken = open_choice._within_budget(batch) if has_budget else _searched(batch)
    seconds = {choice: sum(machine.passes(choice, BASE_TOKENS)) for choice in choices}
    least = min(seconds.values())
    return Outcome(
        regret=sum(machine.passes(taken, BASE_TOKENS)) / least - 1,
        took=f"{case['name']}: n={taken.forward}/{taken.backward} {taken.restore}",
        runs=machine.runs,
        steps=machine.seconds / least,
        pair_steps=machine.pair_seconds / least,
    )


def _searched(batch: Any) -> Choice:
    """Returns the choice of a layer without a budget: n with the pair of Eq. 10, then the pair."""
    predicted = open_choice._chooser_of(batch).predicted_pair(
        batch.sizes, batch.counts.max_tokens, batch.profile
    )
    degrees = search.search(GranularityTable(), batch, predicted, DEGREES, apart=True)
    assert degrees is not None
    pair = open_choice._cheapest_pair(batch, degrees, one_is_taken=True)
    return Choice(forward=degrees.forward, backward=degrees.backward, restore=pair)


def search_without_reuse(number: int, disturbance: Disturbance) -> Outcome:
    """Searches once for n, with the stored seconds of a case of bench_choices, for a layer without reuse.

    number: selects the case, the noise and the disturbances.
    """
    stored = _stored()
    case = stored["cases"][number % len(stored["cases"])]
    screened = stored["results"][case["name"]]["screened"]
    machine = StoredMachine(screened, disturbance, random.Random(f"no reuse {number}"), reuses=False)
    modules = SimpleNamespace(options=SimulatedOptions(None), pairs=(KEEP,))
    batch: Any = SimulatedBatch(None, modules, BASE_TOKENS, NO_REUSE)
    with simulated(machine):
        degrees = search.search(GranularityTable(), batch, KEEP, DEGREES, apart=False)
    assert degrees is not None
    seconds = {
        n: sum(machine.passes(Choice(forward=n, backward=n, restore=KEEP), BASE_TOKENS)) for n in DEGREES
    }
    least = min(seconds.values())
    return Outcome(
        regret=seconds[degrees.forward] / least - 1,
        took=f"{case['name']}: n={degrees}",
        runs=machine.runs,
        steps=machine.seconds / least,
        pair_steps=0.0,
    )


@functools.cache
def _stored() -> Any:
    return json.loads(STORED.read_text(encoding="utf-8"))


KINDS: dict[str, Callable[[int, Disturbance], Outcome]] = {
    "`pipeline=True`": search_without_reuse,
    "`pipeline=True, memory_reuse=True`": functools.partial(search_once, has_budget=False),
    "the same with a `memory_budget`": functools.partial(search_once, has_budget=True),
}
"""Maps each kind of layer to a function that searches once for it.

The names are those of the table in docs/choosing.md.
"""


# ---- the report


def row_of(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the row of the printed table for the searches of one kind of layer."""
    regrets = sorted(100 * outcome.regret for outcome in outcomes)
    return {
        "layer": name,
        "searches": len(outcomes),
        "mean regret %": statistics.fmean(regrets),
        "median %": statistics.median(regrets),
        "99th percentile %": regrets[int(0.99 * len(regrets))],
        "worst %": regrets[-1],
        "steps, median": statistics.median(outcome.steps for outcome in outcomes),
        "steps, mean": statistics.fmean(outcome.steps for outcome in outcomes),
        "pairs, mean": statistics.fmean(outcome.pair_steps for outcome in outcomes),
        "runs, median": statistics.median(outcome.runs for outcome in outcomes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--searches", type=int, default=COUNT, help="searches of each kind of layer")
    parser.add_argument("--noise", type=float, default=Disturbance.noise, help="of a run, relative")
    parser.add_argument("--share", type=float, default=Disturbance.share, help="of the runs that are slowed")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON")
    args = parser.parse_args()
    disturbance = Disturbance(noise=args.noise, share=args.share)
    logging.getLogger("pmoe").setLevel(logging.WARNING)  # thousands of searches would log their results
    rows = []
    for name, search_of in KINDS.items():
        outcomes = [search_of(number, disturbance) for number in range(args.searches)]
        rows.append(row_of(name, outcomes))
    print(f"noise {disturbance.noise:.0%}, {disturbance.share:.0%} of the runs slowed")
    print(table(rows))
    path = args.out / "disturbed_searches.json"
    write_json(path, rows=rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

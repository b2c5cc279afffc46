"""Cases of bench_choices, and one case on a rank: a layer's choice beside all that it could have chosen."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pmoe
from bench.links import INFINITE
from bench.links.copies import limited_copies
from bench.passes import Run, Setting, choose_rate, measure, products_alone, timed
from bench.timing import Timing
from pmoe.planner.degree import DEGREES
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore

ALL_DEGREES = range(1, 17)
BUDGET_SHARE = 0.6
"""The memory budget, as a fraction of the bytes of keep/keep at n = 1."""
REUSE_DEGREE = 4
"""Number of chunks n of the layers that choose only the restore pair."""
SCREENING, FINALISTS = 3, 2
"""Rounds in which all candidates are timed, and number of the fastest ones that are timed again.

They are timed again beside the layers that chose, because the smallest of many noisy medians would be lower
than any layer really is.
"""

OFTEN = 4
"""Factor by which the number of rounds is larger in cases without a slow link.

The times of steps that do not wait for a link differ by a tenth, those of steps that wait by a hundredth.
"""


WITH_BUDGET = ", budget"
"""End of the name of a run whose layer has a fixed n and restore pair, and the memory budget."""


@dataclass(frozen=True)
class Case:
    """A machine and a routing.

    link: seconds that a step's messages take alone, over the seconds that its products take alone.
    copies: seconds of a copy of T_DI, over the seconds of one of the experts' two products; 0 leaves copies
        as fast as the memory is.
    latency: seconds that a message takes in addition to its bytes, over the seconds of a forward's products.
    skew: how uneven the routing is: the rows of the experts are proportional to 1, 1 / 2 ** skew, 1 / 3 **
        skew, ...; 0 is even.
    """

    name: str
    link: float
    copies: float = 0.0
    latency: float = 0.0
    skew: float = 0.0


CASES = (
    Case("computation slow", link=0.2),
    Case("link as slow as computation", link=1.0),
    Case("link slow", link=3.0),
    Case("every message late", link=1.0, latency=0.05),
    Case("skewed", link=1.0, skew=1.0),
    Case("skewed, link slow", link=3.0, skew=1.0),
    Case("copies slow", link=1.0, copies=2.0),
    Case("copies and link slow", link=3.0, copies=1.0),
)


def batch(layer: pmoe.MoELayer, tokens: int, skew: float) -> tuple[Tensor, Tensor]:
    """Returns (x, dy), and makes the gate send the experts uneven numbers of rows, the same on every rank.

    tokens: number of tokens of a rank.
    skew: how uneven the numbers are (`Case`).
    """
    experts = layer.num_experts
    torch.manual_seed(dist.get_rank())
    x = torch.randn(tokens, layer.d_model)
    share = torch.arange(1, experts + 1, dtype=torch.float64) ** -skew
    ends = (share.cumsum(0) / share.sum() * tokens).round()
    first = torch.searchsorted(ends, torch.randperm(tokens).double(), right=True)
    with torch.no_grad():
        layer.gate.weight.normal_(std=1e-3, generator=torch.Generator().manual_seed(0))
        layer.gate.weight[:, :experts] += torch.eye(experts)
        x[torch.arange(tokens), first] += 10
    return x.requires_grad_(), torch.randn(tokens, layer.d_model)


class Subject:
    """Layers with different options, but with the same parameters and the same batch."""

    def __init__(self, setting: Setting, skew: float) -> None:
        self.setting = setting
        torch.manual_seed(0)
        self.fixed = self.built()
        self.x, self.dy = batch(self.fixed, setting.rows, skew)

    def built(self, **options: Any) -> pmoe.MoELayer:
        sizes = self.setting
        return pmoe.MoELayer(sizes.d_model, sizes.d_hidden, sizes.num_experts, **options)

    def like(self, **options: Any) -> pmoe.MoELayer:
        layer = self.built(**options)
        # All layers use the same memory: times of products differ by some percent with the addresses.
        layer.load_state_dict(self.fixed.state_dict(), assign=True)
        return layer

    def step(self, layer: pmoe.MoELayer, warm: bool = True) -> dict[str, float]:
        """Returns the times of a step of a layer.

        warm: whether the second of two steps is timed, as in training. The first step is slower: another
            layer's step ran before it, and left buffers of other sizes in the memory pool.
        """
        if warm:
            self.step(layer, warm=False)
        self.x.grad = None
        layer.zero_grad(set_to_none=True)
        return timed(lambda: layer(self.x), self.dy)

    def fixed_step(self, n: int, pair: Restore | None) -> dict[str, float]:
        self.fixed.pipeline, self.fixed.memory_reuse = n, pair or False
        return self.step(self.fixed)

    def within(self, budget: int, n: int, pair: Restore) -> pmoe.MoELayer:
        """Returns a layer with a memory budget in bytes, n chunks and a restore pair."""
        return self.like(pipeline=n, memory_reuse=pair, memory_budget=budget)

    def promised(self, n: int, pair: Restore) -> int:
        """Returns the bytes that are enough for any routing, as `MoELayer.predict_memory` predicts them."""
        self.fixed.pipeline, self.fixed.memory_reuse = n, pair
        return int(self.fixed.predict_memory(self.setting.rows).promised)


def name_of(n: int, pair: Restore | None) -> str:
    return f"n={n}" + (f" {pair}" if pair is not None else "")


def name_of_ran(ran: Any) -> str:
    degrees = f"n={ran.forward}" + (f"/{ran.backward}" if ran.backward != ran.forward else "")
    return degrees + (f" {ran.restore}" if ran.restore is not None else "")


@dataclass(frozen=True)
class Chosen:
    """The choice of a layer that chose by itself.

    took: what it chose, as a name of a run.
    first_seconds: seconds of its first step, with search and measurements.
    among: names of the candidates with which it is compared.
    finalists: names of the runs that are timed again: the candidates that were fastest when all were timed
        once. Under a budget their layers have the budget, too, and `WITH_BUDGET` ends the name of the run.
    """

    took: str
    first_seconds: float
    among: list[str]
    finalists: list[str]


@dataclass(frozen=True)
class Result:
    """The results of a case, as rank 0 has them.

    screened: times of all candidates, from a few rounds.
    times: times of the layers that chose, and of the fastest candidates.
    """

    screened: dict[str, dict[str, Timing]]
    times: dict[str, dict[str, Timing]]
    chosen: dict[str, Chosen]
    bytes_per_second: float
    copy_bytes_per_second: float
    budget_bytes: int


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """Makes pmoe store its measurements in an empty folder within the context.

    Stored measurements of other links would be wrong for the modelled one.
    """
    with tempfile.TemporaryDirectory(prefix="pmoe-choices-") as folder:
        os.environ["PMOE_CACHE"] = folder
        yield
        dist.barrier()  # all ranks have written their measurements


def set_rates(link: Any, case: Case, setting: Setting, rounds: int) -> tuple[float, float]:
    """Limits the link and copies to the rates of the case.

    Returns (rate of the link, rate of copies), in bytes a second.
    """
    link.set_rate(INFINITE)
    alone = measure({"computation": products_alone(setting)}, rounds)["computation"]
    rate = choose_rate(setting, "auto-step", alone) / case.link
    link.set_rate(rate, case.latency * alone["forward"].median)
    product = alone["forward"].median / 2
    copies = setting.rows * setting.row_bytes / (case.copies * product) if case.copies else INFINITE
    limited_copies().set_rate(copies)
    return rate, copies


@own_cache()
def run_case(link: Any, case: Case, setting: Setting, degrees: list[int], rounds: int) -> Result:
    """Measures a case: all candidates, then the layers that choose, beside the fastest candidates.

    degrees: the numbers of chunks n that are tried without reuse. With reuse, only those are tried that
        pipeline=True also tries.
    """
    rate, copy_rate = set_rates(link, case, setting, rounds)
    subject = Subject(setting, case.skew)
    known = [n for n in DEGREES if n in degrees]
    plain = {name_of(n, None): (n, None) for n in degrees}
    pairs: dict[str, tuple[int, Restore]] = {name_of(n, p): (n, p) for n in known for p in ALL_PAIRS}
    promised = {name: subject.promised(*choice) for name, choice in pairs.items()}
    budget = max(int(BUDGET_SHARE * promised[name_of(1, KEEP)]), min(promised.values()))
    strategies = [name for name, (_, pair) in pairs.items() if pair.strategy]
    at_one_n = [name_of(REUSE_DEGREE, pair) for pair in STRATEGIES.values() if REUSE_DEGREE in known]
    choosers: dict[str, tuple[dict[str, Any], list[str]]] = {
        "pipeline=True": ({"pipeline": True}, [*plain]),
        'pipeline="solve"': ({"pipeline": "solve"}, [*plain]),
        f"memory_reuse=True, n={REUSE_DEGREE}": ({"pipeline": REUSE_DEGREE, "memory_reuse": True}, at_one_n),
        "both True": ({"pipeline": True, "memory_reuse": True}, strategies),
        "both True and a budget": (
            {"pipeline": True, "memory_reuse": True, "memory_budget": budget},
            [name for name, size in promised.items() if size <= budget],
        ),
    }
    subject.fixed_step(2, None)  # work that a process does only once must not count for any first step
    runs: dict[str, Run] = {
        name: functools.partial(subject.fixed_step, *choice) for name, choice in {**plain, **pairs}.items()
    }
    screened = measure(runs, SCREENING)
    chosen, finals = {}, dict[str, Run]()
    for name, (options, among) in choosers.items():
        if among:
            layer = subject.like(**options)
            first = subject.step(layer, warm=False)["step"]
            fastest = sorted(among, key=lambda run: screened[run]["step"].median)[:FINALISTS]
            again = {run: runs[run] for run in fastest}
            if "memory_budget" in options:
                # A layer without the budget may keep more free memory between its steps than this one.
                again = {
                    run + WITH_BUDGET: functools.partial(subject.step, subject.within(budget, *pairs[run]))
                    for run in fastest
                }
            chosen[name] = Chosen(name_of_ran(layer.ran), first, among, [*again])
            finals |= {name: functools.partial(subject.step, layer), **again}
    times = measure(finals, rounds if case.link > 1 else OFTEN * rounds)
    return Result(screened, times, chosen, rate, copy_rate, budget)


@own_cache()
def run_batches(
    link: Any, case: Case, setting: Setting, batches: list[int], rounds: int
) -> dict[int, dict[str, Any]]:
    """Returns, for each number of tokens of a rank, the times of every n and what both choosers took.

    The result is {tokens: {"times": ..., "took": ...}}. The numbers of chunks n are those that pipeline=True
    tries. The rates are those of the case with the rows of ``setting``.
    """
    set_rates(link, case, setting, rounds)
    by_tokens = {}
    for tokens in sorted(batches):
        subject = Subject(Setting(**{**asdict(setting), "rows": tokens}), case.skew)
        layers = {
            "pipeline=True": subject.like(pipeline=True),
            'pipeline="solve"': subject.like(pipeline="solve"),
        }
        runs: dict[str, Run] = {
            name_of(n, None): functools.partial(subject.fixed_step, n, None) for n in DEGREES
        }
        for name, layer in layers.items():
            subject.step(layer)
            runs[name] = functools.partial(subject.step, layer)
        times = {name: timings["step"] for name, timings in measure(runs, rounds).items()}
        took = {name: layer.ran.backward for name, layer in layers.items()}
        by_tokens[tokens] = {"times": times, "took": took}
    return by_tokens

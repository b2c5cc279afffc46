"""Times forward, backward and step of a layer on a slow link, and the bounds of these times.

Collective: every rank calls these functions with the same arguments in the same order.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pmoe
from bench.links import measure_rate
from bench.timing import Timing
from pmoe.engine.lanes.recorder import Journal, Span
from pmoe.measure.timing import in_rounds
from pmoe.planner.costs import LineCost
from pmoe.schedule.tasks import Kind

DIRECTIONS = ("forward", "backward")
PARTS = (*DIRECTIONS, "step")
Run = Callable[[], dict[str, float]]
"""A function that runs something once, and returns this rank's seconds by part."""


@dataclass(frozen=True)
class Setting:
    """Sizes of the layer and of a rank's batch: rows = T * K (letters as in docs/how_it_works.md)."""

    rows: int = 4096
    d_model: int = 512
    d_hidden: int = 2048
    num_experts: int = 8
    world: int = 2

    @property
    def remote_rows(self) -> int:
        """Number of rows that each rank sends in one direction."""
        return self.rows * (self.world - 1) // self.world

    @property
    def row_bytes(self) -> int:
        return 4 * self.d_model


def make_layer(setting: Setting) -> tuple[pmoe.MoELayer, Tensor, Tensor]:
    """Returns (layer, x, dy), and makes the gate send all experts equally many rows (`even_batch`)."""
    torch.manual_seed(0)
    layer = pmoe.MoELayer(setting.d_model, setting.d_hidden, setting.num_experts)
    return layer, *even_batch(layer, setting.rows)


def even_batch(layer: pmoe.MoELayer, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns (x, dy), each (tokens, d_model), and makes the gate send all experts equally many rows.

    The benchmarks do not measure uneven loads, so loads should not differ between ranks.
    """
    experts, every = layer.num_experts, torch.arange(tokens)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(tokens, layer.d_model)
    first = torch.randperm(tokens) % experts
    with torch.no_grad():
        layer.gate.weight.normal_(std=1e-3, generator=torch.Generator().manual_seed(0))
        layer.gate.weight[:, :experts] += torch.eye(experts)
        for choice in range(layer.top_k):
            x[every, (first + choice) % experts] += 10
    return x.requires_grad_(), torch.randn(tokens, layer.d_model)


def timed(forward: Callable[[], Tensor], dy: Tensor) -> dict[str, float]:
    """Returns the seconds of forward and backward. All ranks begin each pass together."""
    dist.barrier()
    start = time.perf_counter()
    y = forward()
    middle = time.perf_counter()
    y.backward(dy)
    end = time.perf_counter()
    return {"forward": middle - start, "backward": end - middle, "step": end - start}


def products_of_experts(
    num_experts: int, rows: int, d_model: int, d_hidden: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns two functions that compute only the experts' products, of the forward and the backward pass.

    Each product has all rows of an expert and writes to memory that exists, so that it is as fast as products
    can be.

    num_experts: number of experts of this rank.
    rows: number of rows of each expert.
    """
    w1 = torch.randn(num_experts, d_hidden, d_model)
    w2 = torch.randn(num_experts, d_model, d_hidden)
    x, y = torch.randn(2, num_experts, rows, d_model)
    h, dh = torch.randn(2, num_experts, rows, d_hidden)
    dw1, dw2, dx = torch.empty_like(w1), torch.empty_like(w2), torch.empty_like(x)

    def forward() -> None:
        for e in range(num_experts):
            torch.mm(x[e], w1[e].t(), out=h[e])
            torch.mm(h[e], w2[e].t(), out=y[e])

    def backward() -> None:
        for e in range(num_experts):
            torch.mm(y[e], w2[e], out=dh[e])
            torch.mm(dh[e], w1[e], out=dx[e])
            torch.mm(dh[e].t(), x[e], out=dw1[e])
            torch.mm(y[e].t(), h[e], out=dw2[e])

    return forward, backward


def products_alone(setting: Setting) -> Run:
    """Returns a function that times only the experts' products for the routed rows."""
    local = setting.num_experts // setting.world
    rows = setting.rows // local  # every expert gets the same number of rows
    forward, backward = products_of_experts(local, rows, setting.d_model, setting.d_hidden)

    def run() -> dict[str, float]:
        dist.barrier()
        start = time.perf_counter()
        forward()
        middle = time.perf_counter()
        backward()
        end = time.perf_counter()
        return {"forward": middle - start, "backward": end - middle, "step": end - start}

    return run


def messages_alone(sent: Sequence[int], d_model: int, group: dist.ProcessGroup | None = None) -> Run:
    """Returns a function that times only the two all-to-alls of a pass, each with all rows.

    sent: number of rows for each rank of the group.
    """
    rows = torch.randn(sum(sent), d_model)
    received = torch.empty_like(rows)

    def run() -> dict[str, float]:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(2):
            dist.all_to_all_single(received, rows, list(sent), list(sent), group=group)
        seconds = time.perf_counter() - start
        return {"forward": seconds, "backward": seconds, "step": 2 * seconds}

    return run


def measure(runs: dict[str, Run], rounds: int, warmup: int = 1) -> dict[str, dict[str, Timing]]:
    """Times all runs in rounds. Returns for each run the times of its parts on the slowest rank.

    Every run takes place once in each round, so that a machine whose speed drifts affects all of them
    equally.
    """

    def timed(run: Run) -> list[float]:
        times = run()
        return [times[part] for part in PARTS]

    taken = in_rounds([functools.partial(timed, run) for run in runs.values()], rounds, warm_up=warmup)
    samples = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(samples, op=dist.ReduceOp.MAX)
    return {
        name: {part: Timing(tuple(samples[i, :, j].tolist())) for j, part in enumerate(PARTS)}
        for i, name in enumerate(runs)
    }


def choose_rate(setting: Setting, rate: str, computation: dict[str, Timing]) -> float:
    """Returns the rate in bytes a second at which communication alone takes as long as computation alone.

    rate: "auto" compares them in forward, "auto-step" in the whole step; a number is returned as it is.
    """
    if rate not in ("auto", "auto-step"):
        return float(rate)
    pass_bytes = 2 * setting.remote_rows * setting.row_bytes
    if rate == "auto":
        return pass_bytes / computation["forward"].median
    return 2 * pass_bytes / computation["step"].median


def measure_message(link: Any, setting: Setting, rate: float, rounds: int) -> LineCost:
    """Returns the seconds of a message by its bytes, from messages of two sizes on a link of this rate.

    The link keeps the rate afterwards.
    """
    link.set_rate(rate)
    size = setting.remote_rows * setting.row_bytes
    alpha, bytes_per_second = measure_rate((size // 16, size), rounds=rounds)
    return LineCost(max(alpha, 0.0), 1 / bytes_per_second)


def message_costs(message: LineCost, setting: Setting, n: int) -> dict[Kind, float]:
    """Returns the seconds of each kind of task that sends rows, in a pass of n chunks."""
    rows = message(setting.remote_rows * setting.row_bytes / n)
    kinds = (Kind.DISPATCH, Kind.DISPATCH_AGAIN, Kind.COMBINE)
    return {Kind.WEIGHTS: message(4 * setting.remote_rows), **dict.fromkeys(kinds, rows)}


def spans_of(journal: Journal, direction: str) -> tuple[list[Span], float]:
    """Returns the recorded tasks of one direction, and the seconds that they cover.

    These are the seconds from the first task's start to the last task's end.
    """
    spans = [span for span in journal.spans if span.direction == direction]
    return spans, max(span.end for span in spans) - min(span.start for span in spans)

"""Lancet's evaluation (section 7), simulated from stated costs of operators.

It shows the gain of Lancet's two passes. The models are GPT-2 with a Switch layer in every other block and
two experts a GPU, on two clusters. The cost of an operator follows from its products and bytes at stated
rates. The passes are pmoe's own (`pmoe.graph`). Tutel's pipeline is written in this file. `ASSUMPTIONS`
were fixed before the first run. Nothing was fitted to the paper.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pmoe.graph.instructions import COMMUNICATE, COMPUTE, Instruction, exposed_seconds, total_seconds
from pmoe.graph.ranges import Cuttable, PartCosts, alone, pipelined, solve
from pmoe.graph.weight_gradients import listed
from pmoe.papers.assumptions import assumptions, printed

ASSUMPTIONS = assumptions("lancet")
"""Assumptions, because section 7 leaves them open."""


class GPUCluster(NamedTuple):
    """Rates of a cluster whose nodes have 8 GPUs.

    flops: half-precision operations per second of a GPU.
    memory: bytes per second of a GPU's memory.
    nic: bytes per second between nodes, for a node.
    """

    name: str
    flops: float
    memory: float
    nic: float


class GPTModel(NamedTuple):
    """A GPT-2 model of the evaluation.

    blocks: transformer blocks.
    columns: d_model.
    sequences: sequences a GPU, by cluster.
    """

    name: str
    blocks: int
    columns: int
    sequences: Mapping[str, int]  # a GPU, by cluster


A100 = GPUCluster("A100", 312e12, 2.0e12, 50e9)
V100 = GPUCluster("V100", 125e12, 0.9e12, 12.5e9)
SMALL = GPTModel("GPT2-S-MoE", 12, 768, {"A100": 24, "V100": 16})
LARGE = GPTModel("GPT2-L-MoE", 24, 1024, {"A100": 48, "V100": 8})
TOKENS, WORDS, LAUNCH, MESSAGE = 512, 50_257, 5e-6, 20e-6
NUMBERS, PARTS = (16, 32, 64), (1, 2, 3, 4, 6, 8)


class Operator(NamedTuple):
    """An operator of the forward pass.

    flops: of its product over all rows; 0 without one.
    moved: bytes that it reads and writes, if it is not a product.
    sent: bytes of an all-to-all.
    has_weight: whether the product is with a weight.
    """

    name: str
    flops: float = 0.0
    moved: float = 0.0
    sent: float = 0.0
    has_weight: bool = True


def forward_work(model: GPTModel, sequences: int) -> Iterator[Operator]:
    """Yields the operators of a forward pass, block by block."""
    rows, m = sequences * TOKENS, model.columns
    row_bytes, scores = 2.0 * rows * m, 2.0 * sequences * m // 64 * TOKENS * TOKENS
    for block in range(model.blocks):
        yield Operator(f"norm 1 of {block}", moved=2 * row_bytes)
        yield Operator(f"qkv of {block}", flops=6.0 * rows * m * m)
        yield Operator(f"scores of {block}", flops=2.0 * rows * TOKENS * m, has_weight=False)
        yield Operator(f"softmax of {block}", moved=4 * scores)
        yield Operator(f"values of {block}", flops=2.0 * rows * TOKENS * m, has_weight=False)
        yield Operator(f"projection of {block}", flops=2.0 * rows * m * m)
        yield Operator(f"add 1 of {block}", moved=3 * row_bytes)
        yield Operator(f"norm 2 of {block}", moved=2 * row_bytes)
        if block % 2:
            yield Operator(f"gate of {block}", moved=2 * row_bytes)
            yield Operator(f"order of {block}", moved=2 * row_bytes)
            yield Operator(f"S of {block}", sent=row_bytes)
        yield Operator(f"first product of {block}", flops=8.0 * rows * m * m)
        yield Operator(f"nonlinearity of {block}", moved=8 * row_bytes)
        yield Operator(f"second product of {block}", flops=8.0 * rows * m * m)
        if block % 2:
            yield Operator(f"R of {block}", sent=row_bytes)
            yield Operator(f"join of {block}", moved=2 * row_bytes)
        yield Operator(f"add 2 of {block}", moved=3 * row_bytes)
    yield Operator("head", flops=2.0 * rows * m * WORDS)


def seconds_on(cluster: GPUCluster, gpus: int, rows: int, work: Operator, k: int = 1) -> float:
    """Returns the seconds of one of k parts of an operator."""
    if work.sent:
        return MESSAGE + work.sent / k * (gpus - 8) / gpus * 8 / (0.8 * cluster.nic)
    share = rows / k / (rows / k + 512)
    product = work.flops / k / (0.5 * cluster.flops * share)
    return LAUNCH + product + work.moved / k / (0.8 * cluster.memory)


def forward(works: Sequence[Operator], seconds: Callable[..., float]) -> list[Instruction]:
    """Returns the instructions of the forward pass. Each waits for the one before."""
    return [
        Instruction(
            name=work.name,
            waits=(works[at - 1].name,) if at else (),
            seconds=seconds(work),
            lane=COMMUNICATE if work.sent else COMPUTE,
        )
        for at, work in enumerate(works)
    ]


def backward(works: Sequence[Operator], seconds: Callable[..., float]) -> list[Instruction]:
    """Returns the instructions of the backward pass.

    A product has two gradients of its own size. No instruction waits for that of its weight.
    """
    found, waits = list[Instruction](), tuple[str, ...]()
    for work in reversed(works):
        once, name = seconds(work), f"d {work.name}"
        twice = work.flops > 0 and not work.has_weight
        lane = COMMUNICATE if work.sent else COMPUTE
        found.append(Instruction(name=name, waits=waits, seconds=once * (1 + twice), lane=lane))
        if work.flops and work.has_weight:
            found.append(Instruction(name=f"w {work.name}", waits=waits, seconds=once))
        waits = (name,)
    return found


# ---- systems


@dataclass(frozen=True)
class SimulatedStep:
    """Seconds of a step, and those of them in which nothing is computed (exposed)."""

    seconds: float
    exposed: float

    def __add__(self, other: SimulatedStep) -> SimulatedStep:
        return SimulatedStep(self.seconds + other.seconds, self.exposed + other.exposed)


def one_after_the_other(instructions: Sequence[Instruction]) -> SimulatedStep:
    """Returns the step in which instructions run in list order on their lanes."""
    return SimulatedStep(total_seconds(instructions), exposed_seconds(instructions))


def in_ranges(works: Sequence[Operator], seconds: Callable[..., float], sequences: int) -> SimulatedStep:
    """Returns the forward pass with the ranges that Lancet's dynamic programme cuts."""
    instructions, inside, ends = forward(works, seconds), False, [True]
    for work in works:  # a range must not end between "order" and "join", where rows are routed
        inside = (inside or work.name.startswith("order")) and not work.name.startswith("join")
        ends.append(not inside)
    # Joining the parts of a range costs nothing, because each is written to its place.
    parts = {k: {work.name: seconds(work, k) for work in works} for k in PARTS if k <= sequences}
    costs = {k: PartCosts(part, {}) for k, part in parts.items()}
    total, ranges = solve(Cuttable(instructions, ends, [True] * len(works)), costs)
    busy, k = 0.0, 1
    begins, last = {each.first: each.k for each in ranges}, {each.last for each in ranges}
    for work in works:
        k = begins.get(work.name, k)
        busy += 0.0 if work.sent else k * parts[k][work.name]
        k = 1 if work.name in last else k
    return SimulatedStep(total, total - busy)


def in_layers(
    instructions: Sequence[Instruction], works: Sequence[Operator], seconds: Callable[..., float], k: int
) -> SimulatedStep:
    """Returns the step of Tutel's pipeline.

    The all-to-alls and experts of each layer run in k parts, everything else in one.
    """
    shares = {work.name: seconds(work, k) / seconds(work) for work in works}
    step, body = SimulatedStep(0.0, 0.0), list[Instruction]()
    for each in instructions:
        if not body and not each.communicates:
            step += SimulatedStep(each.seconds, 0.0)
            continue
        body.append(each)
        if len(body) > 1 and each.communicates:
            costs = {
                one.name: one.seconds * shares[one.name.removeprefix("d ").removeprefix("w ")] for one in body
            }
            pipeline = pipelined(alone(body, PartCosts(costs, {})), k, k, PartCosts(costs, {}))
            step, body = step + one_after_the_other(pipeline), []
    return step


def lancet_systems(model: GPTModel, cluster: GPUCluster, gpus: int) -> dict[str, SimulatedStep]:
    """Returns the step of each system."""
    sequences = model.sequences[cluster.name]
    seconds = functools.partial(seconds_on, cluster, gpus, sequences * TOKENS)
    works = list(forward_work(model, sequences))
    ahead, back = forward(works, seconds), backward(works, seconds)
    layered = [in_layers(ahead, works, seconds, k) + in_layers(back, works, seconds, k) for k in (1, 2, 4, 8)]
    ranges, weights = in_ranges(works, seconds, sequences), one_after_the_other(listed(back))
    return {
        "no overlap": one_after_the_other(ahead) + one_after_the_other(back),
        "Tutel": min(layered, key=lambda step: step.seconds),
        "weight gradients": one_after_the_other(ahead) + weights,
        "ranges": ranges + one_after_the_other(back),
        "Lancet": ranges + weights,
    }


def section7() -> list[dict[str, Any]]:
    """Returns a row for each model, cluster and number of GPUs.

    It has the milliseconds of each system, and how many times as fast Lancet is.
    """
    found = []
    for model, cluster, gpus in itertools.product((SMALL, LARGE), (A100, V100), NUMBERS):
        steps = lancet_systems(model, cluster, gpus)
        ours, layered = steps["Lancet"], steps["Tutel"]
        found.append(
            {
                "model": model.name,
                "cluster": cluster.name,
                "GPUs": gpus,
                **{f"{name} ms": step.seconds * 1e3 for name, step in steps.items()},
                "over no overlap": steps["no overlap"].seconds / ours.seconds,
                "over Tutel": layered.seconds / ours.seconds,
                "less exposed than Tutel %": 100 * (1 - ours.exposed / layered.exposed),
            }
        )
    return found


PAPER: Mapping[str, str] = printed("lancet")
"""Gains that the paper reports."""


def tables() -> dict[str, list[dict[str, Any]]]:
    """Returns the tables that `pmoe simulate lancet` prints.

    most: the largest gains, beside the paper's.
    """
    rows = section7()
    most = [{"gain": name, "most": max(row[name] for row in rows), "paper": PAPER[name]} for name in PAPER]
    return {"section7": rows, "most": most}

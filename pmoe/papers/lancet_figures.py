"""Simulates Lancet's evaluation (section 7) and its Figs. 2 and 6, from stated costs of operators.

Lancet changes a training graph in two ways, so that the GPU computes while all-to-alls send rows:

- It changes the order of operators, so that gradients of weights are computed during all-to-alls.
- It chooses ranges (runs of consecutive operators), and runs each range once for each part of the batch. One
  part is computed while the rows of another part are sent.

The results show how much time each way saves.

The models are GPT-2 with a Switch layer in every other block, and two experts on each GPU. A Switch layer is
an MoE layer with one expert for each token. The models are simulated on two clusters. The seconds of an
operator follow from its floating-point operations and bytes, at stated rates. The code that changes graphs is
pmoe's own (`pmoe.graph`). Tutel's pipeline is written in this file. `ASSUMPTIONS` were fixed before the first
run. Nothing was fitted to the paper.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pmoe.graph.instructions import COMMUNICATE, COMPUTE, Instruction, exposed_seconds, total_seconds
from pmoe.graph.ranges import Cuttable, PartCosts, alone, lags, pipelined, solve
from pmoe.graph.weight_gradients import listed
from pmoe.papers.assumptions import assumptions, printed

ASSUMPTIONS = assumptions("lancet")
"""Assumptions, by name, where the paper's section 7 says nothing."""


class GPUCluster(NamedTuple):
    """Rates of a cluster whose nodes have 8 GPUs.

    name: the name of its GPUs, "A100" or "V100".
    flops: half-precision floating-point operations per second of a GPU.
    memory: bytes per second that a GPU reads from and writes to its memory.
    nic: bytes per second that a node sends to other nodes, through all its network cards together.
    """

    name: str
    flops: float
    memory: float
    nic: float


class GPTModel(NamedTuple):
    """A GPT-2 model of the evaluation.

    name: the name of the model in the paper.
    blocks: number of transformer blocks.
    columns: d_model.
    sequences: number of sequences on each GPU, by name of the cluster.
    """

    name: str
    blocks: int
    columns: int
    sequences: Mapping[str, int]


A100 = GPUCluster("A100", 312e12, 2.0e12, 50e9)
V100 = GPUCluster("V100", 125e12, 0.9e12, 12.5e9)
SMALL = GPTModel("GPT2-S-MoE", 12, 768, {"A100": 24, "V100": 16})
LARGE = GPTModel("GPT2-L-MoE", 24, 1024, {"A100": 48, "V100": 8})

TOKENS = 512
"""Tokens of a sequence."""

WORDS = 50_257
"""Words of the vocabulary."""

LAUNCH = 5e-6
"""Seconds to launch a kernel. Each operator that computes takes this time in addition to its work."""

MESSAGE = 20e-6
"""Seconds of an all-to-all of no bytes."""

NUMBERS = (16, 32, 64)
"""Numbers of GPUs."""

PARTS = (1, 2, 3, 4, 6, 8)
"""Numbers of parts into which a range of operators may be cut."""


class Operator(NamedTuple):
    """An operator of the forward pass, with its amount of work.

    An operator has exactly one of ``flops``, ``moved`` and ``sent``. The other two are 0.

    name: the operator's name, which ends with the number of its block.
    flops: floating-point operations of a matrix product.
    moved: bytes that an operator without matrix product reads and writes in memory.
    sent: bytes that an all-to-all sends.
    has_weight: whether the operator is a matrix product with a weight. Backward then computes the gradient of
        the weight.
    """

    name: str
    flops: float = 0.0
    moved: float = 0.0
    sent: float = 0.0
    has_weight: bool = True


def forward_work(model: GPTModel, sequences: int) -> Iterator[Operator]:
    """Yields the operators of a model's forward pass on one GPU, in order.

    model: the model.
    sequences: number of sequences of a GPU.
    """
    rows = sequences * TOKENS
    m = model.columns
    row_bytes = 2.0 * rows * m
    scores = 2.0 * sequences * m // 64 * TOKENS * TOKENS
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
    """Returns the seconds of one part of an operator that is cut into k equal parts.

    cluster: rates of the GPUs and the network.
    gpus: number of GPUs of all nodes.
    rows: number of rows (tokens) on which the whole operator works. Products of few rows run at a lower rate.
    work: the operator.
    k: number of parts. With 1, the result is the time of the whole operator.
    """
    if work.sent:
        return MESSAGE + work.sent / k * (gpus - 8) / gpus * 8 / (0.8 * cluster.nic)
    share = rows / k / (rows / k + 512)
    product = work.flops / k / (0.5 * cluster.flops * share)
    return LAUNCH + product + work.moved / k / (0.8 * cluster.memory)


def forward(works: Sequence[Operator], seconds: Callable[..., float]) -> list[Instruction]:
    """Returns the instructions of the forward pass. Each instruction waits for the one before it.

    works: operators of the forward pass, in order.
    seconds: function from an operator to its seconds.
    """
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

    A matrix product has two gradients, one for each factor. Each gradient takes as long as the product
    itself. If a factor is a weight, its gradient is an instruction of its own, and no other instruction waits
    for it.

    works: operators of the forward pass, in order.
    seconds: function from an operator to its seconds in forward.
    """
    instructions = list[Instruction]()
    waits = tuple[str, ...]()
    for work in reversed(works):
        seconds_once = seconds(work)
        name = f"d {work.name}"
        is_twice = work.flops > 0 and not work.has_weight
        lane = COMMUNICATE if work.sent else COMPUTE
        instructions.append(
            Instruction(name=name, waits=waits, seconds=seconds_once * (1 + is_twice), lane=lane)
        )
        if work.flops and work.has_weight:
            instructions.append(Instruction(name=f"w {work.name}", waits=waits, seconds=seconds_once))
        waits = (name,)
    return instructions


# ---- systems


@dataclass(frozen=True)
class SimulatedStep:
    """Seconds of a simulated pass or step.

    seconds: total seconds.
    exposed: the seconds in which nothing is computed, because all computation waits for all-to-alls.
    """

    seconds: float
    exposed: float

    def __add__(self, other: SimulatedStep) -> SimulatedStep:
        return SimulatedStep(self.seconds + other.seconds, self.exposed + other.exposed)


def one_after_the_other(instructions: Sequence[Instruction]) -> SimulatedStep:
    """Returns the total and the exposed seconds of instructions that run in list order on two lanes.

    A lane is a queue, which runs its instructions one after another. All-to-alls run on one lane, all other
    instructions on the other lane. Both lanes work at the same time, except when an instruction waits for an
    instruction of the other lane. Exposed seconds are those in which nothing is computed.

    instructions: the instructions, in order.
    """
    return SimulatedStep(total_seconds(instructions), exposed_seconds(instructions))


def in_ranges(works: Sequence[Operator], seconds: Callable[..., float], sequences: int) -> SimulatedStep:
    """Returns the seconds of a forward pass in which Lancet's dynamic programme has cut ranges into parts.

    The programme is an algorithm that chooses ranges (runs of consecutive operators). A range runs once for
    each part of the batch. One part is computed while the rows of another part are sent.

    works: operators of the forward pass, in order.
    seconds: function from an operator and a number of parts to the seconds of one part.
    sequences: number of sequences of a GPU, which is also the largest number of parts.
    """
    instructions = forward(works, seconds)
    inside = False
    ends = [True]
    for work in works:  # a range must not end between "order" and "join", where rows are routed
        inside = (inside or work.name.startswith("order")) and not work.name.startswith("join")
        ends.append(not inside)
    # Joining the parts of a range costs nothing, because each is written to its place.
    parts = {k: {work.name: seconds(work, k) for work in works} for k in PARTS if k <= sequences}
    costs = {k: PartCosts(part, {}) for k, part in parts.items()}
    total, ranges = solve(Cuttable(instructions, ends, [True] * len(works)), costs)
    busy = 0.0
    k = 1
    begins = {batch_range.first: batch_range.k for batch_range in ranges}
    last = {batch_range.last for batch_range in ranges}
    for work in works:
        k = begins.get(work.name, k)
        busy += 0.0 if work.sent else k * parts[k][work.name]
        k = 1 if work.name in last else k
    return SimulatedStep(total, total - busy)


def in_layers(
    instructions: Sequence[Instruction], works: Sequence[Operator], seconds: Callable[..., float], k: int
) -> SimulatedStep:
    """Returns the seconds of a forward or backward pass with Tutel's pipeline.

    The all-to-alls and experts of each MoE layer run once for each of k parts of the batch. All other
    operators run once, on the whole batch.

    instructions: instructions of the pass, in order.
    works: operators of the forward pass.
    seconds: function from an operator and a number of parts to the seconds of one part.
    k: number of parts.
    """
    shares = {work.name: seconds(work, k) / seconds(work) for work in works}
    step = SimulatedStep(0.0, 0.0)
    body = list[Instruction]()
    for instruction in instructions:
        if not body and not instruction.communicates:
            step += SimulatedStep(instruction.seconds, 0.0)
            continue
        body.append(instruction)
        if len(body) > 1 and instruction.communicates:
            costs = {
                part.name: part.seconds * shares[part.name.removeprefix("d ").removeprefix("w ")]
                for part in body
            }
            pipeline = pipelined(alone(body, PartCosts(costs, {})), k, k, PartCosts(costs, {}))
            step = step + one_after_the_other(pipeline)
            body = []
    return step


def lancet_systems(model: GPTModel, cluster: GPUCluster, gpus: int) -> dict[str, SimulatedStep]:
    """Returns {name of a system: its simulated training step}.

    Lancet does two things, so that the GPU computes while all-to-alls send rows. It moves weight gradients:
    in backward, gradients of weights are computed during all-to-alls. It cuts ranges: in forward, runs of
    consecutive operators run once for each part of the batch. The systems are:

        "no overlap"         Nothing is computed while all-to-alls run.
        "Tutel"              The all-to-alls and experts of each layer run once for each part of the batch.
        "weight gradients"   One half of Lancet: weight gradients are moved, and no range is cut.
        "ranges"             The other half of Lancet: ranges are cut, and no weight gradient is moved.
        "Lancet"             Weight gradients are moved, and ranges are cut.

    model: the model.
    cluster: rates of the GPUs and the network.
    gpus: number of GPUs of all nodes.
    """
    sequences = model.sequences[cluster.name]
    seconds = functools.partial(seconds_on, cluster, gpus, sequences * TOKENS)
    works = list(forward_work(model, sequences))
    forward_pass = forward(works, seconds)
    backward_pass = backward(works, seconds)
    layered = [
        in_layers(forward_pass, works, seconds, k) + in_layers(backward_pass, works, seconds, k)
        for k in (1, 2, 4, 8)
    ]
    ranges = in_ranges(works, seconds, sequences)
    weights = one_after_the_other(listed(backward_pass))
    return {
        "no overlap": one_after_the_other(forward_pass) + one_after_the_other(backward_pass),
        "Tutel": min(layered, key=lambda step: step.seconds),
        "weight gradients": one_after_the_other(forward_pass) + weights,
        "ranges": ranges + one_after_the_other(backward_pass),
        "Lancet": ranges + weights,
    }


def section7() -> list[dict[str, Any]]:
    """Returns the results of section 7: a row for each model, cluster and number of GPUs.

    A row has these fields beside "model", "cluster" and "GPUs":

        "no overlap ms" and so on      milliseconds of a step, for each system of `lancet_systems`
        over no overlap, over Tutel    speed-up of Lancet over this system
        less exposed than Tutel %      percentage by which Lancet has fewer exposed seconds than Tutel

    Exposed seconds are those in which all computation waits for all-to-alls.
    """
    rows = []
    for model, cluster, gpus in itertools.product((SMALL, LARGE), (A100, V100), NUMBERS):
        steps = lancet_systems(model, cluster, gpus)
        ours = steps["Lancet"]
        layered = steps["Tutel"]
        rows.append(
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
    return rows


PAPER: Mapping[str, str] = printed("lancet")
"""Gains that the paper reports, in words, by name of a field of `section7`."""


# ---- Fig. 2


def figure2() -> list[dict[str, Any]]:
    """Returns Fig. 2, the parts of a training step on V100: a row for each model and number of GPUs.

    A row has these fields. Those that end in "ms" are milliseconds:

        all-to-all ms, experts ms, other ms   time of all-to-alls, of experts, and of all other operators
        all-to-all / experts                  time of all-to-alls divided by time of experts; the paper's
                                              largest value is 3.36
        Orig. ms                              a step if all operators run one after another
        Curr. ms                              a step if all-to-alls overlap with experts only
        Opt. ms                               a step if all-to-alls overlap with all computation
    """
    rows = []
    for model, gpus in itertools.product((SMALL, LARGE), NUMBERS):
        sequences = model.sequences[V100.name]
        seconds = functools.partial(seconds_on, V100, gpus, sequences * TOKENS)
        works = list(forward_work(model, sequences))
        step = [*forward(works, seconds), *backward(works, seconds)]
        experts = {name for layer in moe_layers(works) for name in layer[1:-1]}
        sent = sum(work.seconds for work in step if work.communicates)
        computed = sum(work.seconds for work in step if not work.communicates)
        of_experts = sum(
            work.seconds for work in step if work.name.removeprefix("d ").removeprefix("w ") in experts
        )
        milliseconds = {
            "all-to-all": sent,
            "experts": of_experts,
            "other": computed - of_experts,
            "Orig.": sent + computed,
            "Curr.": sent + computed - min(sent, of_experts),
            "Opt.": max(sent, computed),
        }
        row: dict[str, Any] = {"model": model.name, "GPUs": gpus}
        row |= {f"{name} ms": 1e3 * number for name, number in milliseconds.items()}
        rows.append({**row, "all-to-all / experts": sent / of_experts})
    return rows


def moe_layers(works: Sequence[Operator]) -> list[list[str]]:
    """Returns, for each MoE layer, the names of its operators from dispatch to combine.

    works: operators of the forward pass, in order.
    """
    names = [work.name for work in works]
    sent = [at for at, work in enumerate(works) if work.sent]
    return [names[first : last + 1] for first, last in zip(sent[::2], sent[1::2], strict=True)]


# ---- Fig. 6

FIGURE6_GPUS = 16
FIGURE6_CASES = {"(a)": (SMALL, 24), "(b)": (LARGE, 8)}
"""The parts of Fig. 6 by name: (model, number of sequences on each GPU)."""

SPANS = (0.0, 0.5, 1.0, 2.0, 4.0, math.inf)
"""How many milliseconds of operators before and after each MoE layer are in the layer's range.

With infinity, the range has all operators that are nearer to the layer than to another MoE layer.
"""


def figure6() -> list[dict[str, Any]]:
    """Returns Fig. 6, the milliseconds of a forward pass: a row for each model and each choice of ranges.

    A range is a run of consecutive operators that is cut into parts of the batch. A row has these fields:

        "figure"        the part of Fig. 6, "(a)" or "(b)"
        "range"         the choice of ranges, see below
        "2 parts ms"    milliseconds of the forward pass if every range is cut into 2 parts. There are more
                        fields like this one, for other numbers of parts
        "best ms"       the smallest of these times; for "Lancet" the time that the dynamic programme predicts

    The choices of ranges are:

        "Orig."         Nothing is cut.
        "0 ms"          A range is one MoE layer without other operators, as in Tutel.
        "1 ms"          A range is one MoE layer with the operators of the last 1 ms before it and the first
                        1 ms after it. There are more choices like this one, with other times.
        "half of all"   A range is one MoE layer with all operators that are nearer to it than to another MoE
                        layer.
        "Lancet"        Lancet's dynamic programme chooses the ranges.
    """
    rows = []
    for name, (model, sequences) in FIGURE6_CASES.items():
        seconds = functools.partial(seconds_on, A100, FIGURE6_GPUS, sequences * TOKENS)
        works = list(forward_work(model, sequences))
        uncut = total_seconds(forward(works, seconds))
        chosen = in_ranges(works, seconds, sequences).seconds
        no_parts = {f"{k} parts ms": None for k in PARTS[1:]}
        rows.append({"figure": name, "range": "Orig.", **no_parts, "best ms": 1e3 * uncut})
        for span in SPANS:
            words = "half of all" if math.isinf(span) else f"{span:g} ms"
            in_parts = {k: 1e3 * cut_seconds(works, seconds, span / 1e3, k) for k in PARTS[1:]}
            columns = {f"{k} parts ms": milliseconds for k, milliseconds in in_parts.items()}
            rows.append({"figure": name, "range": words, **columns, "best ms": min(in_parts.values())})
        rows.append({"figure": name, "range": "Lancet", **no_parts, "best ms": 1e3 * chosen})
    return rows


def cut_seconds(works: Sequence[Operator], seconds: Callable[..., float], span: float, k: int) -> float:
    """Returns the seconds of a forward pass in which a range around each MoE layer runs in k parts.

    The range consists of the layer's two all-to-alls, the experts between them, some operators before the
    dispatch and some operators after the combine.

    works: operators of the forward pass, in order.
    seconds: function from an operator and a number of parts to the seconds of one part.
    span: the most seconds that the operators before the dispatch take together, and the operators after the
        combine. An operator between two MoE layers can only belong to the range of the nearer layer.
    k: number of parts.
    """
    instructions = forward(works, seconds)
    costs = PartCosts({work.name: seconds(work, k) for work in works}, {})
    places = {instruction.name: at for at, instruction in enumerate(instructions)}
    layers = [(places[layer[0]], places[layer[-1]] + 1) for layer in moe_layers(works)]
    bounds = [0, *((end + begin) // 2 for (_, end), (begin, _) in itertools.pairwise(layers))]
    bounds.append(len(instructions))
    total = sum(instruction.seconds for instruction in instructions)
    for (begin, end), (least, most) in zip(layers, itertools.pairwise(bounds), strict=True):
        before = _within(instructions[least:begin][::-1], span)
        after = _within(instructions[end:most], span)
        body = instructions[begin - before : end + after]
        total += min(total_seconds(pipelined(body, k, lag, costs)) for lag in lags(k))
        total -= sum(instruction.seconds for instruction in body)
    return total


def _within(instructions: Sequence[Instruction], span: float) -> int:
    """Returns the largest number of first instructions that take at most ``span`` seconds together."""
    return sum(
        sofar <= span for sofar in itertools.accumulate(instruction.seconds for instruction in instructions)
    )


def tables() -> dict[str, list[dict[str, Any]]]:
    """Returns the tables that `pmoe simulate lancet` prints, by name.

    "section7" has all results. "most" has the largest simulated gains beside the paper's.
    """
    rows = section7()
    gains = [{"gain": name, "most": max(row[name] for row in rows), "paper": PAPER[name]} for name in PAPER]
    return {"section7": rows, "most": gains, "figure2": figure2(), "figure6": figure6()}

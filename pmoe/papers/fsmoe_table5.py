"""Simulates FSMoE's Table 5: 1,458 layers, five systems, one testbed (Section 6.3, Testbed B).

The layers are those of Table 4. Their costs come from Fig. 5 and from ASSUMPTIONS, which were written before
any result was seen. A testbed is a cluster on which the paper's authors measured. Its rates are for this
reproduction only: no layer of pmoe uses them. Whole models (Figs. 6 to 8) are simulated in
`pmoe.papers.fsmoe_models`.

Letters: B samples, L tokens of a sample, M = d_model, H = d_hidden, f capacity factor, n chunks. The GPUs of
a node are a model-parallel group, which splits attention and experts.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pmoe.papers.assumptions import assumptions, printed
from pmoe.planner.costs import DegreeSeconds, GeneralizedLayer, LayerCosts, LineCost, all_reduce_seconds
from pmoe.planner.degree import MAX_DEGREE
from pmoe.planner.degree_search import ScheduleOptions, pass_seconds, simulated_degrees, stage_seconds
from pmoe.planner.gradient_partition import partition
from pmoe.planner.simulator import makespan, simulate_slowed, task_seconds
from pmoe.schedule.tasks import Kind, Lane, PassDirection, Stages, finished, make_task

ASSUMPTIONS = assumptions("fsmoe")
"""Assumptions, by name, where the paper says nothing or is ambiguous."""

MS = 1e-3
TOP_K = 2
ELEMENT_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Testbed:
    """A cluster of equal nodes. The seconds of each operation are a line alpha + beta * size.

    nodes: number of nodes.
    gpus: number of GPUs of each node.
    gemm, expert_gemm: lines of a matrix product of attention and of experts. The size is in floating-point
        operations.
    a2a, ag, rs, ar: lines of an all-to-all, an all-gather, a reduce-scatter and an all-reduce. The size is in
        bytes.
    """

    nodes: int
    gpus: int
    gemm: LineCost
    expert_gemm: LineCost
    a2a: LineCost
    ag: LineCost
    rs: LineCost
    ar: LineCost

    def all_reduce(self, num_bytes: int) -> float:
        """Returns the seconds of an all-reduce of one GPU's gradients among the nodes; 0 for 0 bytes."""
        return all_reduce_seconds(self.ar, num_bytes)


def testbed_of_lines(nodes: int, gpus: int, lines: Mapping[str, Sequence[float]]) -> Testbed:
    """Returns a testbed with the cost lines of one part of Fig. 5. All matrix products share one line.

    A cost line is seconds = alpha + beta * size.

    nodes: number of nodes.
    gpus: number of GPUs of each node.
    lines: {operation: (alpha in ms, beta in ms for each byte or floating-point operation)}.
    """
    gemm, a2a, ag, rs, ar = (
        LineCost(alpha * MS, beta * MS)
        for alpha, beta in (
            lines[name] for name in ("GEMM", "AlltoAll", "AllGather", "ReduceScatter", "AllReduce")
        )
    )
    return Testbed(nodes=nodes, gpus=gpus, gemm=gemm, expert_gemm=gemm, a2a=a2a, ag=ag, rs=rs, ar=ar)


TESTBED_B = testbed_of_lines(8, 4, printed("fsmoe figure 5"))
"""Testbed B of the paper's Table 3, with the costs (lines) of its Fig. 5 (c) and (d)."""


@dataclass(frozen=True, kw_only=True)
class LayerConfiguration:
    """One of the layers of Table 4: attention and an MoE layer, with their sizes.

    B: samples of a batch.
    heads: attention heads.
    L: tokens of a sample.
    M, H: d_model and d_hidden.
    f: capacity factor; None for the paper's '*', which drops no token.
    ffn: the kind of experts: "simple" with two matrix products, or "Mixtral" with three.
    """

    B: int
    heads: int
    L: int
    M: int
    H: int
    f: float | None
    ffn: str

    @property
    def tokens(self) -> int:
        """Number of tokens of a node. The GPUs of a node are a model-parallel group."""
        return self.B * self.L

    @property
    def rows(self) -> float:
        """Number of rows that all experts of a node together receive; may be a fraction."""
        return TOP_K * (1.0 if self.f is None else self.f) * self.tokens

    def gradient_bytes(self, testbed: Testbed) -> int:
        """Returns the bytes of gradients that a GPU all-reduces between nodes.

        These are the gradients of attention and of the gate.

        testbed: the cluster.
        """
        return ELEMENT_SIZE * (4 * self.M * self.M // testbed.gpus + testbed.nodes * self.M)


class Attention(NamedTuple):
    """Seconds of attention, the dense part of a layer, in forward.

    compute: seconds of the matrix products.
    all_gather, reduce_scatter: seconds of the two collectives inside the node.
    """

    compute: float
    all_gather: float
    reduce_scatter: float

    def hidden_seconds(self, one_lane: bool) -> float:
        """Returns how many seconds of an all-reduce between nodes can run beside attention's backward pass.

        one_lane: whether collectives inside the node and between nodes wait for each other. If so, the
            all-reduce can run only beside the matrix products.
        """
        return 2 * self.compute + (0 if one_lane else self.all_gather + self.reduce_scatter)


def table4() -> list[LayerConfiguration]:
    """Returns the 1,458 layers of Table 4, for Testbed B."""
    grid = itertools.product(
        (1, 2, 4), (8, 16, 32), (256, 512, 1024), (1024, 2048, 4096), (2, 3, 4), (1.2, 2.4, None),
        ("simple", "Mixtral"),
    )  # fmt: skip
    return [
        LayerConfiguration(B=B, heads=heads, L=L, M=M, H=scale * M, f=f, ffn=ffn)
        for B, heads, L, M, scale, f, ffn in grid
    ]


def num_products(layer: LayerConfiguration) -> int:
    """Returns the number of matrix products of one expert in forward. All of them have the same size."""
    return 3 if layer.ffn == "Mixtral" else 2


def product_flops(layer: LayerConfiguration, testbed: Testbed) -> float:
    """Returns the floating-point operations of one matrix product of the experts on one GPU.

    Each GPU of a node has an equal part of every expert's hidden units. So a GPU multiplies all rows that the
    node receives, but only by its own part of the hidden units.

    layer: sizes of the layer.
    testbed: the cluster.
    """
    return 2 * layer.rows * layer.M * (layer.H // testbed.gpus)


def moe_costs(layer: LayerConfiguration, testbed: Testbed = TESTBED_B) -> LayerCosts:
    """Returns the cost of each stage of the MoE layer's forward pass, from the testbed's cost lines.

    layer: sizes of the layer.
    testbed: the cluster. It has a line alpha + beta * size for the seconds of each operation.
    """
    bytes_of_node = layer.rows * layer.M * ELEMENT_SIZE
    products = num_products(layer)
    gemm = testbed.expert_gemm
    line = LineCost(products * gemm.alpha_seconds, products * gemm.beta_seconds)
    return LayerCosts(
        a2a=testbed.a2a.shared(bytes_of_node / testbed.gpus),
        ag=testbed.ag.shared(bytes_of_node),
        rs=testbed.rs.shared(bytes_of_node),
        exp=line.shared(product_flops(layer, testbed)),
    )


def attention(layer: LayerConfiguration, testbed: Testbed = TESTBED_B) -> Attention:
    """Returns the seconds of attention's forward pass on a testbed.

    The backward pass of attention computes twice as long, and sends the same number of bytes.

    layer: sizes of the layer.
    testbed: the cluster. It has a line alpha + beta * size for the seconds of each operation.
    """
    share = layer.M // testbed.gpus
    products = (
        2 * layer.tokens * layer.M * 3 * share,  # queries, keys, values
        2 * layer.tokens * layer.L * share,  # scores
        2 * layer.tokens * layer.L * share,  # values
        2 * layer.tokens * share * layer.M,  # output
    )
    sent = layer.tokens * layer.M * ELEMENT_SIZE
    return Attention(sum(map(testbed.gemm, products)), testbed.ag(sent), testbed.rs(sent))


# ---- Table 2: measured and modelled operations


MEASURED: Mapping[str, Mapping[str, float]] = printed("fsmoe table 2")
"""Measured milliseconds of Table 2, Testbed B, by "model direction" and operation.

Three of the four attention times of the table are missing in our text of the paper.
"""

MODELS = {name: LayerConfiguration(**row) for name, row in printed("fsmoe models").items()}


def table2() -> list[dict[str, Any]]:
    """Returns the measured and the modelled seconds of each operation in Table 2.

    The measured seconds are the paper's. The modelled seconds follow from ASSUMPTIONS. Both are for one pass
    of one layer. There is one row for each model, direction and operation.
    """
    return [
        {
            "model": model,
            "direction": direction,
            "operation": name,
            "measured_seconds": milliseconds * MS,
            "modelled_seconds": _modelled(MODELS[model], direction == "backward")[name],
        }
        for (model, direction), measured in ((case.split(), MEASURED[case]) for case in MEASURED)
        for name, milliseconds in measured.items()
    ]


def _modelled(layer: LayerConfiguration, backward: bool) -> dict[str, float]:
    """Returns {operation of Table 2: its modelled seconds in one pass of a layer} on Testbed B.

    layer: sizes of the layer.
    backward: True for the backward pass, False for the forward pass.
    """
    costs, dense = moe_costs(layer), attention(layer)
    a2a, ag, rs, exp = (costs.backward() if backward else costs).chunk(1)
    return {
        "AlltoAll": 2 * a2a,
        "AllReduce": TESTBED_B.all_reduce(layer.gradient_bytes(TESTBED_B)) if backward else 0.0,
        "AllGather": ag + dense.all_gather,
        "ReduceScatter": rs + dense.reduce_scatter,
        "Experts": exp,
        "Attention": dense.compute * (2 if backward else 1),
    }


# ---- the five systems

CONTENTION = 1.25
DEGREES = range(1, MAX_DEGREE + 1)

PAPER: Mapping[str, float] = printed("fsmoe table 5")
"""Speed-ups over Tutel that Table 5 prints for Testbed B, by system. DeepSpeed-MoE is not in the table."""
PAPER_DIFFERING = 912
"""How many of the 1,458 layers have different best numbers of chunks in the two passes (Section 2.3)."""


@dataclass(frozen=True, kw_only=True)
class SystemPlan:
    """A system's decisions about one layer: numbers of chunks, and when gradients are all-reduced.

    one_lane: whether collectives inside the node and between nodes wait for each other.
    forward, backward: number of chunks of each pass. With 0, tasks run one after another, without overlap.
    moe_bytes: bytes of gradients that are all-reduced during the MoE layer's backward pass.
    dense_bytes: bytes of gradients that are all-reduced during attention's backward pass.
    end_bytes: bytes of gradients that are all-reduced after the backward pass.
    """

    one_lane: bool
    forward: int
    backward: int
    moe_bytes: int = 0
    dense_bytes: int = 0
    end_bytes: int = 0


def tutel_degree(costs: LayerCosts) -> int:
    """Returns the number of chunks with which both passes together are fastest in Tutel's schedule.

    In this schedule, all collectives run one after another. Both passes have the same number of chunks.

    costs: seconds of the stages of the MoE layer's forward pass.
    """
    forward_options = papers_schedule("forward", True)
    backward_options = papers_schedule("backward", True)
    return min(
        DEGREES,
        key=lambda n: (
            pass_seconds(costs, n, forward_options) + pass_seconds(costs.backward(), n, backward_options)
        ),
    )


@functools.cache
def plans(layer: LayerConfiguration) -> dict[str, SystemPlan]:
    """Returns {name of a system: its decisions for a layer on Testbed B}.

    A lane is computation, collectives inside the node, or collectives between nodes. The systems measure each
    lane by itself, so their decisions do not consider that collectives slow each other.

    layer: sizes of the layer.
    """
    costs = moe_costs(layer)
    total = layer.gradient_bytes(TESTBED_B)
    dense = attention(layer)
    tutel = tutel_degree(costs)
    plan_of = {
        "DeepSpeed-MoE": SystemPlan(one_lane=True, forward=0, backward=0, end_bytes=total),
        "Tutel": SystemPlan(one_lane=True, forward=tutel, backward=tutel, end_bytes=total),
        "Tutel-Improved": SystemPlan(one_lane=True, forward=tutel, backward=tutel, dense_bytes=total),
    }
    for name, one_lane in (("FSMoE-No-IIO", True), ("FSMoE", False)):
        forward, degrees = best_degrees(costs, one_lane)
        seconds = dense.hidden_seconds(one_lane)
        part = partition(
            [GeneralizedLayer(degrees=degrees, dense_seconds=seconds, gradient_bytes=0)], TESTBED_B.ar, total
        )
        (share,) = part.shares
        plan_of[name] = SystemPlan(
            one_lane=one_lane,
            forward=forward,
            backward=share.degree,
            moe_bytes=share.moe_bytes,
            dense_bytes=share.dense_bytes,
            end_bytes=part.end_bytes,
        )
    return plan_of


@functools.cache
def plan_seconds(layer: LayerConfiguration, plan: SystemPlan, contention: float = 1.0) -> float:
    """Returns the seconds of both passes of one layer on Testbed B, if a system runs the layer.

    A layer is attention and an MoE layer.

    layer: sizes of the layer.
    plan: what the system decides: the numbers of chunks, and when gradients are all-reduced.
    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run; 1 for none.
    """
    costs, dense = moe_costs(layer), attention(layer)
    end = TESTBED_B.all_reduce(plan.end_bytes)
    if not plan.forward:
        return sequential_seconds(costs, dense) + end
    t_gar, t_ar = TESTBED_B.all_reduce(plan.moe_bytes), TESTBED_B.all_reduce(plan.dense_bytes)
    seconds = forward_seconds(costs, dense, plan.forward, plan.one_lane, contention)
    return (
        seconds + backward_seconds(costs, dense, plan.backward, plan.one_lane, t_gar, t_ar, contention) + end
    )


def sequential_seconds(costs: LayerCosts, dense: Attention) -> float:
    """Returns the seconds of both passes of a layer in one chunk, if tasks run one after another.

    costs: seconds of the stages of the MoE layer's forward pass.
    dense: seconds of attention's forward pass.
    """
    a2a, ag, rs, exp = costs.chunk(1)
    moe = 4 * a2a + 2 * (ag + rs) + exp + costs.backward().exp(1)
    return moe + 3 * dense.compute + 2 * (dense.all_gather + dense.reduce_scatter)


def forward_seconds(
    costs: LayerCosts, dense: Attention, n: int, one_lane: bool, contention: float = 1.0
) -> float:
    """Returns the simulated seconds of the forward pass of a layer (attention and an MoE layer).

    costs: seconds of the stages of the MoE layer's forward pass.
    dense: seconds of attention's forward pass.
    n: number of chunks of the MoE layer.
    one_lane: whether collectives inside the node and between nodes wait for each other.
    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run.
    """
    options = papers_schedule("forward", one_lane)
    return dense.compute + dense.all_gather + dense.reduce_scatter + _pass(costs, n, options, 0.0, contention)


def backward_seconds(
    costs: LayerCosts,
    dense: Attention,
    n: int,
    one_lane: bool,
    t_gar: float,
    t_ar: float,
    contention: float = 1.0,
) -> float:
    """Returns the simulated seconds of the backward pass of a layer (attention and an MoE layer).

    costs: seconds of the stages of the MoE layer's forward pass.
    dense: seconds of attention's forward pass.
    n: number of chunks of the MoE layer.
    one_lane: whether collectives inside the node and between nodes wait for each other.
    t_gar: seconds of the all-reduce of gradients that runs during the MoE layer's backward pass.
    t_ar: seconds of the all-reduce of gradients that runs during attention's backward pass.
    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run.
    """
    seconds = _pass(costs.backward(), n, papers_schedule("backward", one_lane), t_gar, contention)
    return seconds + _dense_backward(dense, t_ar, one_lane, contention)


def papers_schedule(direction: PassDirection, one_lane: bool) -> ScheduleOptions:
    """Returns the options with which pmoe builds the schedule of the FSMoE paper.

    In this schedule, each chunk of a backward pass has one task for all gradients of the experts.

    direction: "forward" or "backward".
    one_lane: whether collectives inside the node and between nodes wait for each other.
    """
    return ScheduleOptions(direction=direction, one_lane=one_lane, wgrad_share=0.0)


@functools.cache
def best_degrees(costs: LayerCosts, one_lane: bool) -> tuple[int, tuple[DegreeSeconds, ...]]:
    """Returns the best number of chunks in forward, and the seconds of backward for each number of chunks.

    costs: seconds of the stages of the MoE layer's forward pass.
    one_lane: whether collectives inside the node and between nodes wait for each other.
    """
    options = papers_schedule("forward", one_lane)
    forward = min(DEGREES, key=lambda n: pass_seconds(costs, n, options))
    return forward, simulated_degrees(costs.backward(), papers_schedule("backward", one_lane), DEGREES)


@functools.cache
def _pass(costs: LayerCosts, n: int, options: ScheduleOptions, t_gar: float, contention: float) -> float:
    """Returns the simulated seconds of a pass of an MoE layer in n chunks, if collectives slow each other.

    costs: seconds of the stages of this pass.
    n: number of chunks.
    options: the direction of the pass, and options of its schedule.
    t_gar: seconds of an all-reduce of gradients that runs during this pass; 0 for none.
    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run.
    """
    seconds = stage_seconds(costs, n, options, t_gar)
    return makespan(simulate_slowed(options.schedule(n).tasks, seconds, _contended_speeds(contention)))


@functools.cache
def _dense_backward(dense: Attention, t_ar: float, one_lane: bool, contention: float) -> float:
    """Returns the simulated seconds of attention's backward pass while gradients are all-reduced.

    Attention runs an all-gather, its computation and a reduce-scatter, one after another. If all collectives
    share one lane (queue), the all-reduce of gradients can only run beside the computation, not beside the
    all-gather or the reduce-scatter.

    dense: seconds of attention's forward pass.
    t_ar: seconds of the all-reduce of gradients.
    one_lane: whether collectives inside the node and between nodes share one lane.
    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run.
    """
    tasks = [
        make_task(Kind.ALL_GATHER, -1, ["dT"], ["gathered"]),
        make_task(Kind.GRADIENTS, -1, [], ["gradients"]),
        make_task(Kind.COMPUTE, -1, ["gathered"], ["partial"]),
        make_task(Kind.REDUCE_SCATTER, -1, ["partial"], ["sum"]),
    ]
    seconds = task_seconds(
        {
            Kind.ALL_GATHER: dense.all_gather,
            Kind.GRADIENTS: t_ar,
            Kind.COMPUTE: 2 * dense.compute,
            Kind.REDUCE_SCATTER: dense.reduce_scatter,
        }
    )
    schedule = finished("backward", tasks, Stages(local=False, remote=True, one_lane=one_lane))
    return makespan(simulate_slowed(schedule.tasks, seconds, _contended_speeds(contention)))


def _contended_speeds(contention: float) -> Callable[[frozenset[str]], Mapping[str, float]]:
    """Returns a function from the set of busy lanes to the speed of each lane, for `simulate_slowed`.

    A lane is a queue of tasks. There is one for collectives between nodes and one for collectives inside the
    node. While both are busy, each has the speed 1 / contention. Otherwise all lanes have the speed 1 (see
    ASSUMPTIONS).
    """
    lanes = (Lane.COMMUNICATE, Lane.INTRA_NODE)
    both: Mapping[str, float] = dict.fromkeys(lanes, 1 / contention)
    return lambda busy: both if busy.issuperset(lanes) else {}


# ---- the table


@functools.cache
def planned() -> list[tuple[LayerConfiguration, Mapping[str, SystemPlan]]]:
    """Returns the layers of Table 4, each with {name of a system: its decisions for the layer}.

    The number of attention heads changes no cost. So every layer gets one head here: layers that differed
    only in heads are then equal, and share one cached result.
    """
    return [
        (layer, plans(layer)) for layer in (replace(configuration, heads=1) for configuration in table4())
    ]


def speed_ups(contention: float) -> list[dict[str, Any]]:
    """Returns the rows of Table 5 for one value of ``contention``: a row for each system.

    A row has these fields:

        system                   the name of the system
        C                        the value of ``contention``
        mean, smallest, largest  mean, smallest and largest speed-up over Tutel among all layers
        paper                    the mean that the paper prints; None for DeepSpeed-MoE

    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run; 1 for none.
    """
    seconds = {
        name: [plan_seconds(layer, plan[name], contention) for layer, plan in planned()]
        for name in planned()[0][1]
    }
    rows = []
    for name, own_seconds in seconds.items():
        ratios = [tutel / own for tutel, own in zip(seconds["Tutel"], own_seconds, strict=True)]
        spread = {"mean": statistics.fmean(ratios), "smallest": min(ratios), "largest": max(ratios)}
        rows.append({"system": name, "C": contention, **spread, "paper": PAPER.get(name)})
    return rows


def differing_degrees() -> dict[str, int]:
    """Counts the layers whose best number of chunks in forward differs from that in backward.

    The result has these entries:

    layers             number of all layers
    differing          number of layers with two different numbers of chunks, if gradients are all-reduced in
                       backward, as in FSMoE
    without gradients  the same number, if no gradients are all-reduced in backward
    paper              the number in the paper
    """
    degrees_of_layers = [best_degrees(moe_costs(layer), False) for layer, _ in planned()]
    return {
        "layers": len(degrees_of_layers),
        "differing": sum(plan["FSMoE"].forward != plan["FSMoE"].backward for _, plan in planned()),
        "without gradients": sum(
            min(backward, key=lambda option: option.alone).degree != forward
            for forward, backward in degrees_of_layers
        ),
        "paper": PAPER_DIFFERING,
    }


def tables(contention: float = CONTENTION) -> dict[str, list[dict[str, Any]]]:
    """Returns the tables for Tables 2 and 5 that `pmoe simulate fsmoe` prints, by name.

    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run. The table for Table 5 has the results for 1 (no slow-down) and for this number.
    """
    systems = [*speed_ups(1.0), *speed_ups(contention)]
    return {"systems": systems, "degrees": [differing_degrees()], "table2": table2()}

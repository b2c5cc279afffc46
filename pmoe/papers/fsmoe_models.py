"""Simulates FSMoE's Figs. 6 to 8: training steps of whole models by six systems.

A model is a number of equal layers, each with attention and MoE. The costs, numbers of chunks and schedules
of one layer are those of Table 5 (`pmoe.papers.fsmoe_table5`). The systems all-reduce the gradients of the
layers at different times:

    DeepSpeed-MoE, Tutel    after the backward pass
    Tutel-Improved          gradients of a layer during attention of the next layer of the backward pass
    PipeMoE+Lina            in pieces of 30 MB, each during the next experts or attention of the backward pass
    FSMoE, FSMoE-No-IIO     during the layers that FSMoE's gradient partition chooses (Section 5, `partition`)

Letters: L tokens of a sample, M = d_model, H = d_hidden, n chunks.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pmoe.papers.assumptions import printed
from pmoe.papers.fsmoe_table5 import (
    CONTENTION,
    ELEMENT_SIZE,
    MS,
    TESTBED_B,
    Attention,
    LayerConfiguration,
    Testbed,
    attention,
    backward_seconds,
    best_degrees,
    forward_seconds,
    moe_costs,
    num_products,
    product_flops,
    sequential_seconds,
    testbed_of_lines,
    tutel_degree,
)
from pmoe.planner.costs import GeneralizedLayer, LayerCosts, LineCost
from pmoe.planner.degree_search import ScheduleOptions, simulated_degrees
from pmoe.planner.gradient_partition import partition

# ---- testbeds


def by_table2(testbed: Testbed, layer: LayerConfiguration, measured: Mapping[str, float]) -> Testbed:
    """Returns a testbed whose cost lines give the seconds that Table 2 lists for a layer.

    A cost line is seconds = alpha + beta * size. The new testbed has other betas for collectives and for the
    experts' products. Everything else is taken from the old testbed.

    testbed: the old testbed, with the lines of Fig. 5.
    layer: the layer of Table 2.
    measured: milliseconds of each operation in a forward pass, and of the all-reduce in a backward pass.
    """
    of_node = layer.rows * layer.M * ELEMENT_SIZE
    of_attention = layer.tokens * layer.M * ELEMENT_SIZE
    products = num_products(layer)

    def through(line: LineCost, operation: str, times: int, size: float) -> LineCost:
        """Returns ``line`` with another beta, so that it gives the seconds of an operation in Table 2.

        The new beta is (seconds in Table 2 - times * alpha) / size.

        line: the line of one operation, seconds = alpha + beta * size.
        operation: name of the operation in ``measured``.
        times: number of runs of the operation to which the seconds in Table 2 belong.
        size: size of these runs together, in bytes or floating-point operations.
        """
        seconds = measured[operation] * MS - times * line.alpha_seconds
        return LineCost(line.alpha_seconds, seconds / size)

    return replace(
        testbed,
        a2a=through(testbed.a2a, "AlltoAll", 2, 2 * of_node / testbed.gpus),
        ag=through(testbed.ag, "AllGather", 2, of_node + of_attention),
        rs=through(testbed.rs, "ReduceScatter", 2, of_node + of_attention),
        ar=through(testbed.ar, "AllReduce", 1, layer.gradient_bytes(testbed)),
        expert_gemm=through(
            testbed.expert_gemm, "Experts", products, products * product_flops(layer, testbed)
        ),
    )


def on_nodes(testbed: Testbed, nodes: int) -> Testbed:
    """Returns a testbed with another number of nodes.

    In a collective between nodes, the fraction (nodes - 1) / nodes of the bytes leaves its node. The seconds
    per byte (beta) of these collectives are proportional to this fraction.

    testbed: the testbed.
    nodes: the new number of nodes.
    """
    scale = (nodes - 1) / nodes * testbed.nodes / (testbed.nodes - 1)
    slower = {
        name: LineCost(line.alpha_seconds, scale * line.beta_seconds)
        for name, line in (("a2a", testbed.a2a), ("ar", testbed.ar))
    }
    return replace(testbed, nodes=nodes, a2a=slower["a2a"], ar=slower["ar"])


def _of_table2(testbed: Testbed, key: str) -> Testbed:
    """Returns a testbed with the costs that Table 2 lists for the model Mixtral-7B.

    Table 2 has a smaller model, too (GPT2-XL), which is not used here.

    testbed: the testbed from which everything else is taken.
    key: name of the numbers of Table 2 in printed.json.
    """
    layer = LayerConfiguration(**printed("fsmoe models")["Mixtral-7B"])
    return by_table2(testbed, layer, printed(key))


TESTBEDS: Mapping[str, Testbed] = {
    "A, Table 2": _of_table2(
        testbed_of_lines(6, 8, printed("fsmoe figure 5, testbed A")), "fsmoe table 2, Mixtral-7B, testbed A"
    ),
    "B, Table 2": _of_table2(TESTBED_B, "fsmoe table 2, Mixtral-7B, testbed B"),
    "B, Fig. 5": TESTBED_B,
}
"""The testbeds, by the paper's letter and the table or figure from which the costs are taken."""

# ---- systems


class WholeModel(NamedTuple):
    """A language model with an MoE layer in every block.

    layers: number of blocks.
    M, H: d_model and d_hidden.
    ffn: the kind of experts: "simple" with two matrix products, or "Mixtral" with three.
    """

    layers: int
    M: int
    H: int
    ffn: str

    def layer(self, tokens: int) -> LayerConfiguration:
        """Returns one layer of the model, for one sample (Section 6.4).

        tokens: number of tokens of the sample.
        """
        return LayerConfiguration(B=1, heads=1, L=tokens, M=self.M, H=self.H, f=1.2, ffn=self.ffn)


MODELS: Mapping[str, WholeModel] = {
    name: WholeModel(**sizes) for name, sizes in printed("fsmoe whole models").items()
}


class ModelStep(NamedTuple):
    """Seconds of a training step of a model.

    passes: seconds of the forward and the backward pass, without the all-reduces of gradients.
    gradients: seconds that the all-reduces of gradients add to the backward pass.
    """

    passes: float
    gradients: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step, with the all-reduces of gradients."""
        return self.passes + self.gradients

    def staged(self, stages: int, micro_batches: int) -> float:
        """Returns the seconds of a step with pipeline parallelism by GPipe.

        This object has the seconds of one pipeline stage for one micro-batch. All stages take equally long.
        The gradients are all-reduced once, with the last micro-batch.

        stages: number of pipeline stages.
        micro_batches: number of micro-batches of a step.
        """
        return (micro_batches + stages - 1) * self.passes + self.gradients


LINA_BYTES = 30_000_000
"""Bytes of the pieces in which Lina all-reduces gradients; the size is fixed (Section 6.4)."""


@functools.cache
def model_steps(
    model: WholeModel, tokens: int, testbed: Testbed, contention: float = CONTENTION
) -> dict[str, ModelStep]:
    """Returns {name of a system: seconds of a training step of the model}.

    model: sizes of the model.
    tokens: number of tokens of a sample. Each node has one sample.
    testbed: the cluster.
    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run.
    """
    layer = model.layer(tokens)
    costs = moe_costs(layer, testbed)
    dense = attention(layer, testbed)
    gradient_bytes = layer.gradient_bytes(testbed)
    whole = testbed.all_reduce(model.layers * gradient_bytes)
    n = tutel_degree(costs)
    alone = backward_seconds(costs, dense, n, True, 0.0, 0.0)
    one_lane = model.layers * (forward_seconds(costs, dense, n, True) + alone)
    beside_attention = (
        backward_seconds(costs, dense, n, True, 0.0, testbed.all_reduce(gradient_bytes)) - alone
    )
    improved = (model.layers - 1) * beside_attention + testbed.all_reduce(gradient_bytes)
    steps = {
        "DeepSpeed-MoE": ModelStep(model.layers * sequential_seconds(costs, dense), whole),
        "Tutel": ModelStep(one_lane, whole),
        "Tutel-Improved": ModelStep(one_lane, improved),
        "PipeMoE+Lina": ModelStep(
            one_lane, lina_seconds(model.layers, costs, dense, n, testbed, gradient_bytes)
        ),
    }
    for name, lane, slowed in (("FSMoE-No-IIO", True, 1.0), ("FSMoE", False, contention)):
        steps[name] = _partitioned(model.layers, costs, dense, lane, testbed, gradient_bytes, slowed)
    return steps


def lina_seconds(
    layers: int, costs: LayerCosts, dense: Attention, n: int, testbed: Testbed, gradient_bytes: int
) -> float:
    """Returns the seconds that all-reduces of gradients add to a backward pass with Lina's fixed pieces.

    A piece is a fixed number of gradient bytes (`LINA_BYTES`). The link between nodes is idle while experts
    or attention are computed. A piece whose bytes are all computed starts its all-reduce when the link is
    idle. It is always reduced as a whole, even if this takes longer than the link is idle. Gradients that are
    not reduced during the pass are reduced after it.

    layers: number of layers.
    costs: seconds of the stages of an MoE layer's forward pass.
    dense: seconds of attention's forward pass.
    n: number of chunks of an MoE layer.
    testbed: the cluster.
    gradient_bytes: bytes of the gradients of each layer.
    """
    piece = testbed.all_reduce(LINA_BYTES)
    options = ScheduleOptions(direction="backward", one_lane=True, wgrad_share=0.0)
    (moe,) = simulated_degrees(costs.backward(), options, [n])
    alone = backward_seconds(costs, dense, n, True, 0.0, 0.0)
    added = 0.0
    sent = 0
    for before in range(layers):
        counts = []
        for idle in (moe.alone - moe.beside, dense.hidden_seconds(one_lane=True)):
            ready = (before * gradient_bytes - sent) // LINA_BYTES
            counts.append(min(ready, math.ceil(max(idle, 0.0) / piece)))
            sent += counts[-1] * LINA_BYTES
        t_gar, t_ar = (count * piece for count in counts)
        added += backward_seconds(costs, dense, n, True, t_gar, t_ar) - alone
    whole, rest = divmod(layers * gradient_bytes - sent, LINA_BYTES)
    return added + whole * piece + testbed.all_reduce(rest)


def _partitioned(
    layers: int,
    costs: LayerCosts,
    dense: Attention,
    one_lane: bool,
    testbed: Testbed,
    gradient_bytes: int,
    contention: float,
) -> ModelStep:
    """Returns the seconds of a step if FSMoE's partition distributes gradients over layers (Section 5).

    The partition says during which layer's backward pass each gradient is all-reduced.

    layers: number of layers.
    costs: seconds of the stages of an MoE layer's forward pass.
    dense: seconds of attention's forward pass.
    one_lane: whether collectives inside the node and between nodes wait for each other.
    testbed: the cluster.
    gradient_bytes: bytes of the gradients of each layer.
    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run. The partition is always computed for the factor 1, as in Table 5.
    """
    forward, degrees = best_degrees(costs, one_lane)
    generalized = GeneralizedLayer(
        degrees=degrees, dense_seconds=dense.hidden_seconds(one_lane), gradient_bytes=gradient_bytes
    )
    gradient_partition = partition([generalized] * layers, testbed.ar)
    best = generalized.best(0.0).degree
    alone = backward_seconds(costs, dense, best, one_lane, 0.0, 0.0, contention)
    backward = sum(
        backward_seconds(
            costs,
            dense,
            share.degree,
            one_lane,
            testbed.all_reduce(share.moe_bytes),
            testbed.all_reduce(share.dense_bytes),
            contention,
        )
        for share in gradient_partition.shares
    )
    passes = layers * (forward_seconds(costs, dense, forward, one_lane, contention) + alone)
    return ModelStep(passes, backward - layers * alone + testbed.all_reduce(gradient_partition.end_bytes))


# ---- figures

STAGES = 2
MICRO_BATCHES = 4


def _row(case: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Returns one row of a figure: the fields of ``case``, and each system's speed-up over DeepSpeed-MoE.

    case: the names and numbers by which the rows of the figure differ, such as the model.
    seconds: {name of a system: seconds of a step}.
    """
    slowest = seconds["DeepSpeed-MoE"]
    return {
        **case,
        **{name: slowest / own_seconds for name, own_seconds in seconds.items() if name != "DeepSpeed-MoE"},
    }


def _seconds(steps: Mapping[str, ModelStep]) -> dict[str, float]:
    return {name: step.seconds for name, step in steps.items()}


def figure6(contention: float = CONTENTION) -> list[dict[str, Any]]:
    """Returns the speed-ups of Fig. 6 over DeepSpeed-MoE: a row for each testbed and model.

    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run.
    """
    rows = []
    for (name, testbed), model in itertools.product(TESTBEDS.items(), MODELS):
        layers, tokens = printed("fsmoe figure 6")[name[0]].get(model, (0, 0))
        if layers:
            sizes = MODELS[model]._replace(layers=layers)
            steps = model_steps(sizes, tokens, testbed, contention)
            rows.append(_row({"testbed": name, "model": model}, _seconds(steps)))
    return rows


def figure7(contention: float = CONTENTION) -> list[dict[str, Any]]:
    """Returns the speed-ups of Fig. 7 over DeepSpeed-MoE on Testbed A.

    There is a row for each number of tokens of a sample (L), number of GPUs, and model.

    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run.
    """
    testbed = TESTBEDS["A, Table 2"]
    settings = [(512, 48), (1024, 48), (2048, 48), (1024, 16), (1024, 32)]
    rows = []
    for (tokens, gpus), model in itertools.product(settings, _models_of_a()):
        smaller = on_nodes(testbed, gpus // testbed.gpus)
        steps = model_steps(_models_of_a()[model], tokens, smaller, contention)
        rows.append(_row({"L": tokens, "GPUs": gpus, "model": model}, _seconds(steps)))
    return rows


def figure8(contention: float = CONTENTION) -> list[dict[str, Any]]:
    """Returns the speed-ups of Fig. 8 over DeepSpeed-MoE on Testbed A, with two pipeline stages (GPipe).

    There is a row for each model.

    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run.
    """
    testbed = on_nodes(TESTBEDS["A, Table 2"], 6 // STAGES)
    rows = []
    for name, model in _models_of_a().items():
        stage = model._replace(layers=model.layers // STAGES)
        steps = model_steps(stage, 1024, testbed, contention)
        seconds = {system: step.staged(STAGES, MICRO_BATCHES) for system, step in steps.items()}
        rows.append(_row({"model": name}, seconds))
    return rows


def _models_of_a() -> dict[str, WholeModel]:
    """Returns the models of Fig. 6 by name, with the numbers of layers that they have on Testbed A."""
    layers = printed("fsmoe figure 6")["A"]
    return {name: MODELS[name]._replace(layers=number) for name, (number, _) in layers.items()}


def means(figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yields FSMoE's mean speed-ups: a row for each figure and each system to which FSMoE is compared.

    In a row, "over" is the system, "here" the simulated mean, and "paper" the mean that the paper prints.

    figures: the rows of each figure, by the figure's name in printed.json, such as "8" or "6, A and B".
    """
    for figure, rows in figures.items():
        for system, paper in printed(f"fsmoe figure {figure}, means").items():
            ratios = [row["FSMoE"] / row.get(system, 1.0) for row in rows]
            yield {"figure": figure, "over": system, "here": statistics.fmean(ratios), "paper": paper}


def tables(contention: float = CONTENTION) -> dict[str, list[dict[str, Any]]]:
    """Returns the tables of Figs. 6 to 8 that `pmoe simulate fsmoe` prints, by name.

    contention: a collective inside the node and a collective between nodes slow each other by this factor
        while both run.
    """
    six, seven, eight = figure6(contention), figure7(contention), figure8(contention)
    by_figure = {"6, A and B": [row for row in six if row["testbed"] != "B, Fig. 5"]}
    for tokens, gpus in ((512, 48), (1024, 48), (2048, 48), (1024, 16), (1024, 32)):
        by_figure[f"7, L = {tokens}, P = {gpus}"] = [
            row for row in seven if (row["L"], row["GPUs"]) == (tokens, gpus)
        ]
    by_figure["8"] = eight
    return {"figure6": six, "figure7": seven, "figure8": eight, "means": list(means(by_figure))}

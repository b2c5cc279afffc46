"""Simulated training steps of large models on many ranks, from stated rates and real schedules.

In every all-to-all, all ranks wait for the slowest rank. So only the slowest rank is simulated: the one with
the most popular experts. In every layer it has the most rows to send, to receive and to multiply. The command
`pmoe simulate scale --assumptions` prints all assumptions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import torch

from pmoe.planner.cluster import Cluster
from pmoe.planner.costs import LineCost
from pmoe.planner.degree import Choice
from pmoe.planner.layer_seconds import even_task_costs
from pmoe.planner.layer_sizes import LayerSizes, sizes_from_options
from pmoe.planner.priced_choices import bound
from pmoe.planner.simulator import makespan, simulate, task_seconds
from pmoe.schedule.restore import STRATEGIES
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.tasks import Kind, PassDirection, Stages

DEGREES = (1, 4, 8)
"""Numbers of chunks (n) to choose from."""

TOKENS = 8192
"""Tokens of a rank in weak scaling, and the most that a rank has in one forward and backward pass."""

BATCH = 4_194_304
"""Tokens of all ranks together in strong scaling."""

S4 = STRATEGIES["S4"]

SLACK = 1.25
"""Rows that fit into a ring slot, divided by the rows of a chunk under even routing.

A ring slot is a buffer that chunks use in turn.
"""

ELEMENT = 2
"""Bytes of an element: bfloat16."""

OPTIMIZER = 12
"""Bytes of optimizer state for each parameter."""

LIMITS = ("all-to-alls", "gradients", "launches")
"""Costs that may limit scaling.

Each is set to 0 in turn (`ScaledStep.free`), to see how much it adds to a step.
"""


@dataclass(frozen=True, kw_only=True)
class ScaledModel:
    """Sizes of a language model with MoE layers.

    layer: sizes and options of each MoE layer, as {name: value} of arguments of `sizes_from_options`.
    layers: number of MoE layers.
    dense: number of parameters outside of routed experts.
    dense_products: number of multiply-adds outside of routed experts, for one token.
    """

    layer: dict[str, Any]
    layers: int
    dense: int
    dense_products: int


@dataclass(frozen=True, kw_only=True)
class ScaledStep:
    """A training step to simulate.

    model: sizes of the model.
    rates: the cluster: its machines, and the rates of their devices and links. Only the busiest rank of the
        cluster is simulated, because all other ranks wait for it.
    tokens: tokens of a rank in one forward and backward pass.
    n: number of chunks of each pass.
    passes: number of forward and backward passes of a step. The step sums the gradients of all of them.
    skew: how uneven the routing is. An expert's share of the rows is proportional to exp(skew z), with a
        normally distributed z for each expert. With 0 the routing is even.
    free: name of a cost that is set to 0, one of `LIMITS`; "" for none.
    """

    model: ScaledModel
    rates: Cluster
    tokens: int
    n: int
    passes: int
    skew: float = 0.3
    free: str = ""

    @cached_property
    def sizes(self) -> LayerSizes:
        """Sizes of one MoE layer, on the ranks that share its experts.

        If there are fewer ranks than experts, the experts are divided among all ranks. Otherwise each rank
        holds one expert. The ranks then form groups, and the ranks of each group together hold all experts.
        """
        sharing = min(self.rates.num_ranks, self.model.layer["num_experts"])
        place: dict[str, Any] = {"num_ranks": sharing, "device_type": "cuda", "dtype": torch.bfloat16}
        return sizes_from_options(**self.model.layer, **place)

    @cached_property
    def busiest_tokens(self) -> int:
        """The number of tokens of a rank with which the simulation of a layer runs, instead of `tokens`.

        The simulation assumes even routing. With this number of tokens, every rank then receives as many rows
        as the busiest rank does with `tokens` tokens and skewed routing.
        """
        z = np.random.default_rng(0).standard_normal(self.sizes.num_experts)
        shares = np.exp(self.skew * z).reshape(self.sizes.num_ranks, -1).sum(1)
        return math.ceil(self.tokens * self.sizes.num_ranks * float(shares.max() / shares.sum()))

    @cached_property
    def seconds(self) -> float:
        """Seconds of all passes of the step. The last backward pass also all-reduces the gradients."""
        rates = self.rates
        sharing = self.sizes.num_ranks
        if self.free == "launches":
            rates = replace(rates, compute=replace(rates.compute, alpha_seconds=0.0))
        group = replace(rates, machines=math.ceil(sharing / rates.ranks_per_machine))
        profile = group.profile("flat", 1, "bfloat16")
        costs = even_task_costs(self.sizes, profile, self.busiest_tokens, self.n)
        counts = profile.message(4 * self.n * self.sizes.num_experts)
        if self.free == "all-to-alls":
            costs[Kind.DISPATCH] = costs[Kind.WEIGHTS] = counts = 0.0
        gradients = self._gradient_seconds() * (self.free != "gradients")
        dense = self.tokens * self.model.dense_products / self.model.layers * rates.compute.beta_seconds

        def of_pass(gradients: float) -> float:
            seconds_of_task = task_seconds(costs | {Kind.GRADIENTS: gradients})
            stages = Stages(local=True, remote=True, gradients=True)
            both_passes = (
                rotating(direction, self.n, stages, restore=S4).tasks for direction in get_args(PassDirection)
            )
            layer = (
                sum(makespan(simulate(tasks, seconds_of_task)) for tasks in both_passes) + 4 * dense + counts
            )
            return self.model.layers * layer + gradients

        return of_pass(gradients) + (self.passes - 1) * of_pass(0.0)

    def _gradient_seconds(self) -> float:
        """Returns the seconds of all-reducing the gradients of one layer.

        Gradients outside of experts are reduced by a ring all-reduce inside each machine and another one
        between machines. Gradients of experts are reduced among the ranks that hold the same experts.
        """

        def ring(num_bytes: float, ranks: int, link: LineCost) -> float:
            sent = num_bytes * (ranks - 1) / ranks * link.beta_seconds
            return 2 * (sent + math.log2(ranks) * link.alpha_seconds)

        rates = self.rates
        local = self.rates.ranks_per_machine
        dense = ELEMENT * self.model.dense / self.model.layers
        experts = ELEMENT * self.sizes.expert_parameters
        inside, between = ring(dense, local, rates.inside), ring(dense / local, rates.machines, rates.outside)
        return inside + between + ring(experts, rates.num_ranks // self.sizes.num_ranks, rates.outside)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the busiest rank.

        The peak is the sum of

        - parameters and gradients,
        - the rank's part of the optimizer's state,
        - the tensors that all layers save for backward, and
        - the memory that one layer needs in addition while it runs.

        By assumption, the rank sends as many rows as it receives.
        """
        layers = self.model.layers
        ranks = self.rates.num_ranks
        even = replace(self.sizes, num_ranks=1, bypass_local=False)
        choice = Choice(forward=self.n, backward=self.n, restore=S4)
        memory = bound(even, even.call(self.busiest_tokens), choice, SLACK)
        experts = layers * self.sizes.expert_parameters
        dense = self.model.dense
        states = 2 * ELEMENT * (dense + experts)
        states += OPTIMIZER * (dense // ranks + experts * self.sizes.num_ranks // ranks)
        saved = memory.saved + self.tokens * self.sizes.d_model * ELEMENT
        return states + layers * saved + memory.promised - memory.saved


def slowed(step: ScaledStep, link: str, times: float) -> ScaledStep:
    """Returns the step on a cluster in which one cost is higher.

    step: the step.
    link: name of the cost in `Cluster`, such as "compute", or "outside" for the link between machines.
    times: the number by which the seconds of this cost are multiplied.
    """
    line: LineCost = getattr(step.rates, link)
    slower: Any = {link: LineCost(times * line.alpha_seconds, times * line.beta_seconds)}
    return replace(step, rates=replace(step.rates, **slower))


def scaling(models: Mapping[str, ScaledModel], rates: Cluster, *, strong: bool) -> list[dict[str, Any]]:
    """Simulates models on 1, 2, 4, ..., 512 machines: a row for each model and number of machines.

    The text "columns" in assumptions.md explains the fields of a row.

    models: models by name.
    rates: the cluster. Its number of machines is replaced.
    strong: True for strong scaling, with `BATCH` tokens of all ranks together on any number of machines.
        False for weak scaling, with `TOKENS` tokens on each rank.
    """
    rows = []
    for (name, model), i in itertools.product(models.items(), range(10)):
        cluster = replace(rates, machines=1 << i)
        per_rank = BATCH // cluster.num_ranks if strong else TOKENS
        passes = max(1, per_rank // TOKENS)
        tokens = per_rank // passes
        steps = [ScaledStep(model=model, rates=cluster, tokens=tokens, n=n, passes=passes) for n in DEGREES]
        step = min(steps, key=lambda step: step.seconds)
        without = {free: replace(step, free=free).seconds for free in LIMITS}
        without["skew"] = replace(step, skew=0.0).seconds
        waits_for = min(without, key=without.__getitem__)
        rows.append(
            {
                "model": name,
                "ranks": cluster.num_ranks,
                "n": step.n,
                "seconds": step.seconds,
                "even_seconds": without["skew"],
                "lossy_seconds": slowed(step, "outside", 1.61).seconds,
                "ktokens/s": passes * tokens * cluster.num_ranks / step.seconds / 1e3,
                **{
                    f"slow n={candidate.n}": slowed(candidate, "compute", 2).seconds / candidate.seconds
                    for candidate in steps
                },
                "GiB": step.peak_bytes / 2**30,
                "waits for": waits_for,
                "%": round(100 * (1 - without[waits_for] / step.seconds)),
            }
        )
    return rows


def scaling_ends(rows: Sequence[Mapping[str, Any]], *, strong: bool) -> dict[str, Mapping[str, Any]]:
    """Returns, for each model, the first row in which the throughput is too low. Its scaling ends there.

    Throughput is the number of tokens per second. In strong scaling it is too low if it is less than 1.5
    times the throughput with half the machines. In weak scaling it is too low if the throughput of each
    machine is less than half of that in the first row. If the throughput of a model is never too low, the
    result has no entry for it.

    rows: the result of `scaling`.
    strong: True if the rows are of strong scaling, False if they are of weak scaling.
    """
    ends: dict[str, Mapping[str, Any]] = {}
    for previous, row in itertools.pairwise(rows):
        first = next(candidate for candidate in rows if candidate["model"] == row["model"])
        half_of_linear = first["ktokens/s"] * row["ranks"] / first["ranks"] / 2
        if row is not first and row["ktokens/s"] < (
            1.5 * previous["ktokens/s"] if strong else half_of_linear
        ):
            ends.setdefault(row["model"], row)
    return ends

"""Replaces the plans of a compiled model's graphs by others, so that each plan can be measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pmoe.comm.ranks import Ranks
from pmoe.graph import run
from pmoe.graph.explain import PassSeconds
from pmoe.graph.plan import RangePlan
from pmoe.graph.ranges import lags, whole_ranges


class Runner(run.GraphRunner):
    """A `GraphRunner` whose plan can be replaced after the first step.

    `RUNNERS` has those of the model that was compiled last, one for each direction.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.traced: dict[str, Any] = {}
        RUNNERS[self.program.key[0]] = self

    def _first_step(self, ranks: Ranks, boxed: list[Any]) -> Sequence[Any]:
        results = super()._first_step(ranks, boxed)
        self.traced = self.program.costs
        return results

    def take(self, plan: RangePlan, moved: bool) -> None:
        """Replaces the graph's plan. The costs of its parts are measured in the next step.

        moved: whether weight gradients are moved to where they hide all-to-alls.
        """
        self.options = replace(self.options, weight_gradients=moved)
        self.program.plan, self.program.steps, self.program.is_agreed = plan, 1, False
        self.program.costs, self._run = self.traced, None

    def every_plan(self) -> list[tuple[RangePlan, bool]]:
        """Returns plans that cut everything that can be cut, for each number of parts k and each lag.

        The lag says how far the second stage of a part runs behind the first stages
        (`pmoe.graph.ranges.turns`). In backward, each plan is returned with weight gradients moved and not
        moved.
        """
        is_backward = self.program.key[0] == "backward"
        graph = self.cutting.cuttable(run.instructions_of(self.module, {}))
        parts = run.BACKWARD_PARTS if is_backward else run.PARTS
        pairs = [(k, lag) for k in (1, *parts) for lag in lags(k)]
        ranges = [
            tuple(replace(range_, lag=lag) for range_ in whole_ranges(graph, k) if k > 1) for k, lag in pairs
        ]
        plans = [RangePlan(self.cutting.names, plan_ranges) for plan_ranges in ranges]
        return list(itertools.product(plans, (False, True) if is_backward else (True,)))


RUNNERS: dict[str, Runner] = {}


@dataclass(frozen=True)
class Ordered:
    """A graph with its instructions in the order of a plan, and the measured seconds of its passes."""

    program: run.Program
    module: Any
    instructions: list[Any]
    seconds: PassSeconds

    @staticmethod
    def of(runner: Runner) -> Ordered:
        return Ordered(runner.program, runner._run, runner.program.instructions, PassSeconds())

    def enter(self) -> None:
        self.program.watch = lambda _, boxed: self.seconds(self.module, boxed)

    @property
    def median(self) -> float:
        """Median seconds of its passes. The last pass does not count, because allocations were recorded in
        it.
        """
        return statistics.median(self.seconds.durations[:-1] or [0.0])


class Unordered:
    """A graph that is cut into parts but runs in the order in which it was traced.

    All-to-alls are not started early, as the runtime of the backend would.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def forward(self, boxed: list[Any]) -> Any:
        arguments = [*boxed]
        boxed.clear()
        return self._module(*arguments)

"""Compiled graphs of a model that is measured: sets other plans for them, and runs each plan."""

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
    """Runner of the last model that was compiled, by direction, in `RUNNERS`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.traced: dict[str, Any] = {}
        RUNNERS[self.program.key[0]] = self

    def _first_step(self, ranks: Ranks, boxed: list[Any]) -> Sequence[Any]:
        results = super()._first_step(ranks, boxed)
        self.traced = self.program.costs
        return results

    def take(self, plan: RangePlan, moved: bool) -> None:
        """Sets another plan. Its costs are measured at the next step.

        moved: whether weight gradients are moved.
        """
        self.options = replace(self.options, weight_gradients=moved)
        self.program.plan, self.program.steps, self.program.is_agreed = plan, 1, False
        self.program.costs, self._run = self.traced, None

    def every_plan(self) -> list[tuple[RangePlan, bool]]:
        """Returns plans that cut everything that can be cut, for each number of parts and lag.

        In backward, each plan is returned with weight gradients moved and not moved.
        """
        is_backward = self.program.key[0] == "backward"
        graph = self.cutting.cuttable(run.instructions_of(self.module, {}))
        parts = run.BACKWARD_PARTS if is_backward else run.PARTS
        pairs = [(k, lag) for k in (1, *parts) for lag in lags(k)]
        ranges = [
            tuple(replace(each, lag=lag) for each in whole_ranges(graph, k) if k > 1) for k, lag in pairs
        ]
        plans = [RangePlan(self.cutting.names, each) for each in ranges]
        return list(itertools.product(plans, (False, True) if is_backward else (True,)))


RUNNERS: dict[str, Runner] = {}


@dataclass(frozen=True)
class Ordered:
    """A graph as it was lowered for a plan."""

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
        """Median seconds, without the last pass, in which allocations were recorded."""
        return statistics.median(self.seconds.found[:-1] or [0.0])


class Unordered:
    """A cut graph that runs as it is, without the runtime's starts, waits and order."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def forward(self, boxed: list[Any]) -> Any:
        given = [*boxed]
        boxed.clear()
        return self._module(*given)

"""Records when each instruction of a compiled graph's pass really ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pmoe.graph.explain import clock_like
from pmoe.graph.instructions import COMMUNICATE, COMPUTE, Instruction
from pmoe.graph.lower import STARTS, label, unboxed
from pmoe.planner.simulator import Simulated

ENDS = frozenset(wait for _, wait in STARTS.values())


class PassTimeline:
    """Runs the passes of a compiled graph one instruction at a time, and records when each ran.

    An object of this class takes the place of the graph's program (`Program.watch`). ``ran`` is the
    timeline of the last pass. An all-to-all lasts from its start to the end of the wait for it. If it had
    ended before the wait, nobody knows when, and it lasts for the seconds that its instruction predicts.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._seconds = {instruction.name: instruction.seconds for instruction in instructions}
        self.ran: list[Simulated[Instruction]] = []

    def __call__(self, module: fx.GraphModule, boxed: list[Any]) -> Sequence[Any]:
        clock, arguments = clock_like(boxed), list(boxed)
        boxed.clear()
        run = _Interpreter(module, clock)
        with torch.no_grad():
            done = unboxed(run.boxed_run(arguments))
        self.ran, free, first = [], 0.0, min(begin for begin, _ in run.spans.values())
        for name, (begin, end) in run.spans.items():
            lane = COMPUTE
            if name in run.waited:
                lane, begin = COMMUNICATE, max(begin, free)
                if end - run.waited[name] < SHORT:
                    end = min(end, begin + self._seconds.get(name, 0.0))
                free = end
            self.ran.append(
                Simulated(task=Instruction(name=name, lane=lane), start=begin - first, end=end - first)
            )
        return done


SHORT = 1e-4
"""Waits for an all-to-all that are at most this many seconds long show that it had ended before."""


class _Interpreter(fx.Interpreter):
    """Runs a graph, and records the times of its instructions.

    spans: begin and end of each instruction.
    waited: for each all-to-all, the time at which the wait for it began.
    """

    def __init__(self, module: fx.GraphModule, clock: Callable[[], float]) -> None:
        super().__init__(module)
        self._clock = clock
        self.spans: dict[str, tuple[float, float]] = {}
        self.waited: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        begin = self._clock()
        result = super().run_node(n)
        if n.op == "call_function":
            name, end = label(n), self._clock()
            if n.target in ENDS:
                self.waited[name] = begin
                begin = self.spans[name][0]
            self.spans[name] = (begin, end)
        return result

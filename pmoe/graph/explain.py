"""What the passes made of a model: ranges, parts, weight gradients' places, predicted and measured
seconds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from pmoe.graph import run
from pmoe.graph.instructions import Instruction, exposed_seconds, timeline, total_seconds
from pmoe.graph.run import Key, Program
from pmoe.graph.watch import PassSeconds, PassTimeline
from pmoe.graph.weight_gradients import weight_gradients
from pmoe.measure.black_box import tensors_in
from pmoe.planner.simulator import Simulated
from pmoe.planner.timeline import Bar, draw
from pmoe.text import table

STEPS = 9
"""Passes that `explain` runs: three to measure and agree, the others to be timed, the last by instruction."""


@dataclass(frozen=True)
class Explanation:
    """By direction: the programs of a model, the seconds that their passes took, and when in one of them each
    instruction ran."""

    programs: Mapping[str, Program]
    measured: Mapping[str, float]
    ran: Mapping[str, Sequence[Simulated[Instruction]]]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rows = [["pass", "predicted ms", "measured ms", "exposed ms", "as traced ms", "exposed as traced ms"]]
        for direction, program in self.programs.items():
            before, after = program.before, program.instructions
            seconds = (
                total_seconds(after), self.measured[direction], exposed_seconds(after),
                total_seconds(before), exposed_seconds(before),
            )  # fmt: skip
            rows.append([direction, *(f"{1e3 * each:.1f}" for each in seconds)])
        yield table(rows)
        for direction, program in self.programs.items():
            for each in program.plan.ranges:
                yield f"{direction}: {each.first} to {each.last} in {each.k} parts along the batch"
            for name, count in _moved(program).items():
                yield f"{direction}: beside {name}: {count} instructions that only weight gradients wait for"

    def draw(self, path: str | Path | IO[bytes]) -> None:
        """The timelines as predicted for the traced order and for the order that runs, and as measured, as a
        PNG. Needs matplotlib."""
        panels = {}
        for direction, program in self.programs.items():
            free = weight_gradients(program.before)
            panels[f"{direction}, as traced: predicted"] = bars_of(direction, timeline(program.before), free)
            predicted = timeline(program.instructions)
            panels[f"{direction}, as run: predicted"] = bars_of(direction, predicted, free)
            panels[f"{direction}, as run: measured"] = bars_of(direction, self.ran[direction], free)
        draw(path, panels, "A pass of the whole model")


def explain(model: nn.Module, *example: Any, options: Mapping[str, Any] | None = None) -> Explanation:
    """Compiles ``model`` with the pmoe backend, runs some passes over ``example``, and tells what became of
    it.

    The passes go forward and, where parameters need gradients, backward, from the mean of the squared
    results; gradients that parameters have stay as they are. Every rank must call it. Raises ValueError where
    the graph holds no layer that communicates.
    """
    compiled = torch.compile(model, backend="pmoe", options=dict(options or {}))
    parameters = [each for each in model.parameters() if each.requires_grad]
    seconds, ran = dict[Key, PassSeconds](), dict[Key, PassTimeline]()
    try:
        for step in range(STEPS):
            result = next(tensors_in(compiled(*example)))
            if parameters and result.requires_grad:
                torch.autograd.grad(result.float().square().mean(), parameters, allow_unused=True)
            if step == STEPS // 2:
                for key, program in run.PROGRAMS.items():
                    program.watch = seconds[key] = PassSeconds()
            if step == STEPS - 2:
                for key, program in run.PROGRAMS.items():
                    program.watch = ran[key] = PassTimeline(program.instructions)
    finally:
        for program in run.PROGRAMS.values():
            program.watch = None
    programs = {key[0]: run.PROGRAMS[key] for key, each in ran.items() if each.found and key[1]}
    if not programs:
        raise ValueError("model must hold a MoELayer among several ranks that can be captured")
    return Explanation(
        programs,
        {name: statistics.median(seconds[each.key].found) for name, each in programs.items()},
        {name: ran[each.key].found for name, each in programs.items()},
    )


def _moved(program: Program) -> Counter[str]:
    """By all-to-all, how many weight gradients stand behind it, before another, that stood elsewhere."""
    free = weight_gradients(program.before)

    def behind(order: list[Instruction]) -> dict[str, str]:
        last, found = "", {}
        for each in order:
            last = each.name if each.communicates else last
            found[each.name] = last
        return found

    traced, runs = behind(program.before), behind(program.instructions)
    return Counter(runs[name] for name in runs if name in free and runs[name] != traced[name])


def bars_of(direction: str, ran: Sequence[Simulated[Instruction]], free: Collection[str]) -> list[Bar]:
    """For `pmoe.planner.timeline.draw`. free: the names of weight gradients."""
    return [
        Bar(
            direction=direction,
            name=each.task.name,
            kind=_kind(each.task, free),
            chunk=0,
            lane=each.task.lane,
            start=each.start,
            end=each.end,
        )
        for each in ran
        if each.end > each.start
    ]


def _kind(each: Instruction, free: Collection[str]) -> str:
    if each.communicates:
        return "S"
    if each.name.startswith("experts"):
        return "W" if each.name in free else "C"
    return "LW" if each.name in free else "O"

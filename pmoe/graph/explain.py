"""A report of what the backend "pmoe" did to a model: `explain` makes it, `Explanation` holds it.

It shows which instructions were cut into parts, which weight gradients were moved, and the predicted and
measured seconds.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parallel.distributed import _find_tensors

from pmoe.arguments import check_module
from pmoe.graph import run
from pmoe.graph.instructions import Instruction, exposed_seconds, timeline, total_seconds
from pmoe.graph.lower import run_whole
from pmoe.graph.options import Options
from pmoe.graph.run import Key, Program
from pmoe.graph.weight_gradients import weight_gradients
from pmoe.measure.timing import clock_of
from pmoe.planner.simulator import Simulated
from pmoe.planner.timeline import Span, draw
from pmoe.text import table

STEPS = 8
"""Number of training steps that `explain` runs.

In the first steps ranks measure and agree; the last 3 are timed.
"""


class PassSeconds:
    """A callable that runs and times the passes of a program, for `explain`.

    A program (`pmoe.graph.run.Program`) is the state of all graphs of the same layers and direction.
    `explain` stores this object in the program, which then calls the object to run each pass.

    durations: the seconds of each pass that was run so far.
    """

    def __init__(self) -> None:
        self.durations: list[float] = []

    def __call__(self, module: fx.GraphModule, boxed: list[Any]) -> Sequence[Any]:
        """Runs and times one pass. Returns the results of the pass.

        module: the graph.
        boxed: the arguments of the graph, in a list. The pass empties the list, so that each argument can be
            freed after its last use.
        """
        clock = clock_like(boxed)
        begin = clock()
        results = run_whole(module, boxed)
        self.durations.append(clock() - begin)
        return results


def clock_like(values: Sequence[Any]) -> Callable[[], float]:
    """Returns a clock in seconds. Reading it waits for the devices of the tensors among ``values``."""
    return clock_of(*(value.device for value in values if isinstance(value, Tensor)))


@dataclass(frozen=True)
class Explanation:
    """Report of what the backend "pmoe" decided for a model. ``print`` shows it as text.

    programs: what was decided for the graph of each direction: "forward", "backward" or "inference".
    measured: the median seconds of a pass in each direction.
    """

    programs: Mapping[str, Program]
    measured: Mapping[str, float]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yields the report as text: a table of seconds, then lines about each direction.

        The lines name the ranges of instructions that were cut, and where weight gradients and reductions
        run.
        """
        rows = [["pass", "predicted ms", "measured ms", "exposed ms", "as traced ms", "exposed as traced ms"]]
        for direction, program in self.programs.items():
            before = program.before
            after = program.instructions
            seconds = (
                total_seconds(after), self.measured[direction], exposed_seconds(after),
                total_seconds(before), exposed_seconds(before),
            )  # fmt: skip
            rows.append([direction, *(f"{1e3 * number:.1f}" for number in seconds)])
        yield table(rows)
        for direction, program in self.programs.items():
            for range_ in program.plan.ranges:
                parts = f"{range_.k} parts along the batch, ways home {range_.lag} behind dispatches"
                yield f"{direction}: {range_.first} to {range_.last} in {parts}"
            for name, count in _moved(program).items():
                yield f"{direction}: beside {name}: {count} instructions that only weight gradients wait for"
            for name, count in _reduced(program).items():
                yield f"{direction}: behind {name or 'the beginning'}: {count} reductions of gradients begin"

    def draw(self, path: str | Path | IO[bytes]) -> None:
        """Draws two predicted timelines of each pass into a PNG file: in traced order, and in final order.

        The traced order is that of the model's code. The final order is the one in which the backend runs the
        instructions.

        path: the path of the file, or an open binary file.

        Needs matplotlib.
        """
        panels = {}
        for direction, program in self.programs.items():
            for order, instructions in (("traced", program.before), ("run", program.instructions)):
                bars = bars_of(direction, timeline(instructions), weight_gradients(instructions))
                panels[f"{direction}, as {order}"] = bars
        draw(path, panels, "A pass of the whole model: predicted")


def explain(model: nn.Module, *example: Any, options: Mapping[str, Any] | None = None) -> Explanation:
    """Compiles ``model`` with the backend "pmoe", runs `STEPS` steps, and reports what the backend decided.

    model: a module with at least one `MoELayer` among several ranks.
    example: the arguments of a call of the model.
    options: the options of ``torch.compile``, by name (`pmoe.graph.options.Options`).

    A step is a forward pass, and a backward pass if parameters need gradients. The loss is the mean of the
    squares of the model's first result. The ``grad`` of the parameters does not change. Every rank must call
    `explain`.

    Raises ValueError if no layer of the model was captured and communicates. Raises ValueError or TypeError
    for a bad option.
    """
    check_module(model=model)
    Options.of(options)
    compiled = torch.compile(model, backend="pmoe", options=dict(options or {}))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seconds = dict[Key, PassSeconds]()
    try:
        for step in range(STEPS):
            result = next(iter(_find_tensors(compiled(*example))))
            if parameters and result.requires_grad:
                torch.autograd.grad(result.float().square().mean(), parameters, allow_unused=True)
            if step == STEPS // 2:
                for key, program in run.PROGRAMS.items():
                    program.watch = seconds[key] = PassSeconds()
    finally:
        for program in run.PROGRAMS.values():
            program.watch = None
    programs = {key[0]: run.PROGRAMS[key] for key, watch in seconds.items() if watch.durations and key[1]}
    if not programs:
        raise ValueError(
            "model must hold a MoELayer among several ranks that torch.compile can capture; if it has one, a "
            "warning says why it was not captured"
        )
    measured = {name: statistics.median(seconds[program.key].durations) for name, program in programs.items()}
    return Explanation(programs, measured)


def _moved(program: Program) -> Counter[str]:
    """Counts, for each all-to-all, the moved weight gradients that run between it and the next all-to-all.

    Returns {name of the all-to-all: number of weight gradients}. All-to-alls without moved weight gradients
    are left out. The name "" stands for the time before the first all-to-all.

    program: what was decided for a graph.
    """
    operators = [instruction for instruction in program.before if not instruction.hands_over]
    before_traced, before_run = _behind(operators), _behind(program.instructions)
    moved = (name for name in weight_gradients(operators) if before_run[name] != before_traced[name])
    return Counter(before_run[name] for name in moved)


def _reduced(program: Program) -> Counter[str]:
    """Counts, for each all-to-all, the gradient reductions that begin between it and the next all-to-all.

    Returns {name of the all-to-all: number of reductions}. All-to-alls without reductions are left out. The
    name "" stands for the time before the first all-to-all.

    program: what was decided for a graph.
    """
    before = _behind(program.instructions)
    return Counter(before[instruction.name] for instruction in program.instructions if instruction.reduces)


def _behind(order: Iterable[Instruction]) -> dict[str, str]:
    """Returns {name of an instruction: name of the last all-to-all before it, or "" if there is none}.

    For an all-to-all the value is its own name.

    order: the instructions, in order.
    """
    last_message = ""
    message_before = {}
    for instruction in order:
        last_message = instruction.name if instruction.communicates else last_message
        message_before[instruction.name] = last_message
    return message_before


def bars_of(direction: str, ran: Sequence[Simulated[Instruction]], free: Collection[str]) -> list[Span]:
    """Returns the predicted timeline of a pass as bars for `pmoe.planner.timeline.draw`.

    direction: "forward", "backward" or "inference".
    ran: instructions with their predicted start and end, in seconds. An instruction that takes 0 seconds gets
        no bar.
    free: names of the weight gradients: instructions whose results no all-to-all needs. They get a colour of
        their own.
    """
    return [
        Span(
            direction=direction,
            name=simulated.task.name,
            kind=_kind(simulated.task, free),
            chunk=0,
            lane=simulated.task.lane,
            start=simulated.start,
            end=simulated.end,
        )
        for simulated in ran
        if simulated.end > simulated.start
    ]


def _kind(instruction: Instruction, free: Collection[str]) -> str:
    """Returns the kind of an instruction's bar in the timeline, which decides the bar's colour.

    The kind is "message" for an all-to-all, "reduction" for the reduction of a gradient, "experts" for the
    computation of experts, and "dense" for other computation. If no all-to-all needs the instruction's
    result, the kind is "free experts" or "free dense".

    instruction: the instruction of the bar.
    free: names of the instructions whose results no all-to-all needs.
    """
    if instruction.communicates:
        return "message"
    if instruction.reduces:
        return "reduction"
    name = "experts" if instruction.name.startswith("experts") else "dense"
    return f"free {name}" if instruction.name in free else name

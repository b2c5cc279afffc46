"""How long does the interpreter of pass programs take to issue a pass, without what its calls take?

    python bench/bench_program.py [--rounds 12] [--calls 2000] [--json FILE]
    python bench/bench_program.py --runner

The backend only counts its calls, so launches, events and collectives cost nothing. A run computes the
numbers of the call from its row counts, resolves the addresses of all operands, and issues all calls:
launches, copies, all-to-alls, waits for events and signals of events. The
layer has 8 experts, top-2, SwiGLU without biases, bfloat16, d_model 1024, d_hidden 4096, 4096 tokens a rank
and the restore pair S4. Rows are spread evenly over experts.

The time of a run is the CPU time of the thread for all calls of a round, divided by their number; of the
rounds the median and the smallest. No GPU is used.

Further tables predict the host's time of a pass over CUDA and NCCL, and over CUDA and symmetric heaps, from
the numbers of calls and from assumed costs of a call. The last one is of passes that a CUDA graph repeats.
Nobody has measured any of them on a GPU.

With ``--runner`` it measures what Python's runner (`pmoe.runners.program`) takes around a pass of two ranks,
in the branches for CUDA, with nothing issued: it allocates, converts indices, rounds gradients, and passes
addresses. The assumed costs leave most of this out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.recorded_program import Issue, RecordedProgram, Signal, Wait, compile_library, load_library
from bench.timing import counted, write_json
from pmoe.program.bounded import RowBounds
from pmoe.program.compiler import compile_pass
from pmoe.program.layer_shape import LayerShape
from pmoe.program.records import Base, Kernel, PassProgram
from pmoe.schedule.buffer_sizes import HiddenColumns
from pmoe.schedule.restore import STRATEGIES
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.tasks import Lane, Stages
from pmoe.text import table

EXPERTS = 8
TOP_K = 2
TOKENS = 4096
D_MODEL = 1024
D_HIDDEN = 4096
CASES = [(ranks, n) for ranks in (1, 2, 8) for n in (1, 4, 8)]
DIRECTIONS = ("forward", "backward")
LAUNCH_MICROSECONDS = 2.5
EVENT_MICROSECONDS = 0.5
GROUP_MICROSECONDS = 9.0
ENTRY_MICROSECONDS = 10.0
"""Assumed costs for the host: of a launch or a copy, of an event that is recorded or waited for, of a group
of NCCL's calls, and of all else in a pass (Python's call, row counts and addresses).
"""
REPLAY_MICROSECONDS = 20.0
"""Assumed cost for the host of launching a CUDA graph, whatever it holds.

`tests.gpu.first_costs` measures it on a GPU.
"""
SLACK = 1.25
"""Room of bounded programs, as a multiple of the rows of balanced routing."""
PLACES_OF_LAUNCH = 4
"""The most PLACE calls in one launch (``kMostCopies`` in ``cuda/permute/launch.h``)."""
SUMS_OF_LAUNCH = 2
"""The most HIDDEN_GRADIENT calls whose partial sums are added up in one launch (``kMostUnsummed``)."""
EXCHANGES_OF_LAUNCH = 2
"""The most exchanges over heaps in one launch (``kMostMessages`` in ``cuda/program/push.h``)."""
GOAL_MICROSECONDS = 20
"""The goal for two ranks and n = 4, a pass."""


def compiled(ranks: int, n: int, direction: str, *, bounded: bool = False) -> PassProgram:
    """Returns the program of one pass of the benchmark's layer.

    bounded: whether its row counts stay on the device.
    """
    restore = STRATEGIES["S4"]
    stages = Stages(local=True, remote=ranks > 1)
    shape = LayerShape(
        ranks=ranks,
        local_experts=EXPERTS // ranks,
        top_k=TOP_K,
        d_model=D_MODEL,
        columns=HiddenColumns(hidden=2 * D_HIDDEN, active=D_HIDDEN, scratch=D_HIDDEN, scratch_rows=8192),
        bias=False,
        keeps_own=stages.local,
        sends=stages.remote,
        weighs_active=True,
        places=True,
        element_bytes=2,
        weight_bytes=4,
        sum_bytes=4,
    )
    return compile_pass(rotating(direction, n, stages, restore=restore), shape, restore, bounded=bounded)


@dataclass(frozen=True)
class HostCalls:
    """The calls of CUDA and NCCL of one pass by ``cuda/program/cuda_backend.h``.

    launches: launches of kernels.
    copies: copies and fills of memory.
    groups: groups of NCCL's sends and receives; ``messages`` are the sends and receives in them.
    records, waits: events that are recorded, and waits of a stream for an event.
    """

    launches: int
    copies: int
    groups: int
    messages: int
    records: int
    waits: int

    @property
    def predicted_microseconds(self) -> float:
        """The host's time, predicted from the assumed costs."""
        launches = (self.launches + self.copies) * LAUNCH_MICROSECONDS
        events = (self.records + self.waits) * EVENT_MICROSECONDS
        return ENTRY_MICROSECONDS + launches + events + self.groups * GROUP_MICROSECONDS


def joined_exchanges(first: Issue, later: Sequence[Issue | Wait | Signal]) -> list[Issue]:
    """Returns the exchanges that share a launch over heaps with ``first``: those that directly follow it.

    later: the calls behind ``first``, in their order.
    """
    joined: list[Issue] = []
    for call in later[: EXCHANGES_OF_LAUNCH - 1]:
        if not (isinstance(call, Issue) and call.kernel is Kernel.EXCHANGE and call.lane is first.lane):
            break
        joined.append(call)
    return joined


def num_pushes(issued: Sequence[Issue | Wait | Signal]) -> int:
    """Counts the launches that exchange rows over heaps. Exchanges without rows need none."""
    left = list(issued)
    launches = 0
    while left:
        call = left.pop(0)
        if isinstance(call, Issue) and call.kernel is Kernel.EXCHANGE:
            group = [call, *joined_exchanges(call, left)]
            del left[: len(group) - 1]
            launches += any(any(each.send) or any(each.recv) for each in group)
    return launches


def num_launches(issued: Sequence[Issue | Wait | Signal], *, splits: bool = True) -> int:
    """Counts the launches of kernels that ``cuda/program/cuda_backend.h`` makes for the calls of a pass.

    PLACE calls that follow one another are one launch, as far as `PLACES_OF_LAUNCH` allows. HIDDEN_GRADIENT
    is one launch, and the sums of its parts are put off: those of `SUMS_OF_LAUNCH` calls are one launch. The
    launch comes earlier if the compute lane signals an event, or moves single numbers. Exchanges are not
    counted (`num_pushes`).

    issued: the calls of the pass, in their order.
    splits: whether HIDDEN_GRADIENT makes several partial sums.
    """
    launches = placed = unsummed = 0
    for call in issued:
        is_issue = isinstance(call, Issue)
        if is_issue and call.kernel is Kernel.PLACE:
            launches += placed % PLACES_OF_LAUNCH == 0
            placed += 1
            continue
        placed = 0
        moves_numbers = (
            is_issue and call.kernel in (Kernel.TAKE, Kernel.PUT) and call.operands[0].columns == 1
        )
        if moves_numbers or (isinstance(call, Signal) and call.lane is Lane.COMPUTE):
            launches += unsummed > 0
            unsummed = 0
        launches += is_issue and call.kernel not in (Kernel.EXCHANGE, Kernel.COPY)
        if is_issue and call.kernel is Kernel.HIDDEN_GRADIENT and splits:
            unsummed += 1
            if unsummed == SUMS_OF_LAUNCH:
                launches += 1
                unsummed = 0
    return launches


def host_calls(
    library: Any, ranks: int, n: int, direction: str, *, heaps: bool = False, bounded: bool = False
) -> HostCalls:
    """Counts the calls of a pass of the benchmark's layer, with an even load, on Hopper.

    heaps: whether rows travel over heaps, and not by NCCL.
    bounded: whether row counts stay on the device. The calls are then those of any load that fits.
    """
    calls = RecordedProgram(library, compiled(ranks, n, direction, bounded=bounded).words())
    if bounded:
        bounds = RowBounds.of(
            max_tokens=TOKENS, top_k=TOP_K, slack=SLACK, chunks=n, ranks=ranks, local_experts=EXPERTS // ranks
        )
        calls.cut(TOKENS, 0, *(counts.flatten().tolist() for counts in bounds.counts(0)))
    else:
        rows = TOKENS * TOP_K // n // EXPERTS
        counts = [rows] * (n * EXPERTS)
        calls.cut(TOKENS, 0, counts, counts)
    issued = calls.run({base: base << 32 for base in Base})
    kernels = [call.kernel for call in issued if isinstance(call, Issue)]
    groups = 0 if heaps else kernels.count(Kernel.EXCHANGE)
    # A forward pass sets the products' counters in its first launch.
    fills = ranks > 1 and n > 1 and direction == "backward"
    return HostCalls(
        launches=num_launches(issued) + (num_pushes(issued) if heaps else 0),
        copies=kernels.count(Kernel.COPY) + fills,
        groups=groups,
        messages=groups * 2 * (ranks - 1),
        records=sum(isinstance(call, Signal) for call in issued)
        + (Kernel.EXCHANGE in kernels),  # one for the end of the pass
        waits=sum(isinstance(call, Wait) for call in issued),
    )


def prediction_table(library: Any, *, heaps: bool = False) -> str:
    """Returns the table of predicted host times.

    heaps: whether rows travel over heaps, and not by NCCL. Then cases of one rank are left out.
    """
    headings = ("ranks", "n", "pass", "launches", "copies", "groups", "messages", "records", "waits")
    rows = []
    for ranks, n in [case for case in CASES if case[0] > 1 or not heaps]:
        for direction in DIRECTIONS:
            calls = host_calls(library, ranks, n, direction, heaps=heaps)
            numbers = (f"{number}" for number in astuple(calls))
            rows.append((f"{ranks}", f"{n}", direction, *numbers, f"{calls.predicted_microseconds:.0f}"))
    return table([(*headings, "us, predicted"), *rows], left=(2,))


def replay_table(library: Any) -> str:
    """Returns the table of passes over heaps that a CUDA graph repeats, with the predicted host times."""
    rows = []
    for ranks, n in [case for case in CASES if case[0] > 1]:
        for direction in DIRECTIONS:
            calls = host_calls(library, ranks, n, direction, heaps=True, bounded=True)
            numbers = (f"{calls.launches}", f"{calls.copies}", "1", f"{REPLAY_MICROSECONDS:.0f}")
            rows.append((f"{ranks}", f"{n}", direction, *numbers))
    headings = ("ranks", "n", "pass", "kernels", "fills", "launches of the host", "us, predicted")
    return table([headings, *rows], left=(2,))


def timed(library: Any, ranks: int, n: int, direction: str, rounds: int, calls: int) -> dict[str, Any]:
    """Measures one pass. Returns its records, its calls, and the microseconds of a run."""
    program = compiled(ranks, n, direction)
    recorded = RecordedProgram(library, program.words())
    rows = TOKENS * TOP_K // n // EXPERTS
    counts = [rows] * (n * EXPERTS)
    bases = {base: base << 32 for base in Base} | {Base.NOWHERE: 0}
    issued = recorded.repeat(TOKENS, 0, counts, counts, bases, 10)
    samples = []
    for _ in counted(range(rounds), "round"):
        start = time.thread_time()
        recorded.repeat(TOKENS, 0, counts, counts, bases, calls)
        samples.append((time.thread_time() - start) / calls * 1e6)
    return {
        "ranks": ranks,
        "n": n,
        "pass": direction,
        "records": len(program.records),
        "calls": issued,
        "median_microseconds": median(samples),
        "smallest_microseconds": min(samples),
    }


class NothingIssued:
    """A backend of programs, and a loaded program, that issues nothing."""

    device_type = "cuda"
    arena_bytes = 1 << 20

    def refusal(self, *_: object) -> None:
        return None

    def connect(self, *_: object, **__: object) -> object:
        return self

    def streams(self, *_: object) -> dict[Lane, int]:
        return {}

    def load(self, *_: object, **__: object) -> NothingIssued:
        return self

    def cut(self, *_: object) -> NothingIssued:
        return self

    def take_arena(self, _: object) -> int:
        return 0

    def workspace_bytes(self, _: object) -> int:
        return 16

    def run(self, *_: object) -> None:
        pass


RUNNERS_FILES = ("runners/program.py", "experts/products.py")
"""Files of pmoe whose operators run inside a pass: conversions of indices, and rounding of gradients."""


def runners_part(ranks: int, n: int, calls: int) -> dict[str, dict[str, float]]:
    """Returns for both passes what Python's runner takes around a program that issues nothing.

    It runs on the CPU, in the branches for CUDA (`bench.bench_device_calls`).

    operators: torch's operators that a GPU would launch.
    microseconds: the smallest CPU time of the thread.

    ranks: W. One of the ranks exists, with a stand-in for the others: call this once a process.
    """
    import torch

    from bench import bench_device_calls
    from bench.links import alike
    from pmoe import MoELayer
    from pmoe.call.options import Switches
    from pmoe.decide import program_choice
    from pmoe.runners.program import PassRunner, _ProgramBackward

    seconds: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}

    def timing(direction: str, function: Callable[..., Any]) -> Any:
        def timed_call(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **options)
            seconds[direction].append(time.thread_time() - start)
            return result

        return timed_call

    torch.set_num_threads(1)
    if ranks > 1:
        alike.start(ranks)
    torch.manual_seed(0)
    layer = MoELayer(64, 128, EXPERTS, TOP_K, expert="swiglu", bias=False, dtype=torch.bfloat16,
                     pipeline=n, memory_reuse="S4", slack=2.0)  # fmt: skip
    layer.switches = Switches(program=True)
    x = torch.randn(64, 64, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(64, 64, dtype=torch.bfloat16)
    operators = {}
    with (
        bench_device_calls.as_cuda() as device,
        mock.patch.dict(program_choice.BACKENDS, {"cpu": NothingIssued()}),
    ):
        for _ in range(2):  # the first call of a layer compares options
            counts = {direction: bench_device_calls.Calls() for direction in DIRECTIONS}
            device.calls = counts["forward"]
            with device:
                y = layer(x)
            device.calls = counts["backward"]
            with device:
                y.backward(dy)
        assert layer.ran is not None and layer.ran.path == "program"
        for direction, called in counts.items():
            operators[direction] = sum(
                number for place, number in called.where.items() if place.startswith(RUNNERS_FILES)
            )
        with (
            mock.patch.object(PassRunner, "_forward", timing("forward", PassRunner._forward)),
            mock.patch.object(
                _ProgramBackward, "_gradients", timing("backward", _ProgramBackward._gradients)
            ),
        ):
            for _ in range(calls):
                layer(x).backward(dy)
    return {
        direction: {"operators": operators[direction], "microseconds": 1e6 * min(seconds[direction])}
        for direction in DIRECTIONS
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="rounds of a pass (default: 12)")
    parser.add_argument("--calls", type=int, default=2000, help="runs in a round (default: 2000)")
    parser.add_argument("--json", type=Path, default=None, help="file for the numbers")
    parser.add_argument("--runner", action="store_true", help="measure Python's part of a pass, and end")
    given = parser.parse_args(arguments)
    if given.runner:
        parts = runners_part(2, 4, given.calls)
        print("Python's part of a pass of 2 ranks, n = 4, on this CPU, with nothing issued:")
        for direction, part in parts.items():
            print(f"{direction}: {part['operators']} operators, {part['microseconds']:.0f} us")
        return [{"pass": direction, **part} for direction, part in parts.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.so")
        compile_library(path)
        library = load_library(path)
        predicted = prediction_table(library)
        predicted_over_heaps = prediction_table(library, heaps=True)
        predicted_replays = replay_table(library)
        found = [
            timed(library, ranks, n, direction, given.rounds, given.calls)
            for ranks, n in CASES
            for direction in DIRECTIONS
        ]
    headings = ("ranks", "n", "pass", "records", "calls", "us, median", "us, smallest")
    rows = [
        (*(f"{one[name]}" for name in ("ranks", "n", "pass", "records", "calls")),
         f"{one['median_microseconds']:.2f}", f"{one['smallest_microseconds']:.2f}")
        for one in found
    ]  # fmt: skip
    print(table([headings, *rows], left=(2,)))
    print(f"Goal: at most {GOAL_MICROSECONDS} us for 2 ranks, n = 4.")
    print(f"\nPredicted for CUDA and NCCL, from assumed costs of a call:\n{predicted}")
    print(f"\nPredicted for CUDA and heaps, from the same costs:\n{predicted_over_heaps}")
    print(f"\nPredicted for a CUDA graph that repeats a pass over heaps:\n{predicted_replays}")
    if given.json is not None:
        write_json(given.json, passes=found)
    return found


if __name__ == "__main__":
    main()

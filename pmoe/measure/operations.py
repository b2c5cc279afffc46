"""The lines of FSMoE's performance models (Eq. 1): products, and the four collectives of a layer whose
experts are sharded, measured on the live groups over the sizes of Section 6.2.

The paper takes the mean of five runs; here it is the median, that of the slowest rank, after one run that
does not count. On a slow link all sizes would take minutes: how many of them are measured follows from how
long the smallest takes, a number that all ranks have agreed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.agreement import largest
from pmoe.comm.base import Traffic
from pmoe.comm.ranks import Ranks, at_stage
from pmoe.comm.sharing import Sharing
from pmoe.measure.bench import (
    AGREEING,
    COMMUNICATE,
    COMPUTE,
    MESSAGES,
    Bench,
    TimedCall,
    exchange,
    identity,
    open_bench,
    seconds_of,
)
from pmoe.planner.costs import FREE, Fit, fit
from pmoe.planner.profile import GOOD_FIT, WIDTH, Operations

MESSAGE_STEP_BYTES, MESSAGE_STEPS = 4 * 2**18, 24
"""Section 6.2: from 2^18 to 24 * 2^18 float32 elements. Other types have as many bytes."""

GEMM_STEP, GEMM_STEPS = 2**19, 12
"""Section 6.2: from 2^19 to 12 * 2^19 elements, here those of the matrix that the measured weight is applied
to."""

SMALLER = (16, 4)
"""Parts of the first size that are measured too: large messages alone do not tell what any one costs."""

RUNS = 5
"""Of each size, and one before them."""

LINE_SECONDS = 0.5
"""About how long measuring a line takes, where the whole set is not asked for."""


def measure_operations(
    ranks: Ranks,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    across: Ranks | None = None,
    inside: Ranks | None = None,
    line_seconds: float = LINE_SECONDS,
) -> Operations:
    """Collective among ``ranks``; every rank returns the same.

    across: the ranks among which rows are dispatched and gradients added up, one of each node, say. inside:
    those that share each expert, a node's. Both are parts of ``ranks``, as large on every rank; None: all of
    them. Groups that do not meet are measured at the same time, as they would run; the slowest counts.

    line_seconds: about how long each line may take. math.inf takes all sizes, 0 the three smallest.

    Raises as `identity` does; ValueError for line_seconds that is negative or no number, and for groups that
    are no part of ``ranks`` or of unlike sizes; RuntimeError where a peer fails.
    """
    begin = time.perf_counter()
    device = torch.device(device)
    identity(ranks, device, dtype)  # refuses what cannot be measured
    if not line_seconds >= 0:
        raise ValueError(f"line_seconds ({line_seconds}) must be at least 0")
    named = (("across", across), ("inside", inside))
    across, inside = (part_of(ranks, device, name, part) for name, part in named)
    with torch.inference_mode(False), torch.no_grad(), open_bench(ranks, device) as bench:
        lines = {
            name: _operation_line(bench, among, make, line_seconds)
            for name, (among, make) in _operations(device, dtype, across, inside).items()
        }
    [seconds] = largest(ranks, device, [time.perf_counter() - begin], stage=AGREEING)
    return Operations(num_across=across.size, num_inside=inside.size, seconds=seconds, **lines)


def part_of(whole: Ranks, device: torch.device, name: str, part: Ranks | None) -> Ranks:
    """``part``, or ``whole`` where it is None. Collective: on every rank ValueError where on
    any it is no part, or where parts are of unlike sizes."""
    part = whole if part is None else part
    own, all_ranks = set(part.members), set(whole.members)
    strange = not own <= all_ranks
    highest, minus_lowest, any_strange = largest(
        whole, device, [part.size, -part.size, float(strange)], stage=AGREEING
    )
    if any_strange:
        here = f"ranks {sorted(own)}" if strange else "of another rank"
        raise ValueError(f"{name} ({here}) must be a part of ranks {sorted(all_ranks)}")
    if highest != -minus_lowest:
        raise ValueError(
            f"{name} ({part.size} ranks) must be as large on every rank, "
            f"not {-minus_lowest:.0f} to {highest:.0f}"
        )
    return part


PieceMaker = Callable[[int], tuple[float, TimedCall]]
"""Makes a piece of work of about a size; returns the size that it has, and the piece."""


def _operations(
    device: torch.device, dtype: torch.dtype, across: Ranks, inside: Ranks
) -> dict[str, tuple[Ranks | None, PieceMaker]]:
    """By the name of their line in `Operations`, the ranks among which something travels; None: a product."""
    width = WIDTH[device.type]
    generator = torch.Generator(device).manual_seed(0)  # the caller's random numbers stay as they are

    def random(rows: int) -> Tensor:
        return torch.randn(rows, width, dtype=dtype, device=device, generator=generator)

    def zeros(elements: int) -> Tensor:  # sums of them stay finite, however often they are added up
        return torch.zeros(elements, dtype=dtype, device=device)

    def share(size: int, ranks: Ranks) -> tuple[int, int, float]:
        """How many other ranks, elements for each of them, and the bytes of those together."""
        others = ranks.size - 1
        elements = max(1, size // (others * dtype.itemsize))
        return others, elements, float(others * elements * dtype.itemsize)

    def make_gemm(elements: int) -> tuple[float, TimedCall]:
        rows = elements // width
        x, weight, y = random(rows), random(width), random(rows)
        return float(rows * width * width), lambda: torch.mm(x, weight, out=y)

    def make_all_to_all(size: int) -> tuple[float, TimedCall]:
        others, n, num_bytes = share(size, across)
        sent, received = zeros(others * n), zeros(others * n)
        return num_bytes, lambda: exchange(across, sent, received, n)

    sharing = Sharing(inside, Traffic())

    def make_all_gather(size: int) -> tuple[float, TimedCall]:
        _, n, num_bytes = share(size, inside)
        rows, out, copies = zeros(n), zeros(inside.size * n), zeros(sharing.copies(n))
        return num_bytes, _staged(inside, lambda: sharing.all_gather(rows, out, [n] * inside.size, copies))

    def make_reduce_scatter(size: int) -> tuple[float, TimedCall]:
        _, n, num_bytes = share(size, inside)
        rows, out, parts = zeros(inside.size * n), zeros(n), zeros(inside.size * n)
        return num_bytes, _staged(inside, lambda: sharing.reduce_scatter(rows, out, [n] * inside.size, parts))

    def make_all_reduce(size: int) -> tuple[float, TimedCall]:
        gradient = zeros(size // dtype.itemsize)
        return float(size), _staged(across, lambda: dist.all_reduce(gradient, group=across.group))

    return {
        "gemm": (None, make_gemm),
        "all_to_all": (across, make_all_to_all),
        "all_gather": (inside, make_all_gather),
        "reduce_scatter": (inside, make_reduce_scatter),
        "all_reduce": (across, make_all_reduce),
    }


def _staged(ranks: Ranks, collective: TimedCall) -> TimedCall:
    def run() -> None:
        with at_stage(MESSAGES, ranks):
            collective()

    return run


def _operation_line(bench: Bench, among: Ranks | None, make: PieceMaker, line_seconds: float) -> Fit:
    if among is None:
        lane, step, steps = COMPUTE, GEMM_STEP, GEMM_STEPS
    elif among.size > 1:
        lane, step, steps = COMMUNICATE, MESSAGE_STEP_BYTES, MESSAGE_STEPS
    else:
        return FREE
    _, first = make(step)
    first_seconds = seconds_of(bench, lane, first, RUNS, min)  # interruptions would cost sizes
    wanted = [multiple * step for multiple in multiples(steps, first_seconds, line_seconds)]
    sizes = (*(step // part for part in SMALLER), *wanted)
    for _ in range(2):  # a second time where they are on no line
        samples = [(size, seconds_of(bench, lane, each, RUNS)) for size, each in map(make, sizes)]
        found = fit(samples, relative=True)
        if found.r_squared >= GOOD_FIT:
            break
    return found


def multiples(steps: int, first_seconds: float, line_seconds: float) -> Sequence[int]:
    """Which of the sizes 1 to ``steps`` times the first are measured in ``line_seconds``: as many as there is
    time for, evenly spread over all; where three are too many, three evenly spread over the smaller ones, at
    least 1, 2 and 3. An operation that costs something whatever its size takes less than is reckoned here.

    Example: 24 steps, 0.01 s the first, 5 s -> 1, 6, 10, 15, 19, 24: 75 firsts, six times each, 4.5 s.
    """

    def spread(count: int, largest: int) -> list[int]:
        return [1 + (i * (largest - 1) + (count - 1) // 2) // (count - 1) for i in range(count)]

    wanted = [spread(count, steps) for count in range(steps, 3, -1)]
    wanted += [spread(3, largest) for largest in range(steps, 3, -1)]
    for sizes in wanted:
        if sum(sizes) * (RUNS + 1) * first_seconds <= line_seconds:
            return sizes
    return spread(3, 3)

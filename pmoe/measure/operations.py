"""Measures the lines of FSMoE's performance models (Eq. 1): products and four collectives.

The collectives are those of a layer with sharded experts, measured on its groups. The paper measures the
sizes of Section 6.2 and takes the mean of five runs. Here it is the median, on the slowest rank, after one
run that does not count. All of the paper's sizes take minutes on a slow link. So by default a line goes
through five sizes, of which the largest takes some milliseconds.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.agreement import largest
from pmoe.comm.base import Traffic
from pmoe.comm.expert_sharding import Sharing
from pmoe.comm.ranks import Ranks, at_stage
from pmoe.measure.bench import AGREEING, MESSAGES, Bench, TimedCall, identity, open_bench
from pmoe.measure.line_fits import (
    QUICK,
    USUAL,
    Effort,
    LaneWork,
    longest_units,
    measured_line,
    messages,
    products,
    transfer,
)
from pmoe.planner.cost_model import COMMUNICATE, COMPUTE
from pmoe.planner.costs import FREE, Fit
from pmoe.planner.profile import WIDTH, Operations

MESSAGE_STEP_BYTES = 4 * 2**18
"""First size of a message in Section 6.2, and the distance of the others, in bytes.

It is that of 2^18 float32 elements. Other dtypes are measured with the same bytes.
"""

MESSAGE_STEPS = 24
"""Number of these sizes: 2^18, 2 * 2^18, ..., 24 * 2^18 elements."""

GEMM_STEP = 2**19
"""First size of a product in Section 6.2, and the distance of the others, in elements.

Here they are elements of the matrix that the measured weight is applied to.
"""

GEMM_STEPS = 12
"""Number of these sizes: 2^19, 2 * 2^19, ..., 12 * 2^19 elements."""

SMALLER = (16, 4)
"""Divisors of the first size. The two smaller sizes are measured too.

Large messages alone do not show alpha.
"""


def measure_operations(
    ranks: Ranks,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    across: Ranks | None = None,
    inside: Ranks | None = None,
    quick: bool = False,
    full: bool = False,
) -> Operations:
    """Measures FSMoE's operations. Collective among ``ranks``; every rank returns the same.

    Args:
        across: ranks among which rows are dispatched and gradients are summed, for example one of each
            node.
        inside: ranks that share each expert, for example those of a node.
        quick: smaller sizes and fewer runs.
        full: all sizes of Section 6.2.

    ``across`` and ``inside`` are subsets of ``ranks`` that are equally large on every rank; None stands for
    all ranks. Different groups are measured at the same time, as they would run; the slowest counts.

    Raises as `identity` does; ValueError for groups that are not within ``ranks`` or not equally large;
    RuntimeError if a peer fails.
    """
    begin = time.perf_counter()
    device = torch.device(device)
    identity(ranks, device, dtype)  # raises for a device or dtype that cannot be measured
    effort = QUICK if quick else USUAL
    named = (("across", across), ("inside", inside))
    across, inside = (part_of(ranks, device, name, part) for name, part in named)
    lines = dict.fromkeys(("all_to_all", "all_gather", "reduce_scatter", "all_reduce"), FREE)
    with torch.inference_mode(False), torch.no_grad(), open_bench(ranks, device) as bench:
        for name, work in _operations(device, dtype, across, inside).items():
            lines[name] = _line(bench, work, effort, full)
    [seconds] = largest(ranks, device, [time.perf_counter() - begin], stage=AGREEING)
    return Operations(num_across=across.size, num_inside=inside.size, seconds=seconds, **lines)


def part_of(whole: Ranks, device: torch.device, name: str, part: Ranks | None) -> Ranks:
    """Returns ``part``, or ``whole`` if it is None. Collective.

    Raises ValueError on every rank if on any rank it is not within ``whole``, or if sizes differ between
    ranks.
    """
    part = whole if part is None else part
    own = set(part.members)
    all_ranks = set(whole.members)
    is_foreign = not own <= all_ranks
    highest, minus_lowest, any_foreign = largest(
        whole, device, [part.size, -part.size, float(is_foreign)], stage=AGREEING
    )
    if any_foreign:
        own_text = f"ranks {sorted(own)}" if is_foreign else "on another rank"
        raise ValueError(f"{name} ({own_text}) must have only ranks of {sorted(all_ranks)}")
    if highest != -minus_lowest:
        raise ValueError(
            f"{name} ({part.size} ranks) must have as many ranks on every rank, "
            f"not {-minus_lowest:.0f} to {highest:.0f}"
        )
    return part


def _operations(
    device: torch.device, dtype: torch.dtype, across: Ranks, inside: Ranks
) -> dict[str, LaneWork]:
    """Returns the kinds of work by the names of their lines in `Operations`.

    Those of one rank are left out, because nothing travels there.
    """
    sharing = Sharing(inside, Traffic())
    size = dtype.itemsize

    # Zeros, so that repeated sums stay finite. They are written, because memory that was never written may
    # not be there yet.
    def zeros(elements: int) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=device).zero_()

    def all_gather(n: int) -> TimedCall:
        rows, out, copies = zeros(n), zeros(inside.size * n), zeros(sharing.copies(n))
        return with_stage(inside, lambda: sharing.all_gather(rows, out, [n] * inside.size, copies))

    def reduce_scatter(n: int) -> TimedCall:
        rows, out, parts = zeros(inside.size * n), zeros(n), zeros(inside.size * n)
        return with_stage(inside, lambda: sharing.reduce_scatter(rows, out, [n] * inside.size, parts))

    def all_reduce(n: int) -> TimedCall:
        gradient = zeros(n)
        return with_stage(across, lambda: dist.all_reduce(gradient, group=across.group))

    works = {"gemm": products(device, dtype)}
    if across.size > 1:
        works["all_to_all"] = messages(across, device, dtype)
        works["all_reduce"] = transfer(COMMUNICATE, size, all_reduce)
    for name, make in (("all_gather", all_gather), ("reduce_scatter", reduce_scatter)):
        if inside.size > 1:
            works[name] = transfer(COMMUNICATE, (inside.size - 1) * size, make)
    return works


def _line(bench: Bench, work: LaneWork, effort: Effort, full: bool) -> Fit:
    """Measures the line of one kind of work over five sizes, or over those of Section 6.2 (``full``)."""
    if full:
        product = work.lane == COMPUTE
        steps = GEMM_STEPS if product else MESSAGE_STEPS
        first = GEMM_STEP // WIDTH[bench.device.type] if product else MESSAGE_STEP_BYTES // work.size
        sizes = [*(first // part for part in SMALLER), *range(first, steps * first + 1, first)]
    else:
        longest = longest_units(bench, work, effort.piece_seconds)
        sizes = [longest >> i for i in range(5)]
    return measured_line(bench, work, sizes, effort.repeats)


def with_stage(ranks: Ranks, function: TimedCall) -> TimedCall:
    """``function`` as a call whose errors name the stage."""

    def call() -> object:
        with at_stage(MESSAGES, ranks):
            return function()

    return call

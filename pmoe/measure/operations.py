"""The lines of FSMoE's performance models (Eq. 1): products, and the four collectives of a layer whose
experts are sharded, measured on the live groups over the sizes of Section 6.2.

The paper takes the mean of five runs; here it is the median, that of the slowest rank, after one run that
does not count. All of the paper's sizes take minutes on a slow link: unless they are asked for, a line goes
through five sizes, of which the largest takes some milliseconds.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.agreement import largest
from pmoe.comm.base import Traffic
from pmoe.comm.ranks import Ranks, at_stage
from pmoe.comm.sharing import Sharing
from pmoe.measure.bench import AGREEING, MESSAGES, Bench, TimedCall, identity, open_bench
from pmoe.measure.lines import (
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

MESSAGE_STEP_BYTES, MESSAGE_STEPS = 4 * 2**18, 24
"""Section 6.2: from 2^18 to 24 * 2^18 float32 elements. Other types have as many bytes."""

GEMM_STEP, GEMM_STEPS = 2**19, 12
"""Section 6.2: from 2^19 to 12 * 2^19 elements, here those of the matrix that the measured weight is applied
to."""

SMALLER = (16, 4)
"""Parts of the first size that are measured too: large messages alone do not tell what any one costs."""


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
    """Collective among ``ranks``; every rank returns the same.

    across: the ranks among which rows are dispatched and gradients added up, one of each node, say. inside:
    those that share each expert, a node's. Both are parts of ``ranks``, as large on every rank; None: all of
    them. Groups that do not meet are measured at the same time, as they would run; the slowest counts.

    quick: smaller sizes and fewer runs. full: all sizes of Section 6.2.

    Raises as `identity` does; ValueError for groups that are no part of ``ranks`` or of unlike sizes;
    RuntimeError where a peer fails.
    """
    begin = time.perf_counter()
    device = torch.device(device)
    identity(ranks, device, dtype)  # refuses what cannot be measured
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


def _operations(
    device: torch.device, dtype: torch.dtype, across: Ranks, inside: Ranks
) -> dict[str, LaneWork]:
    """By the name of their line in `Operations`; without those of one rank, where nothing travels."""
    sharing, size = Sharing(inside, Traffic()), dtype.itemsize

    def zeros(elements: int) -> Tensor:  # sums of them stay finite; written, so they have memory of their own
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

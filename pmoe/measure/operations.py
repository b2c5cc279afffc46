"""Measures the lines of FSMoE's performance models (Eq. 1): seconds of products and of four collectives.

A line is seconds = alpha + beta * size. The collectives are those of a layer in which each expert is sharded
over several ranks; they are measured on the layer's process groups.

The FSMoE paper measures the sizes that its Section 6.2 lists, and takes the mean of five runs. This file
takes the median of the runs on the slowest rank, after one run to warm up. On a slow network, the paper's
sizes take minutes. So by default a line is fitted to five sizes, of which the largest takes some
milliseconds.

`measure_operations` measures the flat all-to-all, `measure_exchange` the all-to-all of a layer, which may be
hierarchical or a user's own.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.agreement import largest
from pmoe.comm.base import Exchange, Traffic
from pmoe.comm.expert_sharding import ShardCollectives
from pmoe.comm.failures import at_stage
from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import AGREEING, MESSAGES, Bench, TimedCall, identity, open_bench
from pmoe.measure.line_fits import (
    QUICK,
    USUAL,
    WEIGHT_SHARE,
    Effort,
    LaneWork,
    longest_units,
    measured_line,
    messages,
    products,
    transfer,
    within_bytes,
)
from pmoe.planner.cost_model import COMMUNICATE, COMPUTE
from pmoe.planner.costs import FREE, Fit
from pmoe.planner.profile import WIDTH, Operations

MESSAGE_STEP_BYTES = 4 * 2**18
"""The smallest size of a message in FSMoE's Section 6.2, in bytes. The other sizes are multiples of it.

It is the size of 2^18 float32 elements. Other dtypes are measured with the same number of bytes.
"""

MESSAGE_STEPS = 24
"""Number of sizes of messages in FSMoE's Section 6.2: 2^18, 2 * 2^18, ..., 24 * 2^18 elements."""

GEMM_STEP = 2**19
"""The smallest size of a product in FSMoE's Section 6.2, in elements. The other sizes are multiples of it.

pmoe takes the paper's elements as those of the matrix (rows, columns) that is multiplied by a weight.
"""

GEMM_STEPS = 12
"""Number of sizes of products in FSMoE's Section 6.2: 2^19, 2 * 2^19, ..., 12 * 2^19 elements."""

SMALLER = (16, 4)
"""Two more sizes to measure: the smallest size of FSMoE's Section 6.2 divided by each of these numbers.

They are needed because the seconds of large messages alone do not determine alpha, the fixed cost.
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
    most_bytes: float = math.inf,
) -> Operations:
    """Measures FSMoE's operations: a product and four collectives. Collective; all ranks return the same.

    Args:
        ranks: all ranks that measure.
        across: ranks among which rows are dispatched and gradients are summed, for example one rank of each
            node.
        inside: ranks that share each expert, for example those of a node.
        quick: whether to measure smaller sizes with fewer runs.
        full: whether all sizes of Section 6.2 of the FSMoE paper are measured. By default there are five
            smaller sizes.
        most_bytes: how many bytes the measured tensors may take at once, the same on every rank. With few
            bytes, only small products and messages can be measured. ``full`` ignores it.

    ``across`` and ``inside`` are subsets of ``ranks`` that are equally large on every rank; None stands for
    all ranks. Each rank measures on its own groups, at the same time as the other ranks. The seconds are
    those of the slowest rank.

    Raises ValueError for a device or dtype that cannot be measured, and for groups that are not within
    ``ranks`` or not equally large; RuntimeError if another rank fails.
    """
    begin = time.perf_counter()
    device = torch.device(device)
    identity(ranks, device, dtype)  # raises for a device or dtype that cannot be measured
    effort = QUICK if quick else USUAL
    named = (("across", across), ("inside", inside))
    across, inside = (part_of(ranks, device, name, part) for name, part in named)
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    lines: dict[str, Any] = dict.fromkeys(names, FREE)
    with torch.inference_mode(False), torch.no_grad(), open_bench(ranks, device) as bench:
        for name, work in _operations(device, dtype, across, inside, most_bytes).items():
            lines[name] = _line(bench, within_bytes(work, most_bytes), effort, full)
    [seconds] = largest(ranks, device, [time.perf_counter() - begin], stage=AGREEING)
    return Operations(num_across=across.size, num_inside=inside.size, seconds=seconds, **lines)


def measure_exchange(
    ranks: Ranks,
    device: torch.device | str,
    dtype: torch.dtype,
    exchange: Exchange,
    columns: int = WIDTH["cpu"],
    most_bytes: float = math.inf,
) -> Fit:
    """Measures a layer's own all-to-all, such as a hierarchical one or a user's. Collective.

    Returns the line seconds = alpha + beta * bytes, the same on all ranks. The bytes are those of the rows
    that a rank sends to other ranks, equally many rows to each.

    ranks: all ranks that measure.
    device: the device of the rows.
    dtype: dtype of the rows.
    exchange: the all-to-all. The caller has bound it to its ranks, which are among ``ranks``. It is called as
        a layer calls it. Its counters of sent bytes are set back afterwards to the values that they had
        before.
    columns: number of columns of the rows.
    most_bytes: how many bytes the measured tensors may take at once, the same on every rank. A hierarchical
        all-to-all makes two copies of the rows, which are included.
    """
    device = torch.device(device)
    peers = exchange.ranks
    traffic_before = replace(exchange.traffic)

    def make(num_rows: int) -> TimedCall:
        splits = [num_rows] * peers.size
        splits[peers.rank] = 0
        # This may be a collective. So it comes before tensors that one rank may have too little memory for.
        counts_FW = torch.tensor([splits], device=device)
        counts = exchange.relay_counts(counts_FW, counts_FW)
        relayed = () if counts is None else tuple(counts[0].tolist())
        sent, received = torch.ones(2, sum(splits), columns, dtype=dtype, device=device)

        def run() -> None:
            work = exchange.exchange(sent, splits, received, splits, relayed)
            if work is not None:
                work.wait()

        return with_stage(peers, run)

    row_bytes = max(1, peers.size - 1) * columns * dtype.itemsize
    work = transfer(COMMUNICATE, row_bytes, make, unit_bytes=4 * row_bytes)
    with torch.inference_mode(False), torch.no_grad(), open_bench(ranks, device) as bench:
        line = _line(bench, within_bytes(work, most_bytes), QUICK, full=False)
    vars(exchange.traffic).update(vars(traffic_before))
    return line


def part_of(ranks: Ranks, device: torch.device, name: str, part: Ranks | None) -> Ranks:
    """Checks a group for measuring collectives, on all ranks, and returns it. Collective.

    ranks: all ranks that measure.
    device: the device on which ranks compare their groups.
    name: name of the argument that is checked, for errors.
    part: the group: some or all ranks of ``ranks``. None stands for ``ranks``.

    Raises ValueError on every rank if on any rank ``part`` is not within ``ranks``, or if its size differs
    between ranks.
    """
    part = ranks if part is None else part
    own = set(part.members)
    all_ranks = set(ranks.members)
    is_foreign = not own <= all_ranks
    highest, minus_lowest, any_foreign = largest(
        ranks, device, [part.size, -part.size, float(is_foreign)], stage=AGREEING
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
    device: torch.device, dtype: torch.dtype, across: Ranks, inside: Ranks, most_bytes: float
) -> dict[str, LaneWork]:
    """Returns the work to measure, by the name of its field in `Operations`.

    device: the device of all tensors.
    dtype: dtype of all tensors.
    across: ranks among which rows are dispatched (all-to-all) and gradients are summed (all-reduce).
    inside: ranks that share each expert (all-gather, reduce-scatter).
    most_bytes: how many bytes the tensors of one kind of work may take.

    A collective in a group of one rank is left out, because nothing is sent.
    """
    sharing = ShardCollectives(inside, Traffic())
    size = dtype.itemsize

    # Zeros, because repeated sums of zeros stay finite. They are written explicitly, because the operating
    # system provides a page of memory only at the first write, which must not be timed.
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

    works = {"gemm": products(device, dtype, most_bytes / WEIGHT_SHARE)}
    if across.size > 1:
        works["all_to_all"] = messages(across, device, dtype)
        works["all_reduce"] = transfer(COMMUNICATE, size, all_reduce)
    # One unit takes an element of this rank's rows, and twice one element for each rank.
    unit_bytes = (2 * inside.size + 1) * size
    for name, make in (("all_gather", all_gather), ("reduce_scatter", reduce_scatter)):
        if inside.size > 1:
            works[name] = transfer(COMMUNICATE, (inside.size - 1) * size, make, unit_bytes=unit_bytes)
    return works


def _line(bench: Bench, work: LaneWork, effort: Effort, full: bool) -> Fit:
    """Measures work of several sizes, and returns the fitted line seconds = alpha + beta * size.

    Collective, because the work may be a collective.

    bench: runs the work and reads the clock.
    effort: how long and how often the work runs.
    full: True measures the sizes that Section 6.2 of the FSMoE paper lists, False five sizes, each half of
        the size before.
    """
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
    """Returns a function that calls ``function``, and adds the stage to its errors: "measuring messages".

    ranks: the ranks that take part in the messages. The error names the ranks that are missing.
    function: sends messages.
    """

    def call() -> object:
        with at_stage(MESSAGES, ranks):
            return function()

    return call

"""`pmoe memory`: prints the bytes that a layer takes: predicted, measured, and by MPipeMoE's equations."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from pmoe.arguments import check_count, check_int
from pmoe.choose.trials import may_overlap
from pmoe.cli.arguments import DTYPES, add_allow, parse_device, restore_pair, whole_number
from pmoe.cli.layer_arguments import (
    add_layer_sizes,
    constructor_arguments,
    describe_layer,
    layer_fields,
    layer_shape,
    python_line,
)
from pmoe.cli.output import Output, mib, pair_name
from pmoe.engine.buffers.arena import pool
from pmoe.layer import MoELayer
from pmoe.measure.step_memory import step_peak_bytes
from pmoe.papers.mpipemoe_memory import theory
from pmoe.planner.degree import DEGREES, MOST_CHUNKS, all_choices, check_backward
from pmoe.planner.layer_sizes import CopyNumbers, LayerSizes
from pmoe.planner.memory import PredictedMemory
from pmoe.planner.priced_choices import bound, planned_pairs
from pmoe.planner.trial_memory import searching_peak
from pmoe.schedule.restore import Restore, without_messages
from pmoe.text import table

ABOUT = "print a layer's bytes: by the paper's equations, predicted, measured"
TOTALS = ("saved", "temporary", "gradients", "host", "peak", "promised")
"""Fields of `PredictedMemory` that the first table shows, one column each."""
SEARCHING = "searching_peak"
"""The field of `PredictedMemory` that the first table also shows, if trials may need more than a step."""
SEARCHES = (
    "searching peak: with pipeline=True or memory_reuse=True, of a step that finds n or the pair by trials,\n"
    "and takes this n and this pair. Later steps need the peak"
)
"""The line below the first table that explains the column of the searching step."""
EQUATIONS = {
    "model_states": ("Eq. 1", "4 (E M + 2 H M)"),
    "activations": ("Eq. 2", "4 B M + B H"),
    "buffers": ("Eq. 3", "B M + B H"),
    "activations_pipelined": ("Eq. 4", "4 B M + B H"),
    "buffers_pipelined": ("Eq. 4", "4 B M + B H"),
    "saved": ("Eq. 5", "2 B (2 M (n - 2) / n + H (n - 1) / n)"),
    "saving_ratio": ("Eq. 6", "saved / (model states + activations + buffers, pipelined)"),
}
"""Maps each name in the result of `theory` to its equation in MPipeMoE: (number of the equation, formula).

Letters: B tokens of a rank, M = d_model, H = d_hidden, E experts, n chunks.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_layer_sizes(command)
    add = command.add_argument
    pairs = "S1 to S4, or a pair such as keep/recompute (default: all pairs)"
    add("--n", type=whole_number, default=4, help="micro-batches (default 4)")
    add("--n-backward", type=whole_number, help="micro-batches of the backward pass (default n)")
    add("--memory-reuse", type=restore_pair, metavar="PAIR", help=pairs)
    add_allow(add)
    copies = "copies of busy experts on a rank (default 0), as if later calls use the copies"
    add("--balance", type=int, default=0, metavar="K", help=copies)
    add(
        "--shard-experts",
        type=int,
        default=0,
        metavar="N",
        help="shard experts over N copies (default 0: no)",
    )
    add("--theory", action="store_true", help="print MPipeMoE's Eq. 1-6, in elements")
    add(
        "--measure",
        action="store_true",
        help="also run a forward and backward pass on this machine, on one rank",
    )
    add("--device", default="cpu", help="cpu or cuda, the device that bytes are for (default cpu)")


def run_command(args: argparse.Namespace) -> Output:
    """Returns predicted bytes for each restore pair, or with --theory the values of MPipeMoE's equations.

    A restore pair says how backward gets the dispatched rows (T_DI) and the hidden activation (T_M) of
    forward: kept, offloaded or made again. With --measure, a step with each pair is also run and measured.
    """
    if args.theory:
        return _theory(args)
    check_count(MOST_CHUNKS, **{"--n": args.n})
    try:
        check_backward(args.n, args.n_backward)
    except ValueError as error:
        raise ValueError(str(error).replace("pipeline_", "--n-").replace("pipeline", "--n")) from None
    if args.measure and args.ranks > 1:
        raise ValueError(f"--ranks ({args.ranks}) must be 1 with --measure")
    check_int(0, **{"--balance": args.balance, "--shard-experts": args.shard_experts})
    if args.measure and args.shard_experts:
        raise ValueError(
            f"--shard-experts ({args.shard_experts}) must be 0 with --measure, which runs one rank"
        )
    device = parse_device(args.device, must_exist=args.measure)
    shape = layer_shape(args, device.type)
    num_local = args.num_experts // args.ranks
    copies = CopyNumbers.at_most(args.balance, num_local, args.ranks, stay=True)
    shape = replace(shape, copies=copies, shared_over=args.shard_experts)
    backward = args.n_backward or args.n
    rows = {}
    pairs = _pairs(args, shape)
    tried = _tried(args, shape, pairs)
    for choice in all_choices([(args.n, backward)], pairs):
        call = shape.call(args.tokens)
        memory = bound(shape, call, choice, args.slack)
        if tried:
            memory = replace(memory, searching_peak=searching_peak(memory, shape, call, tried))
        pair = choice.restore
        measured = _measured(args, pair, device) if args.measure else {}
        rows[pair] = {"restore": str(pair), "strategy": pair.strategy, **asdict(memory), **measured}
    sizes = {**layer_fields(args), "n": args.n, "n_backward": backward, "device": device.type}
    smallest = min(rows, key=lambda pair: rows[pair]["promised"])
    own = None if backward == args.n else backward
    code = python_line(
        args,
        pipeline=args.n,
        pipeline_backward=own,
        memory_reuse=smallest.strategy or smallest,
        balance=args.balance or None,
    )
    fields = {**sizes, "slack": args.slack, "pairs": list(rows.values()), "python": code}
    lines = [*_lines(args, rows, device), f"\nwith the fewest bytes:\n  {code}"]
    if args.shard_experts:
        fields["shard_experts"] = args.shard_experts
        fields["kept"] = kept = shape.gathered_bytes // args.shard_experts
        lines.insert(
            -1,
            f"\nMiB that each of {args.shard_experts} ranks keeps of these experts: parameters {mib(kept)}, "
            f"gradients {mib(kept)}, AdamW's states {mib(2 * kept)} (whole: {mib(shape.gathered_bytes)}, "
            f"{mib(shape.gathered_bytes)}, {mib(2 * shape.gathered_bytes)})",
        )
    return Output(fields, lines)


def _pairs(args: argparse.Namespace, shape: LayerSizes) -> tuple[Restore, ...]:
    """Returns the restore pairs for which bytes are predicted.

    shape: sizes of the layer.

    Raises ValueError if --memory-reuse names a pair that the layer cannot have.
    """
    pair: Restore | None = args.memory_reuse
    if pair is None:
        return planned_pairs(shape, args.allow, has_budget=True)
    if pair.dispatched == "message" and args.wire is None:
        raise ValueError(f"--memory-reuse ({pair}) needs --wire: without it rows come in no messages")
    if pair.rounds and args.dtype == "float64":
        raise ValueError(f"--memory-reuse ({pair}) must not keep T_M in e4m3 with --dtype float64")
    return (pair if shape.wires.rows else without_messages(pair),)


def _tried(args: argparse.Namespace, shape: LayerSizes, pairs: Sequence[Restore]) -> list[PredictedMemory]:
    """Returns the predictions for all choices that a layer with pipeline=True may try in a step.

    The list is empty if the layer would run no trials (timed runs of both passes): on one rank, and with few
    tokens. It is also empty if no trials can find the n of --n and --n-backward.

    args: the options of the command.
    shape: sizes of the layer.
    pairs: the restore pairs that may be tried. A pair says how backward gets the dispatched rows and the
        hidden activation of forward.
    """
    numbers = {args.n, args.n_backward or args.n}
    if not numbers <= set(DEGREES) or not may_overlap(args.tokens * shape.top_k, args.ranks):
        return []
    choices = all_choices([(n, n) for n in DEGREES], pairs)
    return [bound(shape, shape.call(args.tokens), choice, args.slack) for choice in choices]


def _measured(args: argparse.Namespace, pair: Restore, device: torch.device) -> dict[str, Any]:
    """Runs one training step with a restore pair. Returns its measured bytes and its predicted bytes.

    args: the options of the command.
    pair: how backward gets the dispatched rows (T_DI) and the hidden activation (T_M) of forward.
    device: the device on which the step runs.

    The prediction is for the row counts of this step. A step with few tokens runs first, as a warm-up. The
    layer's input and the gradient of its output are allocated before the step and are not counted.
    """
    layer = MoELayer(
        **constructor_arguments(args),
        pipeline=args.n,
        pipeline_backward=None if args.n_backward == args.n else args.n_backward,
        memory_reuse=pair,
        slack=args.slack,
        device=device,
    )

    def step(num_tokens: int) -> int:
        x_TM = torch.randn(num_tokens, args.d_model, device=device, dtype=DTYPES[args.dtype]).requires_grad_()
        dy_TM = torch.randn_like(x_TM)
        return step_peak_bytes(layer, x_TM, dy_TM)

    host = pool(device).host
    step(min(args.tokens, 64))
    host.peak_bytes = bytes_before = host.bytes_in_use
    begin = time.perf_counter()
    peak = step(args.tokens)
    seconds = time.perf_counter() - begin
    predicted = layer.predict_memory(args.tokens, layer.row_counts)
    return {
        "measured": {"peak": peak, "host": host.peak_bytes - bytes_before, "seconds": seconds},
        "predicted": {"peak": predicted.peak, "host": predicted.host},
    }


def _lines(
    args: argparse.Namespace, rows: Mapping[Restore, Mapping[str, Any]], device: torch.device
) -> Iterator[str]:
    """Yields the lines of the output: the layer, and two tables, or three with --measure.

    The tables show totals, bytes of each tensor, and with --measure measured bytes. Each table has one line
    for each restore pair.

    args: the options of the command.
    rows: the bytes of each restore pair, as in the JSON output.
    device: the device on which bytes were measured.
    """

    def by_pair(header: Sequence[str], cells: Callable[[Mapping[str, Any]], Sequence[str]]) -> str:
        return table([["pair", *header], *([pair_name(pair), *cells(row)] for pair, row in rows.items())])

    differs = args.n_backward not in (None, args.n)
    yield f"{describe_layer(args, device.type)}, n = {args.n}" + f" and {args.n_backward} backward" * differs
    yield "\npredicted MiB for any routing, without x, dy and the parameters"
    searches = any(row[SEARCHING] > row["peak"] for row in rows.values())
    totals = (*TOTALS, SEARCHING) if searches else TOTALS
    columns = [name.replace("_", " ") for name in totals]
    yield by_pair(columns, lambda row: [mib(row[name]) for name in totals])
    if searches:
        yield SEARCHES
    yield "\nMiB by tensor"
    names = list(dict.fromkeys(name for row in rows.values() for name in row["tensors"]))
    yield by_pair(names, lambda row: [mib(row["tensors"][name]) for name in names])
    if args.measure:
        yield f"\nMiB measured on {device}, beside the prediction for the rows of this step"
        header = ("measured peak", "predicted", "predicted / measured", "host", "predicted")
        yield by_pair(header, _measured_cells)


def _measured_cells(row: Mapping[str, Any]) -> list[str]:
    """Returns the measured and predicted bytes of a restore pair as cells of a table, in MiB."""
    measured, predicted = row["measured"], row["predicted"]
    ratio = f"{predicted['peak'] / measured['peak']:.4f}"
    hosts = mib(measured["host"]), mib(predicted["host"])
    return [mib(measured["peak"]), mib(predicted["peak"]), ratio, *hosts]


def _theory(args: argparse.Namespace) -> Output:
    """Returns the values of MPipeMoE's Eq. 1-6 for the described layer, in elements."""
    sizes = {"B": args.tokens, "M": args.d_model, "H": args.d_hidden, "E": args.num_experts, "n": args.n}
    numbers = theory(**sizes)
    rows = [("", "", "formula", "elements")]
    for name, number in numbers.items():
        equation, formula = EQUATIONS[name]
        rows.append((equation, name, formula, f"{number:{'.4f' if name == 'saving_ratio' else ','}}"))
    letters = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
    code = python_line(args, pipeline=args.n, memory_reuse=True)
    head = f"MPipeMoE's memory of a rank, in elements: {letters}"
    return Output({**numbers, "python": code}, [head, table(rows, left=range(3)), f"\n  {code}"])

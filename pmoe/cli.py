"""The command ``pmoe``: what a layer's memory is, how it should run, and what a machine can do.

    pmoe memory --theory --d-model 2048 --d-hidden 8192 --num-experts 64 --tokens 16384 --n 8
    pmoe plan --d-model 1024 --d-hidden 4096 --num-experts 64 --tokens 8192 --ranks 8 --budget 2GiB
    torchrun --nproc-per-node 8 -m pmoe profile
    pmoe profile --kernels --d-model 4096 --d-hidden 14336 --num-experts 8 --top-k 2 --virtual-ranks 8
    pmoe simulate fsmoe-table5 --contention 1.25
    pmoe simulate comet --draw comet.png
    pmoe kernels
    pmoe report runs/lm

Each subcommand parses, calls the library, and prints; with --json one object and nothing else. Bad arguments
end with exit code 2 and one message.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pmoe import __version__
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import gathered
from pmoe.engine.arena import pool
from pmoe.kernels import status
from pmoe.layer import MoELayer
from pmoe.layer.byte_sizes import parse_bytes
from pmoe.measure.allocations import StepMemory, step_memory
from pmoe.measure.division import forget, fused_layer_sizes
from pmoe.measure.division_file import as_fields, load_divisions, save_divisions
from pmoe.measure.fused_kernels import measure_kernels, now, time_layers, timing_refusal
from pmoe.measure.identity import WIDTH, identity
from pmoe.measure.operations import LINE_SECONDS, measure_operations
from pmoe.measure.profile_file import NoProfileError, find_profile, load_profile, profile_path, save_profile
from pmoe.measure.rates import measure
from pmoe.papers import comet_figures
from pmoe.papers.fsmoe_assumptions import ASSUMPTIONS
from pmoe.papers.fsmoe_table2 import table2
from pmoe.papers.fsmoe_table5 import CONTENTION, PAPER_DIFFERING, table5
from pmoe.planner.advise import Advice, advise, step_bars
from pmoe.planner.candidates import PricedChoice, bound
from pmoe.planner.cost_model import Interference
from pmoe.planner.degree import check_backward
from pmoe.planner.division import FusedLayerSizes, all_kernel_sizes, rule, sizes_of
from pmoe.planner.division_table import DivisionTable, LayerTimes
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Operations, Profile
from pmoe.planner.sizes_from_options import STACKED, sizes_from_options
from pmoe.planner.theory import theory
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore
from pmoe.store import cache_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16} | {
    "float64": torch.float64
}

LAYER: dict[str, Any] = {
    "d_model": 4096,
    "d_hidden": 14336,
    "num_experts": 8,
    "top_k": 2,
    "tokens": (1024, 4096, 16384),
    "expert": "swiglu",
}
"""Whose fused kernels `pmoe profile --kernels` measures where nobody says: COMET's Table 2, Mixtral 8x7B."""

EQUATIONS = {
    "model_states": ("Eq. 1", "4 (E M + 2 H M)"),
    "activations": ("Eq. 2", "4 B M + B H"),
    "buffers": ("Eq. 3", "B M + B H"),
    "activations_pipelined": ("Eq. 4", "4 B M + B H"),
    "buffers_pipelined": ("Eq. 4", "4 B M + B H"),
    "saved": ("Eq. 5", "2 B (2 M (n - 2) / n + H (n - 1) / n)"),
    "saving_ratio": ("Eq. 6", "saved / (model states + activations + buffers, pipelined)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Raises SystemExit(2), after a message, for bad arguments."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except (_BadInputError, NoProfileError, ValueError) as error:
        command: argparse.ArgumentParser = args.parser
        command.error(str(error))


class _BadInputError(Exception):
    """Told as argparse tells its own."""


# ---- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pmoe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"pmoe {__version__}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="memory | plan | profile | simulate | kernels | report"
    )
    for name, add, run, about in (
        (
            "memory",
            _add_memory,
            run_memory,
            "bytes of a layer: by the paper's equations, predicted, measured",
        ),
        ("plan", _add_plan, run_plan, "n and the restore pair for a layer, from a stored profile"),
        ("profile", _add_profile, run_profile, "measure what this machine, or this group of ranks, can do"),
        ("simulate", _add_simulate, run_simulate, "a paper's experiment from its own task costs"),
        ("kernels", None, run_kernels, "the CUDA kernels: what was built, what runs on each device, why not"),
        ("report", _add_report, run_report, "one page about a training run, from what StatsWriter left"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        if add is not None:
            add(command)
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        command.set_defaults(run=run, parser=command)
    return parser


def _whole(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


def _slack(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 1")
    return number


def _bytes(text: str) -> int:
    try:
        return parse_bytes("value", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pair(text: str) -> Restore:
    if text in STRATEGIES:
        return STRATEGIES[text]
    found = [pair for pair in ALL_PAIRS if str(pair) == text]
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be one of {', '.join(STRATEGIES)}, or a pair: {', '.join(map(str, ALL_PAIRS))}"
        )
    return found[0]


def _add_sizes(command: argparse.ArgumentParser) -> None:
    sizes = command.add_argument_group("the layer")
    sizes.add_argument("--d-model", type=_whole, required=True, metavar="M")
    sizes.add_argument("--d-hidden", type=_whole, required=True, metavar="H")
    sizes.add_argument("--num-experts", type=_whole, required=True, metavar="E", help="on all ranks together")
    sizes.add_argument("--tokens", type=_whole, required=True, metavar="B", help="of one rank, the most")
    sizes.add_argument("--ranks", type=_whole, default=1, metavar="W", help="that share the experts")
    sizes.add_argument("--top-k", type=_whole, default=1, metavar="K", help="experts a token")
    sizes.add_argument("--expert", choices=list(STACKED), default="ffn")
    sizes.add_argument("--bias", action=argparse.BooleanOptionalAction, default=True)
    sizes.add_argument("--dtype", choices=list(DTYPES), default="float32")
    sizes.add_argument("--slack", type=_slack, default=1.25, help="rows of a slot over the balanced share")


def _add_memory(command: argparse.ArgumentParser) -> None:
    _add_sizes(command)
    command.add_argument("--n", type=_whole, default=4, help="micro-batches (default 4)")
    command.add_argument("--n-backward", type=_whole, help="micro-batches of the backward pass (default n)")
    command.add_argument(
        "--memory-reuse", type=_pair, metavar="PAIR", help="S1 to S4 or such as keep/recompute; default: all"
    )
    command.add_argument("--theory", action="store_true", help="MPipeMoE's Eq. 1-6, in elements")
    command.add_argument(
        "--measure", action="store_true", help="also run a forward and backward here, on one rank"
    )
    command.add_argument("--device", default="cpu", help="cpu or cuda: whose buffers (default cpu)")


def _add_plan(command: argparse.ArgumentParser) -> None:
    _add_sizes(command)
    command.add_argument("--budget", type=_bytes, help="most bytes on the device, such as 2GiB or '500 MB'")
    command.add_argument("--profile", type=Path, metavar="FILE", help="default: the stored one that fits")
    command.add_argument(
        "--folder", type=Path, help="of stored profiles (default $PMOE_CACHE, ~/.cache/pmoe)"
    )
    command.add_argument("--html", type=Path, metavar="FILE", help="also write one page with pictures")


def _add_profile(command: argparse.ArgumentParser) -> None:
    effort = command.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="a few seconds in place of ten or twenty")
    effort.add_argument(
        "--full", action="store_true", help="all sizes of FSMoE's lines, Section 6.2: minutes on a slow link"
    )
    command.add_argument(
        "--inside",
        type=_whole,
        metavar="L",
        help="ranks of a node, which are to share each expert (default: torchrun's ranks a node)",
    )
    command.add_argument("--dtype", choices=list(DTYPES), help="default float32, and bfloat16 with --kernels")
    command.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    command.add_argument("--folder", type=Path, help="where to store it (default $PMOE_CACHE, ~/.cache/pmoe)")
    command.add_argument("--out", type=Path, metavar="FILE", help="store it in this file instead")
    fused = command.add_argument_group(
        "the fused kernels", "how many of their thread blocks communicate (default layer: Mixtral 8x7B's)"
    )
    fused.add_argument(
        "--kernels", action="store_true", help="measure them in place of the machine, on a CUDA device"
    )
    fused.add_argument("--show", action="store_true", help="print what is stored, and measure nothing")
    for name, letter, about in (
        ("--d-model", "M", ""),
        ("--d-hidden", "H", ""),
        ("--num-experts", "E", "on all ranks together; "),
        ("--top-k", "K", "experts a token; "),
    ):
        default = LAYER[name.removeprefix("--").replace("-", "_")]
        fused.add_argument(name, type=_whole, metavar=letter, help=f"{about}default {default}")
    fused.add_argument(
        "--tokens",
        type=_whole,
        nargs="+",
        metavar="B",
        help=f"of one rank; default {' '.join(map(str, LAYER['tokens']))}",
    )
    fused.add_argument("--expert", choices=list(STACKED), help=f"default {LAYER['expert']}")
    fused.add_argument(
        "--virtual-ranks", type=_whole, metavar="W", help="that share this one device, in one process"
    )


def _add_simulate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "experiment",
        choices=["fsmoe-table5", "comet"],
        help="FSMoE's Table 5: five systems, 1,458 layers, Testbed B; or COMET's Table 3, the moves of n_c "
        "in its Fig. 8, and a fused layer beside a chunked one",
    )
    command.add_argument(
        "--contention",
        type=_slack,
        metavar="C",
        help="fsmoe-table5: seconds of collectives of both lanes together, over those alone "
        f"(default {CONTENTION})",
    )
    command.add_argument(
        "--draw", type=Path, metavar="FILE", help="comet: the fused layer beside the chunked one, as a PNG"
    )
    command.add_argument(
        "--assumptions", action="store_true", help="print what is assumed, and simulate nothing"
    )


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder that StatsWriter wrote to")
    command.add_argument("--out", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")


def _shape(args: argparse.Namespace, device_type: str) -> LayerSizes:
    return sizes_from_options(
        args.d_model,
        args.d_hidden,
        args.num_experts,
        top_k=args.top_k,
        num_ranks=args.ranks,
        expert=args.expert,
        bias=args.bias,
        dtype=DTYPES[args.dtype],
        device_type=device_type,
    )


def _device(text: str, *, must_exist: bool) -> torch.device:
    rule = f"--device ({text!r}) must be {' or '.join(WIDTH)}"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise _BadInputError(rule) from None
    if device.type not in WIDTH:
        raise _BadInputError(rule)
    if must_exist and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise _BadInputError(f"--device ({text!r}) must be here: torch sees {torch.cuda.device_count()} GPUs")
    return device


# ---- pmoe memory


def run_memory(args: argparse.Namespace) -> int:
    if args.theory:
        return _print_theory(args)
    backward = args.n if args.n_backward is None else args.n_backward
    try:
        check_backward(args.n, args.n_backward)
    except ValueError:
        raise _BadInputError(
            f"--n-backward ({args.n_backward}) must divide --n ({args.n}) or be a multiple of it"
        ) from None
    if args.measure and args.ranks > 1:
        raise _BadInputError(f"--ranks ({args.ranks}) must be 1 with --measure")
    device = _device(args.device, must_exist=args.measure)
    shape = _shape(args, device.type)
    rows = []
    for pair in ALL_PAIRS if args.memory_reuse is None else (args.memory_reuse,):
        memory = bound(shape, args.tokens, args.n, backward, pair, args.slack)
        row: dict[str, Any] = {"restore": str(pair), "strategy": pair.strategy, **asdict(memory)}
        if args.measure:
            row |= _measured(args, backward, pair, device)
        rows.append(row)
    if args.json:
        sizes = {**_sizes(args), "n": args.n, "n_backward": backward, "device": device.type}
        print(json.dumps({**sizes, "slack": args.slack, "pairs": rows}))
        return 0
    degrees = f"n = {args.n}" + f" and {backward} backward" * (backward != args.n)
    print(f"{_told_sizes(args)}, {degrees}\n")
    print("predicted MiB for any routing, beyond x, dy and the parameters")
    totals = ("saved", "temporary", "gradients", "host", "peak", "promised")
    print(_table(["pair", *totals], [[_name(row), *(_mib(row[name]) for name in totals)] for row in rows]))
    print("\nMiB by tensor")
    names = list(dict.fromkeys(name for row in rows for name in row["tensors"]))
    print(
        _table(
            ["pair", *names], [[_name(row), *(_mib(row["tensors"][each]) for each in names)] for row in rows]
        )
    )
    if args.measure:
        print(f"\nMiB measured on {device}, beside what is predicted for the rows that came")
        print(
            _table(
                ["pair", "measured peak", "predicted", "predicted / measured", "host", "predicted"],
                [
                    [
                        _name(row),
                        _mib(row["measured"]["peak"]),
                        _mib(row["predicted"]["peak"]),
                        f"{row['predicted']['peak'] / row['measured']['peak']:.4f}",
                        _mib(row["measured"]["host"]),
                        _mib(row["predicted"]["host"]),
                    ]
                    for row in rows
                ],
            )
        )
    return 0


def _print_theory(args: argparse.Namespace) -> int:
    numbers = theory(B=args.tokens, M=args.d_model, H=args.d_hidden, E=args.num_experts, n=args.n)
    if args.json:
        print(json.dumps(numbers))
        return 0
    print(
        f"MPipeMoE's memory of a rank, in elements: B = {args.tokens}, M = {args.d_model}, "
        f"H = {args.d_hidden}, E = {args.num_experts}, n = {args.n}"
    )
    rows = []
    for name, number in numbers.items():
        told = f"{number:.4f}" if name == "saving_ratio" else f"{number:,}"
        rows.append([EQUATIONS[name][0], name, EQUATIONS[name][1], told])
    print(_table(["", "", "formula", "elements"], rows, words=3))
    return 0


def _measured(
    args: argparse.Namespace, backward: int, pair: Restore, device: torch.device
) -> dict[str, dict[str, int | float]]:
    """One step of a real layer, after one with few tokens, whose inputs are there before and do not count."""
    layer = MoELayer(
        args.d_model,
        args.d_hidden,
        args.num_experts,
        args.top_k,
        expert=args.expert,
        bias=args.bias,
        pipeline=args.n,
        pipeline_backward=None if backward == args.n else backward,
        memory_reuse=pair,
        slack=args.slack,
        device=device,
        dtype=DTYPES[args.dtype],
    )
    host = pool(device).host

    def step(num_tokens: int) -> StepMemory:
        shape = (num_tokens, args.d_model)
        x = torch.randn(shape, device=device, dtype=DTYPES[args.dtype], requires_grad=True)
        dy = torch.randn(shape, device=device, dtype=DTYPES[args.dtype])
        return step_memory(layer, lambda: (x, dy))

    step(min(args.tokens, 64))
    host.peak_bytes = before = host.bytes_in_use
    found = step(args.tokens)
    predicted = layer.predict_memory(args.tokens, layer.row_counts)
    return {
        "measured": {"peak": found.peak, "host": host.peak_bytes - before, "seconds": found.seconds},
        "predicted": {"peak": predicted.peak, "host": predicted.host},
    }


# ---- pmoe plan


def run_plan(args: argparse.Namespace) -> int:
    _shape(args, "cpu")  # bad sizes first
    path, profile = _profile_for(args)
    shape = _shape(args, profile.device_type)
    try:
        advice = advise(shape, profile, args.tokens, budget=args.budget, slack=args.slack)
    except ValueError as error:
        if args.budget is None:
            raise
        raise _BadInputError(str(error).replace("memory_budget", "--budget", 1)) from None
    if args.html is not None:
        _write_page(args, shape, profile, advice)
    if args.json:
        print(json.dumps(_plan_as_json(args, path, profile, advice)))
        return 0
    print(_told_sizes(args))
    print(f"profile: {path}\n  {_told_profile(profile)}\n")
    header, rows, marked = _candidate_table(advice, args.budget)
    print(_table(header, [[*row, "<-" if i in marked else ""] for i, row in enumerate(rows)], words=1))
    for line in _conclusions(advice):
        print(line)
    if args.html is not None:
        print(f"wrote {args.html}")
    return 0


def _profile_for(args: argparse.Namespace) -> tuple[Path, Profile]:
    if args.profile is None:
        return find_profile(args.folder, num_ranks=args.ranks, dtype=args.dtype)
    try:
        profile = load_profile(args.profile)
    except OSError as error:
        raise _BadInputError(f"--profile ({args.profile}) must be a file to read: {error.strerror}") from None
    except ValueError as error:
        raise _BadInputError(f"--profile ({args.profile}) must hold a profile: {error}") from None
    for name, asked, held in (
        ("--ranks", args.ranks, profile.num_ranks),
        ("--dtype", args.dtype, profile.dtype),
    ):
        if asked != held:
            raise _BadInputError(f"{name} ({asked}) must be that of --profile {args.profile} ({held})")
    return args.profile, profile


def _conclusions(advice: Advice) -> list[str]:
    lines = [f"decision: {_told_candidate(advice.decision)}", f"  {advice.why}"]
    if advice.fastest is not advice.decision:
        lines.append(f"fastest of all: {_told_candidate(advice.fastest)}")
    return lines


def _told_candidate(candidate: PricedChoice) -> str:
    memory = f"at most {_mib(candidate.memory.promised)} MiB on the device"
    if candidate.memory.host:
        memory += f" and {_mib(candidate.memory.host)} on the host"
    pair = candidate.restore
    name = str(pair) if pair.strategy is None else f"{pair.strategy} ({pair})"
    return f"n={candidate.forward}, {name}: {_ms(candidate.seconds)} ms a step, {memory}"


def _candidate_table(advice: Advice, budget: int | None) -> tuple[list[str], list[list[str]], list[int]]:
    """Header, rows, and the number of the row that is the decision."""
    header = ["pair", "n", "simulated ms", "Eq. 10 ms", "promised MiB", "host MiB"]
    header += ["fits"] * (budget is not None)
    rows = []
    for each in advice.candidates:
        row = [
            _pair_name(each.restore),
            str(each.forward),
            _ms(each.seconds),
            _ms(advice.eq10[each.restore]),
            _mib(each.memory.promised),
            _mib(each.memory.host),
        ]
        if budget is not None:
            row.append("yes" if each.memory.promised <= budget else "no")
        rows.append(row)
    return header, rows, [i for i, each in enumerate(advice.candidates) if each is advice.decision]


def _plan_as_json(args: argparse.Namespace, path: Path, profile: Profile, advice: Advice) -> dict[str, Any]:
    def told(each: PricedChoice) -> dict[str, Any]:
        return {
            "n": each.forward,
            "restore": str(each.restore),
            "strategy": each.restore.strategy,
            "seconds": each.seconds,
            "eq10_seconds": advice.eq10[each.restore],
            "promised_bytes": each.memory.promised,
            "peak_bytes": each.memory.peak,
            "host_bytes": each.memory.host,
            "fits": args.budget is None or each.memory.promised <= args.budget,
        }

    return {
        **_sizes(args),
        "slack": args.slack,
        "budget_bytes": args.budget,
        "profile": {"path": str(path), **asdict(profile.identity), "when": profile.when},
        "decision": {**told(advice.decision), "why": advice.why},
        "fastest": told(advice.fastest),
        "candidates": [told(each) for each in advice.candidates],
    }


def _write_page(args: argparse.Namespace, shape: LayerSizes, profile: Profile, advice: Advice) -> None:
    from pmoe.planner.drawing import Picture, Point, Table, page, scatter
    from pmoe.planner.timeline import draw

    decision = advice.decision
    points = [
        Point(
            group=_pair_name(each.restore),
            label=str(each.forward),
            num_bytes=each.memory.promised,
            seconds=each.seconds,
            chosen=each is decision,
        )
        for each in advice.candidates
    ]
    name = f"n={decision.forward}, {_pair_name(decision.restore)}"
    time_over_memory, schedule = io.BytesIO(), io.BytesIO()
    bars = step_bars(shape, profile, args.tokens, decision)
    try:
        scatter(time_over_memory, points, "numbers: n; ringed in black: the decision", budget=args.budget)
        draw(schedule, {name: bars}, "one step, simulated")
    except ImportError as error:
        raise _BadInputError(f"--html ({args.html}) must be left out without matplotlib: {error}") from None
    header, rows, marked = _candidate_table(advice, args.budget)
    text = page(
        "pmoe plan",
        [
            _told_sizes(args) + ("" if args.budget is None else f", budget {_mib(args.budget)} MiB"),
            f"Profile: {_told_profile(profile)}.",
            *(line.strip()[:1].upper() + line.strip()[1:] + "." for line in _conclusions(advice)),
            Picture(
                png=time_over_memory.getvalue(),
                caption="Predicted time of a step over the bytes that no routing exceeds",
            ),
            Picture(png=schedule.getvalue(), caption=f"The schedule of the decision, {name}, as simulated"),
            Table(header=header, rows=rows, marked=marked, words=1),
        ],
    )
    try:
        args.html.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _BadInputError(f"--html ({args.html}) must be a file to write: {error.strerror}") from None


# ---- pmoe profile


def run_profile(args: argparse.Namespace) -> int:
    """Under torchrun every rank takes part, and rank 0 stores and prints."""
    if args.kernels:
        return run_profile_kernels(args)
    _refuse_given(args, ("show", *LAYER, "virtual_ranks"), "needs --kernels")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    text = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if text == "cuda":
        text = f"cuda:{local_rank}"
    device = _device(text, must_exist=True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if several:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        ranks, dtype = Ranks(), DTYPES[args.dtype or "float32"]
        path = args.out or profile_path(identity(ranks, device, dtype), args.folder)
        across, inside = _nodes(ranks, args.inside)
        profile = measure(ranks, device, dtype, quick=args.quick)
        seconds = math.inf if args.full else LINE_SECONDS / 5 if args.quick else LINE_SECONDS
        operations = measure_operations(
            ranks, device, dtype, across=across, inside=inside, line_seconds=seconds
        )
        profile = replace(profile, operations=operations)
        if ranks.rank:
            return 0
        try:
            save_profile(profile, path)
        except OSError as error:
            raise _BadInputError(
                f"{'--out' if args.out else '--folder'} ({path}) must be a file to write: {error.strerror}"
            ) from None
    finally:
        if several:
            dist.destroy_process_group()
    if args.json:
        print(json.dumps({"path": str(path), **asdict(profile)}))
        return 0
    print(_told_profile(profile))
    print(f"measured in {profile.seconds + operations.seconds:.1f} s\n")
    print(_rates_table(profile))
    print(f"\n{_told_operations(operations)}")
    print(_operations_table(operations))
    print("\nspeed beside other lanes, relative to running alone (MPipeMoE, Fig. 3)")
    print(_interference_table(profile.interference, profile.num_ranks > 1))
    print(f"\nwrote {path}")
    return 0


def _refuse_given(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(args, name) not in (None, False):
            raise _BadInputError(f"--{name.replace('_', '-')} {why}")


def run_profile_kernels(args: argparse.Namespace) -> int:
    """Fills the table of division points. Under torchrun as `run_profile`."""
    _refuse_given(args, ("quick", "full", "inside", "out"), "must not be given with --kernels")
    if args.show:
        return _show_divisions(args)
    world, virtual = int(os.environ.get("WORLD_SIZE", "1")), args.virtual_ranks
    if virtual is not None and world > 1:
        raise _BadInputError(f"--virtual-ranks ({virtual}) must be of one process, and there are {world}")
    text = args.device or "cuda"
    if text == "cuda":
        text = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    device = _device(text, must_exist=False)
    reason = timing_refusal(device)
    if reason is not None:
        raise _BadInputError(f"pmoe profile --kernels needs a CUDA device with the fused kernels: {reason}")
    torch.cuda.set_device(device)
    several = world > 1 and not dist.is_initialized()
    if several:
        dist.init_process_group("nccl")
    try:
        ranks = Ranks()
        given = {name: getattr(args, name) or default for name, default in LAYER.items()}
        gated = given.pop("expert") == "swiglu"
        layers = [
            fused_layer_sizes(
                device,
                **given | {"tokens": tokens},
                num_ranks=virtual or ranks.size,
                gated=gated,
                dtype=DTYPES[args.dtype or "bfloat16"],
                virtual=virtual is not None,
            )
            for tokens in given["tokens"]
        ]
        found = measure_kernels(layers, ranks, device, top_k=given["top_k"])
        if not found.entries:
            raise _BadInputError("no fused kernel could be measured")
        path = _save_divisions(found, ranks, args.folder)
        if virtual is None and ranks.size > 1:  # with the division points that were just stored
            kind = "swiglu" if gated else "ffn"
            times = _time_layers(layers, given, kind, ranks, device, DTYPES[args.dtype or "bfloat16"])
            found = DivisionTable(found.entries, times)
            path = _save_divisions(found, ranks, args.folder)
        if ranks.rank:
            return 0
    finally:
        if several:
            dist.destroy_process_group()
    if args.json:
        print(json.dumps({"path": str(path), **as_fields(found)}))
        return 0
    print(f"{_divisions_table(found)}\n\nwrote {path}")
    return 0


def _save_divisions(found: DivisionTable, ranks: Ranks, folder: Path | None) -> Path | None:
    """Where rank 0 has stored it; collective."""
    path, told = None, ""
    if ranks.rank == 0:
        try:
            (path,) = save_divisions(found, folder)
        except OSError as error:
            told = f"--folder ({cache_folder(folder)}) must be a folder to write: {error.strerror}"
    if ranks.size > 1:
        told = next(filter(None, gathered(told, ranks)), "")
    if told:
        raise _BadInputError(told)
    forget()
    return path


def _time_layers(
    layers: Sequence[FusedLayerSizes],
    given: Mapping[str, Any],
    expert: str,
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[FusedLayerSizes, LayerTimes]:
    """The fused layer beside the one in chunks, for each number of tokens; none where the fused one falls
    back."""
    names = ("d_model", "d_hidden", "num_experts", "top_k")
    options = {name: given[name] for name in names} | {"expert": expert, "bias": False}
    found = {}
    for sizes, tokens in zip(layers, given["tokens"], strict=True):
        x_TM = torch.randn(tokens, given["d_model"], device=device).to(dtype)
        fused, chunked = (
            MoELayer(**options, fused=way, pipeline=True, memory_reuse=True, device=device, dtype=dtype)
            for way in (True, False)
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fused(x_TM)
        if any("falls back" in str(each.message) for each in told):
            print(f"pmoe: no layer times: {told[0].message}", file=sys.stderr)
            continue
        found[sizes] = LayerTimes(sizes=sizes, seconds=time_layers(fused, chunked, x_TM, ranks), when=now())
    return found


def _show_divisions(args: argparse.Namespace) -> int:
    found, folder = load_divisions(args.folder), cache_folder(args.folder)
    if args.json:
        print(json.dumps({"folder": str(folder), **as_fields(found)}))
        return 0
    if not (found.entries or found.layers):
        print(f"nothing measured of the fused kernels in {folder}")
        return 0
    if found.entries:
        print(_divisions_table(found))
    if found.layers:
        rows = []
        for times in sorted(found.layers.values(), key=lambda times: str(times.sizes)):
            each = times.seconds
            cells = (each.fused_forward, each.chunked_forward, each.fused_step, each.chunked_step)
            rows.append([str(times.sizes), *map(_ms, cells), times.when])
        print("\nms of a layer, forward and both passes, with fused kernels and in chunks")
        print(_table(["", "fused", "chunked", "fused, both", "chunked, both", "measured"], rows))
    print(f"\nstored in {folder}")
    return 0


def _divisions_table(found: DivisionTable) -> str:
    """Beside the fastest, what the rule takes that holds where nothing is measured, if it was tried."""
    lines = ["thread blocks that communicate (n_c), columns of a chunk (T_N), and ms of the kernel"]
    layers = sorted({sizes_of(shape) for shape in found.entries}, key=str)
    for sizes in layers:
        rows = []
        for shape in all_kernel_sizes(sizes):
            entry = found.entries.get(shape)
            if entry is None:
                continue
            by_rule = entry.seconds.get(rule(shape))
            rows.append(
                [
                    f"{shape.kernel} {shape.direction}",
                    str(entry.division.n_c),
                    str(entry.division.chunk_columns) if shape.kernel == "combine" else "-",
                    _ms(entry.seconds[entry.division]),
                    "-" if by_rule is None else _ms(by_rule),
                    entry.when,
                ]
            )
        lines += ["", str(sizes), _table(["kernel", "n_c", "T_N", "ms", "ms by rule", "measured"], rows)]
    return "\n".join(lines)


def _rates_table(profile: Profile) -> str:
    rows = []
    for name, line, unit, scale in (
        ("compute", profile.compute, "G multiply-adds / s", 1e9),
        ("communicate", profile.message, "GB sent to others / s", 1e9),
        ("copy out", profile.copy_out, "GB / s", 1e9),
        ("copy in", profile.copy_in, "GB / s", 1e9),
    ):
        if name == "communicate" and profile.num_ranks == 1:
            rows.append([name, "nothing travels on one rank", "", ""])
            continue
        rate = f"{1 / line.beta_seconds / scale:.4g}" if line.beta_seconds else "-"
        rows.append([name, unit, rate, f"{line.alpha_seconds * 1e6:.3g}"])
    return _table(["work", "unit", "rate", "and a task, us"], rows, words=2)


def _nodes(ranks: Ranks, size: int | None) -> tuple[Ranks | None, Ranks | None]:
    """The ranks across nodes and inside this one's, where nodes are ``size`` consecutive ranks each, or as
    many as torchrun started on each; None, None where all are one node. Collective."""
    told = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    if size is None:
        size = ranks.size if ranks.size % told else told
    if ranks.size % size:
        raise _BadInputError(f"--inside ({size}) must divide the number of ranks ({ranks.size})")
    if size == ranks.size:
        return None, None
    places = [list(range(first, first + size)) for first in range(0, ranks.size, size)]
    inside, _ = dist.new_subgroups_by_enumeration(places)
    across, _ = dist.new_subgroups_by_enumeration([list(line) for line in zip(*places, strict=True)])
    return Ranks(across), Ranks(inside)


def _told_operations(found: Operations) -> str:
    return (
        "FSMoE's lines, seconds = alpha + beta * size by least squares: all-to-all and all-reduce among "
        f"{found.num_across},\nall-gather and reduce-scatter among {found.num_inside} ranks"
    )


def _operations_table(found: Operations) -> str:
    rows = []
    for name, fit, unit in (
        ("GEMM", found.gemm, "TFLOP / s"),
        ("all-to-all", found.all_to_all, "GB sent to others / s"),
        ("all-gather", found.all_gather, "GB sent to others / s"),
        ("reduce-scatter", found.reduce_scatter, "GB sent to others / s"),
        ("all-reduce", found.all_reduce, "GB of the tensor / s"),
    ):
        if not fit.num_sizes:
            rows.append([name, "nothing travels", "", "", "", ""])
            continue
        a_second = 2e-12 if fit is found.gemm else 1e-9  # two floating-point operations a multiply-add
        beta = fit.line.beta_seconds
        rate = f"{a_second / beta:.4g}" if beta else "-"
        alpha = f"{fit.line.alpha_seconds * 1e6:.3g}"
        rows.append([name, unit, rate, alpha, f"{fit.r_squared:.6f}", str(fit.num_sizes)])
    return _table(["operation", "unit", "1 / beta", "alpha, us", "r^2", "sizes"], rows, words=2)


def _interference_table(found: Interference, travels: bool) -> str:
    """Rows: whose speed. Columns: what runs beside it."""
    rows: dict[str, list[float | None]] = {
        "compute": [None, found.sigma_comm, found.sigma_mem, found.sigma_all],
        "communicate": [found.mu_comp, None, found.mu_mem, found.mu_all],
        "copy": [found.eta_comp, found.eta_comm, None, found.eta_all],
    }
    if not travels:
        del rows["communicate"]
    written = []
    for name, speeds in rows.items():
        cells = ["" if speed is None else f"{speed:.2f}" for speed in speeds]
        if not travels:
            cells[1] = "-"
        written.append([name, *cells])
    return _table(
        ["speed of", "beside compute", "beside communicate", "beside copies", "beside all"], written
    )


# ---- pmoe simulate


def run_simulate(args: argparse.Namespace) -> int:
    comet = args.experiment == "comet"
    if comet and args.contention is not None:
        raise _BadInputError(f"--contention ({args.contention:g}) is for fsmoe-table5, not for comet")
    if args.draw is not None and (not comet or args.assumptions):
        raise _BadInputError(f"--draw ({args.draw}) is for comet, without --assumptions")
    if args.assumptions:
        return _print_assumptions(comet_figures.ASSUMPTIONS if comet else ASSUMPTIONS, args.json)
    return _simulate_comet(args) if comet else _simulate_table5(args)


def _print_assumptions(assumptions: Mapping[str, str], as_json: bool) -> int:
    if as_json:
        print(json.dumps(dict(assumptions)))
        return 0
    width = max(map(len, assumptions))
    for name, told in assumptions.items():
        first, other = f"{name:<{width}}  ", " " * (width + 2)
        print(textwrap.fill(told, 110, initial_indent=first, subsequent_indent=other))
    return 0


def _simulate_comet(args: argparse.Namespace) -> int:
    sizes, cases, beside = comet_figures.table3(), comet_figures.figure8(), comet_figures.beside()
    told = comet_figures.moves(cases)
    if args.draw is not None:
        _draw_comet(args.draw, beside)
    if args.json:
        found = {
            "table3": [asdict(each) for each in sizes],
            "figure8": [asdict(each) for each in cases],
            "moves": told,
            "beside": {**asdict(beside), "fused": beside.fused},
            "machine": asdict(comet_figures.H800),
            "assumptions": dict(comet_figures.ASSUMPTIONS),
        }
        print(json.dumps(found))
        return 0
    print("COMET's Table 3: MB (2^20 bytes) of the communication buffer, 2 M N bytes\n")
    rows = [
        [each.model, f"{each.tokens}", f"{each.paper_mb}", f"{each.num_bytes / 2**20:g}"] for each in sizes
    ]
    print(_table(["model", "M", "paper", "computed"], rows))
    print(
        "\nCOMET's Fig. 8: the n_c of 132 blocks with which layer 1 is fastest; also the model's where "
        "communicating\nblocks are half as fast, and where M is of a TP group; us with the model's n_c and "
        "the paper's\n"
    )
    rows = []
    for case in cases:
        paper = "-" if case.paper is None else f"{case.paper}"
        slower = "-" if case.paper_seconds is None else f"{case.paper_seconds * 1e6:.0f}"
        numbers = [case.model, case.half_rate, case.per_group]
        rows.append(
            [f"{case.tp}", f"{case.tokens}", paper, *map(str, numbers), f"{case.seconds * 1e6:.0f}", slower]
        )
    print(_table(["TP", "M", "paper", "model", "half rate", "M W / TP", "us", "us, paper's"], rows))
    print("\n" + "\n".join(told))
    print(textwrap.fill(comet_figures.WHY, 110))
    print(
        f"\nMixtral 8x7B, EP = 8, M = {beside.tokens}: fused {_ms(beside.fused)} ms (layer 0 "
        f"{_ms(beside.dispatch.seconds)} with n_c = {beside.dispatch.division.n_c}, layer 1 "
        f"{_ms(beside.combine.seconds)} with n_c = {beside.combine.division.n_c}\nand T_N = "
        f"{beside.combine.division.chunk_columns}), chunked "
        + ", ".join(f"{_ms(seconds)} with n = {n}" for n, seconds in beside.chunked.items())
    )
    print("\nassumed: pmoe simulate comet --assumptions")
    return 0


def _draw_comet(path: Path, beside: comet_figures.Beside) -> None:
    from pmoe.planner.timeline import draw

    title = f"Mixtral 8x7B, EP = 8, M = {beside.tokens}: a rank of 8 H800, simulated"
    try:
        draw(path, comet_figures.panels(beside), title)
    except ImportError as error:
        raise _BadInputError(f"--draw ({path}) must be left out without matplotlib: {error}") from None
    except (OSError, ValueError) as error:
        raise _BadInputError(f"--draw ({path}) must be a file to write: {error}") from None


def _simulate_table5(args: argparse.Namespace) -> int:
    contention = CONTENTION if args.contention is None else args.contention
    ideal, contended, operations = table5(1.0), table5(contention), table2()
    if args.json:
        found = {
            "ideal": asdict(ideal),
            "contended": asdict(contended),
            "paper_differing": PAPER_DIFFERING,
            "table2": [asdict(each) for each in operations],
            "assumptions": dict(ASSUMPTIONS),
        }
        print(json.dumps(found))
        return 0
    print(
        f"speed-up over Tutel, mean of {ideal.num_layers} layers; C: how many times as long communication "
        "between nodes\nand inside the node take beside each other\n"
    )
    rows = []
    for name, alone in ideal.systems.items():
        beside = contended.systems[name]
        spans = [f"{each.least:.2f} - {each.greatest:.2f}" for each in (alone, beside)]
        paper = "-" if alone.paper is None else f"{alone.paper:.2f}"
        rows.append([name, f"{alone.mean:.3f}", spans[0], f"{beside.mean:.3f}", spans[1], paper])
    header = ["system", "C = 1", "of one layer", f"C = {contention:g}", "of one layer", "paper"]
    print(_table(header, rows))
    print(
        f"\nlayers whose best degrees of both passes differ: {ideal.differing} ({ideal.differing_alone} "
        f"where backward carries no gradients), paper {PAPER_DIFFERING}\n"
    )
    print("FSMoE's Table 2, Testbed B: ms of an operation in one pass, all of them beside nothing")
    rows = []
    for each in operations:
        ratio = f"{each.modelled / each.measured:.2f}" if each.measured else "-"
        rows.append(
            [
                f"{each.model} {each.direction}",
                each.name,
                f"{each.measured * 1e3:.1f}",
                f"{each.modelled * 1e3:.1f}",
                ratio,
            ]
        )
    print(_table(["pass", "operation", "measured", "modelled", "modelled / measured"], rows, words=2))
    print("\nassumed: pmoe simulate fsmoe-table5 --assumptions")
    return 0


# ---- pmoe kernels


def run_kernels(args: argparse.Namespace) -> int:
    """A report: a missing extension or device is told, and is no failure."""
    found = status()
    print(json.dumps(asdict(found)) if args.json else found)
    return 0


# ---- pmoe report


def run_report(args: argparse.Namespace) -> int:
    from pmoe.integrations.report import run_page, summary
    from pmoe.integrations.run_folder import read_run

    try:
        run = read_run(args.run_dir)
    except (OSError, ValueError) as error:
        raise _BadInputError(f"RUN_DIR ({args.run_dir}) must be a run's folder: {error}") from None
    out = args.run_dir / "report.html" if args.out is None else args.out
    try:
        out.write_text(run_page(run), encoding="utf-8", errors="backslashreplace")  # names of files
    except OSError as error:
        raise _BadInputError(f"--out ({out}) must be a file to write: {error.strerror}") from None
    found = summary(run)
    if args.json:
        print(json.dumps({"path": str(out), **found}))
        return 0
    told = f"{found['steps']:,} steps, {found['layers']} MoE layer{'s' * (found['layers'] != 1)}"
    print(f"{told}\nwrote {out}")
    return 0


# ---- telling


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    names = ("d_model", "d_hidden", "num_experts", "tokens", "ranks", "top_k", "expert", "bias", "dtype")
    return {name: getattr(args, name) for name in names}


def _told_sizes(args: argparse.Namespace) -> str:
    ranks = f"{args.ranks} rank{'s' * (args.ranks > 1)}"
    return (
        f"MoELayer({args.d_model}, {args.d_hidden}, {args.num_experts}, top_k={args.top_k}, "
        f"expert={args.expert!r}, bias={args.bias}), {args.dtype}, {ranks}, {args.tokens} tokens a rank"
    )


def _told_profile(profile: Profile) -> str:
    ranks = f"{profile.num_ranks} rank{'s' * (profile.num_ranks > 1)}"
    backend = f" over {profile.backend}" * (profile.num_ranks > 1)
    return f"{profile.device}, {ranks}{backend}, {profile.dtype}, measured {profile.when}"


def _name(row: Mapping[str, Any]) -> str:
    return _pair_name(Restore(*row["restore"].split("/")))


def _pair_name(pair: Restore) -> str:
    return str(pair) + (f" {pair.strategy}" if pair.strategy else "")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{3 if seconds < 0.1 else 1}f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Aligned text: the first ``words`` columns to the left, numbers to the right."""
    columns = max(map(len, [header, *rows]))
    lines = [[*line, *[""] * (columns - len(line))] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(columns)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )

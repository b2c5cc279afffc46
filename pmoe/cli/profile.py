"""`pmoe profile`: measures how fast this machine, or a group of ranks, computes, communicates and copies.

The result, a profile, is stored in a file. `pmoe plan` and layers predict times from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from pmoe.arguments import check_path
from pmoe.cli import profile_kernels
from pmoe.cli.arguments import DTYPES, add_dtype, refuse_options, refused_as, whole_number
from pmoe.cli.launch import all_ranks, own_device, split_by_node
from pmoe.cli.output import Output
from pmoe.measure.bench import identity
from pmoe.measure.operations import measure_operations
from pmoe.measure.profile import profile_path, save_profile
from pmoe.measure.rates import measure
from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import LineCost
from pmoe.planner.profile import Operations, Profile
from pmoe.text import table

ABOUT = "measure the rates of this machine, or of this group of ranks, and store them"


def add_arguments(command: argparse.ArgumentParser) -> None:
    effort = command.add_mutually_exclusive_group().add_argument
    effort("--quick", action="store_true", help="measure for a few seconds instead of ten or twenty")
    full = "measure all sizes of FSMoE's Section 6.2: takes minutes on a slow link"
    effort("--full", action="store_true", help=full)
    add = command.add_argument
    inside = "number of ranks of a node that share each expert (default: torchrun's ranks per node)"
    add("--inside", type=whole_number, metavar="L", help=inside)
    add_dtype(add, help="or bf16, fp16, fp32, fp64; default float32, and bfloat16 with --kernels")
    add("--device", help="cpu or cuda (default: cuda if there is one)")
    add("--folder", type=Path, help="folder to store the profile in (default $PMOE_CACHE, ~/.cache/pmoe)")
    add("--out", type=Path, metavar="FILE", help="store the profile in this file instead")
    profile_kernels.add_arguments(command)


def run_command(args: argparse.Namespace) -> Output | None:
    """Measures a profile, stores it in a file, and returns its tables.

    Under torchrun every rank must run this. Rank 0 stores and prints, and the other ranks return None.
    """
    if args.kernels:
        return profile_kernels.run_command(args)
    refuse_options(args, profile_kernels.OPTIONS, "needs --kernels")
    paths = {"--out": args.out, "--folder": args.folder}
    check_path(**{name: path for name, path in paths.items() if path is not None})
    default = "cuda" if torch.cuda.is_available() else "cpu"
    device = own_device(default if args.device is None else args.device)
    with all_ranks(device) as ranks:
        dtype = DTYPES[args.dtype or "float32"]
        path = args.out or profile_path(identity(ranks, device, dtype), args.folder)
        across, inside = split_by_node(ranks, args.inside)
        profile = measure(ranks, device, dtype, quick=args.quick)
        options = {"across": across, "inside": inside, "quick": args.quick, "full": args.full}
        operations = measure_operations(ranks, device, dtype, **options)
        profile = replace(profile, operations=operations)
        if ranks.rank:
            return None
        with refused_as(f"{'--out' if args.out else '--folder'} ({path}) must be a file to write", OSError):
            save_profile(profile, path)
    return Output({"path": str(path), **asdict(profile)}, _lines(profile, operations, path))


def _lines(profile: Profile, operations: Operations, path: Path) -> Iterator[str]:
    """Yields the text of the output: tables of rates, of linear fits, and of slowdowns.

    A linear fit gives the seconds of an operation as alpha + beta * size (FSMoE's performance models). A
    slowdown says how much computation, communication and copies slow each other when they run at the same
    time.

    operations: the linear fits.
    path: the file in which the profile is stored.
    """
    yield str(profile)
    yield f"measured in {profile.seconds + operations.seconds:.1f} s\n"
    yield table(_rate_rows(profile), left=range(2))
    yield (
        "\nFSMoE's lines, seconds = alpha + beta * size by least squares: all-to-all and all-reduce among "
        f"{operations.num_across},\nall-gather and reduce-scatter among {operations.num_inside} ranks"
    )
    yield table(_operation_rows(operations), left=range(2))
    yield "\nspeed beside other lanes, relative to running alone (MPipeMoE, Fig. 3)"
    yield table(_interference_rows(profile.interference, profile.num_ranks > 1))
    if profile.doubt:
        yield f"\nwarning: {profile.doubt}"
    yield f"\nwrote {path}"


def _rate_rows(profile: Profile) -> Iterator[Sequence[str]]:
    """Yields the rows of a table with the rate of each kind of work: computing, communicating and copying.

    The last column is the fixed time that a task of this kind takes, in microseconds.
    """
    sent = ("GB sent to others / s", *_cells(profile.message, 1e9))
    yield "work", "unit", "rate", "and a task, us"
    yield "compute", "G multiply-adds / s", *_cells(profile.compute, 1e9)
    yield "communicate", *(sent if profile.num_ranks > 1 else ["nothing travels on one rank"])
    yield "copy out", "GB / s", *_cells(profile.copy_out, 1e9)
    yield "copy in", "GB / s", *_cells(profile.copy_in, 1e9)


def _operation_rows(operations: Operations) -> Iterator[Sequence[str]]:
    """Yields the rows of a table of linear fits, seconds = alpha + beta * size, one for each operation.

    These are FSMoE's performance models.

    operations: the fits.
    """
    yield "operation", "unit", "1 / beta", "alpha, us", "r^2", "sizes"
    for name, fit, unit, scale in (
        ("GEMM", operations.gemm, "TFLOP / s", 0.5e12),  # a multiply-add is two floating-point operations
        ("all-to-all", operations.all_to_all, "GB sent to others / s", 1e9),
        ("all-gather", operations.all_gather, "GB sent to others / s", 1e9),
        ("reduce-scatter", operations.reduce_scatter, "GB sent to others / s", 1e9),
        ("all-reduce", operations.all_reduce, "GB of the tensor / s", 1e9),
    ):
        if fit.num_sizes:
            yield name, unit, *_cells(fit.line, scale), f"{fit.r_squared:.6f}", str(fit.num_sizes)
        else:
            yield name, "nothing travels"


def _cells(line: LineCost, scale: float) -> tuple[str, str]:
    """Returns two cells of a table: the rate 1 / beta, and alpha in microseconds.

    line: the measured line, seconds = alpha + beta * size.
    scale: how many units of ``size`` make one unit of the table, such as 1e9 bytes for GB.
    """
    rate = f"{1 / line.beta_seconds / scale:.4g}" if line.beta_seconds else "-"
    return rate, f"{line.alpha_seconds * 1e6:.3g}"


def _interference_rows(interference: Interference, travels: bool) -> Iterator[Sequence[str]]:
    """Yields the rows of a table of relative speeds: how fast one kind of work is while another kind runs.

    A row is for the kind of work that is slowed down, a column for the kind that runs at the same time.

    interference: the measured speeds, relative to running alone.
    travels: whether there are several ranks, which send rows to each other, so that messages were measured.
    """
    yield "speed of", "beside compute", "beside communicate", "beside copies", "beside all"
    yield (
        "compute",
        "",
        _speed(interference.sigma_comm, travels),
        _speed(interference.sigma_mem),
        _speed(interference.sigma_all),
    )
    if travels:
        yield (
            "communicate",
            _speed(interference.mu_comp),
            "",
            _speed(interference.mu_mem),
            _speed(interference.mu_all),
        )
    yield (
        "copy",
        _speed(interference.eta_comp),
        _speed(interference.eta_comm, travels),
        "",
        _speed(interference.eta_all),
    )


def _speed(relative: float, known: bool = True) -> str:
    """Returns a relative speed as text with two decimals; "-" if it was not measured."""
    return f"{relative:.2f}" if known else "-"

"""`pmoe report`: writes one HTML page about a training run, from the files of `StatsWriter`."""

from __future__ import annotations

import argparse
from pathlib import Path

from pmoe.cli.arguments import refused_as
from pmoe.cli.output import Output, plural

ABOUT = "write one page about a training run, from the files of StatsWriter"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a StatsWriter")
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="page to write (default: RUN_DIR/report.html)"
    )


def run_command(args: argparse.Namespace) -> Output:
    """Writes the page, and returns its path with a summary of the run.

    Raises ValueError if the run cannot be read, the page cannot be written, or matplotlib is not installed.
    """
    from pmoe.integrations.report.history import summary
    from pmoe.integrations.report.page import run_page
    from pmoe.integrations.run_folder import read_run

    with refused_as(f"RUN_DIR ({args.run_dir}) must be a run's folder", OSError, ValueError):
        run = read_run(args.run_dir)
    out = args.run_dir / "report.html" if args.out is None else args.out
    try:
        page = run_page(run)
    except ImportError as error:
        raise ValueError(str(error)) from None
    with refused_as(f"--out ({out}) must be a file to write", OSError):
        # The page may hold names of files that are not valid text.
        out.write_text(page, encoding="utf-8", errors="backslashreplace")
    numbers = summary(run)
    layers = plural(numbers["layers"], "MoE layer")
    return Output({"path": str(out), **numbers}, [f"{numbers['steps']:,} steps, {layers}\nwrote {out}"])

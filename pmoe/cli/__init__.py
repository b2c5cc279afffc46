"""The command ``pmoe``: predicts a layer's memory, plans how to run it, and measures a machine.

    pmoe memory --theory --d-model 2048 --d-hidden 8192 --num-experts 64 --tokens 16384 --n 8
    pmoe plan --d-model 1024 --d-hidden 4096 --num-experts 64 --tokens 8192 --ranks 8 --budget 2GiB
    torchrun --nproc-per-node 8 -m pmoe profile
    pmoe profile --kernels --d-model 4096 --d-hidden 14336 --num-experts 8 --top-k 2 --virtual-ranks 8
    pmoe simulate fsmoe --contention 1.25

Each subcommand prints text, or with --json one JSON object and nothing else. Bad arguments end with exit
code 2 and one message.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from pmoe import __version__
from pmoe.cli import kernels, memory, plan, profile, report, simulate
from pmoe.cli.parser import Parser

COMMANDS: Mapping[str, ModuleType] = {
    "memory": memory,
    "plan": plan,
    "profile": profile,
    "simulate": simulate,
    "kernels": kernels,
    "report": report,
}
"""Maps the name of each subcommand to its module.

Each module has a help text, ABOUT, and two functions: ``add_arguments(parser)``, and ``run_command(args)``,
which returns an `Output`, or None on ranks that print nothing.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command ``pmoe``, prints its output and returns the exit code 0.

    argv: the arguments; None takes those of the command line.

    Prints a message and raises SystemExit(2) for wrong arguments.
    """
    with _quiet_on_closed_pipe():
        args = build_parser().parse_args(argv)
        try:
            output = args.run(args)
            if output is not None:
                print(json.dumps(dict(output.fields)) if args.json else "\n".join(output.lines))
        except ValueError as error:
            args.parser.refuse(str(error))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command, with a subparser for each subcommand."""
    parser = Parser(prog="pmoe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"pmoe {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar=" | ".join(COMMANDS))
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.ABOUT, description=module.ABOUT)
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        command.set_defaults(run=module.run_command, parser=command)
    return parser


@contextlib.contextmanager
def _quiet_on_closed_pipe() -> Iterator[None]:
    """A context that hides the error if the reader of stdout has ended, as in ``pmoe plan | head``."""
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:  # Python flushes stdout again when it ends, and would raise
            os.dup2(nowhere.fileno(), sys.stdout.fileno())

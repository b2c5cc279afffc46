"""`pmoe kernels`: prints which CUDA kernels were built, and which run on each device."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pmoe.cli.output import Output
from pmoe.kernels import status

ABOUT = "print which CUDA kernels were built, which run on each device, and why others do not"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds nothing: the command has no arguments of its own."""


def run_command(args: argparse.Namespace) -> Output:
    """Returns a report. A missing extension or device is a line of the report, and no error."""
    report = status()
    return Output(asdict(report), [str(report)])

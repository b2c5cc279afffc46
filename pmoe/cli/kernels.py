"""`pmoe kernels`: the CUDA kernels that were built, and those that run on each device."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pmoe.cli.output import Output
from pmoe.kernels import status

ABOUT = "the CUDA kernels: what was built, what runs on each device, why not"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def run_command(args: argparse.Namespace) -> Output:
    """A report: it names a missing extension or device, and does not fail."""
    found = status()
    return Output(asdict(found), [str(found)])

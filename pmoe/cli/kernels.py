"""`pmoe kernels`: prints which of pmoe's CUDA kernels were built, and which of them run on each device."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pmoe.cli.output import Output
from pmoe.kernels import status

ABOUT = "print which CUDA kernels were built, which run on each device, and why others do not"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds no arguments, because this command has none of its own."""


def run_command(args: argparse.Namespace) -> Output:
    """Returns which kernels were built and which run on each device.

    If the compiled extension or a CUDA device is missing, the output says so, and the command does not fail.
    """
    report = status()
    return Output(asdict(report), [str(report)])

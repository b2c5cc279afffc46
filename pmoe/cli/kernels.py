"""`pmoe kernels`: prints which CUDA kernels of pmoe were built, which of them each device runs, and why."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict

from pmoe.cli.output import Output
from pmoe.kernels import status
from pmoe.kernels.expected import expected_kernels
from pmoe.kernels.extension import Device

ABOUT = "print which CUDA kernels were built, what each device runs of them, and why"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--capability",
        type=_capability,
        metavar="MAJOR.MINOR",
        help="also print what a device of this compute capability would run, such as 10.0; needs no device",
    )
    command.add_argument(
        "--archs",
        help="with --capability: what the extension is taken to be compiled for, such as sm_80,sm_90a,ptx80; "
        "default: what this one is compiled for",
    )


def run_command(args: argparse.Namespace) -> Output:
    """Returns which kernels were built, and which of them each device of this machine runs.

    With --capability, the output says which kernels a device of that compute capability would run. This
    needs no device. --archs then names the architectures that the kernels are assumed to be compiled for. If
    the compiled extension or a CUDA device is missing, the output says so, and the command does not fail.

    Raises ValueError for --archs without --capability, without a name, or with a name that is no
    architecture.
    """
    if args.archs is not None and args.capability is None:
        raise ValueError(f"--archs ({args.archs!r}) needs --capability: it says for which device")
    report = status()
    archs = report.archs if args.archs is None else args.archs
    names = [name for name in re.split(r"[\s,;]+", archs or "") if name]
    if args.archs is not None and not names:
        raise ValueError(f"--archs ({args.archs!r}) must name an architecture such as sm_80")
    if args.capability is not None:
        expected = [expected_kernels(args.capability, names)]
    else:
        expected = [
            expected_kernels(device.capability, names, _versions(device))
            for device in report.devices
            if device.reason is None
        ]
    lines = [line for device_kernels in expected for line in ("", *device_kernels.lines)]
    return Output(
        {**asdict(report), "expected": [asdict(device_kernels) for device_kernels in expected]},
        [str(report), *lines],
    )


def _versions(device: Device) -> tuple[int, int] | None:
    """Returns the versions (binary, PTX) of the code that the driver has loaded on a device.

    Returns None if the driver has loaded no code of pmoe.
    """
    return next(((kernel.binary_version, kernel.ptx_version) for kernel in device.kernels), None)


def _capability(text: str) -> tuple[int, int]:
    """Returns a compute capability as (major, minor). Example: "10.3" -> (10, 3)."""
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a compute capability such as 9.0")
    return int(match[1]), int(match[2])

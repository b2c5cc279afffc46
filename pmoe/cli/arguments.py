"""Converters for command-line arguments, and checks that refuse wrong values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, get_args

import torch

from pmoe.arguments import MOST
from pmoe.planner.profile import WIDTH
from pmoe.schedule.restore import ALL_PAIRS, NARROW_PAIRS, STRATEGIES, AllowName, Restore
from pmoe.text import meant, parse_bytes

Number = TypeVar("Number", int, float)

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}


def at_least_1(kind: type[Number], name: str, text: str) -> Number:
    """Converts text to a number from 1 to MOST, for argparse.

    kind: int or float, the type of the number.
    name: what the error message calls the number, for example "whole number".
    text: the text from the command line.

    Raises ArgumentTypeError for any other text.
    """
    try:
        number = kind(text)
    except ValueError:
        number = kind()
    if not 1 <= number <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} must be a {name} of at least 1, and at most {MOST}")
    return number


whole_number: Callable[[str], int] = partial(at_least_1, int, "whole number")
slack: Callable[[str], float] = partial(at_least_1, float, "number")


DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
"""Other names of dtypes that options take, and the names in `DTYPES` that they stand for."""


def dtype_name(text: str) -> str:
    """Returns the name in `DTYPES` of a dtype, for argparse. Any other text is returned in lower case.

    Examples: "bf16", "BF16", "torch.bfloat16" and "bfloat16" -> "bfloat16".
    """
    name = text.lower().removeprefix("torch.")
    return DTYPE_NAMES.get(name, name)


def add_dtype(add: Callable[..., object], **options: Any) -> None:
    """Adds the option --dtype to a command. Its value is a name in `DTYPES`.

    add: the method add_argument of a parser or of a group of arguments.
    options: further arguments of this method, such as ``default``.
    """
    add("--dtype", type=dtype_name, choices=list(DTYPES), **options)


def byte_count(text: str) -> int:
    """Converts text such as "2GiB" or "500 MB" to a number of bytes, for argparse.

    Raises ArgumentTypeError if the text is not a number of bytes.
    """
    try:
        return parse_bytes("value", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def restore_pair(text: str) -> Restore:
    """Converts text to a restore pair, for argparse.

    A restore pair says how backward gets the dispatched rows (T_DI) and the hidden activation (T_M) of
    forward: kept, offloaded or made again.

    text: a name from the MPipeMoE paper, "S1" to "S4", or a pair such as "keep/recompute".

    Raises ArgumentTypeError for any other text.
    """
    pairs = STRATEGIES | {str(pair): pair for pair in (*ALL_PAIRS, *NARROW_PAIRS)}
    if text not in pairs:
        listed = ", ".join(map(str, (*ALL_PAIRS, *NARROW_PAIRS)))
        raise argparse.ArgumentTypeError(
            f"{text!r} must be one of {', '.join(STRATEGIES)}, or a pair: {listed}"
        )
    return pairs[text]


def add_allow(add: Callable[..., object]) -> None:
    """Adds the option --allow to a command. The option permits restore pairs that keep rounded values.

    add: the method add_argument of a parser or of a group of arguments.
    """
    words = "also pairs that keep T_DI in its messages (with --wire), or T_M rounded to e4m3"
    add("--allow", choices=get_args(AllowName), help=words)


def parse_device(text: str, *, must_exist: bool) -> torch.device:
    """Converts text, such as "cpu" or "cuda:1", to a device.

    text: the text from the command line.
    must_exist: whether a CUDA device must be present on this machine.

    Raises ValueError if the text names neither a CPU nor a CUDA device, or if the device is not present
    although it must be.
    """
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in WIDTH:
        # The word most like "gpu" is "cpu", so it needs a meaning of its own.
        suggestion = ": did you mean cuda?" if text.lower().startswith("gpu") else meant(text, WIDTH)
        raise ValueError(f"--device ({text!r}) must be {' or '.join(WIDTH)}{suggestion}")
    if must_exist and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device ({text!r}) must exist: torch sees {torch.cuda.device_count()} GPUs")
    return device


def refuse_options(args: argparse.Namespace, names: Sequence[str], rule: str) -> None:
    """Raises ValueError for the first option in ``names`` that was given on the command line.

    names: names of attributes of ``args``.
    rule: the message after the option's name, such as "needs --kernels".
    """
    for name in names:
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} {rule}")


@contextmanager
def refused_as(rule: str, *errors: type[Exception]) -> Iterator[None]:
    """A context that turns errors into a ValueError, which `pmoe` prints as a message about arguments.

    rule: the beginning of the message; the text of the error follows.
    errors: the classes of errors to turn into a ValueError.
    """
    try:
        yield
    except errors as error:
        raise ValueError(f"{rule}: {error}") from None

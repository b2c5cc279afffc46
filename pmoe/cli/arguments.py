"""Arguments: what their values must be, and how wrong ones are refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from pmoe.arguments import MOST
from pmoe.planner.profile import WIDTH
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore
from pmoe.text import parse_bytes

Number = TypeVar("Number", int, float)

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}


def at_least_1(kind: type[Number], name: str, text: str) -> Number:
    """A number from 1 to MOST; ``name`` stands in the message."""
    try:
        number = kind(text)
    except ValueError:
        number = kind()
    if not 1 <= number <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} must be a {name} of at least 1, and at most {MOST}")
    return number


whole_number: Callable[[str], int] = partial(at_least_1, int, "whole number")
slack: Callable[[str], float] = partial(at_least_1, float, "number")


def byte_count(text: str) -> int:
    """Bytes, as in "2GiB" or "500 MB"."""
    try:
        return parse_bytes("value", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def restore_pair(text: str) -> Restore:
    """A pair by the paper's name, "S1" to "S4", or by its own, such as "keep/recompute"."""
    pairs = STRATEGIES | {str(pair): pair for pair in ALL_PAIRS}
    if text not in pairs:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be one of {', '.join(STRATEGIES)}, or a pair: {', '.join(map(str, ALL_PAIRS))}"
        )
    return pairs[text]


def parse_device(text: str, *, must_exist: bool) -> torch.device:
    """Raises ValueError unless it is a CPU or a CUDA device, with ``must_exist`` one that torch sees."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in WIDTH:
        raise ValueError(f"--device ({text!r}) must be {' or '.join(WIDTH)}")
    if must_exist and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device ({text!r}) must be here: torch sees {torch.cuda.device_count()} GPUs")
    return device


def refuse_options(args: argparse.Namespace, names: Sequence[str], rule: str) -> None:
    """Raises ValueError for the first of these options that was passed."""
    for name in names:
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} {rule}")


@contextmanager
def refused_as(rule: str, *errors: type[Exception]) -> Iterator[None]:
    """Raises ValueError with the rule, and with the reason behind it, where the block raises an error."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{rule}: {error}") from None

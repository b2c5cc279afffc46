"""Arguments: what their values must be, how wrong ones are refused, and those that describe one layer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from pmoe.arguments import parse_bytes
from pmoe.cli.output import plural
from pmoe.measure.identity import WIDTH
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.sizes_from_options import STACKED, sizes_from_options
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore

Number = TypeVar("Number", int, float)

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}


class BadInputError(Exception):
    """The command ends with this message, as argparse ends it for arguments that it refuses itself."""


# ---- types, for argparse


def at_least_1(kind: type[Number], name: str) -> Callable[[str], Number]:
    """A type of finite numbers from 1 on; ``name`` stands in its message."""

    def parsed(text: str) -> Number:
        try:
            number = kind(text)
        except ValueError:
            number = kind()
        if not 1 <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} must be a {name} of at least 1")
        return number

    return parsed


whole_number = at_least_1(int, "whole number")
slack = at_least_1(float, "number")


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


# ---- checks of what was parsed


def parse_device(text: str, *, must_exist: bool) -> torch.device:
    """Raises BadInputError unless it is a CPU or a CUDA device, with ``must_exist`` one that torch sees."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in WIDTH:
        raise BadInputError(f"--device ({text!r}) must be {' or '.join(WIDTH)}")
    if must_exist and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInputError(f"--device ({text!r}) must be here: torch sees {torch.cuda.device_count()} GPUs")
    return device


def refuse_options(args: argparse.Namespace, names: Sequence[str], rule: str) -> None:
    """Raises BadInputError for the first of these options that was passed."""
    for name in names:
        if getattr(args, name) not in (None, False):
            raise BadInputError(f"--{name.replace('_', '-')} {rule}")


@contextmanager
def refused_as(rule: str, *errors: type[Exception]) -> Iterator[None]:
    """Raises BadInputError with the rule, and with the reason behind it, where the block raises an error."""
    try:
        yield
    except errors as error:
        raise BadInputError(f"{rule}: {getattr(error, 'strerror', None) or error}") from None


# ---- the arguments that describe one layer: those of `pmoe memory` and `pmoe plan`


NAMES = ("d_model", "d_hidden", "num_experts", "tokens", "ranks", "top_k", "expert", "bias", "dtype")


def add_layer_sizes(command: argparse.ArgumentParser) -> None:
    """Adds NAMES and the slack of slots."""
    add = command.add_argument_group("the layer").add_argument
    add("--d-model", type=whole_number, required=True, metavar="M")
    add("--d-hidden", type=whole_number, required=True, metavar="H")
    add("--num-experts", type=whole_number, required=True, metavar="E", help="on all ranks together")
    add("--tokens", type=whole_number, required=True, metavar="B", help="of one rank, the most")
    add("--ranks", type=whole_number, default=1, metavar="W", help="that share the experts")
    add("--top-k", type=whole_number, default=1, metavar="K", help="experts a token")
    add("--expert", choices=list(STACKED), default="ffn")
    add("--bias", action=argparse.BooleanOptionalAction, default=True)
    add("--dtype", choices=list(DTYPES), default="float32")
    add("--slack", type=slack, default=1.25, help="rows of a slot over the balanced share")


def layer_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The sizes by name, for JSON."""
    return {name: getattr(args, name) for name in NAMES}


def constructor_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `MoELayer`."""
    options = layer_fields(args) | {"dtype": DTYPES[args.dtype]}
    return {name: value for name, value in options.items() if name not in ("tokens", "ranks")}


def layer_shape(args: argparse.Namespace, device_type: str) -> LayerSizes:
    """Raises ValueError for sizes that no layer has."""
    return sizes_from_options(**constructor_arguments(args), num_ranks=args.ranks, device_type=device_type)


def describe_layer(args: argparse.Namespace) -> str:
    """The layer as Python would build it, its dtype, ranks and tokens."""
    return (
        f"MoELayer({args.d_model}, {args.d_hidden}, {args.num_experts}, top_k={args.top_k}, "
        f"expert={args.expert!r}, bias={args.bias}), {args.dtype}, {plural(args.ranks, 'rank')}, "
        f"{args.tokens} tokens a rank"
    )

"""The command-line arguments that describe one MoE layer, for `pmoe memory` and `pmoe plan`."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from pmoe.cli.arguments import DTYPES, add_dtype, slack, whole_number
from pmoe.cli.output import plural
from pmoe.experts import STACKED
from pmoe.planner.layer_sizes import LayerSizes, sizes_from_options
from pmoe.schedule.wire import WireName

NAMES = (
    *("d_model", "d_hidden", "num_experts", "tokens", "ranks", "top_k", "expert", "bias", "dtype"),
    *("wire", "wire_backward", "wire_combine", "d_latent"),
)
"""Names of the arguments that describe the layer, its ranks and its tokens. The slack is not among them."""
SLACK = 1.25


def add_layer_sizes(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that describe a layer to a command: those in `NAMES`, and --slack.

    Chunks share buffers of fixed size; the slack is the size of a buffer as a multiple of a chunk's rows
    under even routing.
    """
    add = command.add_argument_group("the layer").add_argument
    add("--d-model", type=whole_number, required=True, metavar="M")
    add("--d-hidden", type=whole_number, required=True, metavar="H")
    add("--num-experts", type=whole_number, required=True, metavar="E", help="experts on all ranks")
    add("--tokens", type=whole_number, required=True, metavar="B", help="tokens of the rank that has most")
    add("--ranks", type=whole_number, default=1, metavar="W", help="number of ranks that share the experts")
    add("--top-k", type=whole_number, default=1, metavar="K", help="experts of each token")
    add("--expert", choices=list(STACKED), default="ffn")
    add("--bias", action=argparse.BooleanOptionalAction, default=True)
    add_dtype(add, default="float32", help="or bf16, fp16, fp32, fp64")
    add(
        "--wire",
        choices=get_args(WireName),
        help="form in which rows are sent to experts (default: as they are)",
    )
    add("--wire-backward", choices=get_args(WireName), help="the same for backward's gradients")
    add("--wire-combine", choices=get_args(WireName), help="the same for results, in both passes")
    add("--d-latent", type=whole_number, metavar="L", help="columns of rows that are sent (default: M)")
    add("--slack", type=slack, default=SLACK, help="rows of a ring slot, over the balanced share")


def layer_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the arguments in `NAMES` by name, for the JSON output."""
    return {name: getattr(args, name) for name in NAMES}


def constructor_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments with which `pmoe.MoELayer` would build the described layer, by name."""
    options = layer_fields(args) | {"dtype": DTYPES[args.dtype]}
    return {name: value for name, value in options.items() if name not in ("tokens", "ranks")}


def layer_shape(args: argparse.Namespace, device_type: str) -> LayerSizes:
    """Returns the sizes of the described layer, which predictions need.

    args: the options of the command.
    device_type: "cpu" or "cuda": the type of device whose memory the command counts.

    Raises ValueError for sizes that no layer can have.
    """
    return sizes_from_options(**constructor_arguments(args), num_ranks=args.ranks, device_type=device_type)


def python_line(args: argparse.Namespace, **options: Any) -> str:
    """Returns Python code that builds the described layer, so that a user can copy it.

    args: the options of the command.
    options: further arguments of `pmoe.MoELayer`. Those that are None are left out of the code.
    """
    arguments = constructor_arguments(args) | options | {"slack": None if args.slack == SLACK else args.slack}
    listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)
    return f"pmoe.MoELayer({listed})".replace("=Restore(", "=pmoe.Restore(")


def describe_layer(args: argparse.Namespace, device_type: str) -> str:
    """Returns one line of text: code that builds the layer, numbers of ranks and tokens, and the device.

    args: the options of the command.
    device_type: "cpu" or "cuda": the type of device whose memory the command counts.
    """
    return f"{python_line(args)}, {plural(args.ranks, 'rank')}, {args.tokens} tokens a rank, on {device_type}"

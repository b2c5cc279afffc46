"""Command line of train_lm.py: the arguments, their defaults, and which of them a resumed run may change.

With the defaults a run takes about four and a half minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAY_CHANGE_ON_RESUME = {"out", "resume", "data", "pipeline", "checkpoint_every", "time_limit", "timeout"}
"""Arguments that do not change the numbers of a run.

"data" is one of them: the text is compared by its hash.
"""

LAYER_OPTIONS = ("wire", "wire_backward", "wire_combine", "products", "memory_reuse", "allow")
"""Arguments that have the names of arguments of `pmoe.MoELayer`, and are None if they are not set."""

MAY_BE_ZERO = {"seed", "warmup", "weight_decay", "aux_weight"}
"""Arguments that may be 0. All other numbers must be greater."""


class SettingsError(ValueError):
    """The arguments contradict each other, or differ from those of the checkpoint."""


def parse_arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line, or those of ``command_line``."""
    parser = argparse.ArgumentParser(
        description="Trains a byte-level language model with a pmoe.MoELayer in every second block.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=argparse.SUPPRESS,
        help="folder for checkpoints, metrics.json and curves.png (runs/lm; with --dense runs/lm_dense)",
    )
    add(
        "--resume",
        nargs="?",
        const="always",
        choices=["always", "if-any"],
        help="continue from the last checkpoint in --out; if-any: or begin a new run if there is none",
    )
    add(
        "--data",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files or folders to train on; a single file is split by position",
    )
    add("--dense", action="store_true", help="train a dense model of the same active size, without experts")
    add("--steps", type=int, default=1200)
    add("--batch", type=int, default=32, help="sequences a step, of all ranks together")
    add(
        "--parts",
        type=int,
        help="equal parts of a batch, computed one after the other if there are fewer ranks: the same "
        "numbers on any number of ranks that divides it (default: as many as ranks)",
    )
    add("--context", type=int, default=128, help="bytes of a sequence")
    add("--d-model", type=int, default=128)
    add(
        "--d-hidden",
        type=int,
        default=512,
        help="hidden width that a token passes: of a dense FFN, or of its top-k experts together",
    )
    add("--layers", type=int, default=4, help="number of blocks; every second one has experts")
    add("--heads", type=int, default=4)
    add("--num-experts", type=int, default=32, help="experts of all ranks together")
    add("--top-k", type=int, default=2)
    add(
        "--pipeline",
        type=pipeline,
        default=True,
        metavar="N",
        help="micro-batches of the MoE layers; 1 is no pipeline; True measures in the first step how many "
        "are the fastest",
    )
    forms = ["e4m3", "bfloat16"]
    add("--wire", choices=forms, help="form in which the MoE layers send rows to experts; else as they are")
    add("--wire-backward", choices=forms, help="the same for the gradients that backward sends to experts")
    add("--wire-combine", choices=forms, help="form in which both passes send results back")
    add("--products", choices=["e4m3", "mxfp8"], help="rounds the operands of the experts' products")
    add(
        "--memory-reuse",
        choices=["S1", "S2", "S3", "S4", "True"],
        help="what the MoE layers do with activations instead of keeping them; True takes the cheapest",
    )
    add(
        "--allow",
        choices=["e4m3"],
        help="lets --memory-reuse True also keep activations rounded to e4m3",
    )
    add("--lr", type=float, default=4e-3)
    add("--warmup", type=int, default=100, help="steps in which the learning rate rises")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest norm of the whole model's gradient")
    add("--aux-weight", type=float, default=0.01, help="weight of the load-balance loss")
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, default=100, help="steps between evaluations")
    add("--eval-bytes", type=int, default=65_536, help="held-out bytes of an evaluation during training")
    add("--final-eval-bytes", type=int, default=524_288, help="held-out bytes of the last evaluation")
    add("--checkpoint-every", type=int, default=200, help="steps between checkpoints")
    add("--time-limit", type=float, help="seconds after which the run stops as after Ctrl-C")
    add("--timeout", type=float, default=300, help="seconds that ranks wait for another rank")
    arguments = parser.parse_args(command_line)
    if "out" not in arguments:
        arguments.out = Path("runs/lm_dense" if arguments.dense else "runs/lm")
    return arguments


def pipeline(text: str) -> int | bool:
    """Returns the value of --pipeline: True, False, or a number of micro-batches.

    Raises ValueError for any other text.
    """
    words = {"true": True, "false": False}
    return words[text.lower()] if text.lower() in words else int(text)


def check_arguments(arguments: argparse.Namespace, num_ranks: int) -> None:
    """Raises SettingsError, the same on all ranks, for values that neither argparse nor the model checks."""
    for name, value in vars(arguments).items():
        flag = f"--{name.replace('_', '-')} ({value})"
        if type(value) is int and value < 1 and name not in MAY_BE_ZERO:
            raise SettingsError(f"{flag} must be at least 1")
        if type(value) is float and not value > 0 and name not in MAY_BE_ZERO:
            raise SettingsError(f"{flag} must be positive")
    parts = arguments.parts or num_ranks
    if parts % num_ranks:
        raise SettingsError(f"--parts ({parts}) must be divisible by the number of ranks ({num_ranks})")
    if arguments.batch % parts:
        of = "--parts" if arguments.parts else "the number of ranks"
        raise SettingsError(f"--batch ({arguments.batch}) must be divisible by {of} ({parts})")


def layer_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `pmoe.MoELayer` that were set on the command line, by name."""
    values = {name: getattr(arguments, name) for name in ("pipeline", *LAYER_OPTIONS)}
    if values["memory_reuse"] == "True":
        values["memory_reuse"] = True
    return {name: value for name, value in values.items() if value is not None}


def deciding_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments that decide the numbers of a run, as plain data.

    Options of layers that are not set are left out, because checkpoints of older runs do not have them.
    """
    left_out = MAY_CHANGE_ON_RESUME | {name for name in LAYER_OPTIONS if getattr(arguments, name) is None}
    return {name: value for name, value in vars(arguments).items() if name not in left_out}

"""The --moe options of the command line: the arguments of `pmoe.MoELayer`, and those of `PLACES`.

``--moe-top-k 2`` is top_k=2. Names, defaults and help are read from the layer's signature and docstring, so
an argument that is added to the layer is an option here.

Values are strings: ``true``, ``false``, ``none``, numbers, lists such as ``0,0,1,1``, pairs such as
``keep/recompute`` (a `pmoe.Restore`), or words.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pmoe import MoELayer, Restore

NOT_OPTIONS = ("d_model", "group", "mesh", "callbacks", "device", "dtype")
"""Arguments of MoELayer that are no options: the model or fairseq decides them, or only a program can."""

FOLLOWS = {
    "d_hidden": "--encoder-ffn-embed-dim or --decoder-ffn-embed-dim",
    "activation": "--activation-fn",
}
"""Arguments that take the value of an option of fairseq's, named here, if their own option is none."""


@dataclass(frozen=True)
class CommandOption:
    """An option of the command line.

    name: without ``moe_``.
    default: as text.
    help: its description.
    """

    name: str
    default: str
    help: str

    @property
    def flag(self) -> str:
        """The option as it is written on the command line: "--moe-top-k"."""
        return "--moe-" + self.name.replace("_", "-")


PLACES = (
    CommandOption(
        "freq",
        "2",
        "distance of the layers with experts: layer i has them if (i + 1) % freq == 0; 0: no experts",
    ),
    CommandOption("encoder_freq", "none", "the encoder's freq; none: as --moe-freq; 0: no experts there"),
    CommandOption("decoder_freq", "none", "the decoder's freq; none: as --moe-freq; 0: no experts there"),
    CommandOption(
        "expert_parallel",
        "true",
        "true: experts are spread over ranks; false: each process holds all of them, which checkpoints set "
        "for generate and eval-lm",
    ),
    CommandOption(
        "expert_parallel_size",
        "none",
        "N: experts are spread over groups of N consecutive ranks, each with a copy of them all; none: over "
        "all ranks",
    ),
)
"""Options that are no arguments of MoELayer: which layers have experts, and which ranks hold them."""


def layer_options() -> tuple[CommandOption, ...]:
    """Returns an option for each argument of MoELayer, except `NOT_OPTIONS`, with the layer's default."""
    described = _descriptions(inspect.getdoc(MoELayer) or "")
    parameters = inspect.signature(MoELayer).parameters
    return tuple(
        CommandOption(
            name,
            "none" if name in FOLLOWS else as_text(parameter.default),
            described.get(name, "") + (f" If none: {FOLLOWS[name]}." if name in FOLLOWS else ""),
        )
        for name, parameter in parameters.items()
        if name not in NOT_OPTIONS
    )


def layer_arguments(config: Any) -> dict[str, Any]:
    """Returns the arguments for MoELayer, from the ``moe_`` fields of a model's configuration."""
    return {option.name: value_of(config, option) for option in layer_options()}


def value_of(config: Any, option: CommandOption) -> Any:
    """Returns an option's value; its default if the configuration lacks it, as in older checkpoints.

    Raises ValueError if its text is no value.
    """
    text = getattr(config, f"moe_{option.name}", None)
    try:
        return parse(option.default if text is None else str(text))
    except ValueError as error:
        raise ValueError(f"{option.flag} ({text}) must be a value: {error}") from None


def places(config: Any) -> Mapping[str, Any]:
    """Returns the values of the options in `PLACES`, by name."""
    return {option.name: value_of(config, option) for option in PLACES}


def as_text(value: object) -> str:
    """Returns the text of a value, from which `parse` returns the value; "none" for a missing default."""
    if value is None or value is inspect.Parameter.empty:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse(text: str) -> Any:
    """Returns the value of an option's text. Raises ValueError for a pair that is no `pmoe.Restore`.

    Example: "none" -> None, "true" -> True, "2" -> 2, "1.5" -> 1.5, "0,1" -> [0, 1], "2GiB" -> "2GiB".
    """
    stripped = text.strip()
    constants: dict[str, Any] = {"none": None, "true": True, "false": False}
    if stripped.lower() in constants:
        return constants[stripped.lower()]
    if "," in stripped:
        return [parse(part) for part in stripped.split(",")]
    if "/" in stripped:
        return Restore(*stripped.split("/", 1))  # type: ignore[arg-type]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(stripped)
    return stripped


def _descriptions(text: str) -> dict[str, str]:
    """Returns the description of each argument in a docstring's "Args:"."""
    arguments_text = text.partition("\nArgs:\n")[2].partition("\nAttributes:")[0]
    descriptions: dict[str, str] = {}
    for names, words in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*|\n)*)", arguments_text, re.MULTILINE):
        descriptions.update(dict.fromkeys(names.split(", "), " ".join(words.split())))
    return descriptions

"""The --moe options of the command line: one for each argument of `pmoe.MoELayer`, and a few more.

``--moe-top-k 2``, for example, is the argument top_k=2. Names, defaults and help texts are read from the
layer's signature and docstring, so a new argument of the layer is an option without any change here. The
other options are in `PLACES`. They say which layers of a model have experts, and which ranks hold the
experts.

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
"""Arguments of MoELayer that are not options of the command line.

The model or fairseq decides them, or they are objects that no text can give.
"""

FOLLOWS = {
    "d_hidden": "--encoder-ffn-embed-dim or --decoder-ffn-embed-dim",
    "activation": "--activation-fn",
}
"""Arguments of MoELayer whose default comes from an option of fairseq, each with the option's name."""


@dataclass(frozen=True)
class CommandOption:
    """A --moe option of the command line.

    name: its name without the prefix "moe_", such as "top_k".
    default: the default value, as text.
    help: the description for the help.
    """

    name: str
    default: str
    help: str

    @property
    def flag(self) -> str:
        """The option as it is written on the command line, such as "--moe-top-k"."""
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
"""Options that are not arguments of MoELayer: which layers have experts, and which ranks hold them."""


def layer_options() -> tuple[CommandOption, ...]:
    """Returns an option of the command line for each argument of MoELayer that is not in `NOT_OPTIONS`.

    The default of an option is MoELayer's default, with one exception: if one of fairseq's own options
    already sets the argument, the default is "none", which stands for the value of fairseq's option.
    """
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
    """Returns the arguments for MoELayer by name, from a model's options.

    config: the model's options, with attributes such as ``moe_top_k``.
    """
    return {option.name: value_of(config, option) for option in layer_options()}


def value_of(config: Any, option: CommandOption) -> Any:
    """Returns the value of an option; its default if the configuration lacks it, as in older checkpoints.

    config: the model's options.
    option: the option.

    Raises ValueError if the option's text cannot be parsed.
    """
    text = getattr(config, f"moe_{option.name}", None)
    try:
        return parse(option.default if text is None else str(text))
    except ValueError as error:
        raise ValueError(f"{option.flag} ({text}) must be a value: {error}") from None


def places(config: Any) -> Mapping[str, Any]:
    """Returns the options that say which of a model's layers have experts, and which ranks hold them.

    The result is a dict {name: value} of the options in `PLACES`.

    config: all options of the model.
    """
    return {option.name: value_of(config, option) for option in PLACES}


def as_text(value: object) -> str:
    """Returns a default value as text that `parse` turns back into the value.

    None, and the lack of a default, become "none".
    """
    if value is None or value is inspect.Parameter.empty:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse(text: str) -> Any:
    """Returns the value that an option's text stands for.

    Raises ValueError for a text with "/" that is no restore pair such as "keep/recompute" (`pmoe.Restore`).

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
    """Returns the description of each argument, by name, from the "Args:" part of a docstring."""
    arguments_text = text.partition("\nArgs:\n")[2].partition("\nAttributes:")[0]
    descriptions: dict[str, str] = {}
    for names, words in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*|\n)*)", arguments_text, re.MULTILINE):
        descriptions.update(dict.fromkeys(names.split(", "), " ".join(words.split())))
    return descriptions

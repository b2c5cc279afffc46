"""All arguments of MoELayer are options of the fairseq plugin."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

import pmoe
from pmoe.gates import GATES
from pmoe.integrations.fairseq.options import (
    FOLLOWS,
    NOT_OPTIONS,
    as_text,
    layer_arguments,
    layer_options,
    parse,
)

ARGUMENTS = inspect.signature(pmoe.MoELayer).parameters


def test_every_argument_of_the_layer_is_an_option_or_says_why_not() -> None:
    options = {option.name for option in layer_options()}
    assert options | set(NOT_OPTIONS) == set(ARGUMENTS)
    assert not options & set(NOT_OPTIONS)
    assert {"pipeline", "memory_reuse", "memory_budget", "capacity_factor", "top_k"} <= options


def test_every_option_has_the_layers_default_and_its_own_words() -> None:
    given = layer_arguments(SimpleNamespace())
    for option in layer_options():
        assert len(option.help) > 5, option
        default = ARGUMENTS[option.name].default
        if option.name not in FOLLOWS and default is not inspect.Parameter.empty:
            assert given[option.name] == default and type(given[option.name]) is type(default), option


OTHERS: dict[str, tuple[str, object]] = {
    "d_hidden": ("24", 24),
    "num_experts": ("4", 4),
    "top_k": ("2", 2),
    "gate": ("switch", "switch"),
    "expert": ("swiglu", "swiglu"),
    "activation": ("silu", "silu"),
    "bias": ("false", False),
    "capacity_factor": ("1.5", 1.5),
    "pad_to_capacity": ("true", True),
    "pipeline": ("solve", "solve"),
    "memory_reuse": ("offload/recompute", pmoe.Restore("offload", "recompute")),
    "pipeline_backward": ("4", 4),
    "slack": ("2", 2),
    "memory_budget": ("1GiB", "1GiB"),
    "fused": ("auto", "auto"),
    "order": ("einsum", "einsum"),
    "dispatch": ("hierarchical_2d", "hierarchical_2d"),
    "combine": ("hierarchical_1d", "hierarchical_1d"),
    "nodes": ("0,0,1,1", [0, 0, 1, 1]),
    "send_once": ("true", True),
    "wire": ("e4m3", "e4m3"),
    "wire_backward": ("bfloat16", "bfloat16"),
    "wire_combine": ("bfloat16", "bfloat16"),
    "shared_expert": ("32", 32),
    "shared_gate": ("true", True),
    "normalize_gate": ("false", False),
    "z_loss_weight": ("1e-3", 0.001),
    "check_finite": ("true", True),
    "balance": ("2", 2),
    "d_latent": ("16", 16),
    "allow": ("e4m3", "e4m3"),
    "products": ("mxfp8", "mxfp8"),
}
"""Another value than the default for each option: its text on a command line, and what the layer gets."""


def test_every_option_reaches_the_layers_arguments_with_another_value_than_its_default() -> None:
    defaults = layer_arguments(SimpleNamespace())
    assert set(OTHERS) == set(defaults) and OTHERS["gate"][1] in GATES
    given = layer_arguments(SimpleNamespace(**{f"moe_{name}": text for name, (text, _) in OTHERS.items()}))
    for name, (_, value) in OTHERS.items():
        assert given[name] == value and type(given[name]) is type(value), name
        assert given[name] != defaults[name], name


def test_what_older_checkpoints_say_of_switches_is_ignored() -> None:
    """Switches never changed a result, and are no options any more."""
    older = SimpleNamespace(moe_bypass_local="false", moe_sequential="true", moe_one_lane="false")
    assert layer_arguments(older) == layer_arguments(SimpleNamespace())


def test_options_at_their_defaults_build_a_layer() -> None:
    arguments = layer_arguments(
        SimpleNamespace(moe_num_experts="4", moe_d_hidden="16", moe_activation="relu")
    )
    layer = pmoe.MoELayer(d_model=8, **arguments)
    assert (layer.num_experts, layer.d_hidden, layer.restore) == (4, 16, False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("none", None),
        ("True", True),
        ("false", False),
        ("2", 2),
        ("1.25", 1.25),
        ("2GiB", "2GiB"),
        ("S4", "S4"),
        ("0,0,1,1", [0, 0, 1, 1]),
        ("communicate/recompute", pmoe.Restore("communicate", "recompute")),
    ],
)
def test_text_becomes_the_value_that_python_would_take(text: str, value: object) -> None:
    assert parse(text) == value and type(parse(text)) is type(value)
    if not isinstance(value, list):
        assert parse(as_text(value)) == value


def test_text_that_is_no_value_is_refused_with_its_option() -> None:
    with pytest.raises(
        ValueError, match=r"--moe-memory-reuse \(keep/forget\) must be a value: hidden \('forget'\)"
    ):
        layer_arguments(SimpleNamespace(moe_memory_reuse="keep/forget"))

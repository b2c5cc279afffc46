"""Bad arguments and bad input: an error that names the argument, its value and the rule, on every rank."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from tests.spec.kit import E, H, M, error_of, make, on_ranks, step, tokens

# argument, value, what the message must say
ARGUMENTS: list[tuple[str, Any, str]] = [
    ("d_model", 0, r"d_model \(0\)"),
    ("d_model", 2.5, r"d_model \(2.5\)"),
    ("d_hidden", -1, r"d_hidden \(-1\)"),
    ("num_experts", 0, r"num_experts \(0\)"),
    ("num_experts", True, r"num_experts \(True\)"),
    ("top_k", 0, r"top_k \(0\)"),
    ("top_k", 5, r"top_k \(5\) must be at most num_experts \(4\)"),
    ("gate", "best", r"gate \('best'\) must be .*topk"),
    ("gate", 3, r"gate \(3\) must be a name or a torch.nn.Module"),
    ("expert", "rnn", r"expert \('rnn'\) must be ffn, swiglu"),
    ("expert", nn.Linear(M, M), r"expert .* must be a name, a callable"),
    ("expert", nn.ModuleList([nn.Linear(M, M)]), r"must hold this rank's 4 experts"),
    ("activation", "tanh", r"activation \('tanh'\)"),
    ("capacity_factor", 0, r"capacity_factor \(0\) must be None or a positive number"),
    ("capacity_factor", math.nan, r"capacity_factor \(nan\)"),
    ("capacity_factor", "1.25", r"capacity_factor \('1.25'\)"),
    ("pad_to_capacity", True, r"pad_to_capacity \(True\) must be False where capacity_factor is None"),
    ("pad_to_capacity", 1, r"pad_to_capacity \(1\) must be True or False"),
    ("pipeline", 0, r"pipeline \(0\)"),
    ("pipeline", "often", r"pipeline \('often'\)"),
    ("pipeline", 2.0, r"pipeline \(2.0\)"),
    ("pipeline_backward", 0, r"pipeline_backward \(0\)"),
    ("memory_reuse", "S5", r"memory_reuse \('S5'\)"),
    ("memory_reuse", 4, r"memory_reuse \(4\)"),
    ("slack", 0.5, r"slack \(0.5\) must be a number of at least 1"),
    ("memory_budget", "much", r"memory_budget \('much'\)"),
    ("memory_budget", -1, r"memory_budget \(-1\)"),
    (
        "fused",
        "backward",
        r"fused \('backward'\) must be False, True, \"forward\", \"persistent\" or \"auto\"",
    ),
    ("order", "random", r"order \('random'\) must be a pmoe.Order or one of sorted, einsum"),
    ("dispatch", "pigeon", r"dispatch \('pigeon'\) must be a pmoe.Dispatch or one of flat"),
    ("combine", 7, r"combine \(7\) must be a pmoe.Combine or one of flat"),
    ("send_once", "yes", r"send_once \('yes'\) must be True or False"),
    ("wire", "int8", r"wire \('int8'\) must be None, \"e4m3\" or \"bfloat16\""),
    ("wire_backward", True, r"wire_backward \(True\) must be None, \"e4m3\" or \"bfloat16\""),
    ("wire_combine", "int8", r"wire_combine \('int8'\) must be None, \"e4m3\" or \"bfloat16\""),
    ("allow", "e5m2", r"allow \('e5m2'\) must be None or \"e4m3\""),
    ("allow", True, r"allow \(True\) must be None or \"e4m3\""),
    ("products", "e5m2", r"products \('e5m2'\) must be None, \"e4m3\" or \"mxfp8\""),
    ("products", True, r"products \(True\) must be None, \"e4m3\" or \"mxfp8\""),
    ("d_latent", 0, r"d_latent \(0\) must be at least 1"),
    ("shared_expert", 0, r"shared_expert \(0\)"),
    ("shared_expert", "wide", r"shared_expert \('wide'\) must be None, an int or a torch.nn.Module"),
    ("shared_gate", True, r"shared_gate \(True\) must be False without a shared_expert"),
    ("callbacks", [print], r"callbacks .* must be pmoe.Callback objects"),
    ("dtype", torch.int64, r"dtype \(torch.int64\) must be a floating-point type"),
    ("z_loss_weight", -0.1, r"z_loss_weight \(-0.1\)"),
    ("check_finite", 1, r"check_finite \(1\) must be None, True or False"),
    ("balance", -1, r"balance \(-1\) must be an int of at least 0"),
    ("balance", 10**30, rf"balance \({10**30}\) must be an int of at least 0, and below 2\*\*63"),
    ("balance", "yes", r"balance \('yes'\) must be an int of at least 0"),
    ("mesh", "cpu", r"mesh \('cpu'\) must be a torch.distributed.device_mesh.DeviceMesh"),
]


@pytest.mark.parametrize(
    "name, value, message", ARGUMENTS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(ARGUMENTS)]
)
def test_a_bad_argument_is_named_with_its_value_and_the_rule(name: str, value: Any, message: str) -> None:
    found = error_of(lambda: make(**{name: value}))
    assert re.match("(ValueError|TypeError): ", found), found
    assert re.search(message, found), found


TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"gate": "switch", "top_k": 2}, "top_k"),
    ({"gate": "soft", "capacity_factor": 1.0}, "SoftMoE drops nothing"),
    ({"gate": "soft", "shared_expert": 8}, "SoftMoE, which mixes tokens"),
    ({"pipeline": 32, "pipeline_backward": 9}, "pipeline_backward"),
    ({"pipeline": 2, "pipeline_backward": 4, "send_once": True}, "rows travel once"),
    ({"pipeline": 2, "pipeline_backward": 4, "callbacks": [pmoe.Callback()]}, ""),
    ({"memory_budget": "1GiB", "gate": "sigmoid"}, "memory_budget"),
    ({"memory_budget": "1GiB", "shared_expert": 8}, "memory_budget"),
    ({"gate": "hash", "normalize_gate": True}, "normalize"),
]


@pytest.mark.parametrize("options, message", TOGETHER, ids=["+".join(options) for options, _ in TOGETHER])
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    found = error_of(lambda: make(**options))
    assert (message in found) if message else found == "", found


@pytest.mark.parametrize(
    "name, value", [("pipeline", 0), ("memory_reuse", "S9"), ("top_k", 9), ("slack", 0.1)]
)
def test_setting_a_bad_option_on_a_built_layer_is_refused_and_changes_nothing(name: str, value: Any) -> None:
    layer = make()
    before = getattr(layer, name)
    assert f"{name} (" in error_of(lambda: setattr(layer, name, value))
    assert getattr(layer, name) == before


INPUTS: list[tuple[str, Any, str]] = [
    ("no tensor", [1.0, 2.0], "x (list) must be a torch.Tensor"),
    ("width", torch.randn(3, M + 1, dtype=torch.float64), f"must end in d_model ({M})"),
    ("scalar", torch.tensor(1.0, dtype=torch.float64), f"must end in d_model ({M})"),
    ("integers", torch.ones(3, M, dtype=torch.int64), "must be of a floating-point type"),
    ("type", torch.randn(3, M), "must be of the layer's dtype (torch.float64)"),
    (
        "device",
        torch.randn(3, M, dtype=torch.float64, device="meta"),
        "must be where the layer's parameters are",
    ),
]


@pytest.mark.parametrize("name, x, message", INPUTS, ids=[name for name, *_ in INPUTS])
def test_bad_input_is_refused_at_the_call(name: str, x: Any, message: str) -> None:
    assert message in error_of(lambda: make()(x))


def bad_on_one(rank: int, world: int, bad: str) -> tuple[str, bool]:
    """What the call says, and whether the next one works."""
    layer, x = make(pipeline=2), tokens(5, rank)
    given = x
    if rank == world - 1:
        given = {"width": x[:, :-1], "type": x.float(), "NaN": x * math.nan}[bad]
    return error_of(lambda: layer(given)), bool(step(layer, x)["y"].isfinite().all())


@pytest.mark.parametrize("bad, message", [("width", "d_model"), ("type", "dtype"), ("NaN", "not finite")])
@pytest.mark.parametrize("world", [2, 4])
def test_bad_input_on_one_rank_is_an_error_on_all_and_the_next_call_works(
    world: int, bad: str, message: str
) -> None:
    *others, own = on_ranks(world, bad_on_one, bad)
    assert message in own[0] and own[1], own[0]
    for found, works in others:
        assert f"rank {world - 1}: " in found and message in found and works, found


def options_differ(rank: int, world: int, name: str, values: tuple[Any, ...]) -> str:
    layer = make(**{name: values[rank]})
    return error_of(lambda: layer(tokens(5)))


@pytest.mark.parametrize(
    "name, values", [("pipeline", (2, 4)), ("capacity_factor", (1.0, 2.0)), ("top_k", (1, 2))]
)
def test_ranks_with_different_options_are_told_so_at_the_first_call(
    name: str, values: tuple[Any, ...]
) -> None:
    for message in on_ranks(2, options_differ, name, values):
        assert f"{name} must be the same on every rank" in message
        assert f"rank 0: {values[0]}; rank 1: {values[1]}" in message


def uneven_experts(rank: int, world: int) -> str:
    return error_of(lambda: pmoe.MoELayer(M, H, 7))


def test_experts_that_do_not_divide_among_the_ranks_are_refused() -> None:
    assert all("num_experts (7) must be divisible by" in message for message in on_ranks(2, uneven_experts))


# ---- gates of one's own


class Wrong(pmoe.Gate):
    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x_TM: Tensor) -> Any:
        expert, weight = torch.zeros(len(x_TM), 1, dtype=torch.int64), x_TM[:, :1].abs()
        if self.wrong == "no routing":
            return expert
        if self.wrong == "expert out of range":
            expert = expert + E
        if self.wrong == "weight of another shape":
            weight = weight[:-1]
        if self.wrong == "integers as weights":
            weight = weight.long()
        if self.wrong == "weights not finite":
            weight = weight * math.inf
        return pmoe.Routing(expert=expert, weight=weight, l_aux=weight.new_zeros((), dtype=torch.float64))


WRONG = [
    "no routing",
    "expert out of range",
    "weight of another shape",
    "integers as weights",
    "weights not finite",
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_gate_of_ones_own_returns_is_checked(wrong: str) -> None:
    found = error_of(lambda: make(gate=Wrong(wrong), top_k=1)(tokens(5)))
    assert re.match("(ValueError|TypeError|FaultError): ", found) and "gate" in found, found


def wrong_on_rank(rank: int, world: int, wrong: str) -> str:
    gate = Wrong(wrong if rank == 1 else "")
    return error_of(lambda: make(gate=gate, top_k=1)(tokens(5)))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_gate_that_fails_on_one_rank_is_an_error_on_every_rank(wrong: str) -> None:
    first, own = on_ranks(2, wrong_on_rank, wrong)
    assert "rank 1: " in first and own, first


def test_token_ids_are_asked_for_where_the_gate_needs_them() -> None:
    assert "token_ids" in error_of(lambda: make(gate="hash")(tokens(5)))
    assert "token_ids" in error_of(lambda: make(gate="hash")(tokens(5), torch.arange(4)))

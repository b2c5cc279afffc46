"""Calls of few rows without gradients: no plan and no chunks, with the output of any other call."""

from __future__ import annotations

import copy
import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import pmoe
from pmoe.engine.plan.make_plan import SortedSlots
from pmoe.experts import few_rows
from pmoe.experts.base import FEW_ROWS
from pmoe.layer import run_experts
from tests.kit import build, one_thread, tokens
from tests.tiny_transformers import MODELS, batch, integration, make_model, relative

__all__ = ["one_thread"]

transformers_layers: Any = importlib.import_module("pmoe.integrations.transformers.layers")
pytestmark = pytest.mark.timeout(300)  # the first test imports transformers, which takes its time

LAYERS: dict[str, dict[str, Any]] = {
    "default": {},
    "swiglu": {"expert": "swiglu"},
    "no bias": {"bias": False},
    "dropping": {"capacity_factor": 0.7},
    "noisy gate": {"gate": "noisy_topk"},
    "top-1": {"top_k": 1},
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("num_tokens", [0, 1, 11])
def test_a_layer_makes_no_plan_and_gives_the_output_of_a_call_with_gradients(
    name: str, num_tokens: int
) -> None:
    layer = build(**LAYERS[name]).eval()
    x = tokens(num_tokens)
    expected = layer(x)
    counts = layer.tokens_per_expert
    with torch.no_grad(), mock.patch.object(SortedSlots, "plan", side_effect=AssertionError):
        y = layer(x)
    assert layer.ran is not None and layer.ran.path == "few rows"
    assert torch.equal(y, expected)
    assert torch.equal(layer.tokens_per_expert, counts)


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [
        ({}, FEW_ROWS // 2 + 1),
        ({"pipeline": 2}, 11),
        ({"memory_reuse": "S4"}, 11),
        ({"expert": nn.Identity}, 4),
    ],
)
def test_many_rows_chunks_and_ring_slots_are_the_engines(options: dict[str, Any], num_tokens: int) -> None:
    if options.get("expert"):
        options = {"expert": nn.ModuleList(nn.Linear(6, 6).double() for _ in range(4))}
    layer = build(**options)
    with torch.no_grad():
        layer(tokens(num_tokens))
    assert layer.ran is not None and layer.ran.path == "pipeline"


# ---- transformers


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (5, 2)])
def test_a_model_of_transformers_has_the_logits_of_eager_without_a_layers_call(
    name: str, shape: tuple[int, int]
) -> None:
    model = make_model(name, "pmoe").eval()
    plain = make_model(name, "eager").eval()
    logits_of(model, batch(1))  # checks the layout, and builds the layers
    ids = torch.randint(40, shape, generator=torch.Generator().manual_seed(3))
    with mock.patch.object(transformers_layers, "borrow", side_effect=AssertionError):
        got = logits_of(model, ids)
    assert relative(got, logits_of(plain, ids)) < 1e-5
    for layer in integration.layers(model).values():
        assert layer.ran is not None and layer.ran.path == "few rows"
        assert int(layer.tokens_per_expert.sum()) == ids.numel() * layer.top_k


def test_generate_takes_the_short_way_at_every_step() -> None:
    model = make_model("Mixtral", "pmoe").eval()
    plain = make_model("Mixtral", "eager").eval()
    ids = batch(1)[:, :5]
    with mock.patch.object(few_rows, "_outputs", wraps=few_rows._outputs) as steps:
        got = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(got, plain.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert steps.call_count >= 2 * 5  # two layers, six tokens; the first call builds the layers


def test_replaced_and_converted_weights_are_used() -> None:
    model = make_model("Mixtral", "pmoe").eval()
    ids = batch(1)
    logits_of(model, ids)
    module = next(each for each in model.modules() if hasattr(each, "gate_up_proj"))
    module.down_proj = nn.Parameter(module.down_proj.detach() * 2)
    plain = make_model("Mixtral", "eager").eval()
    plain.load_state_dict(model.state_dict())
    assert relative(logits_of(model, ids), logits_of(plain, ids)) < 1e-5
    model.to(torch.bfloat16)
    plain.to(torch.bfloat16)
    assert relative(logits_of(model, ids).float(), logits_of(plain, ids).float()) < 0.05


def test_a_replaced_activation_is_used() -> None:
    experts = make_model("Mixtral", "pmoe").eval().model.layers[0].mlp.experts
    x, index, weights = torch.randn(2, 32), torch.tensor([[0, 1], [7, 3]]), torch.rand(2, 2)
    for function in (torch.nn.SiLU(), torch.nn.GELU()):
        experts.act_fn = function
        usual = experts(x, index, weights).detach()
        with torch.no_grad():
            assert relative(experts(x, index, weights), usual) < 1e-6
    experts.act_fn = torch.nn.SiLU()  # the short way comes first
    with torch.no_grad():
        short = experts(x, index, weights)
    assert relative(short, experts(x, index, weights)) < 1e-6


def test_a_wrong_routing_is_named_as_ever() -> None:
    model = make_model("Mixtral", "pmoe").eval()
    logits_of(model, batch(1))
    module = next(each for each in model.modules() if hasattr(each, "gate_up_proj"))
    x = torch.zeros(2, module.hidden_dim)
    with torch.no_grad(), pytest.raises(ValueError, match="expert"):
        module(x, torch.full((2, 2), 99), torch.ones(2, 2))
    with torch.no_grad(), pytest.raises(ValueError, match="top_k_weights"):
        module(x, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 1))


def test_copies_of_a_model_use_their_own_weights() -> None:
    model = make_model("Mixtral", "pmoe").eval()
    ids = batch(1)
    before = logits_of(model, ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(logits_of(other, ids), before)
    assert relative(logits_of(model, ids), before) < 1e-5


def test_short_calls_do_not_keep_their_module() -> None:
    import gc
    import weakref

    model = make_model("gpt-oss", "pmoe").eval()
    logits_of(model, batch(1))
    logits_of(model, batch(1))
    gone = weakref.ref(model)
    before = len(run_experts._layers), len(transformers_layers._known)
    del model
    gc.collect()
    assert gone() is None
    assert (len(run_experts._layers), len(transformers_layers._known)) < before


def test_the_public_name() -> None:
    assert pmoe.run_experts is run_experts.run_experts

"""The predicted bytes of a layer are those that the allocator counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pmoe
from pmoe.planner.restore import ALL_PAIRS, KEEP, STRATEGIES
from tests.allocated import Allocated

TOKENS, D_MODEL, D_HIDDEN = 2048, 128, 512


def build(**options: Any) -> pmoe.MoELayer:
    torch.manual_seed(0)
    return pmoe.MoELayer(**{"d_model": D_MODEL, "d_hidden": D_HIDDEN, "num_experts": 4, **options})


def measured(layer: pmoe.MoELayer, tokens: int = TOKENS) -> Allocated:
    """A step's bytes; x and dy are there before, y is held to its end."""
    dtype = layer.gate.weight.dtype
    x = torch.randn(tokens, layer.d_model, dtype=dtype, requires_grad=True)
    dy = torch.randn(tokens, layer.d_model, dtype=dtype)

    def step(mark: Callable[[], None]) -> torch.Tensor:
        y = layer(x)
        mark()
        y.backward(dy)
        return y

    step(lambda: None)  # what is made only once is there
    x.grad = None
    layer.zero_grad(set_to_none=True)
    return Allocated(step)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_the_peak_of_a_step_is_within_two_percent_of_the_prediction(pair: pmoe.Restore, n: int) -> None:
    layer = build(pipeline=n, memory_reuse=pair)
    found = measured(layer)
    predicted = layer.predict_memory(TOKENS, layer.row_counts)
    assert not predicted.is_bound
    assert predicted.peak == pytest.approx(found.peak, rel=0.02)
    assert predicted.saved == pytest.approx(found.held, rel=0.02)
    bound = layer.predict_memory(TOKENS)
    assert bound.is_bound
    assert bound.peak >= found.peak


@pytest.mark.parametrize(
    "options",
    [
        {"expert": "swiglu"},
        {"top_k": 2, "bias": False},
        {"capacity_factor": 0.75},
        {"pipeline": 2, "pipeline_backward": 4},
        {"pipeline": 4, "pipeline_backward": 1},
        {"dtype": torch.float64},
        {"activation": "relu", "num_experts": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("pair", [KEEP, *STRATEGIES.values()], ids=str)
def test_other_layers_are_predicted_as_well(pair: pmoe.Restore, options: dict[str, Any]) -> None:
    layer = build(**{"pipeline": 4, "memory_reuse": pair, **options})
    found = measured(layer)
    assert layer.predict_memory(TOKENS, layer.row_counts).peak == pytest.approx(found.peak, rel=0.02)
    assert layer.predict_memory(TOKENS).peak >= found.peak


def test_offloaded_bytes_are_the_hosts() -> None:
    for name, columns in (("S1", D_MODEL + D_HIDDEN), ("S2", D_HIDDEN), ("S3", D_MODEL), ("S4", 0)):
        layer = build(pipeline=4, memory_reuse=name)
        host = pmoe.pool().host
        before = host.bytes_in_use
        y = layer(torch.randn(TOKENS, D_MODEL, requires_grad=True))
        assert host.bytes_in_use - before == TOKENS * columns * 4
        assert layer.predict_memory(TOKENS, layer.row_counts).host == TOKENS * columns * 4
        del y


def test_communicate_keep_saves_no_more_than_the_input_and_the_hidden_of_swiglu() -> None:
    """SonicMoE's floor on one rank, in bytes: x, which the caller holds anyway, and T_M; beside them the
    output, indices, routing weights and gate probabilities."""
    top_k, num_experts, hidden = 2, 8, 256
    layer = build(
        d_hidden=hidden,
        num_experts=num_experts,
        top_k=top_k,
        expert="swiglu",
        bias=False,
        pipeline=4,
        memory_reuse=pmoe.Restore("communicate", "keep"),
        dtype=torch.bfloat16,
    )
    found = measured(layer)
    slots = TOKENS * top_k
    output, floor = TOKENS * D_MODEL * 2, 4 * slots * hidden
    indices, weights, gate = 4 * slots * 8, 4 * slots * 4, 3 * TOKENS * num_experts * 4
    assert floor < found.held - output <= floor + indices + weights + gate


def test_a_module_of_the_paper_needs_less_than_half_of_keep_at_n_1() -> None:
    """Activations and temporaries alone, at H = 4M, as of MoE-GPT3-XL in bench/memory_pairs.py."""
    sizes = {"d_model": 128, "d_hidden": 512, "num_experts": 1, "bias": False}
    peaks = []
    for pair, n in ((KEEP, 1), (STRATEGIES["S4"], 8)):
        layer = build(**sizes, pipeline=n, memory_reuse=pair)
        gradients = sum(parameter.nbytes for parameter in layer.parameters())
        peaks.append(measured(layer, 8192).peak - gradients)
    assert peaks[1] < 0.45 * peaks[0]


def test_what_the_layer_chooses_by_itself_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"pipeline \(None\) and memory_reuse \(None\) must be given"):
        build(pipeline=True, memory_reuse="S4").predict_memory(TOKENS)
    with pytest.raises(ValueError, match="must be given"):
        build(pipeline=2, memory_reuse=True).predict_memory(TOKENS)
    layer = build(pipeline=True, memory_reuse=True)
    given = layer.predict_memory(TOKENS, pipeline=4, memory_reuse="S4")
    assert given.peak == build(pipeline=4, memory_reuse="S4").predict_memory(TOKENS).peak


def test_reuse_only_rises_with_tokens_and_falls_with_n() -> None:
    layer = build(pipeline=4, memory_reuse="S4")
    by_tokens = [layer.predict_memory(tokens).peak for tokens in (0, 1, 100, 1000, 5000)]
    assert by_tokens == sorted(by_tokens)
    by_n = [layer.predict_memory(4096, pipeline=n).promised for n in (1, 2, 4, 8)]
    assert by_n == sorted(by_n, reverse=True)

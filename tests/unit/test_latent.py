"""Latent experts on one rank: the definition, options, memory, and what they cannot be combined with."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe
from pmoe.convert import from_pmoe
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.training.parameter_kinds import kinds_of
from tests.allocated import peak_of_step
from tests.kit import gradients
from tests.reference import relative_error


def build(d_latent: int | None = 5, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(0)
    sizes = {"d_model": 12, "d_hidden": 20, "num_experts": 4, "top_k": 2, "dtype": torch.float64}
    return pmoe.MoELayer(**{**sizes, "d_latent": d_latent, **options})


def rows(count: int = 30, width: int = 12, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, width).to(dtype)


def definition(layer: pmoe.MoELayer, x: Tensor) -> Tensor:
    """y by a loop over tokens: each goes down, to its experts, and the weighted sum goes up."""
    assert layer.latent is not None
    routing = layer.gate(x)
    experts = layer.experts
    lines = []
    for token, (chosen, weights) in enumerate(zip(routing.expert, routing.weight, strict=True)):
        z = layer.latent.down.weight @ x[token]
        total = torch.zeros_like(z)
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            hidden = F.gelu(experts.w1[expert] @ z + experts.b1[expert])
            total = total + weight * (experts.w2[expert] @ hidden + experts.b2[expert])
        lines.append(layer.latent.up.weight @ total)
    return torch.stack(lines)


@pytest.mark.parametrize("options", [{}, {"pipeline": 3, "memory_reuse": "S4"}, {"d_latent": 17}])
def test_a_step_is_that_of_the_definition(options: dict[str, Any]) -> None:
    layer = build(**options)
    plain = copy.deepcopy(layer)
    found = gradients(layer, rows())
    wanted = gradients(plain, rows(), lambda x: (definition(plain, x), plain.gate(x).l_aux))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert relative_error(found[name], value) <= 1e-12, name


def test_parameters_have_their_widths_and_marks() -> None:
    layer = build(expert="swiglu", shared_expert=7)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert shapes["gate.weight"] == (4, 12)
    assert shapes["experts.w1"] == (4, 40, 5) and shapes["experts.w2"] == (4, 5, 20)
    assert shapes["shared_expert.w1"] == (1, 14, 12)
    assert shapes["latent.down.weight"] == (5, 12) and shapes["latent.up.weight"] == (12, 5)
    experts = set(pmoe.expert_parameters(layer))
    assert layer.latent is not None and not experts & set(layer.latent.parameters())
    assert all(kinds_of(layer)[parameter].kind == "matrices" for parameter in layer.latent.parameters())


def test_copies_and_state_dicts_keep_the_projections() -> None:
    layer = build(shared_expert=7, gate="deepseek")
    y = layer(rows())
    assert torch.equal(pickle.loads(pickle.dumps(layer))(rows()), y)
    other = build(shared_expert=7, gate="deepseek")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(rows()), y)


def test_meta_layers_have_shapes_and_get_values_again() -> None:
    layer = build(device="meta", dtype=torch.float32)
    assert layer(torch.empty(3, 12, device="meta")).shape == (3, 12)
    layer.to_empty(device="cpu")
    torch.manual_seed(4)
    layer.reset_parameters()
    assert layer.latent is not None and layer.latent.up.weight.abs().max() <= 5**-0.5
    assert layer(rows(3, dtype=torch.float32)).isfinite().all()


def test_a_mask_autocast_and_checkpoints() -> None:
    layer = build(dtype=torch.float32, shared_expert=6)
    x = rows(6, dtype=torch.float32)
    mask = torch.tensor([True, False, True, True, False, True])
    y = layer(x, mask=mask)
    assert torch.equal(y[mask], layer(x[mask])) and not y[~mask].any()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    again = torch.utils.checkpoint.checkpoint(
        layer, x.requires_grad_(), use_reentrant=False, context_fn=pmoe.checkpoint_contexts
    )
    again.sum().backward()
    first = x.grad
    x.grad = None
    layer(x).sum().backward()
    assert first is not None and x.grad is not None and torch.equal(first, x.grad)


def test_hooks_of_experts_see_rows_of_the_latent_width() -> None:
    layer = build()
    seen = []
    layer.experts.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape))
    layer(rows())
    assert seen == [(30, 5)]


def test_solver_and_trials_take_them() -> None:
    for options in ({"pipeline": "solve"}, {"pipeline": True, "memory_reuse": True}):
        layer = build(**options)
        layer(rows()).sum().backward()
        assert layer.ran is not None and layer.ran.path == "pipeline"


# ---- memory


@pytest.mark.sampled(12)
@pytest.mark.parametrize("sizes", [(96, 32, 64), (256, 32, 32), (64, 48, 256)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline": 4, "memory_reuse": "S4"},
        {"pipeline": 2, "memory_reuse": "S1"},
        {"pipeline": 2, "memory_reuse": "S2"},
        {"pipeline": 4, "memory_reuse": "S3", "top_k": 1},
        {"expert": "swiglu"},
        {"shared_expert": 64, "shared_gate": True},
        {"shared_expert": 600, "pipeline": 4, "memory_reuse": "S4"},
        {"shared_expert": 600, "shared_gate": True, "expert": "swiglu"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_memory_is_predicted(
    dtype: torch.dtype, options: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    d_model, d_latent, d_hidden = sizes
    layer = build(d_latent, d_model=d_model, d_hidden=d_hidden, dtype=dtype, **options)
    x = rows(512, d_model, dtype).requires_grad_()
    dy = torch.ones_like(x)
    peak = peak_of_step(layer, x, dy)
    predicted = layer.predict_memory(512, layer.row_counts).peak
    # With several threads, oneDNN takes scratch memory for some products of the shared expert in bfloat16.
    has_scratch = torch.get_num_threads() > 1 and dtype == torch.bfloat16 and "shared_expert" in options
    scratch = 0.05 * has_scratch
    assert (1 - scratch) * peak <= predicted <= 1.05 * peak
    assert predicted <= layer.predict_memory(512).peak


def test_a_narrower_width_takes_less_memory_and_fewer_bytes_of_messages() -> None:
    wide, narrow = (
        sizes_from_options(256, 512, 8, top_k=2, num_ranks=4, d_latent=width) for width in (None, 64)
    )
    assert wide.sent_bytes() == 4 * narrow.sent_bytes()
    assert wide.expert_parameters > 3 * narrow.expert_parameters
    assert narrow.latent_parameters == 2 * 256 * 64 and wide.latent_parameters == 0
    assert narrow.gate_parameters == wide.gate_parameters


# ---- bad input


@pytest.mark.parametrize("value", [0, -3])
def test_a_width_below_one_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=rf"d_latent \({value}\) must be at least 1"):
        build(value)


@pytest.mark.parametrize("value", [True, 2.5, "6"])
def test_a_width_that_is_no_int_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="d_latent .* must be an int"):
        build(value)


def test_the_width_cannot_be_set_on_a_built_layer() -> None:
    layer = build()
    with pytest.raises(ValueError, match=r"d_latent \(6\) must stay 5, as the layer was built"):
        layer.d_latent = 6
    with pytest.raises(ValueError, match=r"d_latent \(6\) must stay None"):
        build(None).d_latent = 6


SENTENCE = r"experts have another width than the layer \(d_latent=5\)"


def test_what_does_not_take_them_says_so() -> None:
    with pytest.raises(ValueError, match=f"memory_budget .* must be left out where {SENTENCE}"):
        build(memory_budget="1GiB")
    with pytest.raises(ValueError, match=f"cannot be batch-invariant .* where {SENTENCE}"):
        pmoe.make_batch_invariant(build())
    with pytest.warns(UserWarning, match=f"fused .* falls back .* because {SENTENCE}"):
        build(fused=True)(rows())


def test_an_export_has_no_names_for_the_projections(tmp_path: Path) -> None:
    model = nn.Sequential(build(expert="swiglu", bias=False))
    with pytest.raises(ValueError, match=r"layer '0' with d_latent \(5\), for whose projections no layout"):
        pmoe.save_weights(model, tmp_path / "export", "mixtral")
    with pytest.raises(ValueError, match=r"latent.down.weight of shape \(5, 12\) must not be in state"):
        from_pmoe(model[0].state_dict(), "mixtral")


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4]


@pytest.mark.parametrize("name", ["down", "up"])
def test_a_projection_of_another_shape_is_refused(name: str) -> None:
    layer = build()
    setattr(layer.latent, name, Wrong())
    with pytest.raises(ValueError, match=rf"latent\.{name} returned .*; it must return \(30, "):
        layer(rows())


def test_run_experts_takes_rows_of_the_experts_width_only() -> None:
    layer = build()
    routing = layer.gate(rows())
    with pytest.raises(ValueError, match="x"):
        pmoe.run_experts(layer, rows(), routing.expert, routing.weight, layer.experts.w1, layer.experts.w2)

"""The layer computes with the values that ``experts.w1`` and ``gate.weight`` have when a call begins.

They may be parametrized, pruned, quantised, tied or replaced by a tool. Each case is compared with the plain
definition of its values.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.experts import FFNExperts
from pmoe.runners import one_rank
from tests.kit import AUX, build, tokens
from tests.reference import Definition, relative_error

NAMES = ("gate.weight", "experts.w1", "experts.w2", "experts.b1", "experts.b2")


class LowRank(nn.Module):
    """LoRA: adds b @ a to a matrix, or to each matrix of a stack."""

    def __init__(self, weight: Tensor, rank: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shape = weight.shape
        self.a = nn.Parameter(torch.randn(*shape[:-2], rank, shape[-1], generator=generator).to(weight))
        self.b = nn.Parameter(torch.randn(*shape[:-1], rank, generator=generator).to(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Rounded(nn.Module):
    """Fake quantisation with a straight-through gradient."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ((weight * 8).round() / 8 - weight).detach()


class Clamped(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.clamp(-0.1, 0.1)


def lora(layer: pmoe.MoELayer) -> None:
    for module, name in ((layer.experts, "w1"), (layer.experts, "w2"), (layer.gate, "weight")):
        parametrize.register_parametrization(module, name, LowRank(getattr(module, name)))


def rounded(layer: pmoe.MoELayer) -> None:
    for name in ("w2", "b1"):
        parametrize.register_parametrization(layer.experts, name, Rounded())


def clamped_twice(layer: pmoe.MoELayer) -> None:
    parametrize.register_parametrization(layer.experts, "w1", Rounded())
    parametrize.register_parametrization(layer.experts, "w1", Clamped())


def spectral(layer: pmoe.MoELayer) -> None:
    layer.eval()  # in training each reading of a value makes it another
    for name in ("w1", "w2"):
        parametrizations.spectral_norm(layer.experts, name)
    parametrizations.spectral_norm(layer.gate)


def weight_norm(layer: pmoe.MoELayer) -> None:
    parametrizations.weight_norm(layer.experts, "w1")
    parametrizations.weight_norm(layer.gate, "weight")
    with torch.no_grad():
        layer.experts.parametrizations.w1.original0.mul_(1.5)


def weight_norm_by_hook(layer: pmoe.MoELayer) -> None:
    old_weight_norm(layer.experts, "w2")
    with torch.no_grad():
        layer.experts.w2_g.mul_(1.5)


def spectral_by_hook(layer: pmoe.MoELayer) -> None:
    layer.eval()
    old_spectral_norm(layer.experts, "w1")
    with torch.no_grad():
        layer.experts.w1_orig.mul_(1.5)


def pruned(layer: pmoe.MoELayer) -> None:
    for name in ("w1", "w2", "b2"):
        prune.l1_unstructured(layer.experts, name, amount=0.5)
    prune.random_unstructured(layer.gate, "weight", amount=0.2)


def pruned_for_good(layer: pmoe.MoELayer) -> None:
    prune.ln_structured(layer.experts, "w1", amount=0.5, n=2, dim=1)
    prune.remove(layer.experts, "w1")


def removed_and_put_back(layer: pmoe.MoELayer) -> None:
    """Removes a parameter and adds it again, so that parameters() returns w2, b1, b2, w1."""
    weight = layer.experts.w1
    del layer.experts.w1
    layer.experts.w1 = nn.Parameter(weight.detach() * 1.5)


def tied(layer: pmoe.MoELayer) -> None:
    other = FFNExperts(6, 10, 4, dtype=torch.float64)
    nn.init.normal_(other.w1, std=0.3)
    layer.experts.w1 = other.w1


def computed_elsewhere(layer: pmoe.MoELayer) -> None:
    """Replaces a weight by a tensor that another parameter computes, as a hypernetwork would.

    The tensor keeps its graph.
    """
    layer.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    weight = layer.experts.w1
    del layer.experts.w1
    layer.kept_original = weight
    layer.experts.w1 = weight * layer.scale


def a_buffer(layer: pmoe.MoELayer) -> None:
    weight = layer.experts.w2.detach() * 1.5
    del layer.experts.w2
    layer.experts.register_buffer("w2", weight)


def sparse(layer: pmoe.MoELayer) -> None:
    weight = layer.experts.w2.detach().clone()
    weight[weight.abs() < 0.1] = 0
    layer.experts.w2 = nn.Parameter(weight.to_sparse(), requires_grad=False)


def labelled(layer: pmoe.MoELayer) -> None:
    class Labelled(torch.Tensor):
        """A subclass of Tensor that changes no operation, as libraries use to mark their parameters."""

    weight = (layer.experts.w1.detach() * 1.5).as_subclass(Labelled)
    layer.experts.w1 = nn.Parameter(weight)


def by_modules_table(layer: pmoe.MoELayer) -> None:
    """Replaces the experts without the layer's __setattr__, as torch.ao.quantization.convert does."""
    other = FFNExperts(6, 10, 4, dtype=torch.float64)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer._modules["experts"] = other


SURGERIES: list[Callable[[pmoe.MoELayer], None]] = [
    lora, rounded, clamped_twice, spectral, weight_norm, weight_norm_by_hook, spectral_by_hook, pruned,
    pruned_for_good, removed_and_put_back, tied, computed_elsewhere, a_buffer, sparse, labelled,
    by_modules_table,
]  # fmt: skip

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"pipeline": 2, "memory_reuse": "S4"},
    "offloading": {"pipeline": 2, "memory_reuse": "S1"},
    "padded": {"pad_to_capacity": True, "capacity_factor": 4.0},
    "shared": {"shared_expert": 5, "shared_gate": True},
}


def values_of(layer: pmoe.MoELayer) -> dict[str, Tensor]:
    """Returns the values of the layer's parameters, with their graphs, by their names in a state_dict."""
    for module in (layer.experts, layer.gate):
        for hook in module._forward_pre_hooks.values():  # pruning makes its values in these
            hook(module, ())
    values = {}
    for name in NAMES:
        module, _, own = name.partition(".")
        value = getattr(getattr(layer, module), own)
        values[name] = value.to_dense() if value.layout is torch.sparse_coo else value
    return values


def step(layer: pmoe.MoELayer, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Returns y, l_aux, and the gradients of x and of all parameters, also those of parametrizations."""
    layer.zero_grad(set_to_none=True)
    x = tokens().requires_grad_()
    y, l_aux = compute(x)
    ((y * tokens(seed=4)).sum() + AUX * l_aux).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": l_aux.detach(), "x": x.grad, **gradients}


def by_definition(layer: pmoe.MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    values = values_of(layer)
    y, l_aux = Definition(values, layer.top_k).rank(x, values["gate.weight"])
    if layer.shared_expert is not None:
        shared = {f"experts.{name}": getattr(layer.shared_expert, name) for name in ("w1", "w2", "b1", "b2")}
        rows = torch.stack([Definition(shared, 1).run_expert(0, row) for row in x])
        y = y + (x @ layer.shared_gate.weight.t()).sigmoid() * rows
    return y, l_aux


def by_layer(layer: pmoe.MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    y = layer(x)
    return y, layer.l_aux


def check(layer: pmoe.MoELayer) -> None:
    ours = step(layer, lambda x: by_layer(layer, x))
    plain = step(layer, lambda x: by_definition(layer, x))
    assert ours.keys() == plain.keys()
    for name, value in ours.items():
        if value is None or plain[name] is None:
            other = value if plain[name] is None else plain[name]
            assert other is None or not other.count_nonzero(), name
        else:
            assert relative_error(value, plain[name]) < 1e-11, name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("surgery", SURGERIES, ids=lambda surgery: surgery.__name__)
def test_what_experts_and_gate_are_when_a_call_begins_computes_and_gets_gradients(
    surgery: Callable[[pmoe.MoELayer], None], way: str
) -> None:
    layer = build(**WAYS[way])
    before = layer(tokens()).detach()
    surgery(layer)
    assert relative_error(layer(tokens()).detach(), before) > 1e-3, "the surgery changes nothing"
    if surgery is computed_elsewhere:  # its graph is for one backward pass
        y = layer(tokens())
        y.sum().backward()
        assert layer.scale.grad is not None and layer.kept_original.grad is not None
        return
    check(layer)


@pytest.mark.parametrize(
    "surgery", [lora, rounded, spectral, weight_norm, pruned, tied], ids=lambda s: s.__name__
)
def test_kernels_of_one_rank_take_values_by_name(
    surgery: Callable[[pmoe.MoELayer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_rank, "DEVICES", ("cpu",))
    monkeypatch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
    layer = build()
    surgery(layer)
    check(layer)
    if surgery is not pruned:  # the gate's hook must run, so the gate is called
        assert layer.ran is not None and layer.ran.path == "one rank"


@pytest.mark.parametrize("surgery", [lora, pruned, weight_norm], ids=lambda s: s.__name__)
def test_a_copied_or_pickled_layer_keeps_its_surgery(surgery: Callable[[pmoe.MoELayer], None]) -> None:
    layer = build()
    surgery(layer)
    y = layer(tokens()).detach()
    if surgery is not pruned:  # torch copies no tensors with a graph, which a pruned weight is
        assert torch.equal(copy.deepcopy(layer)(tokens()), y)
    other = build()
    surgery(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    other.load_state_dict(pickle.loads(pickle.dumps(layer.state_dict())))
    assert torch.equal(other(tokens()), y)


def test_a_surgery_that_is_undone_leaves_the_layer_as_it_was() -> None:
    layer = build()
    y = layer(tokens()).detach()
    parametrize.register_parametrization(layer.experts, "w1", Clamped())
    assert not torch.equal(layer(tokens()), y)
    parametrize.remove_parametrizations(layer.experts, "w1", leave_parametrized=False)
    assert torch.equal(layer(tokens()), y)


class Counting(nn.Module):
    reads = 0

    def forward(self, weight: Tensor) -> Tensor:
        type(self).reads += 1
        return weight * 1.0


def test_a_parametrization_is_computed_once_a_call() -> None:
    layer = build(pipeline=2, memory_reuse="S4", expert="swiglu")
    parametrize.register_parametrization(layer.experts, "w1", Counting())
    Counting.reads = 0
    layer(tokens()).sum().backward()
    assert Counting.reads == 1


def test_experts_that_are_frozen_beside_a_trained_parametrization_give_it_its_gradient() -> None:
    layer = build()
    layer.requires_grad_(False)
    parametrize.register_parametrization(layer.experts, "w2", LowRank(layer.experts.w2))
    layer.experts.parametrizations.w2.original.requires_grad_(False)
    layer(tokens()).sum().backward()
    assert layer.experts.parametrizations.w2[0].a.grad.abs().sum() > 0


class OwnScale(FFNExperts):
    """Experts of a user's own, with a parameter that only they know."""

    def __init__(self) -> None:
        super().__init__(6, 10, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.float64))

    def weights(self, parameters: Any) -> Any:
        w1, w2, b1, b2, scale = parameters
        return w1 * scale, w2, b1, b2

    def weight_gradient(self, pending: Any, groups: Any, sums: Any) -> None:
        super().weight_gradient(pending, groups, [None, *sums[1:4]])


def test_a_users_experts_get_their_own_parameter_behind_the_others_whatever_is_parametrized() -> None:
    layer = build(expert=OwnScale())
    for parameter in layer.experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    expected = layer(tokens()).detach()
    parametrize.register_parametrization(layer.experts, "w1", Counting())
    parametrize.register_parametrization(layer.experts, "scale", Counting())
    assert torch.equal(layer(tokens()).detach(), expected)


# ---- what cannot be taken is named


def grown(layer: pmoe.MoELayer) -> None:
    for module, name in ((layer.experts, "w1"), (layer.experts, "w2"), (layer.gate, "weight")):
        weight = getattr(module, name).detach()
        setattr(module, name, nn.Parameter(torch.cat([weight, weight[:2]])))


def grown_experts_alone(layer: pmoe.MoELayer) -> None:
    for name in ("w1", "w2", "b1", "b2"):
        weight = getattr(layer.experts, name).detach()
        setattr(layer.experts, name, nn.Parameter(weight[:3]))


def without_w2(layer: pmoe.MoELayer) -> None:
    layer.experts.w2 = None


def with_one_bias(layer: pmoe.MoELayer) -> None:
    layer.experts.b1 = None


def of_another_type(layer: pmoe.MoELayer) -> None:
    layer.experts.w2 = nn.Parameter(layer.experts.w2.detach().float())


def all_of_another_type(layer: pmoe.MoELayer) -> None:
    parametrize.register_parametrization(layer.experts, "w1", Narrowed(), unsafe=True)
    for name in ("w2", "b1", "b2"):
        parametrize.register_parametrization(layer.experts, name, Narrowed(), unsafe=True)


class Narrowed(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.float()


def no_experts(layer: pmoe.MoELayer) -> None:
    layer.experts = nn.ModuleList([nn.Linear(6, 6)])


REFUSED: list[tuple[Callable[[pmoe.MoELayer], None], str]] = [
    (grown, r"scores 6 experts, but the layer has num_experts \(4\).*docs/weights.md"),
    (
        grown_experts_alone,
        r"w1 \(of shape \(3, 10, 6\) on this rank\) must have shape \(4, 10, 6\).*docs/weights.md",
    ),
    (without_w2, r"experts' w2 \(NoneType\) must be a torch.Tensor"),
    (with_one_bias, r"experts' b1 \(NoneType\) must be a torch.Tensor"),
    (
        of_another_type,
        r"experts' w2 \(torch.float32 on cpu\) must have the dtype and device of their w1 \(torch.float64",
    ),
    (
        all_of_another_type,
        r"experts' parameters \(torch.float32 on cpu\) must have the dtype and device of the rows",
    ),
    (no_experts, r"experts \(a torch.nn.modules.container.ModuleList\) must be pmoe.Experts, or a wrapper"),
]


@pytest.mark.parametrize("surgery, message", REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_surgery_that_cannot_be_taken_is_named(
    surgery: Callable[[pmoe.MoELayer], None], message: str
) -> None:
    layer = build()
    surgery(layer)
    with pytest.raises(ValueError, match=message):
        layer(tokens())


def test_more_modules_than_experts_are_named() -> None:
    layer = build(expert=lambda: nn.Linear(6, 6, dtype=torch.float64))
    layer.experts.local.append(nn.Linear(6, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"experts.local \(of 5 modules\) must hold this rank's 4 experts"):
        layer(tokens())


def test_the_documented_way_to_more_experts_keeps_what_was_trained() -> None:
    layer = build()
    wider = build(num_experts=6)
    with torch.no_grad():
        for module, name in (
            ("experts", "w1"),
            ("experts", "w2"),
            ("experts", "b1"),
            ("experts", "b2"),
            ("gate", "weight"),
        ):
            weight = getattr(getattr(layer, module), name)
            getattr(getattr(wider, module), name).copy_(torch.cat([weight, weight[:2]]))
        wider.gate.weight[4:] -= (
            1e3 * tokens()[:1].sign()
        )  # scored last for this token: nothing changes for it
    assert torch.allclose(wider(tokens()[:1]), layer(tokens()[:1]), atol=1e-12)


@pytest.mark.parametrize("was_trained", [True, False])
def test_frozen_pruned_experts_save_nothing_for_backward(was_trained: bool) -> None:
    # Pruning leaves the w1 of the last call in the experts, with requires_grad of that time. The first pass
    # of a checkpoint took it for a weight that needs a gradient, and saved tensors that the second did not.
    layer = build()
    prune.l1_unstructured(layer.experts, "w1", amount=0.5)
    layer.requires_grad_(was_trained)
    layer(tokens())
    layer.requires_grad_(False)
    head = nn.Linear(layer.options.d_model, 1, dtype=torch.float64)

    def model(x: Tensor) -> Tensor:
        out: Tensor = head(layer(x))
        return out

    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
        layer(tokens())
    assert not saved
    checkpoint(model, tokens(), use_reentrant=False).sum().backward()
    assert head.weight.grad is not None


def test_a_hook_that_computes_a_weight_gets_gradients_after_calls_without_them() -> None:
    scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))  # not a parameter of the layer
    layer = build()
    weight = layer.experts.w1.detach()
    layer.requires_grad_(False)
    del layer.experts.w1

    def compute(experts: nn.Module, _: object) -> None:
        experts.w1 = weight * scale

    layer.experts.register_forward_pre_hook(compute)
    with torch.no_grad():
        layer(tokens())
    layer(tokens()).sum().backward()
    assert scale.grad is not None
    assert scale.grad.abs() > 0

"""Experts that are users' own modules, on one rank."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import pmoe
from pmoe.experts import FFNExperts
from pmoe.experts.modules import ModuleExperts
from tests.kit import D_HIDDEN, D_MODEL, build
from tests.own_experts import changing
from tests.reference import relative_error


def mlp(d_model: int, d_hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, d_hidden), nn.Tanh(), nn.Linear(d_hidden, d_model)).double()


def mlp_without_arguments() -> nn.Module:
    return mlp(D_MODEL, D_HIDDEN)


def module_layer(expert: object, *, top_k: int = 2, n: int = 1, num_experts: int = 4) -> pmoe.MoELayer:
    torch.manual_seed(5)
    layer = pmoe.MoELayer(
        D_MODEL, D_HIDDEN, num_experts, top_k, expert=expert, pipeline=n, dtype=torch.float64
    )
    with torch.no_grad():
        layer.gate.weight *= 3
    return layer


def tokens(count: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, D_MODEL, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() + 1
    return x


def by_the_definition(layer: pmoe.MoELayer, x: Tensor, parameters: list[Tensor]) -> Tensor:
    """Computes the layer by loops over tokens and choices, with one row at a time, under autograd."""
    routing = layer.gate(x)
    rows = []
    for t in range(x.shape[0]):
        outs = [
            weight * layer.experts.local[expert](x[t : t + 1])[0]
            for expert, weight in zip(routing.expert[t], routing.weight[t], strict=True)
        ]
        rows.append(sum(outs))
    return torch.stack(rows)


@pytest.mark.parametrize("expert", [mlp, mlp_without_arguments, lambda *sizes: mlp(*sizes)])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("top_k", [1, 2])
def test_modules_equal_the_definition(expert: Callable[..., nn.Module], n: int, top_k: int) -> None:
    layer = module_layer(expert, n=n, top_k=top_k)
    x, dy = tokens().requires_grad_(), tokens() - 1
    leaves = [x, *layer.parameters()]
    expected = by_the_definition(layer, x, leaves)
    expected_grads = torch.autograd.grad((expected * dy).sum(), leaves, allow_unused=True)
    y = layer(x)
    grads = torch.autograd.grad((y * dy).sum(), leaves)
    assert relative_error(y, expected) < 1e-12
    for got, want in zip(grads, expected_grads, strict=True):
        assert relative_error(got, torch.zeros_like(got) if want is None else want) < 1e-12


def test_each_local_expert_is_an_instance_of_its_own_with_its_own_weights() -> None:
    layer = module_layer(mlp)
    modules = list(layer.experts.local)
    assert len(modules) == len(set(modules)) == 4
    first = [module[0].weight for module in modules]
    assert all(not torch.equal(a, b) for a, b in zip(first, first[1:], strict=False))


def test_each_row_reaches_the_module_of_its_expert() -> None:
    class Times(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

        def forward(self, rows: Tensor) -> Tensor:
            return rows * self.factor

    layer = module_layer(nn.ModuleList(Times(i + 1.0) for i in range(4)), top_k=1, n=2)
    x = tokens()
    routing = layer.gate(x)
    assert len(routing.expert.unique()) > 1
    torch.testing.assert_close(layer(x), x * (routing.expert + 1) * routing.weight)


def test_an_expert_runs_once_a_chunk_in_forward_and_never_in_backward() -> None:
    layer = module_layer(mlp, n=3)
    calls: list[int] = []
    for i, module in enumerate(layer.experts.local):
        module.register_forward_hook(lambda _, args, out, i=i: calls.append(i))
    x = tokens(12).requires_grad_()
    y = layer(x)
    expert_T = layer.gate(x).expert
    per_chunk = [sorted(set(expert_T[start : start + 4].flatten().tolist())) for start in (0, 4, 8)]
    assert calls == sum(per_chunk, [])
    y.sum().backward()
    assert calls == sum(per_chunk, [])


@pytest.mark.parametrize("n", [1, 2])
def test_experts_without_rows_have_zero_gradients_not_none(n: int) -> None:
    layer = module_layer(mlp, top_k=1, n=n)
    with torch.no_grad():
        layer.gate.weight[2, 0] = 40  # every token's first column is positive
    layer(tokens()).sum().backward()
    assert layer.tokens_per_expert.tolist() == [0, 0, 11, 0]
    for i, module in enumerate(layer.experts.local):
        for parameter in module.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) == (i == 2)


def test_frozen_parameters_have_no_gradient_and_the_others_their_own() -> None:
    layer, whole = module_layer(mlp), module_layer(mlp)
    for module in layer.experts.local:
        module[0].weight.requires_grad_(False)
    x, x_whole = tokens().requires_grad_(), tokens().requires_grad_()
    layer(x).sum().backward()
    whole(x_whole).sum().backward()
    assert torch.equal(x.grad, x_whole.grad)
    for (name, a), (_, b) in zip(layer.named_parameters(), whole.named_parameters(), strict=True):
        if name.endswith("0.weight") and name.startswith("experts"):
            assert a.grad is None
        else:
            assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("module", [nn.Identity, lambda: nn.Tanh(), lambda: nn.Flatten()])
def test_modules_without_parameters_pass_the_gradient_on(module: Callable[[], nn.Module]) -> None:
    layer = module_layer(module, top_k=1, n=2)
    x, x_plain = tokens().requires_grad_(), tokens().requires_grad_()
    layer(x).sum().backward()
    (module()(x_plain) * layer.gate(x_plain).weight).sum().backward()
    torch.testing.assert_close(x.grad, x_plain.grad)


def test_modules_that_cut_the_graph_give_no_gradient_to_their_rows() -> None:
    class Constant(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return torch.ones_like(rows)

    layer = module_layer(lambda: Constant(), top_k=1)
    x, x_plain = tokens().requires_grad_(), tokens().requires_grad_()
    layer(x).sum().backward()
    (D_MODEL * layer.gate(x_plain).weight.sum()).backward()
    torch.testing.assert_close(x.grad, x_plain.grad)


def test_one_module_shared_by_all_experts_sums_their_gradients() -> None:
    shared = mlp_without_arguments()
    layer = module_layer(nn.ModuleList([shared] * 4), n=2)
    x = tokens()
    layer(x).sum().backward()
    got = [parameter.grad.clone() for parameter in shared.parameters()]
    shared.zero_grad()
    shared(x).sum().backward()  # the weights of a token sum to 1
    for a, b in zip(got, shared.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad)


def test_dropout_is_drawn_once_and_the_same_under_one_seed() -> None:
    def dropping(d_model: int, d_hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(d_model, d_hidden), nn.Dropout(0.5), nn.Linear(d_hidden, d_model))

    layer = module_layer(dropping, top_k=1, n=2)
    x = tokens().requires_grad_()
    runs = []
    for _ in range(2):
        torch.manual_seed(11)
        y = layer(x)
        runs.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_one_backward_frees_what_the_modules_saved() -> None:
    """The modules' graphs exist as long as y does, so they must not keep the saved tensors after backward."""
    seen: list[weakref.ref[Tensor]] = []

    class Remember(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            square = rows * 2
            seen.append(weakref.ref(square.untyped_storage()))
            return square.square()  # saves its input

    layer = module_layer(lambda: Remember(), top_k=1)
    y = layer(tokens())
    assert seen
    assert all(ref() is not None for ref in seen)
    y.sum().backward()
    assert all(ref() is None for ref in seen)
    seen.clear()
    y = layer(tokens())
    del y  # without a backward: no cycle that only the garbage collector would find
    layer.l_aux = None
    assert all(ref() is None for ref in seen)


def test_outer_hooks_see_what_the_modules_save() -> None:
    """Hooks on saved tensors must get the modules' tensors too.

    Checkpointing and offloading work with these hooks.
    """
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    layer = module_layer(mlp, top_k=1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(tokens())
    hidden_rows = sum(
        t.shape[0] for t in packed if t.dim() == 2 and t.shape[1] == D_HIDDEN and t.shape[0] <= 11
    )
    assert hidden_rows >= 11


@pytest.mark.parametrize(
    "expert, error, match",
    [
        ("moe", ValueError, r"expert \('moe'\) must be ffn, swiglu, or a callable"),
        (nn.Linear(6, 6), TypeError, r"expert \(Linear.*must be a name, a callable that builds one expert"),
        (3, TypeError, r"expert \(3\) must be a name, a callable"),
        (lambda a, b, c: None, ValueError, r"must be callable as expert\(d_model, d_hidden\) or expert\(\)"),
        (lambda a: None, ValueError, r"must be callable as expert\(d_model, d_hidden\) or expert\(\)"),
        (lambda: "no module", TypeError, "must build a torch.nn.Module, not str"),
        (
            nn.ModuleList([nn.Identity()] * 3),
            ValueError,
            r"ModuleList of 3\) must hold this rank's 4 experts",
        ),
        (FFNExperts(6, 10, 2), ValueError, r"FFNExperts of 2\) must hold this rank's 4 experts"),
    ],
)
def test_what_is_no_expert_is_refused_when_built(expert: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        module_layer(expert)


def test_modules_that_return_something_else_are_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match=r"Linear returned shape \(\d+, 7\); it must be that of its rows"):
        module_layer(lambda: nn.Linear(6, 7))(tokens())
    with pytest.raises(TypeError, match="LSTM must return a tensor, not tuple"):
        module_layer(lambda: nn.LSTM(6, 6))(tokens())


def test_given_experts_are_taken_as_they_are() -> None:
    experts = ModuleExperts(mlp_without_arguments() for _ in range(4))
    assert module_layer(experts).experts is experts
    modules = nn.ModuleList(mlp_without_arguments() for _ in range(4))
    before = copy.deepcopy(modules.state_dict())
    layer = module_layer(modules)
    assert list(layer.experts.local) == list(modules)
    assert all(torch.equal(a, b) for a, b in zip(modules.state_dict().values(), before.values(), strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_shared_expert_that_writes_over_the_layers_input_is_named(mode: Any) -> None:
    """Otherwise the routed experts would read the changed input, and without gradients nothing would fail."""
    layer = build(shared_expert=changing(D_MODEL, D_HIDDEN).double())
    with (
        mode(),
        pytest.raises(RuntimeError, match=r"shared_expert \(Sequential\) changes its input in place"),
    ):
        layer(tokens())


def test_a_shared_expert_may_write_over_what_no_version_counts() -> None:
    layer = build(shared_expert=changing(D_MODEL, D_HIDDEN).double())
    plain = build(shared_expert=changing(D_MODEL, D_HIDDEN).double())
    plain.load_state_dict(layer.state_dict())
    plain.shared_expert.local[0][0].inplace = False
    with torch.inference_mode():
        x = tokens() * 1.0
        before = x.clone()
        assert torch.equal(layer(x), plain(before)) and torch.equal(x, before)

"""Experts: what is computed on the rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.experts import FFNExperts
from tests.spec.kit import (
    E,
    H,
    K,
    M,
    assert_close,
    assert_is_the_plain_layer,
    make,
    on_ranks,
    run_expert,
    step,
    tokens,
)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_a_feed_forward_expert_is_two_products_with_an_activation_between(
    activation: str, bias: bool
) -> None:
    assert_is_the_plain_layer([9], {"activation": activation}, activation=activation, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"pipeline": 3, "memory_reuse": "S4"}])
def test_a_swiglu_expert_multiplies_two_halves(options: dict, bias: bool) -> None:
    assert_is_the_plain_layer([9], {"expert": "swiglu"}, expert="swiglu", bias=bias, **options)


def test_swiglus_first_product_is_twice_as_wide_gate_rows_first() -> None:
    assert make(expert="swiglu").experts.w1.shape == (E, 2 * H, M)


# ---- modules of one's own


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(M, H), nn.Tanh(), nn.Linear(H, M))


def modules_step(rank: int, world: int, options: dict) -> dict[str, Tensor]:
    return step(make(expert=block, **options), tokens(7, 10 + rank))


@pytest.mark.parametrize("pair", [False, "S1", "S2", "S3", "S4"])
@pytest.mark.parametrize("n", [1, 3])
def test_modules_as_experts_give_the_same_with_chunks_and_restored(n: int, pair: bool | str) -> None:
    got = modules_step(0, 1, {"pipeline": n, "memory_reuse": pair})
    assert_close(got, modules_step(0, 1, {}))


def test_a_callable_builds_one_module_for_each_expert_with_values_of_its_own() -> None:
    layer = make(expert=block)
    firsts = [
        each for name, each in layer.named_parameters() if name.endswith("0.weight") and "experts" in name
    ]
    assert len(firsts) == E
    assert not torch.equal(firsts[0], firsts[1])


def test_a_list_of_modules_may_hold_experts_of_different_kinds() -> None:
    experts = nn.ModuleList([block(), nn.Linear(M, M), nn.Identity(), block()]).double()
    layer = make(expert=experts, pipeline=2)
    assert torch.autograd.gradcheck(layer, tokens(5).requires_grad_())


def test_an_expert_that_multiplies_by_its_number_shows_where_each_row_went() -> None:
    class Times(nn.Module):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    layer = make(expert=nn.ModuleList(map(Times, range(1, E + 1))), pipeline=3, memory_reuse="S3")
    x = tokens(9)
    routing = layer.gate(x)
    factor_T = (routing.weight * (routing.expert + 1)).sum(1, keepdim=True)
    assert_close({"y": layer(x)}, {"y": x * factor_T}, limit=1e-6)


@pytest.mark.parametrize("world", [2, 4])
def test_modules_on_several_ranks_equal_those_on_one(world: int) -> None:
    options = {"num_experts": 4, "pipeline": 2}
    whole = make(expert=block, **options)
    for rank, got in enumerate(on_ranks(world, modules_step, options)):
        x = tokens(7, 10 + rank)
        assert_close({"y": got["y"]}, {"y": whole(x).detach()})


def test_dropout_in_an_expert_is_the_same_in_forward_and_in_what_is_computed_again() -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(M, H), nn.Dropout(0.5), nn.Linear(H, M))

    def run(pair: bool | str) -> dict[str, Tensor]:
        layer = make(expert=dropping, pipeline=2, memory_reuse=pair)
        torch.manual_seed(3)
        return step(layer, tokens(9))

    assert_close(run("S4"), run(False))


class SquaredReLU(FFNExperts):
    """relu(h)^2 between the two products."""

    def activate(self, hidden_NG: Tensor, active_NH: Tensor) -> None:
        torch.square(hidden_NG.relu(), out=active_NH)

    def activation_gradient(self, grad_NG: Tensor, hidden_NG: Tensor) -> None:
        grad_NG.mul_(2 * hidden_NG.relu())


@pytest.mark.parametrize("pair", [False, "S1", "S2", "S3", "S4"])
def test_a_nonlinearity_of_ones_own_has_right_gradients(pair: bool | str) -> None:
    torch.manual_seed(0)
    experts = SquaredReLU(M, H, num_local_experts=E).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer = make(expert=experts, pipeline=2, memory_reuse=pair)
    assert torch.autograd.gradcheck(layer, tokens(5).requires_grad_())


# ---- shared experts


@pytest.mark.parametrize("options", [{}, {"pipeline": 3}, {"pipeline": 3, "memory_reuse": "S4"}])
def test_a_shared_expert_is_added_for_every_token(options: dict) -> None:
    layer, x = make(shared_expert=8, **options), tokens(9)
    routed, p = make(**options), dict(layer.named_parameters())
    routed.load_state_dict({name: each for name, each in p.items() if not name.startswith("shared")})
    shared = {name.replace("shared_expert", "experts"): each for name, each in p.items() if "shared" in name}
    added = torch.stack([run_expert(shared, 0, each) for each in x])
    assert_close({"y": layer(x)}, {"y": routed(x) + added})


def test_a_shared_gate_scales_the_shared_expert() -> None:
    layer, x = make(shared_expert=8, shared_gate=True), tokens(9)
    p = dict(layer.named_parameters())
    shared = {
        name.replace("shared_expert", "experts"): each for name, each in p.items() if "shared_expert" in name
    }
    added = torch.stack([run_expert(shared, 0, each) for each in x])
    routed = make()
    routed.load_state_dict({name: each for name, each in p.items() if not name.startswith("shared")})
    scale = torch.sigmoid(x @ layer.shared_gate.weight.t())
    assert_close({"y": layer(x)}, {"y": routed(x) + scale * added})


def test_a_shared_expert_may_be_a_module() -> None:
    layer = make(shared_expert=block().double(), pipeline=2)
    assert torch.autograd.gradcheck(layer, tokens(5).requires_grad_())


def test_a_shared_experts_parameters_are_as_any_dense_layers() -> None:
    layer = make(shared_expert=8)
    shared = [each for name, each in layer.named_parameters() if name.startswith("shared")]
    assert shared and all(getattr(each, "allreduce", True) for each in shared)


def shared_step(rank: int, world: int) -> dict[str, Tensor]:
    return step(make(shared_expert=8, num_experts=4, pipeline=2), tokens(7, 10 + rank))


def test_a_shared_expert_is_the_same_on_every_rank() -> None:
    whole = make(shared_expert=8, num_experts=4)
    for rank, got in enumerate(on_ranks(2, shared_step)):
        assert_close({"y": got["y"]}, {"y": whole(tokens(7, 10 + rank)).detach()})


def test_a_layer_may_have_one_expert_for_each_of_many_choices() -> None:
    assert_is_the_plain_layer([5], {"top_k": 8}, num_experts=8, top_k=8)
    assert K == 2
    assert isinstance(make().experts, pmoe.Experts)

"""One layer in one process: it takes the place of a feed-forward block."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import pmoe
from tests.spec.kit import E, H, K, M, assert_close, assert_is_the_plain_layer, make, step, tokens


@pytest.mark.parametrize("shape", [(M,), (5, M), (2, 3, M), (2, 1, 3, M), (0, M), (2, 0, M)])
def test_the_output_has_the_shape_of_the_input(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, dtype=torch.float64)
    assert make()(x).shape == shape


def test_leading_dimensions_are_tokens_one_after_the_other() -> None:
    layer, x = make(), tokens(12)
    assert torch.equal(layer(x.view(3, 4, M)).view(12, M), layer(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_type_of_the_input(dtype: torch.dtype) -> None:
    layer = pmoe.MoELayer(M, H, E, dtype=dtype)
    assert layer(torch.randn(5, M, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("num_experts", [4, 8])
def test_each_token_gets_the_weighted_sum_of_its_experts_outputs(num_experts: int, top_k: int) -> None:
    options = {"num_experts": num_experts, "top_k": top_k}
    assert_is_the_plain_layer([13], {"top_k": top_k}, **options)


def test_one_expert_is_a_plain_feed_forward_network() -> None:
    layer, x = make(num_experts=1, top_k=1), tokens(7)
    experts = dict(layer.experts.named_parameters())
    hidden = nn.functional.gelu(x @ experts["w1"][0].t() + experts["b1"][0])
    assert_close({"y": layer(x)}, {"y": hidden @ experts["w2"][0].t() + experts["b2"][0]})


def test_a_layer_of_three_sizes_sends_each_token_whole_to_one_expert() -> None:
    layer = pmoe.MoELayer(M, H, E)
    assert (layer.top_k, layer.capacity_factor) == (1, None)
    assert (layer.pipeline, layer.memory_reuse) == (False, False)


def test_gradients_are_those_of_finite_differences() -> None:
    assert torch.autograd.gradcheck(make(), tokens(5).requires_grad_())


def test_tokens_per_expert_counts_the_rows_of_the_last_call() -> None:
    layer = make()
    layer(tokens(5))
    layer(tokens(11))
    assert layer.tokens_per_expert.shape == (E,)
    assert layer.tokens_per_expert.sum() == 11 * K


def test_before_the_first_call_there_are_no_rows_and_no_loss() -> None:
    layer = make()
    assert layer.tokens_per_expert.tolist() == [0] * E
    assert layer.ran is None
    assert layer.l_aux.shape == () and layer.l_aux == 0 and not layer.l_aux.requires_grad


def test_a_loss_that_was_let_go_is_zero_until_the_next_call() -> None:
    layer = make()
    layer(tokens(7))
    loss = layer.l_aux
    layer.l_aux = None
    assert loss > 0 and layer.l_aux == 0
    assert torch.equal(0.01 * layer.l_aux + loss, loss)
    layer(tokens(7))
    assert layer.l_aux == loss


def test_parameters_have_the_documented_names_and_shapes() -> None:
    assert {name: tuple(each.shape) for name, each in make().named_parameters()} == {
        "gate.weight": (E, M),
        "experts.w1": (E, H, M),
        "experts.b1": (E, H),
        "experts.w2": (E, M, H),
        "experts.b2": (E, M),
    }


def test_without_bias_there_are_no_bias_parameters() -> None:
    assert [name for name, _ in make(bias=False).named_parameters()] == [
        "gate.weight",
        "experts.w1",
        "experts.w2",
    ]


def test_experts_parameters_are_marked_for_data_parallel_wrappers() -> None:
    marked = {name for name, each in make().named_parameters() if getattr(each, "allreduce", True) is False}
    assert marked == {"experts.w1", "experts.b1", "experts.w2", "experts.b2"}


def test_the_same_seed_gives_the_same_layer() -> None:
    some, other = make(), make()
    assert all(map(torch.equal, some.state_dict().values(), other.state_dict().values()))


def test_reset_parameters_draws_what_building_draws() -> None:
    torch.manual_seed(1)
    built = pmoe.MoELayer(M, H, E)
    again = pmoe.MoELayer(M, H, E)
    torch.manual_seed(1)
    again.reset_parameters()
    assert all(map(torch.equal, built.state_dict().values(), again.state_dict().values()))


def test_a_layer_from_the_meta_device_becomes_real() -> None:
    layer = pmoe.MoELayer(M, H, E, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.randn(3, M)).isfinite().all()


def test_a_state_dict_goes_through_a_file_into_another_layer() -> None:
    layer, other, x = make(), pmoe.MoELayer(M, H, E, K, dtype=torch.float64), tokens(7)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), layer(x))


def test_a_copy_is_a_layer_of_its_own() -> None:
    layer, x = make(), tokens(7)
    before = layer(x)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        layer.experts.w1.zero_()
    assert torch.equal(copied(x), before)


def test_a_pickled_layer_computes_the_same() -> None:
    layer, x = make(pipeline=2, memory_reuse="S4"), tokens(7)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_inference_leaves_no_graph() -> None:
    with torch.no_grad():
        assert not make()(tokens(5)).requires_grad
    with torch.inference_mode():
        make()(tokens(5))


@pytest.mark.parametrize("name", ["x", "gate.weight", "experts.w1", "experts.b2"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(name: str) -> None:
    expected = step(make(), tokens(9))
    layer, x = make(), tokens(9).requires_grad_(name != "x")
    for each, parameter in layer.named_parameters():
        parameter.requires_grad_(each != name)
    ((layer(x) * tokens(9, 4)).sum() + 0.37 * layer.l_aux).backward()
    found = {"x": x.grad, **{each: parameter.grad for each, parameter in layer.named_parameters()}}
    assert found.pop(name) is None
    assert_close(found, {each: expected[each] for each in found}, limit=0)


def test_an_expert_without_tokens_gets_a_gradient_of_zero() -> None:
    layer = make(load="one expert", top_k=1)
    grads = step(layer, tokens(9))
    assert layer.tokens_per_expert.tolist() == [0, 0, 0, 9]
    assert grads["experts.w1"][0].abs().sum() == 0 and grads["experts.w1"][3].abs().sum() > 0


def test_a_batch_without_tokens_goes_forward_and_backward() -> None:
    found = step(make(), tokens(0))
    assert found["y"].shape == (0, M)
    assert all(torch.equal(each, torch.zeros_like(each)) for each in found.values())


def test_gradients_of_two_calls_add_up() -> None:
    layer, some, other = make(), tokens(5, 1), tokens(9, 2)
    first = step(layer, some)
    second = step(layer, other)
    layer.zero_grad(set_to_none=True)
    for x in (some, other):
        ((layer(x) * tokens(len(x), 4)).sum() + 0.37 * layer.l_aux).backward()
    for name, parameter in layer.named_parameters():
        assert_close({name: parameter.grad}, {name: first[name] + second[name]})


def test_several_forwards_may_go_backward_in_any_order() -> None:
    layer, xs = make(pipeline=2, memory_reuse="S4"), [tokens(n, n).requires_grad_() for n in (4, 7, 5)]
    losses = [layer(x).square().sum() for x in xs]
    for i in (1, 0, 2):
        losses[i].backward()
    for x in xs:
        alone = x.detach().clone().requires_grad_()
        layer(alone).square().sum().backward()
        assert torch.equal(x.grad, alone.grad)


def test_autocast_computes_in_its_type() -> None:
    layer = pmoe.MoELayer(M, H, E)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(5, M)).dtype == torch.bfloat16


def test_bfloat16_is_as_exact_as_torchs_own_products() -> None:
    exact, x = make(), tokens(32)
    y = exact(x)
    rounded = make().bfloat16().double()  # the rounding that both have in common
    error = (make().bfloat16()(x.bfloat16()).double() - rounded(x.bfloat16().double())).abs().max()
    assert error < 0.02 * y.abs().max()


def test_options_of_a_built_layer_may_be_set() -> None:
    layer, x = make(), tokens(9)
    expected = step(layer, x)
    layer.pipeline, layer.memory_reuse = 3, "S4"
    assert_close(step(layer, x), expected)
    assert (layer.pipeline, str(layer.memory_reuse)) == (3, "communicate/recompute")


def test_training_with_the_balance_loss_learns() -> None:
    torch.manual_seed(0)
    moe = pmoe.MoELayer(16, 32, num_experts=4, top_k=2, pipeline=2, memory_reuse="S4")
    model = nn.Sequential(nn.Linear(8, 16), moe, nn.Linear(16, 1))
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(128, 8)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x) - x.prod(dim=1, keepdim=True).tanh()).square().mean()
        (loss + 0.01 * moe.l_aux).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]

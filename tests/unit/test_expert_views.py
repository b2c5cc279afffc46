"""A pass makes views of each expert's weights once. No call computes with the weights of an earlier call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pmoe import MoELayer
from pmoe.experts.products import ExpertViews
from tests.kit import assert_same, build, gradients, loss_of, tokens
from tests.kit import one_thread as one_thread

OPTIONS = {"pipeline": 4, "memory_reuse": "S4", "bypass_local": False}
SEED = 5


def other(parameter: Tensor) -> Tensor:
    """Returns other values for a parameter, the same at each call."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def write(layer: MoELayer) -> None:
    with torch.no_grad():
        layer.experts.w1.copy_(other(layer.experts.w1))


def assign(layer: MoELayer) -> None:
    layer.experts.w1 = nn.Parameter(other(layer.experts.w1))
    layer.experts.b2 = nn.Parameter(other(layer.experts.b2))


def assign_data(layer: MoELayer) -> None:
    layer.experts.w2.data = other(layer.experts.w2)


def swap(layer: MoELayer) -> None:
    torch.utils.swap_tensors(layer.experts.w1, nn.Parameter(other(layer.experts.w1)))


def freeze(layer: MoELayer) -> None:
    write(layer)
    layer.experts.w1.requires_grad_(False)


def move(layer: MoELayer) -> None:
    layer.to(torch.float32)


def parametrized(layer: MoELayer) -> None:
    parametrize.register_parametrization(layer.experts, "w1", Doubled())


def hook(layer: MoELayer) -> None:
    layer.experts.register_forward_pre_hook(lambda *_: write(layer))


def load(layer: MoELayer) -> None:
    layer.load_state_dict({name: other(value) for name, value in layer.state_dict().items()}, strict=False)


CHANGES = [write, assign, assign_data, swap, freeze, move, parametrized, hook, load]


def found(layer: MoELayer) -> dict[str, Tensor]:
    """Returns the results of a step, without the gradients that frozen parameters do not get."""
    results = gradients(layer, tokens(dtype=layer.experts.w2.dtype))
    return {name: value for name, value in results.items() if value is not None}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_computes_with_the_weights_that_it_finds(change: Callable[[MoELayer], None]) -> None:
    used, fresh = build(**OPTIONS), build(**OPTIONS)
    for _ in range(2):
        before = found(used)
    for layer in (used, fresh):
        change(layer)
    after = found(used)
    assert_same(after, found(fresh))
    assert not torch.equal(after["y"].double(), before["y"])


def test_a_backward_pass_computes_with_data_that_was_replaced_after_forward() -> None:
    results = []
    for replaced_first in (False, True):
        layer = build(**OPTIONS)
        if replaced_first:
            assign_data(layer)
        x = tokens().requires_grad_()
        y = layer(x)
        if not replaced_first:
            assign_data(layer)
        layer.zero_grad(set_to_none=True)
        loss_of(layer, y).backward()
        results.append({"x": x.grad, "w1": layer.experts.w1.grad})
    assert_same(results[0], results[1])


def test_views_of_parameters_alone_are_stored() -> None:
    weight, made_of_it = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    views = ExpertViews([weight])
    assert views.of(weight) is views.of(weight)
    assert views.of(weight, transposed=True) is views.of(weight, transposed=True)
    assert [view.data_ptr() for view in views.of(weight)] == [part.data_ptr() for part in weight]
    assert torch.equal(views.of(weight, transposed=True)[1], weight[1].t())
    assert views.of(made_of_it) is not views.of(made_of_it)  # else a pass would keep its memory

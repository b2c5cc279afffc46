"""The beginning of most tests of a layer: a small one, its tokens, one step, a comparison of two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pmoe import MoELayer
from tests.reference import relative_error
from tests.switched import switched_layer

D_MODEL, D_HIDDEN, NUM_EXPERTS, TOP_K, TOKENS, AUX = 6, 10, 4, 2, 11, 0.37


def build(num_experts: int = NUM_EXPERTS, **options: Any) -> MoELayer:
    """A float64 layer of top-2 from one seed. Its gate is bent to be uneven."""
    torch.manual_seed(7)
    given = {"d_model": D_MODEL, "d_hidden": D_HIDDEN, "top_k": TOP_K, "dtype": torch.float64}
    layer = switched_layer(**{**given, "num_experts": num_experts, **options})
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter *= 3
    return layer


def tokens(
    num_tokens: int = TOKENS, seed: int = 3, dtype: torch.dtype = torch.float64, width: int = D_MODEL
) -> Tensor:
    """(num_tokens, width), drawn in float64 whatever the dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, width, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(layer: MoELayer, y: Tensor, l_aux: Tensor | None = None) -> Tensor:
    """<y, dy> + AUX * l_aux for the dy that all steps share. l_aux: the layer's own unless given."""
    flat = y.reshape(-1, y.shape[-1])
    dy = tokens(flat.shape[0], 4, y.dtype, y.shape[-1])
    return (flat * dy).sum() + AUX * (layer.l_aux if l_aux is None else l_aux)


def gradients(
    layer: MoELayer, x: Tensor | None = None, run: Callable[[Tensor], Any] | None = None
) -> dict[str, Tensor]:
    """y, l_aux and every gradient of one forward and backward from fresh leaves.

    x: `tokens()` by default. run: instead of the layer; gives y, or (y, l_aux).
    """
    layer.zero_grad(set_to_none=True)
    x = (tokens() if x is None else x).detach().clone().requires_grad_()
    found = (run or layer)(x)
    y, l_aux = found if isinstance(found, tuple) else (found, layer.l_aux)
    loss = loss_of(layer, y, l_aux)
    between = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), between), "a backward must draw no random number"
    parameters = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": l_aux.detach(), "x": x.grad, **parameters}


def step(
    layer: MoELayer, x: Tensor | None = None, run: Callable[[Tensor], Any] | None = None
) -> dict[str, Tensor]:
    """`gradients` from one seed, every buffer, and the next random number."""
    torch.manual_seed(1)
    found = gradients(layer, x, run)
    return {**found, **dict(layer.named_buffers()), "random": torch.rand(1, dtype=torch.float64)}


def assert_same(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float = 0.0, told: object = None
) -> None:
    """The same names, none of them None, of the same types. limit: relative; 0 means to the bit.

    told: is part of the message.
    """
    assert set(got) == set(expected), told
    for name, value in expected.items():
        assert value is not None and got[name] is not None, (told, name)
        assert got[name].dtype == value.dtype, (told, name)
        if limit:
            assert relative_error(got[name].double(), value.double()) <= limit, (told, name)
        else:
            assert torch.equal(got[name], value), (told, name)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small are slower on several, by far where a machine is shared. Import it to use it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

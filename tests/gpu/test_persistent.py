"""A layer of one rank by a persistent kernel a pass, beside the same layer without it: values, bits, and one
launch a pass of pmoe's own behind the gate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pmoe
from pmoe.comm.heap import close_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels.registry import PMOE, PRODUCTS
from tests.gpu.fused import need_kernels
from tests.gpu.ladder.persistent import find_wrong
from tests.gpu.support import DEVICE, NEEDS_GPU, make_batch, measure_nothing, plain_step, poison_memory, step
from tests.gpu.test_alone import assert_as_near, device_work, narrow_layer, with_aux, without_kernels

pytestmark = NEEDS_GPU

PAIRS = [pmoe.Restore(d, h) for d in ("keep", "communicate") for h in ("keep", "recompute")]


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    need_kernels()
    measure_nothing(monkeypatch)
    with warnings.catch_warnings(), PRODUCTS.forcing(PMOE):
        warnings.filterwarnings("error", message="pmoe")
        yield
    close_heaps(Ranks.single())


def check(num_tokens: int, **options: Any) -> None:
    """As near to float64 as the layer without the kernels."""
    layer = narrow_layer(fused="persistent", **options)
    x, grad = make_batch(num_tokens, dtype=torch.bfloat16)
    poison_memory()
    found = with_aux(layer, step(layer, x, grad))
    assert layer.ran is not None and layer.ran.path == "persistent"
    expert_TK = layer.gate(x).expert
    twin = narrow_layer(**options)
    with without_kernels():
        plain = with_aux(twin, step(twin, x, grad))
    expected = plain_step(twin, x, grad, torch.float64, expert_TK, kind=options.get("expert", "ffn"))
    assert_as_near(found, plain, expected, torch.bfloat16)
    again = with_aux(layer, step(layer, x, grad))
    assert all(torch.equal(again[name], found[name]) for name in found)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_it_is_as_near_to_float64_as_unfused_and_repeats_to_the_bit(expert: str, pair: pmoe.Restore) -> None:
    check(517, expert=expert, memory_reuse=pair)


@pytest.mark.sanitize
def test_a_small_layer() -> None:
    check(37, expert="swiglu", memory_reuse="S4")


def test_a_pass_is_one_launch_of_the_persistent_kernel() -> None:
    layer = narrow_layer(fused="persistent")
    x, grad = make_batch(517, dtype=torch.bfloat16)
    step(layer, x, grad)
    names = device_work(lambda: step(layer, x, grad))
    assert sum("flashdmoe" in name for name in names) == 2
    assert not any("choose_kernel" in name or "place_kernel" in name for name in names)


def test_a_forward_pass_is_one_launch_from_x_to_y() -> None:
    layer = narrow_layer(fused="persistent").eval()
    x, _ = make_batch(517, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        assert len(device_work(lambda: layer(x))) == 1


@pytest.mark.parametrize("is_pool", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_virtual_ranks_compute_what_float64_computes(num_ranks: int, is_pool: bool) -> None:
    assert find_wrong(num_ranks, 500, 256, 192, DEVICE, is_pool) == []

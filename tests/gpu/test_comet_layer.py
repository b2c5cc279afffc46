"""A layer of one rank by the fused kernels, both ways, beside the same layer without them: values, bits, what
is launched and what is waited for. test_comet_processes.py has two ranks.

Letters: T tokens, K choices, E experts, M = d_model.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pmoe
from pmoe.comm.heap import close_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels.comet import launcher
from pmoe.kernels.registry import PMOE, PRODUCTS
from tests.gpu.fused import need_kernels
from tests.gpu.support import (
    AUX,
    DEVICE,
    NEEDS_GPU,
    make_batch,
    measure_nothing,
    plain_step,
    poison_memory,
    step,
    synchronisations,
)
from tests.gpu.test_alone import assert_as_near, device_work, narrow_layer, with_aux, without_kernels

pytestmark = NEEDS_GPU

PAIRS = [pmoe.Restore(d, h) for d in ("keep", "communicate") for h in ("keep", "recompute")]
OPTIONS = {
    "ffn": {},
    "relu, no bias": {"activation": "relu", "bias": False},
    "silu": {"activation": "silu"},
    "swiglu": {"expert": "swiglu"},
    "swiglu, no bias, top-3": {"expert": "swiglu", "bias": False, "top_k": 3},
}


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The fused launches, by the kernel. A layer that falls back fails, and nothing is measured."""
    need_kernels()
    found: list[str] = []
    launch = launcher.Launcher.launch

    def counted(self: launcher.Launcher, kernel: str, *args: Any, **options: Any) -> None:
        found.append(kernel)
        launch(self, kernel, *args, **options)

    monkeypatch.setattr(launcher.Launcher, "launch", counted)
    measure_nothing(monkeypatch)
    with warnings.catch_warnings(), PRODUCTS.forcing(PMOE):
        warnings.filterwarnings("error", message="pmoe")
        yield found
    close_heaps(Ranks.single())


def check(launches: list[str], num_tokens: int, way: bool | str, **options: Any) -> list[str]:
    """As near to float64 as the layer without the kernels; gives what was launched."""
    layer = narrow_layer(fused=way, **options)
    x, grad = make_batch(num_tokens, dtype=torch.bfloat16)
    poison_memory()
    found = with_aux(layer, step(layer, x, grad))
    told = launches.copy()
    expert_TK = layer.gate(x).expert
    twin = narrow_layer(**options)
    with without_kernels():
        plain = with_aux(twin, step(twin, x, grad))
    assert launches == told
    given = {name: options[name] for name in ("activation",) if name in options}
    expected = plain_step(twin, x, grad, torch.float64, expert_TK, kind=options.get("expert", "ffn"), **given)
    assert_as_near(found, plain, expected, torch.bfloat16)
    return told


@pytest.mark.parametrize("way", [True, "forward"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_it_is_as_near_to_float64_as_unfused(
    launches: list[str], options: dict[str, Any], pair: pmoe.Restore, way: bool | str
) -> None:
    told = check(launches, 517, way, memory_reuse=pair, **options)
    backward = ["dispatch", "combine"]
    if pair.dispatched == "communicate":  # the tokens' rows come once more, T_M made of them anew or not
        backward = ["dispatch", *backward]
    assert told == ["dispatch", "combine"] + (backward if way is True else [])


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 9001])
def test_few_tokens_and_none_and_many(launches: list[str], num_tokens: int) -> None:
    if num_tokens:
        assert check(launches, num_tokens, True, expert="swiglu") == ["dispatch", "combine"] * 2
        return
    layer = narrow_layer(fused=True, expert="swiglu")
    x, grad = make_batch(0, dtype=torch.bfloat16)
    found = step(layer, x, grad)
    assert found["y"].shape == (0, 64) and not found["experts.w1"].any()
    assert launches == ["dispatch", "combine"] * 2


@pytest.mark.sanitize
def test_a_small_layer(launches: list[str]) -> None:
    assert check(launches, 37, True, expert="swiglu", memory_reuse="S4")


def test_bits_are_those_of_the_run_before(launches: list[str]) -> None:
    for way in (True, "forward"):
        layer = narrow_layer(fused=way, expert="swiglu", top_k=3, d_model=256, d_hidden=512)
        x, grad = make_batch(1500, 256, torch.bfloat16)
        first = with_aux(layer, step(layer, x, grad))
        for _ in range(3):
            poison_memory()
            for name, value in with_aux(layer, step(layer, x, grad)).items():
                assert torch.equal(value, first[name]), f"{name}, fused={way}"


def test_layers_share_a_heap(launches: list[str]) -> None:
    """Of two, whose passes cross, each gives the bits that it gives by itself."""
    layers = [
        narrow_layer(fused=True, expert="swiglu", memory_reuse="S4"),
        narrow_layer(fused=True, d_hidden=136, seed=9),
    ]
    batches = [make_batch(count, dtype=torch.bfloat16, seed=count) for count in (300, 411)]
    expected = [step(layer, *batch) for layer, batch in zip(layers, batches, strict=True)]
    poison_memory()
    leaves = [x.clone().requires_grad_() for x, _ in batches]
    outputs = [layer(leaf) for layer, leaf in zip(layers, leaves, strict=True)]
    for at in (0, 1):
        layer, y, (_, grad) = layers[at], outputs[at], batches[at]
        layer.zero_grad(set_to_none=True)
        ((y * grad).sum() + AUX * layer.l_aux).backward()
        found = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found |= {"y": y.detach(), "x": leaves[at].grad}
        for name, value in expected[at].items():
            assert torch.equal(found[name], value), f"layer {at}: {name}"


def test_one_host_synchronisation_in_forward_and_none_in_backward(launches: list[str]) -> None:
    layer = narrow_layer(fused=True, expert="swiglu")
    x, grad = make_batch(dtype=torch.bfloat16)
    one = torch.ones((), device=DEVICE)
    assert synchronisations(one.item) == 1, "torch no longer reports synchronisations"
    for _ in range(2):  # what is set up at first use may wait
        step(layer, x, grad)
    outputs = []
    assert synchronisations(lambda: outputs.append(layer(x.detach().requires_grad_()))) <= 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        (outputs[0] * grad).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


MAX_KERNELS = 6


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("way", [True, "forward"])
def test_kernels_of_a_forward_pass(
    launches: list[str], way: bool | str, needs_grad: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most six, where the layer needs no more than the kernels do: all that there are, are told."""
    # In training mode a pass without gradients may be a checkpoint's first: its routing is remembered.
    layer = narrow_layer(fused=way, expert="swiglu", bias=False, d_model=256, d_hidden=512).train(needs_grad)
    x = make_batch(4000, 256, torch.bfloat16)[0].requires_grad_(needs_grad)
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.set_grad_enabled(needs_grad))
        for _ in range(2):
            layer(x)
        device_work(lambda: layer(x))  # what the profiler sets up at first use
        found = device_work(lambda: layer(x))
    with capsys.disabled():
        print(f"\nfused={way!r}, needs_grad={needs_grad}: {len(found)} kernels, copies and memsets", *found,
              sep="\n  ")  # fmt: skip
    fused = [name for name in found if "dispatch_gemm" in name or "gemm_combine" in name]
    assert len(fused) == 2, found
    if way is True:
        assert len(found) <= MAX_KERNELS, f"{len(found)} are more than {MAX_KERNELS}, see above"

"""Whole training steps in a CUDA graph: one rank by the kernels' path, and padded layers over NCCL; replayed
with batches that are routed otherwise. What cannot be captured is refused.

Letters: T tokens, K choices, E experts, M = d_model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.kernels import extension, permute
from pmoe.kernels.registry import PMOE, PRODUCTS
from tests.gpu.support import (
    AUX,
    DEVICE,
    NEEDS_GPU,
    count_alone,
    make_batch,
    make_layer,
    measure_nothing,
    synchronisations,
)

pytestmark = NEEDS_GPU

NUM_TOKENS, WARM_UP = 300, 3

PADDED: dict[str, dict[str, Any]] = {
    "n=1": {},
    "n=2": {"pipeline": 2},
    "top-1": {"top_k": 1, "pipeline": 2},
    "swiglu": {"expert": "swiglu", "bias": False, "pipeline": 2},
    "keep/keep": {"pipeline": 4, "memory_reuse": pmoe.Restore("keep", "keep"), "pipeline_backward": 2},
    "S4": {"pipeline": 3, "memory_reuse": "S4"},
    "drops": {"num_experts": 8, "capacity_factor": 1.0, "pipeline": 2},
}


def padded_layer(dtype: torch.dtype, **options: Any) -> pmoe.MoELayer:
    """Its rows travel through a collective, all of them."""
    return make_layer(
        dtype, **{"capacity_factor": 1.5, "bypass_local": False, **options}, pad_to_capacity=True
    )


class Model(nn.Module):
    def __init__(self, layer: pmoe.MoELayer, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.moe, self.last = nn.Linear(64, 64), layer, nn.Linear(64, 64)
        for dense in (self.first, self.last):
            dense.to(DEVICE, dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x + self.moe(self.first(x)))
        return y


class Training:
    """Steps of a model on one batch, which lies where it always lies."""

    def __init__(self, model: Model, x: Tensor, target: Tensor) -> None:
        self.model, self.x, self.target = model, x.clone(), target.clone()
        # float16 has no smaller eps, and 0 / 0 is NaN.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, capturable=True)

    def step(self) -> Tensor:
        loss = (self.model(self.x) - self.target).float().square().mean()
        loss = loss + AUX * self.model.moe.l_aux
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def take(self, x: Tensor, target: Tensor) -> None:
        self.x.copy_(x)
        self.target.copy_(target)


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What runs again what ``run`` launches now, into the same memory. Nothing runs yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def warm_up(training: Training) -> None:
    """On a stream of its own, as capturing asks for: what is set up or measured at first use is so now."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            training.forget_gradients()
            training.step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    training.forget_gradients()


def check_training(layer: pmoe.MoELayer, dtype: torch.dtype) -> None:
    """Four steps replayed from one graph equal four steps that are not: losses, parameters, loads."""
    batches = [make_batch(NUM_TOKENS, dtype=dtype, seed=seed) for seed in range(4)]
    other = copy.deepcopy(layer)
    eager, graphed = (Training(Model(each, dtype), *batches[0]) for each in (layer, other))
    for training in (eager, graphed):
        warm_up(training)
    replay = captured(graphed.step)
    loads = []
    for batch in batches:
        for training in (eager, graphed):
            training.take(*batch)
        eager.forget_gradients()
        expected, found = eager.step(), replay()
        assert torch.equal(found, expected)
        loads.append(graphed.model.moe.tokens_per_expert)
        assert torch.equal(loads[-1], eager.model.moe.tokens_per_expert)
    assert any(not torch.equal(loads[0], load) for load in loads), "all batches were routed alike"
    for (name, found), expected in zip(
        graphed.model.named_parameters(), eager.model.parameters(), strict=True
    ):
        assert torch.equal(found, expected), name


# ---- one rank, by the kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One entry for each call by the kernels' path, which is taken without being measured."""
    why = extension.path(DEVICE)[1] or permute.refusal(DEVICE, torch.bfloat16, 2)
    if why is not None:
        pytest.fail(why)
    calls = count_alone(monkeypatch)
    measure_nothing(monkeypatch)
    with PRODUCTS.forcing(PMOE):
        yield calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expert": "swiglu", "bias": False},
        {"top_k": 1, "gate": "switch"},
        {"z_loss_weight": 0.1, "top_k": 4},
    ],
    ids=str,
)
def test_a_training_step_of_one_rank(kernels: list[str], options: dict[str, Any], dtype: torch.dtype) -> None:
    check_training(make_layer(dtype, **{"num_experts": 8, **options}), dtype)
    assert len(kernels) == 2 * WARM_UP + 1 + 4  # the capture is one call, and a replay none


def test_a_training_step_of_one_rank_whose_products_were_measured() -> None:
    """Where pmoe's kernels are the faster ones. Where not, the capture is refused and says who is faster."""
    layer = make_layer(torch.bfloat16, num_experts=8, d_model=64, d_hidden=96)
    training = Training(Model(layer, torch.bfloat16), *make_batch(NUM_TOKENS, dtype=torch.bfloat16))
    warm_up(training)
    assert layer.ran is not None
    if layer.ran.path == "one rank":
        captured(training.step)()
    else:
        with pytest.raises(RuntimeError, match="is chosen for the .* product|products of .* take"):
            captured(training.step)
    training.forget_gradients()
    assert training.step().isfinite()


# ---- padded, over NCCL


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", PADDED.values(), ids=PADDED.keys())
def test_a_training_step_of_a_padded_layer(options: dict[str, Any], dtype: torch.dtype) -> None:
    check_training(padded_layer(dtype, **options), dtype)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("options", PADDED.values(), ids=PADDED.keys())
def test_a_padded_step_waits_for_nothing(options: dict[str, Any]) -> None:
    layer = padded_layer(torch.bfloat16, **options)
    training = Training(Model(layer, torch.bfloat16), *make_batch(NUM_TOKENS, dtype=torch.bfloat16))
    one = torch.ones((), device=DEVICE)
    assert synchronisations(one.item) == 1, "torch no longer reports synchronisations"
    warm_up(training)
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- what cannot be captured


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n=2": ({"pipeline": 2}, r"pipeline \(2\)"),
    "S4": ({"memory_reuse": "S4"}, "memory_reuse"),
    "capacity": ({"capacity_factor": 1.0}, "dropped over a capacity"),
    "padded, S1": (
        {"memory_reuse": "S1", "capacity_factor": 1.0, "pad_to_capacity": True},
        "may offload",
    ),
}


@pytest.mark.parametrize("options, match", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_captured_is_refused_and_can_be_called_again(
    options: dict[str, Any], match: str
) -> None:
    layer = make_layer(torch.bfloat16, **options)
    x, _ = make_batch(NUM_TOKENS, dtype=torch.bfloat16)
    expected = layer(x)
    with pytest.raises(RuntimeError, match=f"CUDA graph cannot hold this call.*{match}"):
        captured(lambda: layer(x))
    assert torch.equal(layer(x), expected)


def test_a_padded_call_unlike_any_before_is_refused() -> None:
    layer = make_layer(torch.bfloat16, capacity_factor=1.0, pad_to_capacity=True)
    x, _ = make_batch(NUM_TOKENS, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"no call of its kind \(PaddedKind\(num_tokens=300.*made before"):
        captured(lambda: layer(x))
    layer(x)
    torch.cuda.synchronize()
    captured(lambda: layer(x))()

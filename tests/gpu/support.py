"""What the GPU tests share: marks, one training step, the layer written plainly, poison, and slow lanes.

Letters: T tokens, K choices, E experts, M = d_model.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe
from pmoe.comm.base import FlatAllToAll
from pmoe.engine.buffers.arena import Arena, DevicePool
from pmoe.engine.lanes.base import Action
from pmoe.engine.lanes.cuda import CudaLanes
from pmoe.experts.base import ExpertRows
from pmoe.runners import one_rank
from pmoe.schedule.tasks import Lane, Task
from tests.reference import ACTIVATIONS
from tests.switched import switched_layer

DEVICE = torch.device("cuda", 0)
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

AUX = 0.37
SHORT, LONG = 1_000_000, 50_000_000
"""Cycles to sleep: half a millisecond and 25 ms at 2 GHz. The kernels of these tests take microseconds."""

ROUNDED = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
"""The largest relative error of one rounding."""


def make_layer(dtype: torch.dtype = torch.float64, seed: int = 7, **options: Any) -> pmoe.MoELayer:
    """A small layer. Its parameters are drawn on the CPU, so they are the same on every machine."""
    torch.manual_seed(seed)
    sizes = {"d_model": 64, "d_hidden": 96, "num_experts": 4, "top_k": 2}
    layer = switched_layer(**{**sizes, **options})
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter *= 3
    return layer.to(DEVICE, dtype)


def make_batch(
    num_tokens: int = 96, d_model: int = 64, dtype: torch.dtype = torch.float64, seed: int = 3
) -> tuple[Tensor, Tensor]:
    """(input, gradient of the output)"""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(num_tokens, d_model, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(DEVICE, dtype), grad.to(DEVICE, dtype)


def step(
    model: nn.Module, x: Tensor, grad: Tensor, between: Callable[[], object] = lambda: None
) -> dict[str, Tensor]:
    """Forward and backward; ``between`` runs after each. Returns the output and every gradient."""
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = model(x)
    between()
    loss = (y * grad).sum()
    for module in model.modules():
        if isinstance(module, pmoe.MoELayer):
            loss = loss + AUX * module.l_aux
    loss.backward()
    between()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **found}


def largest_error(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Over all names, the largest difference relative to the largest expected value; NaN where one is."""
    assert set(got) == set(expected), set(got) ^ set(expected)
    errors = []
    for name, value in expected.items():
        assert got[name] is not None and got[name].shape == value.shape, name
        if value.numel():
            difference = (got[name].double() - value.double()).abs().max()
            errors.append(difference / value.double().abs().max().clamp(min=1e-30))
    return torch.stack(errors).max().item()


def relative_norm(got: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """||got - expected|| / ||expected||, or / ``least`` where the expected norm is below it."""
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return (got - expected).norm().item() / max(expected.norm().item(), least)


# ---- the layer, written plainly ------------------------------------------------------------------


def plain_forward(
    parameters: Mapping[str, Tensor],
    x_TM: Tensor,
    expert_TK: Tensor,
    *,
    dtype: torch.dtype,
    kind: str = "ffn",
    activation: str = "gelu",
    normalize: bool | None = None,
    capacity: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, auxiliary loss) as any model would compute them in ``dtype``: a loop over the experts under
    autograd, the gate in float32 or wider. expert_TK is given, so that rounding flips no choice."""
    top_k, num_experts = expert_TK.shape[1], parameters["gate.weight"].shape[0]
    wide = torch.promote_types(dtype, torch.float32)
    probability_TE = (x_TM.to(wide) @ parameters["gate.weight"].to(wide).t()).softmax(-1)
    weight_TK = probability_TE.gather(1, expert_TK)
    if top_k > 1 if normalize is None else normalize:
        weight_TK = weight_TK / weight_TK.sum(1, keepdim=True)
    p = {name: value.to(dtype) for name, value in parameters.items() if name.startswith("experts.")}
    rows_TM = x_TM.to(dtype)
    y_TM = torch.zeros_like(rows_TM)
    for e in range(num_experts):
        token, choice = (expert_TK == e).nonzero(as_tuple=True)  # in token order
        token, choice = token[:capacity], choice[:capacity]
        b1, b2 = (p[name][e] if name in p else None for name in ("experts.b1", "experts.b2"))
        hidden = F.linear(rows_TM[token], p["experts.w1"][e], b1)
        if kind == "swiglu":
            gate, up = hidden.chunk(2, dim=1)
            active = F.silu(gate) * up
        else:
            active = ACTIVATIONS[activation](hidden)
        out = F.linear(active, p["experts.w2"][e], b2) * weight_TK[token, choice].unsqueeze(1)
        y_TM = y_TM.index_add(0, token, out.to(dtype))
    share_E = torch.bincount(expert_TK.flatten(), minlength=num_experts).to(wide) / expert_TK.numel()
    return y_TM, num_experts * (share_E * probability_TE.mean(0)).sum()


def plain_step(
    layer: pmoe.MoELayer, x: Tensor, grad: Tensor, dtype: torch.dtype, expert_TK: Tensor, **options: Any
) -> dict[str, Tensor]:
    """What `step` returns for ``layer``, and its l_aux, computed plainly in ``dtype``. Parameters and input
    keep the values and, below float64, the type that they have in the layer."""

    def leaf(value: Tensor) -> Tensor:
        value = value.detach().double() if dtype == torch.float64 else value.detach().clone()
        return value.requires_grad_()

    parameters = {name: leaf(value) for name, value in layer.named_parameters()}
    x = leaf(x)
    y, l_aux = plain_forward(parameters, x, expert_TK, dtype=dtype, **options)
    ((y * grad.to(y.dtype)).sum() + AUX * l_aux).backward()
    found = {name: parameter.grad for name, parameter in parameters.items()}
    return {"y": y.detach(), "l_aux": l_aux.detach(), "x": x.grad, **found}


# ---- races -------------------------------------------------------------------------------------------


def poison_memory() -> None:
    """Fills the allocator's free blocks with NaN, so a buffer that is read before it is written shows."""
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        return  # nothing is kept for the next tensor
    held = [
        torch.full((2**power,), float("nan"), dtype=torch.float64, device=DEVICE)
        for power in range(5, 22)  # 256 bytes to 16 MiB
        for _ in range(24 if power < 18 else 6)
    ]
    del held


def slow_link(
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: int = 0,
    after: int = 0,
    prepare: Callable[[Tensor], None] | None = None,
) -> None:
    """Every exchange sleeps that many cycles on its lane's stream, before and after the collective.

    prepare(out) is called with the receive buffer before anything else.
    """
    exchange = FlatAllToAll.exchange

    def slow(
        self: FlatAllToAll, rows: Tensor, send_rows: Any, out: Tensor, recv_rows: Any, relayed: Any = ()
    ) -> Any:
        if prepare is not None:
            prepare(out)
        if before:
            torch.cuda._sleep(before)
        work = exchange(self, rows, send_rows, out, recv_rows)
        if after and work is not None:
            work.wait()  # the stream waits, so the sleep comes behind the collective
            torch.cuda._sleep(after)
        return work

    monkeypatch.setattr(FlatAllToAll, "exchange", slow)


def slow_experts(
    monkeypatch: pytest.MonkeyPatch, layer: pmoe.MoELayer, cycles: int, *, poison: bool = False
) -> None:
    """The experts sleep before they compute, on the compute lane's stream. With ``poison`` the buffer of
    their output holds NaN until then."""
    compute, input_gradient = layer.experts.compute, layer.experts.input_gradient

    def delayed(given: ExpertRows) -> ExpertRows:
        if poison and given.out is None:
            given = given._replace(out=torch.full_like(given.rows_NM, float("nan")))
        torch.cuda._sleep(cycles)
        return given

    def slow_compute(given: ExpertRows, *args: Any, **options: Any) -> Any:
        return compute(delayed(given), *args, **options)

    def slow_input_gradient(grad: Tensor, given: ExpertRows, *args: Any) -> Any:
        return input_gradient(grad, delayed(given), *args)

    monkeypatch.setattr(layer.experts, "compute", slow_compute)
    monkeypatch.setattr(layer.experts, "input_gradient", slow_input_gradient)


def slow_copies(
    monkeypatch: pytest.MonkeyPatch,
    cycles: int,
    *copy_lanes: Lane,
    behind: Callable[[], object] = lambda: None,
) -> None:
    """Every copy of those lanes sleeps that many cycles on its lane's stream before it starts. The host calls
    ``behind`` when a copy is issued, on the compute stream."""
    run = CudaLanes.run

    def slow(self: CudaLanes, task: Task, action: Action) -> None:
        def late() -> Any:
            torch.cuda._sleep(cycles)
            return action()

        run(self, task, late if task.lane in copy_lanes else action)
        if task.lane in copy_lanes:
            behind()

    monkeypatch.setattr(CudaLanes, "run", slow)


def poison_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring slots of every pass hold NaN until a task writes them."""
    take = DevicePool.take

    def poisoned(self: DevicePool, elements: int, like: Tensor, arena: Arena) -> Tensor:
        return take(self, elements, like, arena).fill_(float("nan"))

    monkeypatch.setattr(DevicePool, "take", poisoned)


# ---- the path of one rank's kernels --------------------------------------------------------------------


def measure_nothing(patch: pytest.MonkeyPatch) -> None:
    """Which of two ways computes a product is for the test to say; no file of measurements is written."""
    for measuring in (
        "pmoe.runners.one_rank.measure_products",
        "pmoe.choose.open_choice.measure_products_of",
    ):
        patch.setattr(measuring, lambda *_, **__: None)


def count_alone(patch: pytest.MonkeyPatch) -> list[str]:
    """Gets one entry for each call by that path."""
    calls: list[str] = []
    forward = one_rank.OneRankRunner.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("alone")
        return forward(*args, **kwargs)

    patch.setattr(one_rank.OneRankRunner, "forward", counted)
    return calls


# ---- host synchronisations ---------------------------------------------------------------------------


def synchronisations(function: Callable[[], object]) -> int:
    """How often ``function`` made the host wait for the device, as far as torch notices."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


class OwnGate(nn.Module):
    """A user's gate, whose indices the layer checks."""

    def __init__(self, d_model: int, num_experts: int) -> None:
        super().__init__()
        self.score = nn.Linear(d_model, num_experts, bias=False)

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        logits_TE = self.score(x_TM).float()
        weight_TK, expert_TK = logits_TE.softmax(-1).topk(2)
        return pmoe.Routing(
            expert=expert_TK, weight=weight_TK, l_aux=logits_TE.square().mean(), logits=logits_TE
        )


def own_expert() -> nn.Module:
    """A user's expert."""
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


class GatedExpert(nn.Module):
    """A user's expert whose graph saves halves of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 192), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


LAYERS: dict[str, Callable[[], dict[str, Any]]] = {
    "n=1": lambda: {},
    "n=3": lambda: {"pipeline": 3},
    "adaptive": lambda: {"pipeline": True},
    "sequential": lambda: {"pipeline": 3, "sequential": True},
    "top-1": lambda: {"top_k": 1},
    "switch": lambda: {"top_k": 1, "gate": "switch"},
    "no bias": lambda: {"bias": False},
    "swiglu": lambda: {"expert": "swiglu"},
    "capacity": lambda: {"capacity_factor": 0.6, "pipeline": 2},
    "check_finite": lambda: {"check_finite": True},
    "user's gate": lambda: {"gate": OwnGate(64, 4)},
    "user's gate, check_finite": lambda: {"gate": OwnGate(64, 4), "check_finite": True},
    "user's experts": lambda: {"expert": own_expert},
    "S1": lambda: {"pipeline": 3, "memory_reuse": "S1"},
    "S4": lambda: {"pipeline": 3, "memory_reuse": "S4"},
    "S1, capacity": lambda: {"pipeline": 3, "memory_reuse": "S1", "capacity_factor": 0.6},
    "S1, other chunks in backward": lambda: {"pipeline": 4, "pipeline_backward": 2, "memory_reuse": "S1"},
    "S1, user's experts": lambda: {"pipeline": 3, "memory_reuse": "S1", "expert": GatedExpert},
    "S4, user's experts": lambda: {"pipeline": 3, "memory_reuse": "S4", "expert": GatedExpert},
}
"""Options of layers that must all keep the promise of at most one host synchronisation."""


def check_waiting(layer: pmoe.MoELayer, x: Tensor, grad: Tensor, autocast: bool = False) -> None:
    """At most one host synchronisation in forward, none in backward, as far as torch notices them."""
    one = torch.ones((), device=DEVICE)
    assert synchronisations(one.item) == 1, "torch no longer reports synchronisations"
    outputs = []

    def forward() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            outputs.append(layer(x.detach().requires_grad_()))

    for _ in range(2):  # the first call may set up libraries, which is allowed to wait
        forward()
        (outputs.pop().sum() + layer.l_aux).backward()
    assert synchronisations(forward) <= 1
    y = outputs.pop()
    loss = (y * grad.to(y.dtype)).sum() + AUX * layer.l_aux
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_backward_runs_ahead(layer: pmoe.MoELayer, x: Tensor, grad: Tensor) -> None:
    """The host comes back from backward while the device has not begun it: nothing waits, noticed or not."""
    for _ in range(2):
        step(layer, x, grad)
    y = layer(x.detach().requires_grad_())
    loss = (y * grad).sum() + AUX * layer.l_aux
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * LONG)
    awake = torch.cuda.Event()
    awake.record()
    loss.backward()
    assert not awake.query(), "backward returned only after the device had caught up"
    torch.cuda.synchronize()

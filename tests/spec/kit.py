"""What the specification stands on: a plain layer, one training step, and ranks that run a case together.

The plain layer is a loop over tokens and experts, in float64, under autograd. It shares no code with pmoe.
Letters: T tokens of a rank, K choices, E experts, M = d_model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import pmoe
from tests.pool import ranks

M, H, E, K = 6, 12, 4, 2
AUX = 0.37
"""The weight of l_aux in every loss here."""
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
Parameters = Mapping[str, Tensor]
Step = dict[str, Tensor]
"""By name: y, l_aux, and the gradients of x and of every parameter."""


def make(*, load: str = "mixed", **options: Any) -> pmoe.MoELayer:
    """A small float64 layer from one seed. load: what `tokens` then meet, "one expert" or "some get none"."""
    torch.manual_seed(7)
    given = {"d_model": M, "d_hidden": H, "num_experts": E, "top_k": K, "dtype": torch.float64}
    layer = pmoe.MoELayer(**{**given, **options})
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter *= 3  # uneven
        if load == "one expert":
            layer.gate.weight[-1, 0] += 40
        if load == "some get none":
            layer.gate.weight[::2, 0] -= 40
    return layer


def tokens(count: int, seed: int = 3, width: int = M) -> Tensor:
    """(count, width) of float64. The first column is positive: `make` bends the gate by it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() + 1
    return x


def step(
    layer: pmoe.MoELayer, x: Tensor, seed: int = 4, run: Callable[[Tensor], Tensor] | None = None
) -> Step:
    """One forward and backward of <y, dy> + AUX * l_aux. seed: of dy. run: instead of the layer."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y = (run or layer)(x)
    dy = tokens(y.numel() // y.shape[-1], seed, y.shape[-1]).reshape(y.shape).to(y.dtype)
    ((y * dy).sum() + AUX * layer.l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "x": x.grad, **found}


# ---- the plain layer


def run_expert(
    p: Parameters, e: int, token_M: Tensor, expert: str = "ffn", activation: str = "gelu"
) -> Tensor:
    """(M,): what expert ``e`` makes of one token."""
    hidden = p["experts.w1"][e] @ token_M
    if "experts.b1" in p:
        hidden = hidden + p["experts.b1"][e]
    if expert == "swiglu":
        gate, up = hidden.chunk(2)
        active = F.silu(gate) * up
    else:
        active = ACTIVATIONS[activation](hidden)
    out = p["experts.w2"][e] @ active
    return out + p["experts.b2"][e] if "experts.b2" in p else out


def plain(
    p: Parameters,
    x_TM: Tensor,
    *,
    top_k: int = K,
    expert: str = "ffn",
    activation: str = "gelu",
    capacity_factor: float | None = None,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """The layer's definition: (y (T, M), l_aux). Experts beyond capacity drop their later tokens."""
    num_tokens, num_experts = x_TM.shape[0], p["gate.weight"].shape[0]
    probability_TE = torch.softmax(x_TM @ p["gate.weight"].t(), dim=-1)
    capacity = math.inf
    if capacity_factor is not None:
        capacity = math.ceil(capacity_factor * num_tokens * top_k / num_experts)
    chosen, used, rows = [0] * num_experts, [0] * num_experts, []
    for t in range(num_tokens):
        best = sorted(range(num_experts), key=lambda e: (-probability_TE[t, e].item(), e))[:top_k]
        weights = [probability_TE[t, e] for e in best]
        total = sum(weights) if normalize and top_k > 1 else 1.0
        row = torch.zeros_like(x_TM[t])
        for e, weight in zip(best, weights, strict=True):
            chosen[e] += 1
            if used[e] < capacity:
                used[e] += 1
                row = row + weight / total * run_expert(p, e, x_TM[t], expert, activation)
        rows.append(row)
    y_TM = torch.stack(rows) if rows else x_TM * 1.0
    share_E = torch.tensor(chosen, dtype=x_TM.dtype) / max(num_tokens * top_k, 1)
    mean_E = probability_TE.sum(0) / max(num_tokens, 1)
    return y_TM, num_experts * (share_E * mean_E).sum()


def plain_steps(p: Parameters, xs: Sequence[Tensor], **options: Any) -> list[Step]:
    """`step` of the plain layer for each rank's tokens. The gate is each rank's own, the experts are shared:
    their gradients are sums over all tokens."""
    experts = {name: each.detach().clone().requires_grad_() for name, each in p.items() if "experts." in name}
    leaves, outputs, losses = [], [], []
    for rank, x in enumerate(xs):
        x, gate = x.detach().clone().requires_grad_(), p["gate.weight"].detach().clone().requires_grad_()
        y, l_aux = plain({"gate.weight": gate, **experts}, x, **options)
        leaves.append({"x": x, "gate.weight": gate})
        outputs.append({"y": y.detach(), "l_aux": l_aux.detach()})
        losses.append((y * tokens(len(x), 4 + rank)).sum() + AUX * l_aux)
    sum(losses).backward()
    found = []
    for output, own in zip(outputs, leaves, strict=True):
        named = {**own, **experts}
        grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in named.items()}
        found.append({**output, **grads})
    return found


# ---- comparing


def assert_close(got: Parameters, expected: Parameters, limit: float = 1e-12) -> None:
    """The same names; each value within ``limit`` of the largest expected one; 0 means to the bit."""
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        if value.numel():
            error = (got[name].double() - value.double()).abs().max() / value.abs().max().clamp(min=1e-30)
            assert error <= limit, f"{name} is {error:.1e} away"


# ---- ranks


def on_ranks(world: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """``job(rank, world, *args)`` on each of ``world`` gloo ranks. A job is a function of a module."""
    return ranks(world).run(job, *args)


def mine(rank: int, world: int, whole: Tensor) -> Tensor:
    """This rank's experts of a tensor of all experts."""
    return whole.chunk(world)[rank]


def step_on_rank(rank: int, world: int, counts: Sequence[int], options: dict[str, Any]) -> Step:
    return step(make(**options), tokens(counts[rank], 10 + rank), 4 + rank)


def assert_is_the_plain_layer(
    counts: Sequence[int], of_plain: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """One rank for each of ``counts`` tokens: its y, l_aux and gradients equal the plain layer's.

    of_plain: what `plain` must know of ``options``.
    """
    world = len(counts)
    among_ranks = ("dispatch", "combine", "nodes") if world > 1 else ()
    whole = make(**{name: each for name, each in options.items() if name not in among_ranks})  # all experts
    xs = [tokens(count, 10 + rank) for rank, count in enumerate(counts)]
    expected = plain_steps(dict(whole.named_parameters()), xs, **(of_plain or {}))
    found = on_ranks(world, step_on_rank, counts, options) if world > 1 else [step(whole, xs[0])]
    for rank, (got, each) in enumerate(zip(found, expected, strict=True)):
        own = {n: mine(rank, world, v) if n.startswith("experts.") else v for n, v in each.items()}
        assert_close(got, own)


def error_of(function: Callable[[], object]) -> str:
    """The type and text of what ``function`` raises, "" where it raises nothing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

"""A layer's passes by one persistent kernel each, beside float64.

There is one rank, or there are several virtual ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.virtual_ranks import FusedParameters, PersistentRanks

LIMIT = 2.0**-6
"""Of the relative difference between bfloat16 results and float64."""

EXPERTS, TOP_K, ROUNDS = 2, 2, 3


def check_passes(num_ranks: str) -> None:
    for is_pool in (False, True):
        wrong = find_wrong(int(num_ranks), 300, 256, 192, torch.device("cuda", 0), is_pool)
        assert not wrong, f"is_pool {is_pool}: {'; '.join(wrong)}"


def find_wrong(
    num_ranks: int, tokens: int, d_model: int, d_hidden: int, device: torch.device, is_pool: bool
) -> list[str]:
    """What is wrong, by round and name. Raises HeapError where an actor waits in vain."""
    torch.manual_seed(0)
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    given = FusedParameters.random(num_ranks, EXPERTS, d_model, d_hidden, "relu", bias=True, like=like)
    cell_rows = -(-tokens // 128) * 128 * (num_ranks * EXPERTS if is_pool else 1)
    world = PersistentRanks(
        num_ranks,
        EXPERTS,
        cell_rows=cell_rows,
        tokens=tokens,
        d_model=d_model,
        d_hidden=d_hidden,
        dtype=like.dtype,
        device=device,
        is_pool=is_pool,
    )
    found: list[str] = []
    for number in range(ROUNDS):
        counts = [tokens - (number + rank) % 3 * 7 for rank in range(num_ranks)]
        x, dy = ([torch.randn(each, d_model).to(like) for each in counts] for _ in range(2))
        weight = [torch.rand(each, TOP_K, device=device) for each in counts]
        expert = [torch.rand(each, num_ranks * EXPERTS).topk(TOP_K).indices.to(device) for each in counts]
        forward = world.forward(x, weight, expert, given)
        backward = world.backward(dy, weight, given, forward)
        world.check()
        got = {"y": [each["result"] for each in forward]}
        names = {"of_x": "result", "of_weight": "weight_gradient"}
        names |= {f"of_{name}": f"of_{name}" for name in ("w1", "w2", "b1", "b2")}
        got |= {name: [each[field] for each in backward] for name, field in names.items()}
        for name, wanted in plain(x, dy, weight, expert, given).items():
            for rank, (one, other) in enumerate(zip(got[name], wanted, strict=True)):
                apart = float((one.double() - other).norm() / other.norm())
                if not apart <= LIMIT:  # NaN, too
                    found.append(f"round {number}, rank {rank}: {name} is apart by {apart:.3g}")
    world.close()
    return found


def plain(
    x: list[Tensor], dy: list[Tensor], weight: list[Tensor], expert: list[Tensor], given: FusedParameters
) -> dict[str, list[Tensor]]:
    """By rank, in float64 under autograd."""

    def leaves(values: object) -> list[Tensor]:
        return [each.double().requires_grad_() for each in values]  # type: ignore[attr-defined]

    of = {"x": leaves(x), "weight": leaves(weight)}
    of |= {name: leaves(getattr(given, name)) for name in ("w1", "w2", "b1", "b2")}
    w1, w2, b1, b2 = (torch.cat(of[name]) for name in ("w1", "w2", "b1", "b2"))
    y = []
    for x_TM, weight_TK, expert_TK in zip(of["x"], of["weight"], expert, strict=True):
        y_TM = torch.zeros_like(x_TM)
        for e in range(w1.shape[0]):
            share_T1 = (weight_TK * (expert_TK == e)).sum(1, keepdim=True)
            y_TM = y_TM + share_T1 * ((x_TM @ w1[e].t() + b1[e]).relu() @ w2[e].t() + b2[e])
        y.append(y_TM)
    torch.autograd.backward(y, [each.double() for each in dy])
    gradients = {f"of_{name}": [each.grad for each in values] for name, values in of.items()}
    return {"y": [each.detach() for each in y]} | gradients  # type: ignore[dict-item]

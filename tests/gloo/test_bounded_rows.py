"""pmoe.BoundedSteps with layers whose rows are bounded by ``slack``: no padding, and no counts on the host.

The reference is the same model, trained in a plain loop. `tests.plain_steps` takes the place of the persistent
kernels, so values are compared in float64.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe.experts.marks import is_expert
from tests.gloo.kit import counted_collectives
from tests.plain_steps import plain_steps, using
from tests.pool import ranks
from tests.reference import relative_error

M, EXPERTS, TOP_K, BATCHES = 6, 4, 2, 8
OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}


class Model(nn.Module):
    """Two MoE layers, a dropout, and a module with buffers that each forward pass changes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, dtype=torch.float64, **options)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(M, dtype=torch.float64)
        self.second = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, dtype=torch.float64, **options)
        with torch.no_grad():
            self.first.gate.weight.copy_(8 * torch.eye(EXPERTS, M))  # column e of a token leads to expert e

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.dropout(self.first(x))
        return hidden + self.second(self.norm(hidden) if len(x) else hidden)


def build(**options: Any) -> Model:
    torch.manual_seed(5)
    return Model(**options)


def tokens_of(rank: int, world: int, index: int) -> int:
    """The last rank has no tokens in every third batch, and each rank another number of tokens."""
    return 0 if rank == world - 1 and index % 3 == 2 else 16 - rank


def batch(rank: int, world: int, index: int, skewed: bool) -> Tensor:
    """(T, M): tokens for experts in turn, or for a skewed batch mostly for those of rank 0."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    token = torch.arange(tokens_of(rank, world, index))
    x = torch.randn(len(token), M, generator=generator, dtype=torch.float64)
    x[token, (token + rank) % (2 if skewed else EXPERTS)] += 3
    x[token, (token + rank + 1) % (2 if skewed else EXPERTS)] += 2
    return x


def run_step(model: Model, optimizer: torch.optim.Optimizer, parts: list[Tensor]) -> None:
    """Sets gradients to zero, adds those of all parts, and reduces those that do not belong to experts."""
    optimizer.zero_grad()
    for x in parts:
        (model(x).square().sum() / 16 + 0.01 * model.first.l_aux).backward()
    for parameter in model.parameters():
        if not is_expert(parameter):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns copies of parameters, buffers, the optimizer's tensors, and the next random number."""
    values = {name: value.double().clone() for name, value in model.state_dict().items()}
    for index, slots in optimizer.state_dict()["state"].items():
        values |= {f"{index} {name}": value.double().clone() for name, value in slots.items()}
    return {**values, "random": torch.rand(1, dtype=torch.float64)}


def train(
    rank: int, world: int, kind: str, skewed: dict[int, tuple[int, ...]], num_parts: int, bounded: bool
) -> tuple[dict[str, Tensor], int, list[list[str]]]:
    """Returns the state after training, the number of repeated steps, and the collectives of each step."""
    model = build(fused="persistent" if bounded else False, slack=1.25)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    steps = pmoe.BoundedSteps(model, optimizer, lambda x: run_step(model, optimizer, x)) if bounded else None
    calls = []
    for index in range(BATCHES):
        parts = [
            batch(rank, world, index + 50 * part, rank in skewed.get(index, ()) and part == num_parts - 1)
            for part in range(num_parts)
        ]
        with counted_collectives() as collectives:
            if steps is None:
                run_step(model, optimizer, parts)
                optimizer.step()
            else:
                steps.step(parts)
        calls.append(collectives)
        scheduler.step()
    if steps is not None:
        steps.finish()
    return state(model, optimizer), 0 if steps is None else steps.repeated, calls


def job(rank: int, world: int, *case: Any) -> tuple[list[str], int, list[list[str]]]:
    expected, _, _ = train(rank, world, *case, False)
    with using(plain_steps), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*falls back.*")
        result, repeated, calls = train(rank, world, *case, True)
    assert set(result) == set(expected)
    wrong = [
        f"{name}: {relative_error(result[name], value)}"
        for name, value in expected.items()
        if not relative_error(result[name], value) <= 1e-12
    ]
    return wrong, repeated, calls


SKEWED = {
    "no step": {},
    "one rank in one step": {3: (1,)},
    "consecutive steps, and the last": {2: (0,), 3: (0, 1), 4: (1,), 7: (0,)},
}


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", SKEWED)
@pytest.mark.parametrize("world", [2, 4])
def test_values(world: int, steps: str, kind: str, num_parts: int) -> None:
    for wrong, repeated, calls in ranks(world).run(job, kind, SKEWED[steps], num_parts):
        print(repeated, [sorted(set(c)) for c in calls][:4])
        assert not wrong
        assert repeated == len(SKEWED[steps])

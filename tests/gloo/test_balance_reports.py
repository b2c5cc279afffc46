"""Copies of busy experts under what public reports say of other systems that move or copy experts.

Each test names its report. Results are compared with those of the same layer without copies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pmoe
from pmoe.gates import ReplayGate, TopKGate
from tests.gloo.test_balance import TOKENS, M, build, differences, step
from tests.kit import tokens
from tests.pool import ranks
from tests.reference import relative_error
from tests.switched import switched_layer


def moving_job(rank: int, world: int, trains: bool) -> tuple[list[str], list[int]]:
    """Calls in each of which another expert is busy, so that copies of earlier calls are replaced."""
    wrong = []
    copies = []
    layers = [build(8, 2, 0.5, (0,), balance=balance, pipeline=2).train(trains) for balance in (0, 2)]
    for call, busy in enumerate((0, 7, 2, 2, 5, 0)):
        outputs: list[Tensor] = []
        for layer in layers:
            layer.gate.busy = [busy]
            x = tokens(TOKENS[world][rank], 10 * call + rank)
            with torch.set_grad_enabled(trains):
                outputs.append(layer(x))
            if trains:
                outputs[-1].square().sum().backward()
        if not relative_error(outputs[1].detach(), outputs[0].detach()) <= 1e-12:
            wrong.append(f"call {call}")
        assert layers[1].ran is not None and layers[1].ran.balance is not None
        copies.append(layers[1].ran.balance.copies)
    without, found = ({name: value.grad for name, value in layer.named_parameters()} for layer in layers)
    return wrong + differences(found, without, 1e-12), copies


@pytest.mark.parametrize("trains", [False, True])
def test_copies_may_be_replaced_in_every_call(trains: bool) -> None:
    """sglang 25882: with a new placement in every iteration, results on the CPU were wrong."""
    for wrong, copies in ranks(4).run(moving_job, trains):
        assert not wrong
        assert min(copies) >= 1


def odd_job(rank: int, world: int, balance: int, nodes: Any) -> list[str]:
    options: dict[str, Any] = {"nodes": nodes, "pipeline": 2}
    without = step(build(12, 3, 0.6, (0, 1), **options), rank, world)
    layer = build(12, 3, 0.6, (0, 1), balance=balance, **options)
    found = step(layer, rank, world)
    assert layer.ran is not None and layer.ran.balance is not None and layer.ran.balance.copies
    return differences(found, without, 1e-12)


@pytest.mark.parametrize("balance", [1, 3, 5, 9])
@pytest.mark.parametrize("nodes", [[0, 0, 0, 1], [0, 1, 2, 2]], ids=str)
def test_any_number_of_copies_and_ranks_of_a_node_will_do(balance: int, nodes: list[int]) -> None:
    """vllm 18343: (experts + copies) had to be a multiple of ranks. sglang 8253: so had ranks, of nodes."""
    assert ranks(4).run(odd_job, balance, nodes) == [[]] * 4


def freed_job(rank: int, world: int) -> list[str]:
    """Evaluation before and after the memory of all experts was freed and filled again with other values."""
    wrong = []
    layers = [build(4, 1, 0.8, (0,), balance=balance).eval() for balance in (0, 1)]
    for time in range(3):
        for again in ("", " again"):
            with torch.no_grad():
                without, found = (layer(tokens(TOKENS[world][rank], rank)) for layer in layers)
            if not relative_error(found, without) <= 1e-12:
                wrong.append(f"{time}{again}")
        for layer in layers:
            for value in layer.experts.parameters():
                storage = value.untyped_storage()
                values = value.detach() * (time + 2)
                num_bytes = storage.nbytes()
                storage.resize_(0)
                storage.resize_(num_bytes)
                value.data.copy_(values)
    return wrong


def test_copies_follow_experts_whose_memory_was_freed_and_filled_again() -> None:
    """vllm-ascend 13012: after weights were dropped and loaded again, copies used the memory of before."""
    assert ranks(2).run(freed_job) == [[], []]


ROWS = 24
"""Tokens of all ranks together in `scale_job`."""


def scale_job(rank: int, world: int, max_norm: float) -> dict[str, Any]:
    """The gradients' norm, and all experts' clipped gradients, of one batch that the ranks divide."""
    torch.manual_seed(3)
    chosen = torch.tensor([0, 0, 0, 1, 0, 2, 0, 3]).repeat(ROWS // 8)
    own = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    gate = ReplayGate(TopKGate(M, 4, 1, dtype=torch.float64), [chosen[own].view(-1, 1)])
    layer = switched_layer(M, 10, 4, 1, gate=gate, dtype=torch.float64, balance=1 if world > 1 else 0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in layer.experts.parameters():
            whole = torch.randn(4, *value.shape[1:], generator=generator, dtype=torch.float64)
            value.copy_(whole[layer.experts.num_local_experts * rank :][: value.shape[0]])
        for value in layer.gate.parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
    layer.gate.requires_grad_(False)  # ranks have different gradients of the gate, which DDP would add
    x = torch.randn(ROWS, M, generator=generator, dtype=torch.float64)
    layer(x[own]).square().sum().backward()
    norm = pmoe.clip_grad_norm_(layer, max_norm)
    copies = layer.ran.balance.copies if layer.ran is not None and layer.ran.balance is not None else 0
    gradients = {name: value.grad for name, value in layer.experts.named_parameters()}
    return {"norm": float(norm), "copies": copies, "gradients": gradients}


@pytest.mark.parametrize("world", [2, 4])
def test_experts_with_copies_have_the_gradients_and_the_norm_of_one_rank(world: int) -> None:
    """DeepSpeed 6545, pytorch 160285: W times the gradients of one rank. Megatron-LM 5916: a smaller norm."""
    (alone,) = ranks(1).run(scale_job, 0.5)
    found = ranks(world).run(scale_job, 0.5)
    assert alone["norm"] > 0.5
    for rank, of_rank in enumerate(found):
        assert of_rank["copies"] == world - 1
        assert of_rank["norm"] == pytest.approx(alone["norm"], rel=1e-12)
        for name, value in of_rank["gradients"].items():
            first = rank * 4 // world
            assert relative_error(value, alone["gradients"][name][first : first + 4 // world]) <= 1e-12

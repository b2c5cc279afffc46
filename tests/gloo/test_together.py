"""Other tools work with a layer: each line of the table "Precision and compilers" of docs/training.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.comm.ranks import Ranks
from tests.gloo.kit import error_of
from tests.pool import ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
TOKENS, M, H = 8, 16, 32
CLOSE = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-5}
"""Largest error of an output whose largest value is about 1."""


def plain(dtype: torch.dtype = torch.float32, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(M, M), pmoe.MoELayer(M, H, 4, 2, **options), nn.Linear(M, M)).to(dtype)


def spread(world: int, **options: object) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    return pmoe.parallelize(plain(group=mesh.get_group("ep"), **options), mesh)


def rows(rank: int) -> Tensor:
    return torch.randn(TOKENS, M, generator=torch.Generator().manual_seed(rank))


def step(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = model(x)
    y.float().square().sum().backward()
    return y.detach()


def check(model: nn.Module, y: Tensor, rank: int, dtype: torch.dtype) -> None:
    """Checks y and the experts' gradients of a model that computes in ``dtype``.

    y must be that of float32, to the precision of ``dtype``; the gradients must have the right dtype.
    """
    assert y.dtype == dtype
    expected = step(plain(), rows(rank))
    assert (y.float() - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()
    for parameter in pmoe.expert_parameters(model):
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype


def autocast(rank: int, world: int, dtype: torch.dtype = torch.bfloat16) -> None:
    model = spread(world)
    with torch.autocast("cpu", dtype):
        y = model(rows(rank))
    y.float().square().sum().backward()
    check(model, y.detach(), rank, dtype)


def mixed_precision(rank: int, world: int) -> None:
    """Uses the policy without autocast: for every block, and for the whole model."""
    for blocks in (True, False):
        model = spread(world)
        experts = pmoe.expert_parameters(model)
        options = {
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "ignored_params": experts,
        }
        for block in model if blocks else ():
            fully_shard(block, **options)
        fully_shard(model, **options)
        check(model, step(model, rows(rank)), rank, torch.bfloat16)
        assert {each.dtype for each in experts} == {torch.float32}


def in_its_own_type(rank: int, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = spread(world, dtype=dtype)
        check(model, step(model, rows(rank).to(dtype)), rank, dtype)
    error = error_of(lambda: spread(world)(rows(rank).half()))  # a model in float32, and no autocast
    assert "must have the same dtype" in error, error
    layer = spread(world)[1]
    assert "under torch.autocast" in error_of(lambda: layer(rows(rank).half()))


def scaled(rank: int, world: int) -> None:
    model = spread(world)
    optimizer = torch.optim.SGD(pmoe.parameter_groups(model), lr=0.1)
    scaler = pmoe.GradScaler("cpu", init_scale=2.0**8)
    before = model[1].gate.weight.detach().clone()
    with torch.autocast("cpu", torch.float16):
        loss = model(rows(rank)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model[1].gate.weight)


def deterministic(rank: int, world: int) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            model = spread(world, pipeline=4, memory_reuse="S4")
            y = step(model, rows(rank))
            found.append([y, *(each.grad.to_local() for each in model[1].experts.parameters())])
        assert all(map(torch.equal, *found))
    finally:
        torch.use_deterministic_algorithms(False)


def compiled(rank: int, world: int) -> None:
    torch._dynamo.reset()
    model = spread(world)
    check(model, step(torch.compile(model, backend="aot_eager"), rows(rank)), rank, torch.float32)


def compiled_by_pmoe(rank: int, world: int, **options: object) -> None:
    """Compiles on one rank, where nothing is measured; tests/gloo/test_whole_graph.py has several ranks."""
    model = plain(group=Ranks.single())
    check(model, step(torch.compile(model, backend="pmoe", **options), rows(rank)), rank, torch.float32)
    assert model[1].ran.path == "whole graph"


def whole_in_one_graph(rank: int, world: int) -> None:
    torch._dynamo.reset()
    model = spread(world)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    check(model, step(compiled, rows(rank)), rank, torch.float32)
    assert model[1].ran.path == "pipeline"
    compiled_by_pmoe(rank, world, fullgraph=True)


def checkpointed(rank: int, world: int) -> None:
    model = spread(world)
    context = pmoe.checkpoint_contexts
    y = step(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=context), rows(rank))
    check(model, y, rank, torch.float32)


def transforms(rank: int, world: int) -> None:
    """Calls transforms on one rank: they raise before any message."""
    layer = plain(group=Ranks.single())[1]
    x = rows(rank)
    for way in (
        lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        lambda: torch.func.vmap(layer)(x.unsqueeze(0)),
        lambda: torch.jit.script(layer),
        lambda: torch.export.export(layer, (x,), strict=True),
    ):
        assert error_of(way), "it works by now: say so in the table"
    loss = layer(x.requires_grad_()).square().sum()
    assert "no second derivative" in error_of(lambda: torch.autograd.grad(loss, x, create_graph=True))


LINES: dict[str, Callable[[int, int], None]] = {
    '`torch.autocast("cuda", torch.bfloat16)`': autocast,
    '`torch.autocast("cuda", torch.float16)`': lambda rank, world: autocast(rank, world, torch.float16),
    "FSDP2's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`": mixed_precision,
    "a model in bfloat16 or float16": in_its_own_type,
    "`GradScaler`": scaled,
    "`torch.use_deterministic_algorithms(True)`": deterministic,
    "`torch.compile(model)`": compiled,
    "`torch.compile(model, fullgraph=True)`": whole_in_one_graph,
    '`torch.compile(model, backend="pmoe")`': compiled_by_pmoe,
    "`torch.utils.checkpoint`": checkpointed,
    "`torch.func`, `torch.jit`, `torch.export`, a second derivative": transforms,
}
"""Tests by the first cell of each line of the table."""


def is_compiled(name: str) -> bool:
    return "compile" in name


def job(rank: int, world: int, names: list[str]) -> None:
    for name in names:
        LINES[name](rank, world)


def test_the_table_has_these_lines() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition("\n## Precision and compilers\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[1:] == list(LINES)  # without the header


def test_each_line_of_the_table_is_as_it_says() -> None:
    ranks(2).run(job, [name for name in LINES if not is_compiled(name)])


@pytest.mark.slow
def test_each_line_about_compilers_is_as_it_says() -> None:
    ranks(2).run(job, [name for name in LINES if is_compiled(name)])

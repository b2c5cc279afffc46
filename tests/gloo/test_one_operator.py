"""torch.compile(model, fullgraph=True) on several ranks, by backends that are not pmoe's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe.graph import one_operator
from tests.pool import ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "chunks that reuse memory": {"pipeline": 2, "memory_reuse": "S4"},
    "copies of busy experts": {"balance": 1, "pipeline": 2},
    "rows in bfloat16 on their way": {"wire": "bfloat16"},
    "a capacity, tokens sent once": {"capacity_factor": 1.0, "send_once": True},
}


def two_layers(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [pmoe.MoELayer(16, 32, num_experts=4, top_k=2, dtype=dtype, **options) for _ in range(2)]
    return nn.Sequential(nn.Linear(16, 16, dtype=dtype), layers[0], nn.ReLU(), layers[1])


def step(model: nn.Module, forward: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = forward(x)
    losses = [each.l_aux for each in model.modules() if isinstance(each, pmoe.MoELayer)]
    (y.square().mean() + 0.1 * sum(losses)).backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def compiled_job(rank: int, world: int, options: dict[str, Any], backend: str) -> None:
    torch._dynamo.reset()
    model = two_layers(torch.float32 if "wire" in options else torch.float64, **options)
    dtype = next(model.parameters()).dtype
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for tokens in (20, 33, 0):  # one rank has no tokens in the end
        x = torch.randn(tokens + 7 * rank, 16, dtype=dtype)
        for value, wanted in zip(step(model, compiled, x), step(model, model, x), strict=True):
            torch.testing.assert_close(
                value, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-12
            )
    assert not one_operator.KEPT


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_graph_with_layers_of_two_ranks_gives_the_same_values(options: dict[str, Any]) -> None:
    ranks(2).run(compiled_job, options, "aot_eager", timeout=120)


@pytest.mark.slow
def test_inductor_gives_the_same_values_on_two_ranks() -> None:
    ranks(2).run(compiled_job, OPTIONS["chunks that reuse memory"], "inductor", timeout=280)


def assert_close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Compares tensors; of a DTensor this rank's part."""
    for pair in zip(found, wanted, strict=True):
        local = [each.to_local() if hasattr(each, "to_local") else each for each in pair]
        torch.testing.assert_close(*local, rtol=1e-12, atol=1e-12)


def data_parallel_job(rank: int, world: int) -> None:
    """The dense part has a copy on each rank, whose gradients DDP averages; experts are spread."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    found = []
    for is_compiled in (False, True):
        model = pmoe.parallelize(two_layers(group=mesh.get_group("ep"), pipeline=2), mesh)
        replicas = DistributedDataParallel(model)
        forward = torch.compile(replicas, backend="aot_eager") if is_compiled else replicas
        x = torch.randn(9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        found.append(step(model, forward, x))
    assert_close(*found)


@pytest.mark.slow
def test_ddp_around_layers_that_are_spread() -> None:
    ranks(2).run(data_parallel_job, timeout=120)


def buckets_job(rank: int, world: int) -> None:
    """DDP has parameters for several buckets, into which torch 2.13 would cut the graph, and fail."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        kind: dict[str, Any] = {"dtype": torch.float64}
        layers = [pmoe.MoELayer(16, 32, 4, 2, group=mesh.get_group("ep"), **kind) for _ in range(2)]
        dense = [nn.Linear(16, 4096, **kind), nn.ReLU(), nn.Linear(4096, 16, **kind)]
        model = pmoe.parallelize(nn.Sequential(layers[0], *dense, layers[1]), mesh)
        replicas = DistributedDataParallel(model, bucket_cap_mb=1)
        forward = torch.compile(replicas, backend="aot_eager") if is_compiled else replicas
        x = torch.randn(9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        with torch._dynamo.config.patch(optimize_ddp=False):
            found.append(step(model, forward, x))
    assert_close(*found)


@pytest.mark.slow
def test_ddp_with_several_buckets_has_the_gradients_of_the_eager_model_in_one_graph() -> None:
    ranks(2).run(buckets_job, timeout=120)


def failing_job(rank: int, world: int) -> str:
    torch._dynamo.reset()
    compiled = torch.compile(two_layers(), backend="aot_eager", fullgraph=True)
    x = torch.full((4, 16), float("nan") if rank else 1.0, dtype=torch.float64)
    try:
        compiled(x)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_an_error_of_one_rank_comes_out_of_every_ranks_graph() -> None:
    for text in ranks(2).run(failing_job):
        assert "check_finite" in text

"""Other types of tensors than plain ones on several ranks: DTensors, errors on all ranks, calls without
values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import pmoe
from pmoe import MoELayer
from tests import kit
from tests.gloo.kit import NUM_EXPERTS, counted_collectives, error_of
from tests.kit import AUX, D_HIDDEN, D_MODEL, assert_same, tokens
from tests.pool import Pool, ranks


def step(layer: MoELayer, x: Tensor, run: Any, dy: Any) -> dict[str, Tensor]:
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = run(x)
    loss = (y * dy).sum()
    if isinstance(loss, DTensor):
        loss = loss.to_local()  # this rank's share, as of plain tensors
    (loss + AUX * layer.l_aux).backward()
    plain = [each.to_local() if isinstance(each, DTensor) else each for each in (y.detach(), x.grad)]
    found = {name: each.grad for name, each in layer.named_parameters()}
    return {"y": plain[0], "l_aux": layer.l_aux.detach(), "x": plain[1], **found}


def sharded_job(rank: int, world: int, dim: int, options: dict[str, Any]) -> None:
    """Calls a layer with uneven parts of a DTensor: 7 and 6 sequences, or 5 and 4 of their positions."""
    layer = kit.build(NUM_EXPERTS, **options)
    mesh = init_device_mesh("cpu", (world,))
    whole = (13, 2, D_MODEL) if dim == 0 else (2, 9, D_MODEL)
    lengths = (7, 6) if dim == 0 else (5, 4)
    shape = list(whole)
    shape[dim] = lengths[rank]
    x = tokens(shape[0] * shape[1], 10 + rank).view(shape)
    dy = tokens(shape[0] * shape[1], 20 + rank).view(shape)
    expected = step(layer, x, layer, dy)

    def laid(part: Tensor) -> DTensor:
        stride = torch.empty(whole).stride()
        shards = [Shard(dim)]
        return DTensor.from_local(part, mesh, shards, run_check=False, shape=torch.Size(whole), stride=stride)

    y = layer(laid(x))
    assert isinstance(y, DTensor) and y.placements == (Shard(dim),) and tuple(y.shape) == whole
    assert y.full_tensor().shape == whole
    got = step(layer, laid(x), layer, laid(dy))
    assert_same(got, expected)


@pytest.mark.parametrize("options", [{}, {"pipeline": 2, "memory_reuse": "S4"}])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_sharded_input_is_this_ranks_tokens(dim: int, options: dict[str, Any]) -> None:
    ranks(2).run(sharded_job, dim, options)


def replicated_job(rank: int, world: int) -> None:
    layer = kit.build(NUM_EXPERTS)
    mesh = init_device_mesh("cpu", (world,))
    x, dy = tokens(7, 10), tokens(7, 20)
    expected = step(layer, x, layer, dy)
    laid = DTensor.from_local(x, mesh, [Replicate()])
    assert layer(laid).placements == (Replicate(),)
    got = step(layer, laid, layer, DTensor.from_local(dy, mesh, [Replicate()]))
    assert_same(got, expected)


def test_a_replicated_input_is_every_ranks_tokens() -> None:
    ranks(2).run(replicated_job)


def refusals_job(rank: int, world: int) -> list[str]:
    """Calls with inputs that a layer refuses, on rank 0 only. A correct call follows each."""
    layer, x = kit.build(NUM_EXPERTS), tokens(6, rank)
    mesh = init_device_mesh("cpu", (world,))
    bad = [
        lambda: DTensor.from_local(x, mesh, [Partial()], run_check=False),
        lambda: DTensor.from_local(x, mesh, [Shard(1)], run_check=False),
        lambda: x.to_sparse(),
        lambda: torch.nested.nested_tensor([x, x]),
        lambda: x.to(torch.complex64),
        lambda: torch.empty(6, D_MODEL, dtype=torch.float64, device="meta"),
        lambda: torch.masked.masked_tensor(x, torch.ones_like(x).bool()),
    ]
    found = []
    for make in bad:
        try:
            layer(make() if rank == 0 else x)
        except (ValueError, TypeError) as error:
            found.append(str(error))
        layer(x).sum().backward()
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_refusal_reaches_every_rank() -> None:
    first, second = ranks(2).run(refusals_job)
    assert len(first) == len(second) == 7
    for text in first[:2]:
        assert "x.redistribute(placements=[Shard(0)])" in text
    assert "x.to_dense()" in first[2] and "layout=torch.jagged" in first[3] and "x.real" in first[4]
    assert "must be where the layer's parameters are (cpu)" in first[5] and "mask=" in first[6]
    assert all("rank 0" in text for text in second)


def meta_layer_job(rank: int, world: int) -> str:
    layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, device="meta")
    try:
        layer(torch.randn(3, D_MODEL))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_meta_layer_of_several_ranks_says_how_it_gets_values() -> None:
    for text in ranks(2).run(meta_layer_job):
        assert "call layer.to_empty(device=...) and layer.reset_parameters() before" in text


def shapes_job(rank: int, world: int, options: dict[str, Any], is_parallelized: bool) -> None:
    """Makes the call on one rank only, because nothing is sent."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    with torch.device("meta"):
        on_meta = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, **options)
    real = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, **options)
    if is_parallelized:
        pmoe.parallelize(on_meta, mesh)
        pmoe.parallelize(real, mesh)
    if rank == 0:
        with counted_collectives() as sent:
            y = on_meta(torch.randn(2, 3, D_MODEL, device="meta", requires_grad=True))
            (y.sum() + on_meta.l_aux).backward()
            assert y.shape == (2, 3, D_MODEL) and on_meta.experts.w1.grad.shape == on_meta.experts.w1.shape
            with FakeTensorMode(allow_non_fake_inputs=True):
                y = real(torch.randn(4, D_MODEL, requires_grad=True))
                if not is_parallelized:  # a DTensor's gradient under that mode is torch's affair
                    (y.sum() + real.l_aux).backward()
                assert y.shape == (4, D_MODEL)
            if not is_parallelized:
                with FakeTensorMode():
                    fake = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, **options)
                    y = fake(torch.randn(4, D_MODEL, requires_grad=True))
                    (y.sum() + fake.l_aux).backward()
        assert not sent
    real.zero_grad(set_to_none=True)
    real(torch.randn(3, D_MODEL)).sum().backward()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_parallelized", [False, True])
@pytest.mark.parametrize("options", [{}, {"pipeline": True, "memory_reuse": True, "shared_expert": 4}])
@pytest.mark.slow
def test_shapes_are_known_without_the_other_ranks(options: dict[str, Any], is_parallelized: bool) -> None:
    ranks(2).run(shapes_job, options, is_parallelized)


def unfinished_job(rank: int, world: int) -> None:
    layer = kit.build(NUM_EXPERTS)
    x = tokens(3, 10 + rank).requires_grad_()
    gathered = collectives.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    assert type(gathered).__name__ == "AsyncCollectiveTensor"
    y = layer(gathered)
    assert type(y) is Tensor
    y.sum().backward()
    assert x.grad is not None and x.grad.any()
    whole = torch.cat([tokens(3, 10), tokens(3, 11)])
    assert torch.equal(y, layer(whole))


def test_a_collective_that_runs_on_is_waited_for() -> None:
    ranks(2).run(unfinished_job)


def in_transform(layer: MoELayer, way: str, x: Tensor) -> object:
    """Calls a layer inside a transform of torch.func."""
    parameters = dict(layer.named_parameters())
    if way == "grad":
        return torch.func.grad(lambda x: layer(x).sum())(x)
    if way == "vmap":
        return torch.func.vmap(layer)(x[:, None])
    if way == "jvp":
        return torch.func.jvp(layer, (x,), (x,))
    assert way == "parameters"
    call = torch.func.functional_call
    return torch.func.grad(lambda values: call(layer, values, (x,)).sum())(parameters)


def transforms_job(rank: int, world: int, was_called: bool) -> list[str]:
    """All ranks call a layer in each transform, then without one. Returns the errors."""
    layer = kit.build(NUM_EXPERTS)
    x = tokens(4, rank)
    if was_called:
        layer(x).sum().backward()
    errors = [
        error_of(lambda way=way: in_transform(layer, way, x)) for way in ("grad", "vmap", "jvp", "parameters")
    ]
    return [*errors, error_of(lambda: layer(x).sum().backward())]


@pytest.mark.parametrize("was_called", [False, True])
def test_transforms_of_torch_func_are_refused_by_name_and_the_next_call_works(was_called: bool) -> None:
    """A transform wraps the tensors of messages, too, which no collective can send."""
    for *errors, after in ranks(2).run(transforms_job, was_called):
        assert after == ""
        for error in errors:
            assert error.startswith("FaultError: x (inside the transform ")
            assert "of torch.func) must be outside of it" in error
            assert error.endswith("all tokens as one batch, and differentiate it by torch.autograd.grad")


def transform_of_one_job(rank: int, world: int, was_called: bool) -> str:
    layer = kit.build(NUM_EXPERTS)
    x = tokens(4, rank)
    if was_called:
        layer(x).sum().backward()
    return error_of((lambda: in_transform(layer, "grad", x)) if rank else (lambda: layer(x)))


@pytest.mark.parametrize("was_called", [False, True])
def test_a_transform_of_one_rank_is_told_to_the_others(was_called: bool) -> None:
    with Pool(2) as pool:
        waiting, own = pool.run(transform_of_one_job, was_called)
    assert own.startswith("FaultError: x (inside the transform grad of torch.func) must be outside of it")
    assert "global rank 1 raised FaultError: x (inside the transform grad of torch.func) must be" in waiting

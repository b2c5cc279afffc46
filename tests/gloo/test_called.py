"""Several ranks: parameters of experts that are read by name, hooks of one rank only, masks that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune

import pmoe
from tests.gloo.kit import backward, build, error_of, inputs, part_of
from tests.kit import tokens
from tests.pool import Pool, ranks
from tests.reference import relative_error

WAYS: dict[str, dict[str, Any]] = {
    "n=2": {},
    "S4": {"memory_reuse": "S4"},
    "shared": {"shared_expert": 5, "shared_gate": True},
    "modules": {"expert": lambda: nn.Linear(6, 6, dtype=torch.float64)},
    "padded": {"capacity_factor": 8.0, "pad_to_capacity": True},
}


class Scaled(nn.Module):
    """A wrapper that multiplies the weights of each expert by a number of its own."""

    def __init__(self, num_experts: int, first: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(
            torch.arange(1, num_experts + 1, dtype=torch.float64)[:, None, None] + first
        )

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def parametrized_job(rank: int, world: int, way: str) -> dict[str, Tensor]:
    layer = build(**WAYS[way])
    local = layer.num_local_experts
    parametrize.register_parametrization(layer.experts, "w1", Scaled(local, rank * local))
    x, dy = (torch.cat([value, value]) for value in inputs(0, 1))  # the same tokens on every rank
    return backward(layer, x.requires_grad_(), dy)


@pytest.mark.parametrize("way", ["n=2", "S4", "shared"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parametrized_experts_of_several_ranks_are_those_of_one(world: int, way: str) -> None:
    whole = ranks(1).run(parametrized_job, way)[0]
    for rank, found in enumerate(ranks(world).run(parametrized_job, way)):
        for name in ("y", "x"):
            assert relative_error(found[name], whole[name]) < 1e-12, name
        for name in found:
            if name.startswith("experts."):  # each rank brought the same tokens
                expected = part_of(whole, name, rank, world) * world
                assert relative_error(found[name], expected) < 1e-12, name


def pruned_job(rank: int, world: int, parallel: bool) -> list[float]:
    layer = build(bias=False)
    if parallel:
        pmoe.parallelize(layer, init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
    else:
        for name in ("w1", "w2"):
            prune.l1_unstructured(layer.experts, name, amount=0.9)
    x, dy = inputs(rank, world)
    before = backward(layer, x.requires_grad_(), dy)
    if parallel:  # torch's pruning sorts, which DTensors do not: a mask as a parametrization
        parametrize.register_parametrization(layer.experts, "w1", Halved())
        after = backward(layer, x.detach().requires_grad_(), dy)
        gradient = after["experts.parametrizations.w1.original"]
        return [relative_error(after["y"], before["y"]), float(gradient.to_local().abs().sum())]
    zeros = layer.experts.w1 == 0
    gradient = before["experts.w1_orig"]
    return [float(zeros.double().mean()), float(gradient[zeros].abs().max()), float(gradient.abs().sum())]


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def test_pruned_experts_of_several_ranks_are_pruned() -> None:
    for zeros, of_pruned, of_all in ranks(2).run(pruned_job, False):
        assert abs(zeros - 0.9) < 0.02 and of_pruned == 0 and of_all > 0


def test_a_parametrization_of_parallelized_experts_counts_and_its_gradient_is_laid_out() -> None:
    for differs, of_original in ranks(2).run(pruned_job, True):
        assert differs > 1e-3 and of_original > 0


def hooked_job(rank: int, world: int, way: str) -> list[Any]:
    layer = build(**WAYS[way])
    x, dy = tokens(7, 10 + rank), tokens(7, 20 + rank)  # as many on each: padded rows ask for that
    before = backward(layer, x.requires_grad_(), dy)
    seen: list[str] = []
    if rank == 0:  # a logger, as scripts put it on the first rank alone
        for name in ("experts", "shared_expert", "shared_gate"):
            part = getattr(layer, name)
            if part is not None:
                part.register_forward_hook(lambda *_, name=name: seen.append(name))
                part.register_full_backward_hook(lambda *_, name=name: seen.append(f"{name} back"))
    after = backward(layer, x.detach().requires_grad_(), dy)
    wrong = [
        name
        for name, value in before.items()
        if value is not None and relative_error(after[name], value) > 1e-12
    ]
    return [wrong, sorted(seen)]


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_one_rank_alone_run_and_change_nothing(way: str) -> None:
    first, *others = ranks(2).run(hooked_job, way)
    parts = ["experts", "shared_expert", "shared_gate"] if way == "shared" else ["experts"]
    assert first == [[], sorted([*parts, *(f"{name} back" for name in parts)])]
    assert all(other == [[], []] for other in others)


def masked_job(rank: int, world: int, way: str) -> list[str]:
    """Calls layers with other masks on each rank; one of the masks has no tokens."""
    layer = build(**WAYS[way])
    x, dy = tokens(10, 10 + rank), tokens(10, 20 + rank)
    mask = torch.arange(10) % (rank + 2) == 0 if rank else torch.zeros(10, dtype=torch.bool)
    if layer.pad_to_capacity:  # every rank has as many tokens there
        mask = torch.arange(10) % 2 == rank % 2
    alone = backward(layer, x[mask].requires_grad_(), dy[mask])
    masked = backward(layer, x.requires_grad_(), dy, lambda x: layer(x, mask=mask))
    for name in ("x", "y"):
        masked[name] = masked[name][mask]
    return [
        name for name, value in alone.items() if value is not None and not torch.equal(masked[name], value)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_masks_may_differ_by_rank(world: int, way: str) -> None:
    assert ranks(world).run(masked_job, way) == [[]] * world


def bad_mask_job(rank: int, world: int) -> list[str]:
    layer = build()
    x = tokens(6)
    mask = torch.ones(6 - rank, dtype=torch.bool)
    errors = [error_of(lambda: layer(x, mask=mask))]
    layer(x, mask=torch.ones(6, dtype=torch.bool)).sum().backward()  # nothing is broken
    return errors


def test_a_mask_that_does_not_fit_on_one_rank_is_an_error_on_all() -> None:
    (whole,), (short,) = ranks(2).run(bad_mask_job)
    assert short.startswith("FaultError: mask (a tensor of shape (5,)")
    assert whole.startswith("FaultError: rank 1:")


class HookError(Exception):
    pass


def raising_job(rank: int, world: int, kind: str) -> str:
    layer = build(group=dist.new_group(list(range(world))))
    x, dy = inputs(rank, world)

    def raise_it(*_: Any) -> None:
        raise HookError("planted")

    if rank == 1:
        getattr(layer.experts, f"register_{kind}")(raise_it)
    return error_of(lambda: [backward(layer, x.requires_grad_(), dy) for _ in range(2)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook"])
def test_what_a_hook_raises_on_one_rank_is_told_to_the_others(kind: str) -> None:
    with Pool(2, 30.0) as pool:
        other, own = pool.run(raising_job, kind, timeout=60)
    assert own == "HookError: planted"
    assert "raised HookError: planted" in other


def sizes_job(rank: int, world: int) -> str:
    layer = build(group=dist.new_group(list(range(world))), bias=False)
    if rank == 1:
        layer.experts.w1 = nn.Parameter(layer.experts.w1.detach()[:1])
    x, _ = inputs(rank, world)
    return error_of(lambda: [layer(x) for _ in range(2)])


def test_experts_of_another_number_on_one_rank_are_told_to_all() -> None:
    with Pool(2, 30.0) as pool:
        other, own = pool.run(sizes_job, timeout=60)
    assert own.startswith(
        "ValueError: experts' w1 (of shape (1, 10, 6) on this rank) must have shape (4, 10, 6)"
    )
    assert "raised ValueError: experts' w1" in other


def sharded_job(rank: int, world: int) -> list[float]:
    """FSDP2 over ranks that hold the same experts: its hooks gather parameters when experts are called."""
    layer = build(group=pmoe.comm.ranks.Ranks.single())
    x, dy = inputs(0, 1)
    before = backward(layer, x.requires_grad_(), dy)
    fully_shard(layer.experts, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    after = backward(layer, x.detach().requires_grad_(), dy)
    local = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in after.items()
    }
    return [relative_error(local[name], before[name]) for name in before]


def test_fsdp_may_shard_experts_over_ranks_that_hold_the_same() -> None:
    for errors in ranks(2).run(sharded_job):
        assert max(errors) < 1e-12


def adapted_job(rank: int, world: int) -> list[Any]:
    """Experts of a parallelized model get LoRA as a parametrization; DDP must not reduce its gradients."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    model = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), build(bias=False))
    pmoe.parallelize(model, mesh)
    experts = model[1].experts
    parametrize.register_parametrization(experts, "w1", Adapter(experts.w1, rank))
    wrapped = DistributedDataParallel(model)
    x = tokens(5, 10 + rank)
    before = wrapped(x)
    before.sum().backward()
    adapter = experts.parametrizations.w1[0]
    gradient = adapter.up.grad.clone()
    values = [torch.empty_like(gradient) for _ in range(world)]
    dist.all_gather(values, gradient)
    with torch.no_grad():
        adapter.up.add_(1.0)
    changed = relative_error(wrapped(x).detach(), before.detach())
    return [float(gradient.abs().sum()), torch.equal(values[0], values[1]), changed]


class Adapter(nn.Module):
    """LoRA of the experts of one rank, which are stored in a DTensor."""

    def __init__(self, weight: Any, rank: int) -> None:
        super().__init__()
        experts, outs, ins = weight.to_local().shape
        generator = torch.Generator().manual_seed(rank)
        down = torch.randn(experts, 2, ins, generator=generator, dtype=torch.float64)
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(torch.zeros(experts, outs, 2, dtype=torch.float64))

    def forward(self, weight: Any) -> Any:
        delta = DTensor.from_local(self.up @ self.down, weight.device_mesh, weight.placements)
        return weight + delta


def test_adapters_of_parallelized_experts_stay_with_their_rank() -> None:
    for gradient, is_shared, changed in ranks(2).run(adapted_job):
        assert gradient > 0 and not is_shared and changed > 1e-3


def changed_before_job(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    errors = []
    for change in (
        lambda experts: parametrize.register_parametrization(experts, "w1", Halved()),
        lambda experts: prune.l1_unstructured(experts, "w2", amount=0.5),
    ):
        layer = build(group=pmoe.comm.ranks.Ranks.single())
        change(layer.experts)
        errors.append(error_of(lambda layer=layer: pmoe.parallelize(layer, mesh)))
    return errors


def test_experts_that_were_changed_before_parallelize_are_named() -> None:
    for parametrized, pruned in ranks(2).run(changed_before_job):
        assert "experts' w1 (parametrized, pruned or replaced) must be a plain parameter" in parametrized
        assert "experts' w2 (parametrized, pruned or replaced)" in pruned

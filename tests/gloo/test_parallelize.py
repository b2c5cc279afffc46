"""pmoe.parallelize: a model whose dense part DistributedDataParallel or FSDP2 shares trains as in one
process.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.experts.marks import is_expert
from pmoe.experts.operands import local_part
from pmoe.training.parallel import make_meshes, reduce_gradients
from tests.gloo.kit import error_of
from tests.gloo.lm import (
    SLOW_IMPORT,
    Model,
    alone,
    backward_passes,
    batch,
    build,
    loss_of,
    make_mesh,
    shared,
    square,
    submesh,
    whole,
)
from tests.own_experts import mlp
from tests.pool import ranks
from tests.reference import relative_error
from tests.spread import spread as grid

MAX_NORM, STEPS, LEARNING_RATE = 0.9, 12, 1e-2


# ---- training


def expected_run(world: int, passes: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Returns losses, norms and parameters of one process that has all ranks' sequences."""
    model = build(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        step_losses = [loss_of(model, batch(passes * step + at, world)) / passes for at in range(passes)]
        sum(step_losses).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(sum(step_losses).item())
    return losses, norms, {name: each.detach() for name, each in model.named_parameters()}


def trained(
    rank: int, world: int, wrap: str, options: dict[str, Any], passes: int
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    mesh = square(rank, world)
    model = pmoe.parallelize(build(mesh["ep"]), mesh)
    wrapped = shared(wrap, model)
    groups = pmoe.parameter_groups(wrapped)
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, **options)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = backward_passes(wrapped, wrap, step, passes, rank, world)
        norms.append(pmoe.clip_grad_norm_(wrapped, MAX_NORM).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: whole(each) for name, each in model.named_parameters()}


HOWS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
QUICK = {("ddp", 2, "fused"), ("fsdp", 2, "foreach")}
"""Cases of every test run."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("wrap", "passes", "how"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(("ddp", "fsdp"), (1, 2), HOWS)
    ],
)
def test_four_ranks_train_as_one_process_does(wrap: str, passes: int, how: str) -> None:
    losses, norms, parameters = expected_run(4, passes)
    found = ranks(4).run(trained, wrap, HOWS[how], passes, timeout=SLOW_IMPORT)
    assert min(norms) < MAX_NORM < max(norms)  # some steps are clipped, others not
    assert losses[-1] < losses[0] - 0.3
    for step, expected in enumerate(losses):
        mean = sum(rank[0][step] for rank in found) / 4
        assert mean == pytest.approx(expected, rel=1e-5)
    for _, own_norms, own in found:
        assert own_norms == found[0][1]  # to the bit
        assert own_norms == pytest.approx(norms, rel=1e-4)
        assert own.keys() == parameters.keys()
        for name, expected in parameters.items():
            assert relative_error(own[name], expected) < 2e-4, name


# ---- gradients, on every mesh

MESHES = {
    "copies x experts": {"dp": 2, "ep": 2},
    "experts alone": {"ep": 4},
    "copies alone": {"dp": 4, "ep": 1},
    "experts x parts": {"ep": 2, "esp": 2},
    "parts x experts": {"esp": 2, "ep": 2},
    "copies x parts": {"edp": 2, "ep": 1, "esp": 2},
    "experts x copies": {"ep": 2, "dp": 2},
}


def gradients(
    rank: int, world: int, sizes: dict[str, int], expert: Any, spread: bool, reduce: bool
) -> dict[str, Any]:
    mesh = make_mesh(sizes)
    if spread:
        model = alone(expert=expert)
    else:
        model = build(submesh(mesh), torch.float64, expert=expert)
    pmoe.parallelize(model, mesh, reduce=reduce)
    layers = {at: each for at, each in model.named_modules() if isinstance(each, pmoe.MoELayer)}
    assert layers and all(each.ranks.layer == (at or "model") for at, each in layers.items())
    for at in range(2):  # two passes add up
        loss_of(model, batch(at, world).chunk(world)[rank]).backward()
    if reduce:
        for parameter in model.parameters():
            if not is_expert(parameter):
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
    else:
        reduce_gradients(model, make_meshes(ep=sizes["ep"], esp=sizes.get("esp", 1)))
    before = {name: whole(each.grad).clone() for name, each in model.named_parameters()}
    found: dict[str, Any] = {
        order: pmoe.clip_grad_norm_(model, math.inf, order).item() for order in (1.0, 2.0, math.inf)
    }
    parameters = list(model.parameters())
    if expert != mlp:  # of plain parameters only the model knows how many copies there are
        found["listed"] = pmoe.clip_grad_norm_(parameters, math.inf, foreach=False).item()
    pmoe.clip_grad_norm_(model, 0.01)
    found["clipped"] = pmoe.clip_grad_norm_(model, math.inf).item()
    found["gradients"] = before
    found["values"] = {name: whole(each) for name, each in model.named_parameters()}
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes, expert", grid(list(MESHES), ["ffn", "swiglu"], every=2))
def test_gradients_and_their_norm_are_those_of_one_process(sizes: str, expert: str) -> None:
    check_gradients(MESHES[sizes], expert, spread=False, reduce=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sizes, expert",
    grid(["copies x experts", "experts x parts", "copies x parts"], ["ffn", "swiglu"], every=2),
)
def test_layers_that_each_rank_built_alone_are_spread(sizes: str, expert: str) -> None:
    check_gradients(MESHES[sizes], expert, spread=True, reduce=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spread", [False, True])
def test_experts_that_are_modules_keep_plain_parameters_and_are_reduced_alike(spread: bool) -> None:
    check_gradients(MESHES["copies x experts"], mlp, spread=spread, reduce=True)


def test_the_reduction_can_be_left_to_reduce_gradients() -> None:
    check_gradients(MESHES["copies x experts"], "ffn", spread=False, reduce=False)


def check_gradients(sizes: dict[str, int], expert: Any, *, spread: bool, reduce: bool) -> None:
    model = build(None, torch.float64, expert=expert)
    for at in range(2):
        for tokens in batch(at, 4).chunk(4):
            (loss_of(model, tokens) / 4).backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    norms = {
        order: torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf, order).item()
        for order in (1.0, 2.0, math.inf)
    }
    for rank, found in enumerate(ranks(4).run(gradients, sizes, expert, spread, reduce)):
        for order, norm in norms.items():
            assert found[order] == pytest.approx(norm, rel=1e-12)
        assert found.get("listed", found[2.0]) == pytest.approx(norms[2.0], rel=1e-12)
        assert found["clipped"] == pytest.approx(0.01, rel=1e-3)
        for name, gradient in found["gradients"].items():
            there = of_all(name, rank % 2)
            assert relative_error(gradient, expected[there]) < 1e-12, name
            assert torch.equal(found["values"][name], model.get_parameter(there)), name


def of_all(name: str, place: int) -> str:
    """Returns the name among all experts of a tensor that a rank at ``place`` of two calls ``name``."""
    before, found, after = name.partition(".experts.local.")
    number, _, rest = after.partition(".")
    return f"{before}{found}{int(number) + 2 * place}.{rest}" if found else name


def odd_passes(rank: int, world: int) -> list[bool]:
    """Runs unusual passes: a rank without tokens, a layer twice in a graph, frozen parameters, none at
    all.
    """
    mesh = square(rank, world)
    layer = pmoe.MoELayer(4, 6, 4, 2, mesh=mesh["ep"], dtype=torch.float64)
    pmoe.parallelize(layer, mesh)
    layer.experts.w1.requires_grad_(False)
    x = torch.randn(rank, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    (layer(x).sum() + layer(2 * x).sum()).backward()
    twice = own_gradients(layer)
    layer.zero_grad()
    layer(x).sum().backward()
    layer(2 * x).sum().backward()
    apart = own_gradients(layer)
    same = twice.keys() == apart.keys() == {"w2", "b1", "b2"}
    close = all(relative_error(twice[name], apart[name]) < 1e-12 for name in twice)
    for parameter in layer.experts.parameters():
        parameter.requires_grad_(False)
    inputs = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    layer(inputs).sum().backward()
    return [same, close, inputs.grad is not None, bool(twice["b2"].abs().sum() > 0)]


def own_gradients(layer: pmoe.MoELayer) -> dict[str, Tensor]:
    """Returns this rank's gradients of the experts that have any."""
    named = layer.experts.named_parameters()
    return {name: local_part(each.grad) for name, each in named if each.grad is not None}


def test_ranks_without_tokens_repeated_calls_and_frozen_parameters_are_reduced_alike() -> None:
    assert ranks(4).run(odd_passes) == [[True] * 4] * 4


# ---- refused


def refusals(rank: int, world: int) -> list[str]:
    mesh = square(rank, world)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "other"))
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("tp", "dp", "ep"))
    parts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "esp"))
    falling = DeviceMesh("cpu", torch.tensor([[1, 0], [3, 2]]), mesh_dim_names=("dp", "ep"))
    attempts: list[tuple[type[Exception], Any]] = [
        (ValueError, lambda: pmoe.parallelize(nn.Linear(2, 2), mesh)),
        (ValueError, lambda: pmoe.parallelize(build(mesh["ep"]), mesh["dp"])),
        (ValueError, lambda: pmoe.parallelize(build(mesh["ep"]), three)),
        (ValueError, lambda: pmoe.parallelize(build(None), mesh)),
        (ValueError, lambda: pmoe.parallelize(build(other["ep"]), mesh)),
        (ValueError, lambda: pmoe.parallelize(build(mesh["ep"]), falling)),
        (ValueError, lambda: pmoe.parallelize(pmoe.parallelize(build(mesh["ep"]), mesh), parts)),
        (ValueError, lambda: pmoe.parallelize(alone(expert=mlp), parts)),
        (ValueError, lambda: reduce_gradients(pmoe.parallelize(build(mesh["ep"]), mesh), make_meshes(ep=2))),
        (ValueError, lambda: pmoe.clip_grad_norm_(build(None).parameters(), 1.0)),
        (ValueError, lambda: pmoe.GradientReducer(sharded(nn.Linear(4, 4), mesh))),
        (ValueError, lambda: pmoe.parallelize(DistributedDataParallel(build(mesh["ep"])), mesh)),
        (ValueError, lambda: pmoe.parallelize(shared("fsdp", build(mesh["ep"])), mesh)),
        (RuntimeError, lambda: sharded_by_fsdp(pmoe.parallelize(build(mesh["ep"]), mesh))),
        (ValueError, lambda: sharded_by_fsdp(pmoe.parallelize(build(mesh["ep"], expert=mlp), mesh))),
        (ValueError, lambda: pmoe.parallelize(with_shared_experts(alone()), mesh)),
        (ValueError, lambda: assigned_plainly(pmoe.parallelize(build(mesh["ep"]), mesh))),
    ]
    found = []
    for kind, attempt in attempts:
        with pytest.raises(kind) as error:
            attempt()
        found.append(str(error.value))
    untouched = build(None)
    with pytest.raises(ValueError):
        pmoe.parallelize(untouched, mesh)
    found.append(type(untouched.blocks[0].moe.experts.w1).__name__)
    return found


def sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Returns a dense module as FSDP2 leaves it."""
    return distribute_module(module, mesh["dp"])


def sharded_by_fsdp(model: Model) -> None:
    """Shards a model without ignored_params, which a user may forget."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=make_mesh({"all": dist.get_world_size()}))
    model(batch(0, 1)[:, :-1])


def with_shared_experts(model: Model) -> Model:
    model.blocks[1].moe.experts = model.blocks[0].moe.experts
    return model


def assigned_plainly(model: nn.Module) -> None:
    model.load_state_dict({name: whole(each) for name, each in model.state_dict().items()}, assign=True)


def test_what_cannot_be_parallelized_is_refused_by_name() -> None:
    wanted = [
        r"model \(Linear\) must have a pmoe.MoELayer",
        r"mesh \(dimensions \('dp',\)\) must have the dimension \"ep\"",
        r"mesh \(dimensions \('tp', 'dp', 'ep'\)\) must have",
        r"^blocks.0.moe: a layer built over 4 ranks must not be spread over other ranks: .* 1 of 4 experts",
        r"^blocks.0.moe: a layer built over 2 ranks must not be spread",
        r"^blocks.0.moe: mesh .* must be in ascending order along \"ep\"",
        r"^blocks.0.moe: a layer that is parallelized already must not be parallelized over other ranks",
        r"^blocks.0.moe: experts \(modules\) must not be split over \"esp\"",
        r"^blocks.0.moe \(parallelized\) reduces its experts' gradients in backward",
        r"parameters \(parameter \d+ is an expert's and not a DTensor\) must be the model",
        r"model \(weight is a DTensor\) must have plain dense parameters",
        r"model \(a DistributedDataParallel\) must be wrapped after pmoe.parallelize",
        r"model \(a FSDPModel\) must be wrapped after pmoe.parallelize",
        r"Cannot concatenate overlapping meshes",  # torch's own, at fully_shard
        r"experts' parameters must not be in fully_shard, .* ignored_params=pmoe.expert_parameters\(model\)",
        r"^blocks.1.moe: experts \(those of blocks.0.moe\) must belong to one layer, or be built for",
        r"w1 \(a plain tensor, assigned\) must be a DTensor",
        r"^Parameter$",
    ]
    for found in ranks(4).run(refusals, timeout=SLOW_IMPORT):
        assert len(found) == len(wanted)
        for message, pattern in zip(found, wanted, strict=True):
            assert re.search(pattern, message), message


def meshes_job(rank: int, world: int) -> tuple[str, bool]:
    """Each rank makes a mesh of its own shape, which torch does not notice."""
    mesh = init_device_mesh("cpu", ((2, 1), (1, 2))[rank], mesh_dim_names=("dp", "ep"))
    model = nn.Sequential(pmoe.MoELayer(4, 6, 4, 2, group=Ranks.single()))
    before = list(model.parameters())
    message = error_of(lambda: pmoe.parallelize(model, mesh))
    return message, all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_meshes_that_differ_between_ranks_are_named_at_once() -> None:
    """The ranks waited in collectives of different groups until the timeout, and named no cause."""
    for message, is_unchanged in ranks(2).run(meshes_job):
        assert message.startswith("ValueError: mesh must be the same on every rank, and differs: rank 0: ")
        assert "('dp', 'ep') [[0], [1]] on cpu; rank 1: ('dp', 'ep') [[0, 1]] on cpu." in message
        assert is_unchanged


def meta_job(rank: int, world: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), pmoe.MoELayer(6, 8, 4, 2, group=Ranks.single()))
    pmoe.parallelize(model, mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in model:
        module.reset_parameters()
    return {
        name: getattr(value, "full_tensor", lambda v=value: v)().detach()
        for name, value in model.named_parameters()
    }


def test_a_model_of_the_meta_device_is_drawn_after_it_is_spread() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 6), pmoe.MoELayer(6, 8, 4, 2))
    for found in ranks(4).run(meta_job):
        for name, value in model.named_parameters():
            assert torch.equal(found[name], value), name


# ---- DistributedDataParallel around a parent of what was parallelized


class Holder(nn.Module):
    """Wraps a model with its loss, as a LightningModule does."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().sum()


def parent_job(rank: int, world: int) -> list[dict[str, Tensor]]:
    """Returns gradients of a model that DDP wraps, and of a model inside a parent that DDP wraps."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    found = []
    for wraps_parent in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 6), pmoe.MoELayer(6, 8, 4, 2, group=mesh.get_group("ep")))
        pmoe.parallelize(net, mesh)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
        if wraps_parent:
            DistributedDataParallel(Holder(net))(x).backward()
        else:
            DistributedDataParallel(net)(x).square().sum().backward()
        found.append({name: local_part(each.grad).clone() for name, each in net.named_parameters()})
    return found


def test_ddp_may_wrap_a_parent_of_the_parallelized_model() -> None:
    for of_model, of_parent in ranks(2).run(parent_job):
        assert of_model.keys() == of_parent.keys()
        for name, gradient in of_model.items():
            assert torch.equal(gradient, of_parent[name]), name

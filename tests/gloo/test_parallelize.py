"""pmoe.parallelize: a model whose dense part is DistributedDataParallel's or FSDP2's to share trains as in
one process; experts are DTensors that optimizers, clipping and copies of the model understand."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.experts.base import is_expert, local_part
from pmoe.layer import searched
from pmoe.training.parallel import make_meshes, reduce_gradients
from tests.own_experts import mlp
from tests.pool import ranks
from tests.reference import relative_error

# B sequences of S tokens in all, M = D_MODEL columns.
D_MODEL, D_HIDDEN, VOCABULARY, S = 8, 12, 11, 5
MAX_NORM, STEPS, LEARNING_RATE = 0.7, 20, 1e-2
SLOW_IMPORT = 240
"""Seconds: a rank's first use of FSDP imports it, which may take long on a busy machine."""


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.moe = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 2, mesh=mesh, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.mix(self.norm(x)))
        return y


class Model(nn.Module):
    """Tokens to logits of the next."""

    def __init__(self, mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D_MODEL)
        self.blocks = nn.ModuleList(Block(mesh, **options) for _ in range(2))
        self.head = nn.Linear(D_MODEL, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def build(mesh: DeviceMesh | None, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """From one seed: ranks have the same dense part, and together the experts of one process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(3)
        return Model(mesh, **options)
    finally:
        torch.set_default_dtype(before)


def batch(step: int, world: int, sequences: int = 2) -> Tensor:
    """(world * sequences, S + 1), by rank: each token follows from the one before."""
    generator = torch.Generator().manual_seed(100 + step)
    columns = [torch.randint(VOCABULARY, (world * sequences,), generator=generator)]
    for _ in range(S):
        columns.append((3 * columns[-1] + 1) % VOCABULARY)
    return torch.stack(columns, dim=1)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Without l_aux, which each rank has of its own tokens."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def shared(wrap: str, model: Model) -> nn.Module:
    if wrap == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh, experts = init_device_mesh("cpu", (dist.get_world_size(),)), pmoe.expert_parameters(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
    return model


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def square(rank: int, world: int) -> DeviceMesh:
    """The ranks as copies x experts."""
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "ep"))


# ---- training -------------------------------------------------------------------------------------


def expected_run(world: int, passes: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and parameters of one process that has all ranks' sequences."""
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
        total = 0.0
        for at in range(passes):  # the dense part is reduced in the last, experts in each
            with contextlib.ExitStack() as waiting:
                if wrap == "fsdp":
                    wrapped.set_requires_gradient_sync(at == passes - 1)
                elif at < passes - 1:
                    waiting.enter_context(wrapped.no_sync())
                loss = loss_of(wrapped, batch(passes * step + at, world).chunk(world)[rank]) / passes
                loss.backward()
            total += loss.item()
        norms.append(pmoe.clip_grad_norm_(wrapped, MAX_NORM).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: whole(each) for name, each in model.named_parameters()}


HOWS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
QUICK = {("ddp", 2, "default"), ("fsdp", 2, "foreach")}
"""Of the cases with two passes a step."""


@pytest.mark.parametrize(
    ("wrap", "passes", "how"),
    [
        pytest.param(*case, marks=() if case[1] == 1 or case in QUICK else pytest.mark.slow)
        for case in itertools.product(("ddp", "fsdp"), (1, 2), HOWS)
    ],
)
def test_four_ranks_train_as_one_process_does(wrap: str, passes: int, how: str) -> None:
    losses, norms, parameters = expected_run(4, passes)
    found = ranks(4).run(trained, wrap, HOWS[how], passes, timeout=SLOW_IMPORT)
    assert min(norms) < MAX_NORM < max(norms)  # some steps are clipped, others not
    assert losses[-1] < losses[0] - 0.5
    for step, expected in enumerate(losses):
        mean = sum(rank[0][step] for rank in found) / 4
        assert mean == pytest.approx(expected, rel=1e-5)
    for _, own_norms, own in found:
        assert own_norms == found[0][1]  # to the bit
        assert own_norms == pytest.approx(norms, rel=1e-4)
        assert own.keys() == parameters.keys()
        for name, expected in parameters.items():
            assert relative_error(own[name], expected) < 2e-4, name


# ---- gradients, on every mesh ---------------------------------------------------------------------


MESHES = {
    "copies x experts": {"dp": 2, "ep": 2},
    "experts alone": {"ep": 4},
    "copies alone": {"dp": 4, "ep": 1},
    "experts x parts": {"ep": 2, "esp": 2},
    "parts x experts": {"esp": 2, "ep": 2},
    "copies x parts": {"edp": 2, "ep": 1, "esp": 2},
    "experts x copies": {"ep": 2, "dp": 2},
}


def submesh(mesh: DeviceMesh) -> DeviceMesh:
    """What a layer takes."""
    return mesh[tuple(name for name in mesh.mesh_dim_names if name in ("ep", "esp"))]


def make_mesh(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def alone(**options: Any) -> Model:
    """Built with a group of this rank: each rank has all experts."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return build(None, torch.float64, group=groups[dist.get_rank()], **options)


def gradients(
    rank: int, world: int, sizes: dict[str, int], expert: Any, spread: bool, reduce: bool
) -> dict[str, Any]:
    mesh = make_mesh(sizes)
    if spread:
        model = alone(expert=expert)
    else:
        model = build(submesh(mesh), torch.float64, expert=expert)
    pmoe.parallelize(model, mesh, reduce=reduce)
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


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_gradients_and_their_norm_are_those_of_one_process(sizes: str, expert: str) -> None:
    check_gradients(MESHES[sizes], expert, spread=False, reduce=True)


@pytest.mark.parametrize("sizes", ["copies x experts", "experts x parts", "copies x parts"])
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_layers_that_each_rank_built_alone_are_spread(sizes: str, expert: str) -> None:
    check_gradients(MESHES[sizes], expert, spread=True, reduce=True)


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
    """The name among all experts of what a rank at ``place`` of two calls its own."""
    before, found, after = name.partition(".experts.local.")
    number, _, rest = after.partition(".")
    return f"{before}{found}{int(number) + 2 * place}.{rest}" if found else name


def odd_passes(rank: int, world: int) -> list[bool]:
    """A rank without tokens, a layer called twice in a graph, frozen parameters, none at all."""
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
    """This rank's, of the experts that have any."""
    named = layer.experts.named_parameters()
    return {name: local_part(each.grad) for name, each in named if each.grad is not None}


def test_ranks_without_tokens_repeated_calls_and_frozen_parameters_are_reduced_alike() -> None:
    assert ranks(4).run(odd_passes) == [[True] * 4] * 4


# ---- what experts are -----------------------------------------------------------------------------


def layouts(rank: int, world: int) -> list[Any]:
    mesh = make_mesh({"dp": 1, "ep": 2, "esp": 2})
    model = pmoe.parallelize(build(submesh(mesh)), mesh)
    experts = model.blocks[0].moe.experts
    ignored = model._ddp_params_and_buffers_to_ignore
    of_block = model.blocks[0]._ddp_params_and_buffers_to_ignore
    assert pmoe.parallelize(model, mesh) is model  # again: nothing changes
    assert experts is model.blocks[0].moe.experts and ignored == model._ddp_params_and_buffers_to_ignore
    return [
        {name: (tuple(each.shape), str(each.placements)) for name, each in experts.named_parameters()},
        [tuple(each.shape) for each in experts.local_parameters()],
        {name for name, each in model.named_parameters() if ".experts." in name} <= set(ignored),
        sorted(name for name in of_block if not name.startswith("_orig_mod.")),
        len(pmoe.expert_parameters(model)),
    ]


def test_experts_are_sharded_along_their_dimensions_and_named_to_ddp() -> None:
    for parameters, local, ignored, of_block, count in ranks(4).run(layouts):
        assert parameters == {
            "w1": ((4, 12, 8), "(Replicate(), Shard(dim=0), Shard(dim=1))"),
            "w2": ((4, 8, 12), "(Replicate(), Shard(dim=0), Shard(dim=2))"),
            "b1": ((4, 12), "(Replicate(), Shard(dim=0), Shard(dim=1))"),
            "b2": ((4, 8), "(Replicate(), Shard(dim=0), Replicate())"),
        }
        assert local == [(2, 6, 8), (2, 8, 6), (2, 6), (2, 8)]
        assert ignored and of_block == [f"moe.experts.{name}" for name in ("b1", "b2", "w1", "w2")]
        assert count == 8


class Counted(nn.Module):
    """An expert with a buffer: the sum of all values that it has seen."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D_MODEL, D_MODEL)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += rows.detach().sum()
        y: Tensor = self.inner(rows)
        return y


def experts_under_ddp(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Buffers without DistributedDataParallel and with it, after two passes."""
    mesh, found = make_mesh({"ep": world}), list[list[float]]()
    for wrap in (False, True):
        model = nn.Sequential(nn.BatchNorm1d(D_MODEL), pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 2, expert=Counted))
        with torch.no_grad():
            model[1].gate.weight.copy_(torch.linspace(-1, 1, 4 * D_MODEL).view(4, D_MODEL))
        pmoe.parallelize(model, mesh)
        run = DistributedDataParallel(model) if wrap else model
        for seed in range(2):
            run(torch.randn(6, D_MODEL, generator=torch.Generator().manual_seed(seed)))
        found.append([float(each.seen) for each in model[1].experts.local])
    return found[0], found[1]


def test_buffers_of_experts_stay_each_ranks_own_under_ddp() -> None:
    (alone_0, wrapped_0), (alone_1, wrapped_1) = ranks(2).run(experts_under_ddp)
    assert wrapped_0 == alone_0 and wrapped_1 == alone_1
    assert alone_0 != alone_1


def put_in(model: nn.Module, how: str) -> nn.Module:
    """``model`` with other names, as people wrap theirs."""
    if how == "compiled":
        return torch.compile(model, backend="eager")
    if how == "a part is checkpointed":
        model[1] = checkpoint_wrapper(model[1])
    return nn.Sequential(model) if how == "in another module" else model


def gradients_under(rank: int, world: int, how: str, again: bool, expert: str) -> list[Tensor] | str:
    """Of experts, where names changed between parallelize and DistributedDataParallel; or its error."""
    mesh = make_mesh({"ep": world})
    torch.manual_seed(0)
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 2, expert="ffn" if expert == "ffn" else mlp)
    model = pmoe.parallelize(nn.Sequential(nn.Linear(D_MODEL, D_MODEL), layer), mesh)
    wrapped = put_in(model, how)
    if again:
        pmoe.parallelize(wrapped, mesh)
    try:
        x = torch.randn(6, D_MODEL, generator=torch.Generator().manual_seed(rank))
        DistributedDataParallel(wrapped)(x).square().sum().backward()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return [local_part(each.grad) for each in pmoe.expert_parameters(model) if each.grad is not None]


@pytest.mark.parametrize("how", ["compiled", "a part is checkpointed", "in another module"])
def test_experts_are_left_alone_whatever_names_wrappers_give_them(how: str) -> None:
    for expert in ("ffn", "modules"):
        expected = ranks(2).run(gradients_under, "as it was", False, expert)
        found = ranks(2).run(gradients_under, how, how != "compiled", expert)
        for own, wanted in zip(found, expected, strict=True):
            assert sorted(map(str, own)) == sorted(map(str, wanted)) and len(own) > 1


def test_experts_that_ddp_knows_by_no_name_are_refused_and_not_reduced() -> None:
    for message in ranks(2).run(gradients_under, "in another module", False, "modules"):
        assert "must not be reduced by DistributedDataParallel" in message
        assert "call pmoe.parallelize again" in message


def clipped_by_one_rank(rank: int, world: int) -> str:
    model = nn.Sequential(pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 2))
    pmoe.parallelize(model, make_mesh({"ep": world}))
    model(torch.ones(3, D_MODEL)).sum().backward()
    own = [dist.new_group([each]) for each in range(world)][rank]
    with pytest.raises(ValueError, match="group") as error:
        pmoe.clip_grad_norm_(model, 1.0, group=own)
    return str(error.value)


def test_a_group_that_holds_a_part_of_the_model_is_refused() -> None:
    for message in ranks(2).run(clipped_by_one_rank):
        assert "group (of size 1) must be all ranks that hold the model together: 0 is in 2 parts" in message


def norms_with(rank: int, world: int, value: float, norm_type: float) -> list[float]:
    """Where one rank's gradients hold ``value``, by that rank."""
    found = []
    for where in range(world):
        model = nn.Sequential(pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 2))
        pmoe.parallelize(model, make_mesh({"ep": world}))
        model(torch.ones(3, D_MODEL)).sum().backward()
        if rank == where:
            local_part(model[0].experts.w1.grad).fill_(value)
        found.append(float(pmoe.clip_grad_norm_(model, 1.0, norm_type)))
    return found


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_that_is_not_finite_is_that_on_every_rank_whichever_has_it(norm_type: float) -> None:
    for found in ranks(2).run(norms_with, math.nan, norm_type):
        assert len(found) == 2 and all(math.isnan(each) for each in found)
    for found in ranks(2).run(norms_with, math.inf, norm_type):
        assert found == [math.inf] * 2


def other_seeds(rank: int, world: int) -> list[Tensor]:
    mesh = square(rank, world)
    torch.manual_seed(rank)
    layer = pmoe.MoELayer(4, 6, 4, mesh=mesh["ep"])
    before = layer.experts.w2.detach().clone()
    pmoe.parallelize(layer, mesh)
    return [before, layer.experts.w2.to_local().detach()]


def test_copies_take_the_values_of_the_first() -> None:
    (first, now_0), (second, now_1), (third, now_2), (_, now_3) = ranks(4).run(other_seeds)
    assert torch.equal(now_0, first) and torch.equal(now_2, first) and not torch.equal(third, first)
    assert torch.equal(now_1, second) and torch.equal(now_3, second)


def copies_of_models(rank: int, world: int) -> dict[str, tuple[bool, ...]]:
    mesh = square(rank, world)
    model = pmoe.parallelize(build(mesh["ep"]), mesh)
    tokens = batch(0, world).chunk(world)[rank]
    loss_of(model, tokens).backward()
    expected = {name: whole(each.grad) for name, each in model.named_parameters()}
    made: dict[str, nn.Module] = {"copied": copy.deepcopy(model)}
    made["made empty, then loaded"] = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    made["made empty, then loaded"].load_state_dict(model.state_dict())
    made["assigned"] = copy.deepcopy(model).to("meta")
    state = {name: each.clone() for name, each in model.state_dict().items()}
    made["assigned"].load_state_dict(state, assign=True)
    made["converted there and back"] = copy.deepcopy(model).to(torch.float64).to(torch.float32)
    for name, group in (("built on meta", mesh["ep"]), ("built on meta, over other ranks", None)):
        with torch.device("meta"):
            other = Model(group)
        pmoe.parallelize(other, mesh).to_empty(device="cpu").load_state_dict(model.state_dict())
        made[name] = other
    found = {}
    for name, other in made.items():
        other.zero_grad()
        loss_of(other, tokens).backward()
        errors = [relative_error(whole(each.grad), expected[at]) for at, each in other.named_parameters()]
        marked = {at for at, each in other.named_parameters() if is_expert(each)}
        dtensors = {at for at, each in other.named_parameters() if isinstance(each, DTensor)}
        found[name] = (max(errors) < 1e-5, len(marked) == 8, marked == dtensors)
    return found


def test_copied_loaded_converted_and_meta_models_stay_parallelized() -> None:
    for found in ranks(4).run(copies_of_models):
        assert len(found) == 6
        assert set(found.values()) == {(True, True, True)}, found


def plain_tools(rank: int, world: int) -> list[Any]:
    """What a layer is asked for gives the same answers before and after."""
    mesh = square(rank, world)
    answers = []
    for is_parallelized in (False, True):
        layer = build(mesh["ep"], memory_reuse="S4", pipeline=2).blocks[0].moe
        if is_parallelized:
            pmoe.parallelize(layer, mesh)
        layer(torch.ones(3, 8)).sum().backward()
        memory = layer.predict_memory(16)
        answers.append([memory, repr(layer), searched.key_of(layer.parts), layer.memory_shape()])
    dense = pmoe.GradientReducer(pmoe.parallelize(build(mesh["ep"]), mesh))
    answers.append(any(".experts." in name for name in dense.names))
    dense.remove()
    return answers


def test_predictions_names_and_reducers_know_the_local_part() -> None:
    for before, after, reduces_experts in ranks(4).run(plain_tools):
        assert before == after
        assert not reduces_experts


def mixed_precision(rank: int, world: int) -> tuple[str, float, float, torch.dtype]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, tokens = square(rank, world), batch(0, world).chunk(world)[rank]
    model = pmoe.parallelize(build(mesh["ep"]), mesh)
    expected = loss_of(model, tokens).item()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(
        model, mesh=make_mesh({"all": world}), mp_policy=policy, ignored_params=pmoe.expert_parameters(model)
    )
    with pytest.raises(ValueError) as error:
        loss_of(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, tokens)
    loss.backward()
    return str(error.value), loss.item(), expected, model.blocks[0].moe.experts.w1.grad.dtype


def test_mixed_precision_of_fsdp_needs_autocast_for_experts() -> None:
    for message, loss, expected, dtype in ranks(4).run(mixed_precision, timeout=SLOW_IMPORT):
        assert message == (
            "x of dtype torch.bfloat16 must be of the layer's dtype (torch.float32), or under autocast"
        )
        assert loss == pytest.approx(expected, rel=2e-2) and dtype == torch.float32


def torchs_tools(rank: int, world: int) -> dict[str, bool]:
    """As docs/training.md says that they are to be used."""
    mesh = make_mesh({"ep": world})
    plain = build(None, group=Ranks.alone())
    for parameter in plain.parameters():
        parameter.data.mul_(2)
    model = pmoe.parallelize(build(None, group=Ranks.alone()), mesh)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    values = {name: whole(each) for name, each in model.named_parameters()}
    found = {"loaded": all(torch.equal(each, plain.get_parameter(name)) for name, each in values.items())}
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.75))
    average.update_parameters(model)  # the first is taken whole
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    average.update_parameters(model)
    means = {name: whole(each) for name, each in average.module.named_parameters()}
    found["averaged"] = all(torch.equal(means[name], 0.75 * each) for name, each in values.items())
    loss_of(average, batch(0, 1)).backward()
    torch.nn.utils.clip_grad_value_(average.parameters(), 1e-3, foreach=False)
    found["clipped"] = all(whole(each.grad).abs().max() <= 1e-3 for each in average.parameters())
    average.zero_grad(set_to_none=False)
    found["zeroed"] = all(not whole(each.grad).any() for each in average.parameters())
    return found


def test_torchs_own_tools_take_experts_as_the_docs_say() -> None:
    for found in ranks(2).run(torchs_tools):
        assert found == dict.fromkeys(("loaded", "averaged", "clipped", "zeroed"), True)


def early_optimizers(rank: int, world: int) -> list[str]:
    """What optimizers say that were made before the experts were replaced, and one made in time."""
    mesh, found = make_mesh({"ep": world}), []
    for how in ("laid out", "spread and laid out", "spread"):
        model = build(mesh) if how == "laid out" else alone().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if how == "spread":
            for block in model.blocks:
                block.moe.spread(mesh)
        else:
            pmoe.parallelize(model, mesh)
        loss_of(model, batch(0, 1)).backward()
        before = model.head.weight.detach().clone()
        with pytest.raises(ValueError) as error:
            optimizer.step()
        assert torch.equal(model.head.weight, before)
        torch.optim.SGD(pmoe.parameter_groups(model), lr=0.1).step()
        assert not torch.equal(model.head.weight, before)
        found.append(str(error.value))
    return found


def test_an_optimizer_made_before_experts_are_replaced_refuses_to_step() -> None:
    for found in ranks(2).run(early_optimizers):
        for message, experts in zip(found, (2, 4, 4), strict=True):  # that this rank had before
            assert message == (
                f"optimizer (SGD of a parameter of shape ({experts}, 12, 8) that the model has no more) must "
                "be made after pmoe.parallelize or MoELayer.spread, which replace experts' parameters"
            )


# ---- refused --------------------------------------------------------------------------------------


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
    """As FSDP2 leaves a dense module."""
    return distribute_module(module, mesh["dp"])


def sharded_by_fsdp(model: Model) -> None:
    """With ignored_params forgotten."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=make_mesh({"all": dist.get_world_size()}))
    model(batch(0, 1)[:, :-1])


def assigned_plainly(model: nn.Module) -> None:
    model.load_state_dict({name: whole(each) for name, each in model.state_dict().items()}, assign=True)


def test_what_cannot_be_parallelized_is_refused_by_name() -> None:
    wanted = [
        r"model \(Linear\) must have a pmoe.MoELayer",
        r"mesh \(dimensions \('dp',\)\) must have the dimension \"ep\"",
        r"mesh \(dimensions \('tp', 'dp', 'ep'\)\) must have",
        r"^blocks.0.moe: a layer built over 4 ranks must not be spread over others: .* only 1 of 4 experts",
        r"^blocks.0.moe: a layer built over 2 ranks must not be spread",
        r"^blocks.0.moe: mesh .* must be in ascending order along \"ep\"",
        r"^blocks.0.moe: a layer that is parallelized already must not be parallelized over other ranks",
        r"^blocks.0.moe: experts \(modules\) must not be split over \"esp\"",
        r"^blocks.0.moe \(parallelized\) reduces its experts' gradients in backward",
        r"parameters \(parameter \d+ is an expert's that is no DTensor\) must be the model",
        r"model \(weight is a DTensor\) must have plain dense parameters",
        r"model \(a DistributedDataParallel\) must be wrapped after pmoe.parallelize",
        r"model \(a FSDPModel\) must be wrapped after pmoe.parallelize",
        r"Cannot concatenate overlapping meshes",  # torch's own, at fully_shard
        r"experts' parameters must not be replaced by a data-parallel wrapper: use fully_shard",
        r"w1 \(a plain tensor, assigned\) must be a DTensor",
        r"^Parameter$",
    ]
    for found in ranks(4).run(refusals, timeout=SLOW_IMPORT):
        assert len(found) == len(wanted)
        for message, pattern in zip(found, wanted, strict=True):
            assert re.search(pattern, message), message


def meta_job(rank: int, world: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), pmoe.MoELayer(6, 8, 4, 2, group=Ranks.alone()))
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

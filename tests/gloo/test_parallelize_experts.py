"""pmoe.parallelize and experts: DTensors that optimizers, wrappers and copies of a model understand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import pmoe
from pmoe.call.sizes import memory_shape
from pmoe.choose import search
from pmoe.comm.ranks import Ranks
from pmoe.experts.marks import is_expert
from pmoe.experts.operands import local_part
from tests.gloo.kit import error_of
from tests.gloo.lm import (
    D_HIDDEN,
    D_MODEL,
    SLOW_IMPORT,
    Model,
    alone,
    batch,
    build,
    loss_of,
    make_mesh,
    square,
    submesh,
    whole,
)
from tests.own_experts import mlp
from tests.pool import ranks
from tests.reference import relative_error


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
        [tuple(each.shape) for each in experts.operands()],
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
    """Returns buffers without DistributedDataParallel and with it, after two passes."""
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
    """Returns ``model`` inside another module, so that its parameters have other names."""
    if how == "compiled":
        return torch.compile(model, backend="eager")
    if how == "a part is checkpointed":
        model[1] = checkpoint_wrapper(model[1])
    return nn.Sequential(model) if how == "in another module" else model


def gradients_under(rank: int, world: int, how: str, expert: str) -> list[Tensor]:
    """Returns gradients if experts' names change between parallelize and DistributedDataParallel."""
    mesh = make_mesh({"ep": world})
    torch.manual_seed(0)
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 2, expert="ffn" if expert == "ffn" else mlp)
    model = pmoe.parallelize(nn.Sequential(nn.Linear(D_MODEL, D_MODEL), layer), mesh)
    wrapped = put_in(model, how)
    x = torch.randn(6, D_MODEL, generator=torch.Generator().manual_seed(rank))
    DistributedDataParallel(wrapped)(x).square().sum().backward()
    return [local_part(each.grad) for each in pmoe.expert_parameters(model) if each.grad is not None]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["compiled", "a part is checkpointed", "in another module"])
def test_experts_are_left_alone_whatever_names_wrappers_give_them(how: str) -> None:
    for expert in ("ffn", "modules"):
        expected = ranks(2).run(gradients_under, "as it was", expert)
        found = ranks(2).run(gradients_under, how, expert)
        for own, wanted in zip(found, expected, strict=True):
            assert sorted(map(str, own)) == sorted(map(str, wanted)) and len(own) > 1


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
    """Returns norms for each rank whose gradients have a ``value``."""
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


@pytest.mark.slow
def test_copied_loaded_converted_and_meta_models_stay_parallelized() -> None:
    for found in ranks(4).run(copies_of_models):
        assert len(found) == 6
        assert set(found.values()) == {(True, True, True)}, found


def plain_tools(rank: int, world: int) -> list[Any]:
    """Returns the answers of a layer to usual questions, before parallelize and after it."""
    mesh = square(rank, world)
    answers = []
    for is_parallelized in (False, True):
        layer = build(mesh["ep"], memory_reuse="S4", pipeline=2).blocks[0].moe
        if is_parallelized:
            pmoe.parallelize(layer, mesh)
        layer(torch.ones(3, 8)).sum().backward()
        memory = layer.predict_memory(16)
        answers.append(
            [
                memory,
                repr(layer),
                search.key_of_degrees(layer.layer_modules),
                memory_shape(layer.layer_modules),
            ]
        )
    dense = pmoe.GradientReducer(pmoe.parallelize(build(mesh["ep"]), mesh))
    answers.append(any(".experts." in name for name in dense.names))
    dense.remove()
    return answers


def test_predictions_names_and_reducers_know_the_local_part() -> None:
    for before, after, reduces_experts in ranks(4).run(plain_tools):
        assert before == after
        assert not reduces_experts


def mixed_precision(rank: int, world: int) -> list[tuple[float, float, torch.dtype]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, tokens = square(rank, world), batch(0, world).chunk(world)[rank]
    model = pmoe.parallelize(build(mesh["ep"]), mesh)
    expected = loss_of(model, tokens).item()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(
        model, mesh=make_mesh({"all": world}), mp_policy=policy, ignored_params=pmoe.expert_parameters(model)
    )
    found = []
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, tokens)
        loss.backward()
        found.append((loss.item(), expected, model.blocks[0].moe.experts.w1.grad.dtype))
    return found


def test_mixed_precision_of_fsdp_computes_experts_in_bfloat16_with_autocast_and_without() -> None:
    for loss, expected, dtype in sum(ranks(4).run(mixed_precision, timeout=SLOW_IMPORT), []):
        assert loss == pytest.approx(expected, rel=2e-2) and dtype == torch.float32


def torchs_tools(rank: int, world: int) -> dict[str, bool]:
    """Uses torch's tools as docs/training.md says."""
    mesh = make_mesh({"ep": world})
    plain = build(None, group=Ranks.single())
    for parameter in plain.parameters():
        parameter.data.mul_(2)
    model = pmoe.parallelize(build(None, group=Ranks.single()), mesh)
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
    """Returns errors of optimizers that were made too early, and of one made in time.

    Too early means before the experts were replaced.
    """
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
                f"optimizer (SGD) has a parameter of shape ({experts}, 12, 8) that is no longer in the "
                "model: pmoe.parallelize or MoELayer.spread has replaced it. Make the optimizer after that "
                "call"
            )


# ---- copies that are not trained alike


def frozen_job(rank: int, world: int, frozen: tuple[str, ...], who: tuple[int, ...]) -> str:
    """Returns a rank's error if only the ranks ``who`` have frozen the experts' parameters ``frozen``.

    The mesh holds two copies of the experts. Then all ranks freeze the parameters, and the step succeeds.
    """
    mesh = square(rank, world)
    layer = pmoe.parallelize(pmoe.MoELayer(4, 6, 4, 2, mesh=mesh["ep"], dtype=torch.float64), mesh)
    x = torch.ones(3, 4, dtype=torch.float64)
    layer(x).sum().backward()
    for name in frozen:
        layer.experts.get_parameter(name).requires_grad_(rank not in who)
    told = error_of(lambda: layer(x).sum().backward())
    for name in frozen:
        layer.experts.get_parameter(name).requires_grad_(False)
    layer(x).sum().backward()
    return told


@pytest.mark.parametrize(
    "frozen, who", [(("w1",), (0,)), (("w1", "w2", "b1", "b2"), (0, 1)), (("b1", "b2"), (1, 2))]
)
def test_experts_frozen_on_some_copies_only_are_an_error_on_every_rank(
    frozen: tuple[str, ...], who: tuple[int, ...]
) -> None:
    """Without the error ranks hung, or sent gradients of different lengths, at which gloo aborts."""
    named = ", ".join(name for name in ("w1", "w2", "b1", "b2") if name in frozen)
    told = f"ValueError: requires_grad of experts' {named} must be the same on all copies of the experts"
    assert ranks(4).run(frozen_job, frozen, who) == [told] * 4

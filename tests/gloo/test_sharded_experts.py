"""Experts that FSDP2 shards over their copies (``shard_experts`` of parallelize) train as whole copies do."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.pipelining._backward import stage_backward_input
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.experts.marks import is_expert
from pmoe.experts.operands import local_part
from tests.gloo.kit import error_of, watched_all_to_alls
from tests.gloo.lm import (
    SLOW_IMPORT,
    Model,
    backward_passes,
    batch,
    build,
    loss_of,
    make_mesh,
    shared,
    submesh,
    whole,
)
from tests.gloo.test_footprint import step_bytes
from tests.own_experts import Counting, mlp, normed
from tests.pool import ranks

MAX_NORM, STEPS = 0.9, 4
SQUARE = {"dp": 2, "ep": 2}


def parallelized(
    sizes: dict[str, int], shard_experts: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> Model:
    mesh = make_mesh(sizes)
    model = build(submesh(mesh), dtype, **options)
    return pmoe.parallelize(model, mesh, shard_experts=shard_experts)


def trained(
    rank: int, world: int, sizes: dict[str, int], shard_experts: Any, wrap: str, passes: int, expert: str
) -> dict[str, Any]:
    """Returns losses, norms, the first step's gradients, and parameters after some steps with clipping."""
    model = parallelized(sizes, shard_experts, expert=expert)
    wrapped = shared(wrap, model)
    optimizer = torch.optim.AdamW(pmoe.parameter_groups(wrapped), lr=1e-2, foreach=True)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        found["losses"].append(backward_passes(wrapped, wrap, step, passes, rank, world))
        if step == 0:
            found["gradients"] = {name: whole(each.grad).clone() for name, each in model.named_parameters()}
            found["held"] = {
                name: each.to_local().numel() / each.numel()
                for name, each in model.named_parameters()
                if is_expert(each)
            }
        found["norms"].append(pmoe.clip_grad_norm_(wrapped, MAX_NORM).item())
        optimizer.step()
    found["parameters"] = {name: whole(each) for name, each in model.named_parameters()}
    return found


CASES = [
    # the sizes of the mesh, that of the run with whole copies, wrapper, passes, experts
    (SQUARE, SQUARE, "ddp", 1, "ffn"),
    (SQUARE, SQUARE, "fsdp", 2, "swiglu"),
    (SQUARE, SQUARE, "ddp", 2, "swiglu"),
    (SQUARE, SQUARE, "fsdp", 1, "ffn"),
    ({"ep": 2, "dp": 2}, {"ep": 2, "dp": 2}, "fsdp", 1, "swiglu"),
    ({"dp": 4, "ep": 1}, {"dp": 4, "ep": 1}, "ddp", 1, "swiglu"),
    ({"nodes": 2, "dp": 2, "ep": 1}, {"dp": 4, "ep": 1}, "fsdp", 2, "ffn"),
    ({"nodes": 2, "dp": 1, "ep": 2}, SQUARE, "ddp", 1, "ffn"),
    ({"dp": 2, "ep": 1, "esp": 2}, {"dp": 2, "ep": 1, "esp": 2}, "fsdp", 1, "swiglu"),
    ({"dp": 2, "ep": 1, "esp": 2}, {"dp": 2, "ep": 1, "esp": 2}, "ddp", 1, "ffn"),
]


@pytest.mark.parametrize(
    ("sizes", "plain", "wrap", "passes", "expert"),
    [pytest.param(*case, marks=pytest.mark.slow if at else ()) for at, case in enumerate(CASES)],
)
def test_sharded_experts_train_as_whole_copies_do(
    sizes: dict[str, int], plain: dict[str, int], wrap: str, passes: int, expert: str
) -> None:
    job = ranks(4)
    expected = job.run(trained, plain, False, wrap, passes, expert, timeout=SLOW_IMPORT)
    found = job.run(trained, sizes, True, wrap, passes, expert, timeout=SLOW_IMPORT)
    for own, wanted in zip(found, expected, strict=True):
        assert own["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        assert own["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
        assert own["norms"] == found[0]["norms"]
        for kind in ("gradients", "parameters"):
            assert own[kind].keys() == wanted[kind].keys()
            for name, value in own[kind].items():
                torch.testing.assert_close(value, wanted[kind][name], rtol=1e-5, atol=1e-7)
        if passes == 1 and sizes == plain and sizes["dp"] == 2:  # sums of two numbers, divided by 2 or 4
            assert all(torch.equal(value, wanted["gradients"][n]) for n, value in own["gradients"].items())
        parts = {name: sizes["dp"] * sizes["ep"] * sizes.get("esp", 1) for name in own["held"]}
        for name in own["held"]:
            parts[name] //= sizes.get("esp", 1) if name.endswith("b2") else 1
        assert own["held"] == {name: 1 / parts[name] for name in parts} and parts


# ---- experts that are modules


def module_trained(
    rank: int, world: int, sizes: dict[str, int], shard_experts: Any, wrap: str, expert: Any
) -> dict[str, Any]:
    """Returns losses, norms, gradients and parameters by global names, and how many elements a rank keeps."""
    model = parallelized(sizes, shard_experts, torch.float64, expert=expert, memory_reuse="S4", pipeline=2)
    wrapped = shared(wrap, model)
    optimizer = torch.optim.SGD(pmoe.parameter_groups(wrapped), lr=0.5, momentum=0.5, foreach=True)
    experts = {
        f"{at}.{layer.first_expert + number}.{name}": parameter
        for at, layer in model.named_modules()
        if isinstance(layer, pmoe.MoELayer)
        for number, module in enumerate(layer.experts.local)
        for name, parameter in module.named_parameters()
    }
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        found["losses"].append(backward_passes(wrapped, wrap, step, 2, rank, world))
        if step == 0:
            found["gradients"] = {name: whole(each.grad).clone() for name, each in experts.items()}
        found["norms"].append(pmoe.clip_grad_norm_(wrapped, MAX_NORM).item())
        optimizer.step()
    found["parameters"] = {name: whole(each) for name, each in experts.items()}
    states = [optimizer.state[each]["momentum_buffer"] for each in experts.values()]
    kept = [value for each in experts.values() for value in (each, each.grad)] + states
    found["elements"] = sum(local_part(each).numel() for each in kept)
    return found


MODULE_CASES = [
    # sizes of the mesh, ranks, wrapper, experts
    (SQUARE, 4, "fsdp", mlp),
    ({"dp": 2, "ep": 1}, 2, "ddp", normed),
    (SQUARE, 4, "ddp", Counting),
    ({"dp": 4, "ep": 1}, 4, "fsdp", mlp),
    ({"nodes": 2, "dp": 2, "ep": 1}, 4, "ddp", mlp),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "world", "wrap", "expert"), MODULE_CASES)
def test_sharded_modules_train_as_whole_copies_do(
    sizes: dict[str, int], world: int, wrap: str, expert: Any
) -> None:
    job = ranks(world)
    plain = {"dp": sizes["dp"] * sizes.get("nodes", 1), "ep": sizes["ep"]}
    expected = job.run(module_trained, plain, False, wrap, expert, timeout=SLOW_IMPORT)
    found = job.run(module_trained, sizes, True, wrap, expert, timeout=SLOW_IMPORT)
    for own, wanted in zip(found, expected, strict=True):
        assert own["losses"] == pytest.approx(wanted["losses"], rel=1e-12)
        assert own["norms"] == pytest.approx(wanted["norms"], rel=1e-12)
        assert own["elements"] == wanted["elements"] // sizes["dp"]
        for kind in ("gradients", "parameters"):
            assert own[kind].keys() == wanted[kind].keys() and own[kind]
            for name, value in own[kind].items():
                torch.testing.assert_close(value, wanted[kind][name], rtol=1e-11, atol=1e-13)


def saving_modules(rank: int, world: int, folder: str, sizes: dict[str, int]) -> list[float]:
    """Saves a run with sharded modules after two steps. Returns the losses that follow."""
    model = parallelized(sizes, True, torch.float64, expert=mlp)
    optimizer = optimizer_of(model)
    for step in range(2):
        one_step(model, optimizer, step, rank, world)
    pmoe.save_checkpoint(folder, model, optimizer, step=2)
    return [one_step(model, optimizer, step, rank, world) for step in (2, 3)]


def loading_modules(
    rank: int, world: int, folder: str, sizes: dict[str, int], shard_experts: bool
) -> list[float]:
    """Loads the run in another layout. Returns the losses that follow."""
    model = parallelized(sizes, shard_experts, torch.float64, expert=mlp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = optimizer_of(model)
    assert pmoe.load_checkpoint(folder, model, optimizer).step == 2
    return [one_step(model, optimizer, step, rank, world) for step in (2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "world", "others", "shard_experts"),
    [
        (SQUARE, 2, {"dp": 2, "ep": 1}, True),
        (SQUARE, 4, {"dp": 1, "ep": 4}, False),
        ({"nodes": 2, "dp": 2, "ep": 1}, 4, SQUARE, True),
    ],
)
def test_checkpoints_of_sharded_modules_load_on_other_numbers_of_ranks(
    sizes: dict[str, int], world: int, others: dict[str, int], shard_experts: bool, tmp_path: Path
) -> None:
    going_on = ranks(4).run(saving_modules, str(tmp_path), sizes, timeout=SLOW_IMPORT)
    found = ranks(world).run(loading_modules, str(tmp_path), others, shard_experts, timeout=SLOW_IMPORT)
    for step in range(2):
        mean = sum(losses[step] for losses in found) / world
        assert mean == pytest.approx(sum(losses[step] for losses in going_on) / 4, rel=1e-12)


# ---- policies


def policies(rank: int, world: int) -> dict[str, Any]:
    """Returns the losses of two steps under each policy of FSDP2, and what the experts' parameters are."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    everyone = make_mesh({"all": world})
    cases: dict[str, Any] = {
        "plain": False,
        "sharded": True,
        "kept": {"reshard_after_forward": False},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "bf16": {"mp_policy": bf16},
        "bf16 everywhere": {"mp_policy": bf16},
        "bf16, dense part only": False,
        "bf16, dense part, sharded": True,
    }
    found: dict[str, Any] = {}
    for name, shard_experts in cases.items():
        model = parallelized(SQUARE, shard_experts)
        if name.startswith("bf16 ") or name.startswith("bf16,"):
            experts = pmoe.expert_parameters(model)
            for module in (*model.blocks, model):
                fully_shard(module, mesh=everyone, ignored_params=experts, mp_policy=bf16)
            wrapped: nn.Module = model
        else:
            wrapped = shared("ddp", model)
        optimizer = torch.optim.SGD(pmoe.parameter_groups(model), lr=0.1, momentum=0.9)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            losses.append(backward_passes(wrapped, "ddp", step, 1, rank, world))
            optimizer.step()
        with torch.no_grad():
            losses.append(loss_of(wrapped, batch(3, world).chunk(world)[rank]).item())
        kinds = {each.dtype for each in model.blocks[0].moe.experts.parameters()}
        path = model.blocks[0].moe.ran.path
        found[name] = losses, kinds, path
    return found


@pytest.mark.slow
def test_policies_of_fsdp2_apply_to_sharded_experts() -> None:
    for found in ranks(4).run(policies, timeout=SLOW_IMPORT):
        plain = found["plain"][0]
        for name in ("sharded", "kept", "offloaded"):
            assert found[name][0] == plain, name
        for name in ("bf16", "bf16 everywhere", "bf16, dense part only", "bf16, dense part, sharded"):
            assert found[name][0] != plain
            assert found[name][0] == pytest.approx(plain, rel=2e-2), name
        # Autocast of whole experts and FSDP2's cast of sharded ones compute the same numbers.
        dense = found["bf16, dense part only"][0]
        assert found["bf16, dense part, sharded"][0] == pytest.approx(dense, rel=1e-6)
        assert {tuple(kinds) for _, kinds, _ in found.values()} == {(torch.float32,)}


# ---- checkpoints


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pmoe.parameter_groups(model), lr=1e-2)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, world: int) -> float:
    """Trains one step on all ranks' tokens, with the dense part reduced by hand."""
    optimizer.zero_grad()
    loss = loss_of(model, batch(step, 4).chunk(world)[rank])
    loss.backward()
    for parameter in model.parameters():
        if not is_expert(parameter):
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    optimizer.step()
    return loss.item()


def saving(rank: int, world: int, folder: str, sizes: dict[str, int], expert: str) -> list[float]:
    """Saves a run with sharded experts by pmoe and by DCP after two steps; returns the losses that follow."""
    model = parallelized(sizes, True, expert=expert)
    optimizer = optimizer_of(model)
    for step in range(2):
        one_step(model, optimizer, step, rank, world)
    pmoe.save_checkpoint(f"{folder}/own", model, optimizer, step=2)
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/dcp")
    whole_state = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        torch.save(whole_state, f"{folder}/whole.pt")
    return [one_step(model, optimizer, step, rank, world) for step in (2, 3)]


def loading(
    rank: int, world: int, folder: str, sizes: dict[str, int], shard_experts: Any, expert: str
) -> tuple[list[float], list[bool]]:
    """Loads a checkpoint into another layout. Returns the losses that follow, and if DCP loads the same."""
    torch.manual_seed(1)
    model = parallelized(sizes, shard_experts, expert=expert)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = optimizer_of(model)
    assert pmoe.load_checkpoint(f"{folder}/own", model, optimizer).step == 2
    loaded = {name: whole(each).clone() for name, each in model.named_parameters()}
    same = []
    state = get_model_state_dict(model)
    with torch.no_grad():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    set_model_state_dict(model, state)
    same.append(all(torch.equal(whole(each), loaded[name]) for name, each in model.named_parameters()))
    full = torch.load(f"{folder}/whole.pt", weights_only=True)
    same.append(all(torch.equal(full[name], value) for name, value in loaded.items()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    # torch replaces the tensors of the dict that it gets by the model's DTensors. Taken for whole tensors in
    # the next load, these would make ranks wait for each other forever.
    set_model_state_dict(model, dict(full), options=StateDictOptions(full_state_dict=True))
    same.append(all(torch.equal(whole(each), loaded[name]) for name, each in model.named_parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(full) if rank == 0 else {}, options=from_first)
    same.append(all(torch.equal(whole(each), loaded[name]) for name, each in model.named_parameters()))
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments = get_optimizer_state_dict(model, optimizer, options=gathered)
    other = optimizer_of(model)
    set_optimizer_state_dict(model, other, moments if rank == 0 else {}, options=from_first)
    same.append(
        all(
            torch.equal(whole(other.state[each]["exp_avg"]), whole(optimizer.state[each]["exp_avg"]))
            for each in model.parameters()
        )
    )
    return [one_step(model, optimizer, step, rank, world) for step in (2, 3)], same


LAYOUTS = [
    # saved with, ranks, loaded with, sharded there
    (SQUARE, 2, {"dp": 2, "ep": 1}, True),
    (SQUARE, 4, {"dp": 1, "ep": 4}, False),
    (SQUARE, 4, {"dp": 4, "ep": 1}, True),
    (SQUARE, 2, {"ep": 2}, False),
    ({"nodes": 2, "dp": 2, "ep": 1}, 4, {"ep": 2, "dp": 2}, True),
    ({"dp": 2, "ep": 1, "esp": 2}, 4, SQUARE, True),
]


@pytest.mark.parametrize(
    ("sizes", "world", "others", "shard_experts"),
    [pytest.param(*case, marks=() if at < 1 else pytest.mark.slow) for at, case in enumerate(LAYOUTS)],
)
@pytest.mark.slow
def test_checkpoints_of_sharded_experts_load_on_other_numbers_of_ranks(
    sizes: dict[str, int], world: int, others: dict[str, int], shard_experts: bool, tmp_path: Path
) -> None:
    expert = "ffn" if "esp" in sizes else "swiglu"  # DCP does not take gated experts over "esp"
    going_on = ranks(4).run(saving, str(tmp_path), sizes, expert, timeout=SLOW_IMPORT)
    found = ranks(world).run(loading, str(tmp_path), others, shard_experts, expert, timeout=SLOW_IMPORT)
    for step in range(2):
        mean = sum(losses[step] for losses, _ in found) / world
        assert mean == pytest.approx(sum(losses[step] for losses in going_on) / 4, rel=1e-5)
    assert [same for _, same in found] == [[True] * 5] * world


def gated_over_esp(rank: int, world: int, folder: str) -> bool:
    sizes = {"dp": 2, "ep": 1, "esp": 2}
    model = parallelized(sizes, True, expert="swiglu")
    before = {name: whole(each).clone() for name, each in model.named_parameters()}
    pmoe.save_checkpoint(folder, model, step=0)
    other = parallelized(sizes, False, expert="swiglu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    pmoe.load_checkpoint(folder, other)
    return all(torch.equal(whole(each), before[name]) for name, each in other.named_parameters())


def test_gated_experts_over_esp_and_copies_are_saved_in_two_boxes(tmp_path: Path) -> None:
    assert ranks(4).run(gated_over_esp, str(tmp_path), timeout=SLOW_IMPORT) == [True] * 4


def from_meta(rank: int, world: int, sizes: dict[str, int], expert: str) -> dict[str, torch.Tensor]:
    mesh = make_mesh(sizes)
    with torch.device("meta"):
        model = nn.Sequential(pmoe.MoELayer(6, 8, 4, 2, group=Ranks.single(), expert=expert))
    pmoe.parallelize(model, mesh, shard_experts=True)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model[0].reset_parameters()
    model(torch.randn(3, 6)).sum().backward()
    return {name: whole(value) for name, value in model.named_parameters()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "sizes", [SQUARE, {"dp": 4, "ep": 1}, {"ep": 4, "dp": 1}, {"dp": 2, "ep": 1, "esp": 2}]
)
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_sharded_experts_of_the_meta_device_are_drawn_as_whole_ones(
    sizes: dict[str, int], expert: str
) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(pmoe.MoELayer(6, 8, 4, 2, expert=expert))
    for found in ranks(4).run(from_meta, sizes, expert, timeout=SLOW_IMPORT):
        for name, value in model.named_parameters():
            assert torch.equal(found[name], value), name


def inside_of_matrices(rank: int, world: int) -> bool:
    """Experts that the copies do not divide are cut along their hidden columns, or d_model."""
    mesh = make_mesh({"dp": 2, "ep": 2})
    torch.manual_seed(5)
    expected = pmoe.MoELayer(6, 8, 2, 2, expert="swiglu", group=Ranks.single())
    with torch.device("meta"):
        layer = pmoe.MoELayer(6, 8, 2, 2, expert="swiglu", group=Ranks.single())
    pmoe.parallelize(layer, mesh, shard_experts=True)
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    own, plain = layer.experts.w1, expected.experts.w1
    assert own.to_local().shape == (1, 8, 6)
    with pytest.raises(ValueError, match="cut inside of matrices"):
        pmoe.ExpertMuon(layer)
    return torch.equal(whole(own), plain) and torch.equal(whole(layer.experts.b2), expected.experts.b2)


def test_experts_that_copies_do_not_divide_are_cut_inside() -> None:
    assert ranks(4).run(inside_of_matrices, timeout=SLOW_IMPORT) == [True] * 4


# ---- what other calls of FSDP2 leave behind


def evaluated(
    rank: int, world: int, folder: str, wrap: str, shard_experts: Any, evaluates: bool
) -> list[Any]:
    """Clips, saves and loads, maybe after evaluations, after which FSDP2 leaves gathered parameters."""
    model = parallelized(SQUARE, shard_experts, torch.float64)
    wrapped = shared(wrap, model)
    optimizer = torch.optim.SGD(pmoe.parameter_groups(model), lr=0.1, momentum=0.9)

    def evaluate() -> None:
        if evaluates:
            with torch.no_grad():
                loss_of(wrapped, batch(9, world).chunk(world)[rank])

    loss_of(wrapped, batch(0, world).chunk(world)[rank]).backward()
    evaluate()
    norm = pmoe.clip_grad_norm_(wrapped, 0.5).item()
    evaluate()
    optimizer.step()
    loss = torch.zeros(())
    if (
        wrap == "ddp"
    ):  # fully_shard would compute with parameters of the outermost module from before the step
        with torch.no_grad():
            loss = loss_of(wrapped, batch(2, world).chunk(world)[rank])
    after = loss.item()
    evaluate()
    own = {id(each) for group in pmoe.parameter_groups(model) for each in group["params"]}
    same = own == {id(each) for group in optimizer.param_groups for each in group["params"]}
    evaluate()
    pmoe.save_checkpoint(folder, wrapped, optimizer, step=1)
    evaluate()
    pmoe.load_checkpoint(folder, wrapped, optimizer)
    loss = loss_of(wrapped, batch(1, world).chunk(world)[rank])
    loss.backward()
    return [norm, same, after, loss.item(), pmoe.clip_grad_norm_(wrapped, 0.5).item()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "shard_experts"),
    [
        ("fsdp", True),
        ("ddp", {"reshard_after_forward": False}),
        ("fsdp", False),
    ],
)
def test_an_evaluation_before_clipping_and_saving_changes_nothing(
    wrap: str, shard_experts: Any, tmp_path: Path
) -> None:
    """FSDP2 leaves gathered parameters after a forward pass without backward. Optimizers have the parts."""
    results = [
        ranks(4).run(
            evaluated, str(tmp_path / str(evaluates)), wrap, shard_experts, evaluates, timeout=SLOW_IMPORT
        )
        for evaluates in (False, True)
    ]
    assert results[0] == results[1] and all(same for _, same, *_ in results[0])


def one_pass(model: nn.Module, rank: int, world: int) -> None:
    loss_of(model, batch(0, world).chunk(world)[rank]).backward()


def _fail(*_: Any) -> None:
    raise KeyError("a hook of the user")


def after_other_calls(rank: int, world: int) -> dict[str, Any]:
    """Returns gradients with a factor of FSDP2, and errors of a step and of a schedule between two passes."""
    model = parallelized(SQUARE, True, torch.float64)
    wrapped = shared("fsdp", model)
    found: dict[str, Any] = {}
    for factor in (None, 1.0, 8.0):
        wrapped.zero_grad()
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
        loss_of(wrapped, batch(0, world).chunk(world)[rank]).backward()
        gradients = {name: whole(each.grad).clone() for name, each in model.named_parameters()}
        if factor is None:
            means = gradients
        else:
            sums = [torch.allclose(factor * value, world * means[name]) for name, value in gradients.items()]
            found[f"factor {factor:g}"] = all(sums)
    for kind in ("ffn", mlp):
        model = parallelized(SQUARE, True, torch.float64, expert=kind)
        optimizer = torch.optim.SGD(pmoe.expert_parameters(model), lr=0.1)
        loss_of(model, batch(0, world).chunk(world)[rank]).backward()
        loss = loss_of(model, batch(0, world).chunk(world)[rank])
        optimizer.step()
        found["step" if kind == "ffn" else "step of modules"] = error_of(loss.backward)
    for wrap in ("ddp", "fsdp"):
        model = parallelized(SQUARE, True, torch.float64)
        wrapped = shared(wrap, model) if wrap == "fsdp" else model
        failing = model.blocks[1].moe.register_full_backward_hook(_fail)
        found[f"failed {wrap}"] = [error_of(loss_of(wrapped, batch(1, 1)).backward)]
        failing.remove()
        model.zero_grad()
        found[f"failed {wrap}"].append(error_of(partial(one_pass, wrapped, rank, world)))
        if wrap == "ddp":
            experts = [(name, each) for name, each in model.named_parameters() if is_expert(each)]
            same = [torch.allclose(whole(each.grad), means[name]) for name, each in experts]
            found["after a failure"] = all(same)
    layer = parallelized(SQUARE, True).blocks[0].moe
    x = torch.randn(3, 8, requires_grad=True)
    y = layer(x)
    try:
        stage_backward_input([y], [y.detach()], [x], iter(layer.parameters()))
    except RuntimeError as error:
        found["schedule"] = f"{type(error.__cause__).__name__}: {error.__cause__}"
    return found


@pytest.mark.slow
def test_factors_steps_and_schedules_of_torch_leave_no_wrong_gradients() -> None:
    for found in ranks(4).run(after_other_calls, timeout=SLOW_IMPORT):
        assert found["factor 1"] and found["factor 8"]
        assert re.search(r"RuntimeError: .* of shape \(4, 12, 8\) was changed between", found["step"])
        assert re.search(r"RuntimeError: .* was changed between", found["step of modules"])
        assert found["failed ddp"][1] == "" and found["after a failure"]
        assert re.search(r"RuntimeError: .* Call model.reset_iter_state\(\)", found["failed fsdp"][1])
        assert all("KeyError" in found[f"failed {wrap}"][0] for wrap in ("ddp", "fsdp"))
        assert re.search(r"ValueError: shard_experts \(True\) must be False .*zero bubble", found["schedule"])


# ---- the order of collectives, and bytes


def issued(rank: int, world: int, prefetches: bool) -> tuple[list[str], list[str]]:
    """Returns the order in which a step issues its collectives in forward and in backward.

    "gather 1" is the all-gather of the experts of block 1, "scatter 1" the reduce-scatter of their gradients,
    and "rows" all-to-alls of rows.
    """
    model = parallelized(SQUARE, True)
    wrapped = shared("fsdp", model)
    if prefetches:
        units = [[block, block.moe.experts] for block in model.blocks]
        for (part, *_), following in zip([[model], *units], units, strict=False):
            part.set_modules_to_forward_prefetch(following)
        for (part, *_), following in zip([[model], *units[::-1]], units[::-1], strict=False):
            part.set_modules_to_backward_prefetch(following)
    loss_of(wrapped, batch(0, world).chunk(world)[rank]).backward()
    journal: list[str] = []
    groups = [
        each._get_fsdp_state()._fsdp_param_group for each in (block.moe.experts for block in model.blocks)
    ]

    def note_rows(output: torch.Tensor, rows: torch.Tensor) -> None:
        if output.is_floating_point():  # the exchange of counts has integers
            journal.append("rows")

    def gathering(number: int, method: Any, word: str) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            group = groups[number]
            if word == "scatter" or not (group.is_unsharded or group._all_gather_result is not None):
                journal.append(f"{word} {number}")
            return method(*args, **kwargs)

        return noting

    with contextlib.ExitStack() as patches:
        patches.enter_context(watched_all_to_alls(note_rows))
        for number, group in enumerate(groups):
            group.unshard = gathering(number, group.unshard, "gather")
            group.post_backward = gathering(number, group.post_backward, "scatter")
        loss = loss_of(wrapped, batch(1, world).chunk(world)[rank])
        forward = list(journal)
        journal.clear()
        loss.backward()
    return _without_repeats(forward), _without_repeats(journal)


def _without_repeats(journal: list[str]) -> list[str]:
    return [word for word, _ in itertools.groupby(journal)]


def test_gathers_are_issued_behind_the_layer_before_and_scatters_beside_the_next() -> None:
    for forward, backward_ in ranks(4).run(issued, False, timeout=SLOW_IMPORT):
        assert forward == ["gather 0", "rows", "gather 1", "rows"]
        assert backward_[:4] == ["gather 1", "rows", "scatter 1", "gather 0"]
    for forward, backward_ in ranks(4).run(issued, True, timeout=SLOW_IMPORT):
        assert forward == ["gather 0", "gather 1", "rows"]
        assert backward_[:4] == ["gather 1", "gather 0", "rows", "scatter 1"]


def held(rank: int, world: int, shard_experts: Any) -> dict[str, int]:
    """Returns the bytes that a rank keeps of experts between two steps, by what they are for."""
    mesh = make_mesh(SQUARE)
    layer = pmoe.MoELayer(16, 32, 8, 2, mesh=mesh["ep"])
    pmoe.parallelize(layer, mesh, shard_experts=shard_experts)
    optimizer = optimizer_of(layer)
    layer(torch.randn(16, 16)).sum().backward()
    optimizer.step()
    experts = list(layer.experts.parameters())
    states = [value for each in experts for value in optimizer.state[each].values() if value.dim()]
    found = {
        "parameters": sum(each.to_local().untyped_storage().nbytes() for each in experts),
        "gradients": sum(each.grad.to_local().numel() * 4 for each in experts),
        "states": sum(value.to_local().untyped_storage().nbytes() for value in states),
        "predicted": layer.predict_memory(16).gradients - 4 * layer.gate.weight.numel(),
    }
    if shard_experts:
        (group,) = layer.experts._get_fsdp_state()._fsdp_param_groups
        gathered = [tensor for each in group.fsdp_params for tensor in each.all_gather_outputs]
        found["gathered"] = sum(tensor.untyped_storage().nbytes() for tensor in gathered)
        found["gathered in a step"] = sum(tensor.numel() * 4 for tensor in gathered)
        found["predicted gathered"] = layer.predict_memory(16).tensors["gathered experts"] // 2
    return found


def test_a_rank_keeps_a_part_of_parameters_gradients_and_states() -> None:
    whole_copy = 4 * 4 * (2 * 16 * 32 + 16 + 32)  # 4 experts of float32
    for found in ranks(4).run(held, False, timeout=SLOW_IMPORT):
        assert found == {
            "parameters": whole_copy,
            "gradients": whole_copy,
            "states": 2 * whole_copy,
            "predicted": whole_copy,
        }
    for found in ranks(4).run(held, True, timeout=SLOW_IMPORT):
        assert found == {
            "parameters": whole_copy // 2,
            "gradients": whole_copy // 2,
            "states": whole_copy,
            "predicted": whole_copy // 2,
            "gathered": 0,  # freed after backward
            "gathered in a step": whole_copy,
            "predicted gathered": whole_copy,
        }


def peak(rank: int, world: int, options: dict[str, Any], shard_experts: Any) -> float:
    mesh = make_mesh(SQUARE)
    torch.manual_seed(0)
    layer = pmoe.MoELayer(64, 256, 8, 2, mesh=mesh["ep"], **options)
    pmoe.parallelize(layer, mesh, shard_experts=shard_experts)
    x = torch.randn(512 - 37 * rank, 64, generator=torch.Generator().manual_seed(rank))
    found = step_bytes(layer, x)
    return layer.predict_memory(512 - 37 * rank, layer.row_counts).peak / found.peak


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"pipeline": 2, "memory_reuse": "S4"}], ids=str)
@pytest.mark.parametrize("shard_experts", [True, {"reshard_after_forward": False}], ids=str)
def test_the_peak_with_gathered_experts_is_predicted(options: dict[str, Any], shard_experts: Any) -> None:
    for ratio in ranks(4).run(peak, options, shard_experts, timeout=SLOW_IMPORT):
        assert 0.98 <= ratio <= 1.02


# ---- beside other features


def beside(rank: int, world: int) -> dict[str, Any]:
    """Returns, for each feature, losses of whole and of sharded experts."""
    found: dict[str, Any] = {}
    features: dict[str, dict[str, Any]] = {
        "balance": {"balance": 1},
        "pipeline": {"pipeline": 2, "memory_reuse": "S4"},
        "search": {"pipeline": True, "memory_reuse": True},
        "shared expert": {"shared_expert": 8},
        "latent": {"d_latent": 4},
    }
    for name, options in features.items():
        found[name] = [
            _losses(parallelized(SQUARE, shards, torch.float64, **options), rank, world)
            for shards in (False, True)
        ]
    for name in ("checkpoint", "frozen", "half frozen"):
        found[name] = []
        for shards in (False, True):
            model = parallelized(SQUARE, shards, torch.float64)
            if name == "checkpoint":
                for block in model.blocks:
                    block.moe.forward = partial(checkpoint, block.moe.forward, use_reentrant=False)
            elif name == "frozen":
                model.blocks[0].moe.experts.requires_grad_(False)
            else:
                pmoe.freeze_experts(model, [0, 3])
            found[name].append(_losses(model, rank, world))
            if name == "half frozen":
                start = parallelized(SQUARE, False, torch.float64).blocks[0].moe.experts.w1
                moved = (whole(model.blocks[0].moe.experts.w1) != whole(start)).flatten(1).any(1)
                found[name, shards] = moved.tolist()
    return found


def _losses(model: nn.Module, rank: int, world: int) -> list[float]:
    optimizer = optimizer_of(model)
    losses = [one_step(model, optimizer, step, rank, world) for step in range(3)]
    with torch.no_grad():
        return [*losses, loss_of(model, batch(3, world).chunk(world)[rank]).item()]


@pytest.mark.nightly
def test_sharded_experts_work_beside_other_features() -> None:
    for found in ranks(4).run(beside, timeout=SLOW_IMPORT):
        for name, values in found.items():
            if isinstance(name, str):
                assert values[0] == pytest.approx(values[1], rel=1e-9), name
        assert found["half frozen", False] == found["half frozen", True] == [False, True, True, False]


def odd_passes(rank: int, world: int) -> list[bool]:
    """Runs ranks without tokens, experts without rows, and a layer twice in a graph."""
    mesh = make_mesh(SQUARE)
    found = []
    for shards in (False, True):
        torch.manual_seed(0)
        layer = pmoe.MoELayer(4, 6, 4, 2, mesh=mesh["ep"], dtype=torch.float64)
        pmoe.parallelize(layer, mesh, shard_experts=shards)
        x = torch.randn(rank // 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        (layer(x).square().sum() + layer(2 * x).square().sum()).backward()
        layer(x[:0]).sum().backward()  # no rank has a token
        x.requires_grad_()
        loss = layer(x).square().sum()
        torch.autograd.grad(loss, x, retain_graph=True)  # the gradient of the input first
        loss.backward()
        found.append({name: whole(each.grad).clone() for name, each in layer.experts.named_parameters()})
    return [torch.allclose(value, found[0][name]) for name, value in found[1].items()]


def test_ranks_without_tokens_and_repeated_calls_go_together() -> None:
    assert ranks(4).run(odd_passes, timeout=SLOW_IMPORT) == [[True] * 4] * 4


def exported(rank: int, world: int, num_experts: int) -> bool:
    mesh = make_mesh(SQUARE)
    found = []
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for shards in (False, {"mp_policy": bf16}):
        torch.manual_seed(0)
        layer = pmoe.MoELayer(6, 8, num_experts, 2, expert="swiglu", bias=False, mesh=mesh["ep"])
        pmoe.parallelize(layer, mesh, shard_experts=shards)
        found.append(list(pmoe.export_weights(layer, "mixtral")))
    pairs = zip(*found, strict=True)
    return all(one[:2] == other[:2] and torch.equal(one[2], other[2]) for one, other in pairs)


@pytest.mark.parametrize("num_experts", [2, 4])
def test_exported_weights_are_those_of_whole_experts(num_experts: int) -> None:
    assert ranks(4).run(exported, num_experts, timeout=SLOW_IMPORT) == [True] * 4


# ---- adapters (LoRA)


def with_adapters(
    sizes: dict[str, int], shard_experts: Any, shared_by_all: bool = False, expert: str = "ffn"
) -> Model:
    """Returns a model that trains adapters alone. A is drawn; B has values that do not depend on the mesh."""
    mesh = make_mesh(sizes)
    model = build(submesh(mesh), torch.float64, expert=expert).requires_grad_(False)
    torch.manual_seed(7)
    pmoe.add_lora(model, rank=2, alpha=3.0, shared=shared_by_all)
    for layer in (block.moe for block in model.blocks):
        adapter = layer.experts.adapters["default"]
        for name in adapter.hidden_dims():
            if name.endswith("_B"):
                parameter = adapter.get_parameter(name)
                columns = 1 + 0.1 * torch.arange(parameter.shape[-1], dtype=torch.float64)
                numbers = layer.first_expert + torch.arange(1.0, 1 + len(parameter), dtype=torch.float64)
                values = 0.02 * columns.expand_as(parameter)
                own = values if shared_by_all else values * numbers.reshape(-1, 1, 1)
                with torch.no_grad():
                    parameter.copy_(own)
    return pmoe.parallelize(model, mesh, shard_experts=shard_experts)


def adapter_steps(rank: int, world: int, model: Model) -> dict[str, Any]:
    """Trains the adapters of a model for three steps. Returns losses, norms, first gradients, parameters."""
    adapters = pmoe.lora_adapters(model)
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-2)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, 4).chunk(world)[rank])
        loss.backward()
        found["losses"].append(loss.item())
        if step == 0:
            trained = [(name, each) for name, each in model.named_parameters() if each.grad is not None]
            found["gradients"] = {name: whole(each.grad) for name, each in trained}
        found["norms"].append(pmoe.clip_grad_norm_(model, 0.05).item())
        optimizer.step()
    found["parameters"] = {name: whole(each) for name, each in adapters.named_parameters()}
    return found


def merged(model: Model, rank: int) -> list[torch.Tensor]:
    """Returns outputs with the adapter, after merging, after undoing that, and without the adapter."""
    tokens = batch(rank, 1)[:, :-1]
    with torch.no_grad():
        outputs = [model(tokens)]
        added = pmoe.merge_lora(model)
        outputs.append(model(tokens))
        pmoe.unmerge_lora(model, added)
        outputs.append(model(tokens))
        with pmoe.disable_lora(model):
            outputs.append(model(tokens))
    return outputs


def adapters_beside(
    rank: int, world: int, sizes: dict[str, int], plain: dict[str, int], shared_by_all: bool, expert: str
) -> dict[str, float]:
    """Returns the largest differences between adapters on whole and on sharded experts, by what differs."""
    expected_model = with_adapters(plain, False, shared_by_all, expert)
    model = with_adapters(sizes, True, shared_by_all, expert)
    expected = adapter_steps(rank, world, expected_model)
    found = adapter_steps(rank, world, model)
    differences = {
        name: max(abs(own - other) for own, other in zip(found[name], expected[name], strict=True))
        for name in ("losses", "norms")
    }
    for name in ("gradients", "parameters"):
        assert found[name].keys() == expected[name].keys() and found[name]
        pairs = [(value, expected[name][own]) for own, value in found[name].items()]
        differences[name] = max((value - other).abs().max().item() for value, other in pairs)
    outputs = merged(model, rank)
    changes = [(one - other).abs().max().item() for one, other in itertools.pairwise(outputs)]
    differences["merging"] = max(changes[:2])
    differences["whole outputs"] = max(
        (one - other).abs().max().item()
        for one, other in zip(outputs, merged(expected_model, rank), strict=True)
    )
    assert changes[2] > 1e-4  # without the adapter the output is another one
    again = adapter_steps(rank, world, model)["losses"][0]
    differences["after merging"] = abs(again - adapter_steps(rank, world, expected_model)["losses"][0])
    return differences


ADAPTED = [
    (SQUARE, SQUARE, False, "ffn"),
    (SQUARE, SQUARE, True, "swiglu"),
    ({"dp": 2, "ep": 1, "esp": 2}, {"dp": 2, "ep": 1, "esp": 2}, False, "swiglu"),
    ({"dp": 2, "ep": 1, "esp": 2}, {"dp": 2, "ep": 1, "esp": 2}, True, "swiglu"),
    ({"dp": 4, "ep": 1}, {"dp": 4, "ep": 1}, False, "swiglu"),
    ({"ep": 4, "dp": 1}, {"ep": 4, "dp": 1}, False, "ffn"),
    ({"nodes": 2, "dp": 2, "ep": 1}, {"dp": 4, "ep": 1}, False, "ffn"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "plain", "shared_by_all", "expert"),
    [pytest.param(*case, marks=() if at < 1 else pytest.mark.slow) for at, case in enumerate(ADAPTED)],
)
def test_adapters_of_sharded_experts_train_and_merge_as_those_of_whole_copies_do(
    sizes: dict[str, int], plain: dict[str, int], shared_by_all: bool, expert: str
) -> None:
    for differences in ranks(4).run(
        adapters_beside, sizes, plain, shared_by_all, expert, timeout=SLOW_IMPORT
    ):
        for name, difference in differences.items():
            assert difference < (1e-12 if name in ("losses", "gradients") else 1e-9), name


def switching(rank: int, world: int, shard_experts: Any) -> list[float]:
    """Trains one adapter and then another one, with a call for evaluation between. Returns all losses."""
    mesh = make_mesh(SQUARE)
    model = build(mesh["ep"], torch.float64, expert="swiglu").requires_grad_(False)
    torch.manual_seed(7)
    for name in ("first", "second"):
        pmoe.add_lora(model, rank=2, name=name)
    pmoe.parallelize(model, mesh, shard_experts=shard_experts)
    losses = []
    for name in ("first", "second", "first"):
        with torch.no_grad():
            losses.append(loss_of(model, batch(9, world).chunk(world)[rank]).item())
        pmoe.use_lora(model, name)
        own = pmoe.lora_adapters(model)
        others = pmoe.lora_adapters(model, "first" if name == "second" else "second")
        before = [whole(each).clone() for each in others.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        losses += going_on(rank, world, model, optimizer)
        assert all(each.grad is not None for each in own.parameters())
        assert all(
            torch.equal(whole(each), old) for each, old in zip(others.parameters(), before, strict=True)
        )
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("options", [True, {"reshard_after_forward": False}], ids=str)
def test_adapters_of_sharded_experts_can_be_switched(options: Any) -> None:
    expected = ranks(4).run(switching, False, timeout=SLOW_IMPORT)
    found = ranks(4).run(switching, options, timeout=SLOW_IMPORT)
    for own, wanted in zip(found, expected, strict=True):
        assert own == pytest.approx(wanted, rel=1e-12)


def saving_adapters(rank: int, world: int, folder: str) -> list[float]:
    """Saves adapters of sharded experts by pmoe and in PEFT's files. Returns the losses that follow."""
    model = with_adapters(SQUARE, True, expert="swiglu")
    adapter_steps(rank, world, model)
    adapters = pmoe.lora_adapters(model)
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-2)
    loss_of(model, batch(0, 4).chunk(world)[rank]).backward()
    optimizer.step()
    pmoe.save_checkpoint(f"{folder}/own", adapters, optimizer, step=1)
    pmoe.save_lora(model, f"{folder}/peft", "mixtral-stacked")
    return going_on(rank, world, model, optimizer)


def going_on(rank: int, world: int, model: Model, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, 4).chunk(world)[rank])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loading_adapters(rank: int, world: int, folder: str, sizes: dict[str, int], shards: bool) -> Any:
    """Loads adapters on another mesh. Returns the losses that follow, and how far PEFT's files differ."""
    model = with_adapters(sizes, shards, expert="swiglu")
    adapters = pmoe.lora_adapters(model)
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-2)
    assert pmoe.load_checkpoint(f"{folder}/own", adapters, optimizer).step == 1
    before = {name: whole(each).clone() for name, each in adapters.named_parameters()}
    with torch.no_grad():
        for each in adapters.parameters():
            each.zero_()
    pmoe.load_lora(model, f"{folder}/peft", "mixtral-stacked")
    differences = [
        (whole(each) - before[name]).abs().max().item() for name, each in adapters.named_parameters()
    ]
    return going_on(rank, world, model, optimizer), max(differences)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "sizes", "shards"),
    [(4, {"dp": 4, "ep": 1}, True), (2, {"ep": 2}, False), (2, {"dp": 2, "ep": 1}, True)],
)
def test_adapters_of_sharded_experts_load_on_other_numbers_of_ranks(
    world: int, sizes: dict[str, int], shards: bool, tmp_path: Path
) -> None:
    """Other systems have saved one rank's part of B under FSDP2, with zeros for the rest."""
    expected = ranks(4).run(saving_adapters, str(tmp_path), timeout=SLOW_IMPORT)
    found = ranks(world).run(loading_adapters, str(tmp_path), sizes, shards, timeout=SLOW_IMPORT)
    for step in range(2):
        mean = sum(losses[step] for losses, _ in found) / world
        assert mean == pytest.approx(sum(losses[step] for losses in expected) / 4, rel=1e-9)
    assert all(difference == 0 for _, difference in found)


def held_with_adapters(rank: int, world: int) -> dict[str, int]:
    """Returns elements that a rank keeps of adapters, and those that FSDP2 gathers, counted and predicted."""
    model = with_adapters(SQUARE, True)
    adapter_steps(rank, world, model)
    layer = model.blocks[0].moe
    adapters = list(layer.experts.adapters.parameters())
    (group,) = layer.experts._get_fsdp_state()._fsdp_param_groups
    gathered = [tensor for each in group.fsdp_params for tensor in each.all_gather_outputs]
    predicted = layer.predict_memory(16)
    return {
        "adapters": sum(each.to_local().numel() for each in adapters),
        "predicted adapters": predicted.gradients // 8,
        "gathered": sum(tensor.numel() for tensor in gathered),
        "predicted gathered": predicted.tensors["gathered experts"] // 16,
    }


def test_bytes_of_adapters_of_sharded_experts_are_predicted() -> None:
    adapters = 2 * 2 * (8 + 12 + 12 + 8)  # two experts of a rank, each with matrices of rank 2
    weights = 2 * (2 * 8 * 12 + 8 + 12)
    for found in ranks(4).run(held_with_adapters, timeout=SLOW_IMPORT):
        assert found == {
            "adapters": adapters // 2,
            "predicted adapters": adapters // 2,
            "gathered": adapters + weights,
            "predicted gathered": adapters + weights,
        }


class CountingAllGather(DefaultAllGather):
    """The all-gather of FSDP2. It also counts the bytes that it returns."""

    num_bytes = 0

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.num_bytes += output_tensor.nbytes
        return super().__call__(output_tensor, *args, **kwargs)


def removed(rank: int, world: int, shard_experts: Any) -> dict[str, tuple[int, float]]:
    """Returns the bytes that a call gathers of a layer's experts, and the loss, after changes of adapters."""
    model = with_adapters(SQUARE, shard_experts)
    first_losses = adapter_steps(rank, world, model)["losses"]
    layer = model.blocks[0].moe
    counter = CountingAllGather()
    layer.experts.set_custom_all_gather(counter)

    def evaluated() -> tuple[int, float]:
        layer.experts.reshard()
        counter.num_bytes = 0
        with torch.no_grad():
            loss = loss_of(model, batch(9, 4).chunk(world)[rank]).item()
        return counter.num_bytes, loss

    found = {"adapter": evaluated()}
    with pmoe.disable_lora(model):
        found["disabled"] = evaluated()
    added = pmoe.merge_lora(model)
    found["merged"] = evaluated()
    pmoe.unmerge_lora(model, added)
    found["unmerged"] = evaluated()
    assert adapter_steps(rank, world, model)["losses"][0] < first_losses[0]  # it trains on
    own_part = weakref.ref(next(layer.experts.adapters["default"].parameters()))
    loss = loss_of(model, batch(9, 4).chunk(world)[rank])
    pmoe.remove_lora(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation|in place|storage of size 0"):
        loss.backward()
    del added, loss
    found["removed"] = evaluated()
    gc.collect()
    assert own_part() is None  # the call has forgotten the gradients of the failed backward pass
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [True, {"reshard_after_forward": False}], ids=str)
def test_a_removed_adapter_of_sharded_experts_is_not_gathered(options: Any) -> None:
    weights = 8 * 2 * (2 * 8 * 12 + 8 + 12)  # float64, two experts of a rank
    adapters = 8 * 2 * 2 * (8 + 12 + 12 + 8)
    wanted = {
        "adapter": weights + adapters,
        "disabled": weights + adapters,
        "merged": weights,
        "unmerged": weights + adapters,
        "removed": weights,
    }
    for found in ranks(4).run(removed, options, timeout=SLOW_IMPORT):
        assert {name: num_bytes for name, (num_bytes, _) in found.items()} == wanted
        losses = {name: loss for name, (_, loss) in found.items()}
        assert losses["merged"] == pytest.approx(losses["adapter"], rel=1e-12)
        assert losses["unmerged"] == pytest.approx(losses["adapter"], rel=1e-12)
        assert losses["removed"] == pytest.approx(losses["disabled"], rel=1e-12)
        assert losses["removed"] != pytest.approx(losses["adapter"], rel=1e-6)


def adapted_peak(rank: int, world: int, shard_experts: Any) -> float:
    mesh = make_mesh(SQUARE)
    torch.manual_seed(0)
    layer = pmoe.MoELayer(64, 256, 8, 2, mesh=mesh["ep"]).requires_grad_(False)
    pmoe.add_lora(layer, rank=8, alpha=4)
    pmoe.parallelize(layer, mesh, shard_experts=shard_experts)
    x = torch.randn(512 - 37 * rank, 64, generator=torch.Generator().manual_seed(rank))
    found = step_bytes(layer, x)
    return layer.predict_memory(512 - 37 * rank, layer.row_counts).peak / found.peak


@pytest.mark.slow
@pytest.mark.parametrize("shard_experts", [False, True])
def test_the_peak_with_adapters_is_predicted(shard_experts: bool) -> None:
    for ratio in ranks(4).run(adapted_peak, shard_experts, timeout=SLOW_IMPORT):
        assert 0.98 <= ratio <= 1.02


def adapters_from_meta(rank: int, world: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(pmoe.MoELayer(6, 8, 4, 2, group=Ranks.single()))
        pmoe.add_lora(model, rank=2)
    pmoe.parallelize(model, make_mesh(SQUARE), shard_experts=True)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model[0].reset_parameters()
    return {name: whole(value) for name, value in model.named_parameters()}


@pytest.mark.slow
def test_adapters_of_sharded_experts_of_the_meta_device_are_drawn_as_whole_ones() -> None:
    model = nn.Sequential(pmoe.MoELayer(6, 8, 4, 2))
    pmoe.add_lora(model, rank=2)
    torch.manual_seed(5)
    model[0].reset_parameters()
    for found in ranks(4).run(adapters_from_meta, timeout=SLOW_IMPORT):
        for name, value in model.named_parameters():
            assert torch.equal(found[name], value), name


# ---- refused


def refusals(rank: int, world: int) -> list[str]:
    mesh = make_mesh(SQUARE)
    other = make_mesh({"dp": 2, "ep": 1, "esp": 2})
    three = make_mesh({"a": 1, "b": 1, "dp": 2, "ep": 2})
    shards = partial(pmoe.parallelize, shard_experts=True)

    def by_hand() -> None:
        model = pmoe.parallelize(build(mesh["ep"]), mesh)
        dims = DataParallelMeshDims(shard="dp")
        for block in model.blocks:
            for parameter in block.moe.experts.parameters():
                parameter._spec = replace(parameter._spec, mesh=mesh)  # torch may have cached an equal mesh
            fully_shard(block.moe.experts, mesh=mesh, dp_mesh_dims=dims)
        model(batch(0, 1)[:, :-1])

    def wrapped_before() -> None:
        model = build(mesh["ep"])
        fully_shard(model.blocks[0].moe.experts, mesh=mesh["dp"])
        shards(model, mesh)

    def odd(d_model: int, d_hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(d_model, 7), nn.Linear(7, d_model))

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return build(mesh["ep"], expert=mlp)

    def list_without_model() -> None:
        model = shards(build(mesh["ep"], expert=mlp), mesh)
        loss_of(model, batch(0, 1)).backward()
        pmoe.clip_grad_norm_(list(pmoe.expert_parameters(model)), 1.0)

    def differ() -> None:
        model = shards(build(mesh["ep"]), mesh)
        model.blocks[1].moe.experts.w2.requires_grad_(rank != 2)
        loss_of(model, batch(0, 1)).backward()

    attempts = [
        lambda: shards(build(mesh["ep"]), mesh["ep"]),
        lambda: shards(build(mesh["ep"]), three),
        lambda: shards(build(mesh["ep"]), mesh, reduce=False),
        lambda: pmoe.parallelize(build(mesh["ep"]), mesh, shard_experts={"mesh": mesh}),
        lambda: pmoe.parallelize(build(mesh["ep"]), mesh, shard_experts={"reshard_after_forward": 2}),
        lambda: pmoe.parallelize(build(mesh["ep"]), mesh, shard_experts={"mp_policy": torch.bfloat16}),
        lambda: shards(build(mesh["ep"], expert=odd), mesh),
        lambda: shards(on_meta(), mesh),
        lambda: shards(pmoe.parallelize(build(mesh["ep"]), mesh), mesh),
        wrapped_before,
        by_hand,
        lambda: pmoe.add_lora(shards(build(mesh["ep"]), mesh), rank=2),
        lambda: shards(pmoe.MoELayer(4, 6, 1, 1, expert="swiglu", mesh=other["ep", "esp"]), other),
        lambda: pmoe.copy_into_experts(shards(pmoe.MoELayer(4, 6, 4, mesh=mesh["ep"]), mesh), {}),
        differ,
        list_without_model,
    ]
    return [error_of(attempt) for attempt in attempts]


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    wanted = [
        r"ValueError: shard_experts needs a mesh \(dimensions \('ep',\)\) with a further dimension",
        r"ValueError: mesh \(dimensions \('a', 'b', 'dp', 'ep'\)\) must have .* \(with shard_experts two\)",
        r"ValueError: reduce \(False\) must be True with shard_experts",
        r"ValueError: shard_experts \(with 'mesh'\) may have only reshard_after_forward, mp_policy",
        r"TypeError: shard_experts\['reshard_after_forward'\] \(2\) must be",
        r"TypeError: shard_experts\['mp_policy'\] .* must be a torch.distributed.fsdp.MixedPrecisionPolicy",
        r"ValueError: blocks.0.moe: experts' local.0.0.bias \(of shape \(7,\) on a rank\) must have a dimen",
        r"ValueError: blocks.0.moe: experts' local.0.0.weight \(on the meta device\) must have values",
        r"ValueError: blocks.0.moe: a layer that is parallelized already must not be sharded later",
        r"ValueError: blocks.0.moe.experts \(a FSDPFFNExperts\) must be wrapped after pmoe.parallelize",
        r"ValueError: experts' parameters must not be in fully_shard, .* shard_experts=True",
        r"TypeError: blocks.0.moe \(experts sharded over their copies\) must .* call pmoe.add_lora, then",
        r"ValueError: model: experts' b1 \(of shape \(1, 6\) on a rank\) must have a dimension that the 2",
        r"ValueError: layer \(with shard_experts\) must have whole experts on each rank: call copy_into",
        r"ValueError: requires_grad of experts' w2 must be the same on all copies of the experts",
        r"ValueError: parameters \(parameter 0 is an expert's and sharded over its copies only\) must be the",
    ]
    for found in ranks(4).run(refusals, timeout=SLOW_IMPORT):
        assert len(found) == len(wanted)
        for message, pattern in zip(found, wanted, strict=True):
            assert re.search(pattern, message), message

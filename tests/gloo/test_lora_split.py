"""Adapters of experts whose hidden columns are split over ranks: all results are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe.schedule.restore import ALL_PAIRS
from tests import adapted
from tests.adapted import ALPHA, RANK
from tests.gloo import test_footprint
from tests.gloo.kit import build, counted_collectives, error_of, inputs, one_step
from tests.gloo.test_lora import collectives_if_one_froze
from tests.kit import AUX, tokens
from tests.pool import ranks
from tests.reference import relative_error

EXACT = 1e-12
HIDDEN = 12
SIZES = [(1, 2), (2, 2), (1, 4)]
"""Ranks along "ep" and along "esp"."""

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(*sizes: int) -> DeviceMesh:
    """The mesh with these numbers of ranks along "ep" and "esp", or before them along "dp"."""
    if sizes not in _meshes:
        _meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep", "esp")[-len(sizes) :])
    return _meshes[sizes]


def fill(layer: pmoe.MoELayer, name: str = "default") -> None:
    experts: Any = layer.experts
    adapted.fill(experts.adapter(name), layer.first_expert, halves=experts.hidden_factor)


def own_part(layer: pmoe.MoELayer, name: str, values: torch.Tensor, shared: bool) -> torch.Tensor:
    """This rank's part of a matrix of all experts with all hidden columns."""
    experts: Any = layer.experts
    part = adapted.columns(name, values, layer.shard.index, layer.shard.count, experts.hidden_factor)
    return part if shared else part[layer.first_expert : layer.first_expert + layer.num_local_experts]


# ---- one step


def step_job(rank: int, world: int, sizes: tuple[int, int], cases: list[dict[str, Any]]) -> list[str]:
    wrong = []
    everybody = [inputs(each, world) for each in range(world)]
    for case in cases:
        options = dict(case)
        settings = {"shared": options.pop("shared"), "targets": options.pop("targets")}
        whole = adapted.whole_layer(expert=options["expert"], d_hidden=HIDDEN)
        pmoe.add_lora(whole, rank=RANK, alpha=ALPHA, **settings)
        adapted.fill(whole.experts.adapter("default"))
        outs, of_ranks, of_adapter = adapted.expected(
            whole, [x for x, _ in everybody], [dy for _, dy in everybody], AUX
        )
        layer = build(mesh=mesh_of(*sizes), d_hidden=HIDDEN, **options)
        pmoe.add_lora(layer, rank=RANK, alpha=ALPHA, **settings)
        fill(layer)
        found = one_step(layer, rank, world)
        wanted = {"y": outs[rank], **of_ranks[rank]} | {
            f"experts.adapters.default.{name}": own_part(layer, name, value, settings["shared"])
            for name, value in of_adapter.items()
        }
        assert {name for name, value in found.items() if value is not None} == set(wanted)
        errors = {name: relative_error(found[name], value) for name, value in wanted.items() if value.numel()}
        wrong += [f"{case}: {name} {error}" for name, error in errors.items() if not error < EXACT]
    return wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_results_and_gradients_are_the_definitions_for_every_n_and_pair(
    sizes: tuple[int, int], shared: bool, expert: str
) -> None:
    cases = [
        {"pipeline": n, "memory_reuse": pair, "shared": shared, "targets": targets, "expert": expert}
        for at, pair in enumerate((False, *ALL_PAIRS))
        for n in ((1, 2, 3, 4) if at < 2 else (1 + at % 4,))
        for targets in ([("w1", "w2")] if n != 3 else [("w1",), ("w2",)])
    ]
    for wrong in ranks(sizes[0] * sizes[1]).run(step_job, sizes, cases):
        assert not wrong


WAYS: list[dict[str, Any]] = [
    {"pipeline": True},
    {"pipeline": "solve"},
    {"pipeline": True, "memory_reuse": True},
    {"pipeline": 4, "pipeline_backward": 2, "memory_reuse": "S4"},
    {"send_once": True},
    {"balance": 1, "memory_reuse": "S4"},
]


def ways_job(rank: int, world: int, shared: bool) -> list[str]:
    """The same step by every way of choosing chunks and of sending rows."""
    steps = []
    for options in ({}, *WAYS):
        layer = build(mesh=mesh_of(world // 2, 2), **options)
        pmoe.add_lora(layer, rank=RANK, alpha=ALPHA, shared=shared)
        fill(layer)
        for _ in range(4 if options.get("pipeline") in (True, "solve") else 1):
            step = one_step(layer, rank, world)
        steps.append(step)
    return [
        f"{options}: {name}"
        for options, step in zip(WAYS, steps[1:], strict=True)
        for name, value in steps[0].items()
        if value is not None and not relative_error(step[name], value) < EXACT
    ]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_every_way_to_choose_chunks_and_to_send_rows_computes_adapters(shared: bool) -> None:
    assert ranks(4).run(ways_job, shared) == [[]] * 4


def initial_job(rank: int, world: int, sizes: tuple[int, int], shared: bool) -> list[str]:
    found = []
    torch.manual_seed(3)
    whole = adapted.whole_layer(expert="swiglu")
    pmoe.add_lora(whole, rank=RANK, shared=shared)
    for order in ("built", "adapters first", "adapters last"):
        torch.manual_seed(3)
        options = {"mesh": mesh_of(*sizes)} if order == "built" else {}
        layer = build(expert="swiglu", **options) if options else adapted.whole_layer(expert="swiglu")
        if order == "adapters last":
            pmoe.parallelize(layer, mesh_of(*sizes))
        pmoe.add_lora(layer, rank=RANK, shared=shared)
        if order == "adapters first":
            pmoe.parallelize(layer, mesh_of(*sizes))
        for name, value in whole.experts.adapter("default").named_parameters():
            own = layer.experts.adapter("default").get_parameter(name).detach()
            own = own.to_local() if hasattr(own, "to_local") else own
            if not torch.equal(own, own_part(layer, name, value.detach(), shared)):
                found.append(f"{order}: {name}")
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shared", [False, True])
def test_initial_values_do_not_depend_on_the_ranks(shared: bool) -> None:
    assert ranks(4).run(initial_job, (2, 2), shared) == [[]] * 4


def seeds_job(rank: int, world: int, shared: bool) -> dict[str, torch.Tensor]:
    layer = build(mesh=mesh_of(2, 2))
    torch.manual_seed(rank)
    pmoe.add_lora(layer, rank=RANK, shared=shared)
    experts: Any = layer.experts
    return {name: value.detach() for name, value in experts.adapter("default").named_parameters()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shared", [False, True])
def test_copies_of_a_matrix_are_equal_if_ranks_have_other_seeds(shared: bool) -> None:
    first, second, third, _ = ranks(4).run(seeds_job, shared)
    for name in ("w1_A", "w2_B"):
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(first[name], third[name]) == (shared or name == "w2_B"), name
    assert torch.equal(first["w2_A"], third["w2_A"]) == shared
    assert not torch.equal(first["w2_A"], second["w2_A"])


# ---- training, checkpoints, files


def model_of(shared: bool, order: str, mesh: DeviceMesh | None) -> nn.Sequential:
    """A dense layer and a gated MoE layer with an adapter, parallelized over a mesh, or of one rank."""
    torch.manual_seed(7)
    options: dict[str, Any] = {"expert": "swiglu", "pipeline": 2, "bias": False, "d_hidden": HIDDEN}
    model = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), adapted.whole_layer(**options))
    if order == "adapters last" and mesh is not None:
        pmoe.parallelize(model, mesh)
    pmoe.add_lora(model, rank=RANK, alpha=ALPHA, shared=shared)
    if order == "adapters first" and mesh is not None:
        pmoe.parallelize(model, mesh)
    fill(model[1])
    return model


def whole_of(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return value.detach().clone()


def training_job(rank: int, world: int, sizes: tuple[int, ...], shared: bool, order: str) -> list[float]:
    """Three steps with clipping beside the same model on one rank with the tokens of all ranks."""
    model = model_of(shared, order, mesh_of(*sizes))
    wrapped = DistributedDataParallel(model)
    single = model_of(shared, order, None)
    everybody = [inputs(each, world) for each in range(world)]
    optimizers = [
        torch.optim.AdamW(pmoe.parameter_groups(each.parameters()), lr=0.1) for each in (model, single)
    ]
    errors = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, dy = everybody[rank]
        (wrapped(x) * dy).sum().backward()
        (sum((single(x) * dy).sum() for x, dy in everybody) / world).backward()
        norm = pmoe.clip_grad_norm_(model, 0.5)
        errors.append(relative_error(norm, torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5)))
        for optimizer in optimizers:
            optimizer.step()
    names = dict(model.named_parameters())
    errors += [
        relative_error(whole_of(names[name]), value.detach()) for name, value in single.named_parameters()
    ]
    merged = pmoe.merge_lora(model)
    pmoe.merge_lora(single)
    errors += [
        relative_error(whole_of(value), single.get_parameter(name).detach())
        for name, value in model.named_parameters()
    ]
    pmoe.unmerge_lora(model, merged)
    x, _ = everybody[rank]
    pmoe.add_lora(single, rank=1, name="none")  # of zeros
    y = model(x).detach()
    return [*errors, relative_error(y, single(x).detach()) if len(x) else 0.0]


@pytest.mark.parametrize(
    "sizes, shared, order",
    [
        ((1, 2), True, "adapters last"),
        pytest.param((2, 2), True, "adapters first", marks=pytest.mark.slow),
        pytest.param((2, 2), False, "adapters last", marks=pytest.mark.slow),
        pytest.param((2, 1, 2), False, "adapters first", marks=pytest.mark.slow),
        pytest.param((2, 1, 2), True, "adapters last", marks=pytest.mark.slow),
    ],
)
def test_training_clipping_and_merging_do_not_depend_on_the_ranks(
    sizes: tuple[int, ...], shared: bool, order: str
) -> None:
    for errors in ranks(torch.Size(sizes).numel()).run(training_job, sizes, shared, order):
        assert max(errors) < 1e-9  # Adam divides by roots of squares: 1e-12 of gradients becomes more


def save_job(
    rank: int, world: int, folder: str, sizes: tuple[int, int] | None, shared: bool
) -> dict[str, torch.Tensor]:
    model = model_of(shared, "adapters last", None if sizes is None else mesh_of(*sizes))
    adapters = pmoe.lora_adapters(model)
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=0.1)
    x, dy = inputs(0, 1)
    (model(x[rank::world]) * dy[rank::world]).sum().backward()
    optimizer.step()
    pmoe.save_checkpoint(f"{folder}/checkpoint", adapters, optimizer, step=3)
    for layout in ("qwen-moe", "qwen-moe-stacked"):
        pmoe.save_lora(model, f"{folder}/{layout}", layout)
    return {name: whole_of(value) for name, value in adapters.named_parameters()}


def load_job(
    rank: int, world: int, folder: str, sizes: tuple[int, int] | None, shared: bool,
    saved: dict[str, torch.Tensor],
) -> list[str]:  # fmt: skip
    wrong = []
    for file in ("checkpoint", "qwen-moe", "qwen-moe-stacked"):
        model = model_of(shared, "adapters first", None if sizes is None else mesh_of(*sizes))
        adapters = pmoe.lora_adapters(model)
        with torch.no_grad():
            for parameter in adapters.parameters():
                parameter.zero_()
        if file == "checkpoint":
            optimizer = torch.optim.AdamW(adapters.parameters(), lr=0.1)
            assert pmoe.load_checkpoint(f"{folder}/{file}", adapters, optimizer).step == 3
            assert len(optimizer.state) == 4
        else:
            pmoe.load_lora(model, f"{folder}/{file}", file)
        wrong += [
            f"{file}: {name}"
            for name, value in adapters.named_parameters()
            if not torch.equal(whole_of(value), saved[name])
        ]
    return wrong


@pytest.mark.parametrize(
    "first, second, shared",
    [
        ((1, 2), None, True),
        pytest.param(None, (1, 2), False, marks=pytest.mark.slow),
        pytest.param((2, 2), (1, 2), True, marks=pytest.mark.slow),
        pytest.param((1, 4), (2, 2), False, marks=pytest.mark.slow),
        pytest.param((2, 2), (4, 1), True, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_and_files_of_peft_go_to_other_numbers_of_ranks(
    tmp_path: Path, first: tuple[int, int] | None, second: tuple[int, int] | None, shared: bool
) -> None:
    saved = ranks(torch.Size(first or (1,)).numel()).run(save_job, str(tmp_path), first, shared)[0]
    world = torch.Size(second or (1,)).numel()
    assert ranks(world).run(load_job, str(tmp_path), second, shared, saved) == [[]] * world


def own_files_job(rank: int, world: int, folder: str, shared: bool) -> list[str]:
    """Each rank writes a file of its own; a rank that reads rank 0's is refused."""
    layer = build(mesh=mesh_of(1, world))
    pmoe.add_lora(layer, rank=RANK, shared=shared)
    adapters = pmoe.lora_adapters(layer)
    torch.save(adapters.state_dict(), f"{folder}/{rank}.pt")
    adapters.load_state_dict(torch.load(f"{folder}/{rank}.pt"))
    one_step(layer, rank, world)
    other = torch.load(f"{folder}/{1 - rank}.pt")
    return [
        error_of(lambda: adapters.load_state_dict(other)),
        error_of(lambda: pmoe.save_checkpoint(f"{folder}/all", adapters, step=1)),
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_refuses_the_file_of_another_ranks_columns(tmp_path: Path, shared: bool) -> None:
    for rank, (other, checkpoint) in enumerate(ranks(2).run(own_files_job, str(tmp_path), shared)):
        assert f"part {1 - rank} of 2 of the adapters' hidden columns" in other
        assert f"into part {rank} of 2" in other and "pmoe.load_checkpoint" in other
        assert "spread over 2 ranks" in checkpoint or "of 2 ranks" in checkpoint


# ---- collectives and memory


def collectives_job(rank: int, world: int, shared: bool) -> list[list[str]]:
    layer = build(mesh=mesh_of(2, 2))
    of_steps = collectives_if_one_froze(layer, rank, world, shared)
    with torch.no_grad(), counted_collectives() as forward:
        layer(tokens(3, rank))
    return [*of_steps, forward]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shared", [False, True])
def test_every_rank_starts_the_same_collectives_if_one_has_frozen_its_adapter(shared: bool) -> None:
    found = ranks(4).run(collectives_job, shared)
    assert all(each == found[0] for each in found)
    names, without, forward = found[0]
    assert len(names) == len(without) + (6 if shared else 2)
    assert "all_reduce" not in forward[1:]


def bytes_job(rank: int, world: int, pair: Any, n: int, shared: bool) -> tuple[float, float]:
    layer = test_footprint.build(pipeline=n, memory_reuse=pair, mesh=mesh_of(world // 2, 2))
    pmoe.add_lora(layer, rank=8, alpha=12, shared=shared)
    num_tokens = test_footprint.TOKENS - 37 * rank
    x = torch.randn(num_tokens, test_footprint.D_MODEL, generator=torch.Generator().manual_seed(rank))
    measured = test_footprint.step_bytes(layer, x)
    exact = layer.predict_memory(num_tokens, layer.row_counts)
    return exact.peak / measured.peak, layer.predict_memory(test_footprint.TOKENS).peak / measured.peak


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "pair, world, n, shared", [(False, 2, 4, False), (ALL_PAIRS[0], 2, 4, True), (ALL_PAIRS[-1], 4, 1, False)]
)
def test_the_peak_on_every_rank_is_within_two_percent_of_the_prediction(
    pair: Any, world: int, n: int, shared: bool
) -> None:
    for exact, bound in ranks(world).run(bytes_job, pair, n, shared):
        assert exact == pytest.approx(1, rel=0.02)
        assert bound >= 1


# ---- experts that are modules


def mlp() -> nn.Module:
    """An expert of two linear layers."""
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)).double()


def modules_job(rank: int, world: int, adapts_first: bool) -> list[float]:
    """PEFT adapts experts that are modules, on one rank and spread over ranks."""
    config = peft.LoraConfig(r=RANK, lora_alpha=3, target_modules=r".*experts\.local\.\d+\.[02]")
    layers = []
    for spread in (False, True):
        layer = adapted.whole_layer(expert=mlp)
        model = nn.Sequential(layer)
        if spread and not adapts_first:
            pmoe.parallelize(model, mesh_of(world, 1)["ep"])
        peft.get_peft_model(model, config)
        if spread and adapts_first:
            pmoe.parallelize(model, mesh_of(world, 1)["ep"])
        for number, expert in enumerate(layer.experts.local, start=layer.first_expert):
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for name, parameter in sorted(expert.named_parameters()):
                    if "lora_" in name:
                        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                        parameter.copy_(values)
        layers.append(layer)
    whole, layer = layers
    everybody = [inputs(each, world) for each in range(world)]
    x, dy = everybody[rank]
    (layer(x) * dy).sum().backward()
    (sum((whole(x) * dy).sum() for x, dy in everybody) / world).backward()
    errors = [relative_error(layer(x).detach(), whole(x).detach())]
    own = dict(layer.experts.named_parameters())
    for number, expert in enumerate(whole.experts.local):
        if layer.first_expert <= number < layer.first_expert + layer.num_local_experts:
            for name, parameter in expert.named_parameters():
                gradient = own[f"local.{number - layer.first_expert}.{name}"].grad
                assert (gradient is None) == (parameter.grad is None) == ("lora_" not in name), name
                if gradient is not None:
                    errors.append(relative_error(gradient, parameter.grad))
    return errors


@pytest.mark.parametrize("adapts_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_peft_adapts_experts_that_are_modules_on_every_rank(adapts_first: bool) -> None:
    for errors in ranks(2).run(modules_job, adapts_first):
        assert len(errors) == 17
        assert max(errors) < EXACT

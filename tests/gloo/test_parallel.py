"""A model trains in the same way on any DP x MP x EP x ESP as in one process.

The model has dense parts and experts.

Compared are each gradient, the norm over all of them, what is clipped, and the parameters some steps later.
"""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe.comm.group_options import timeout_of
from pmoe.training import parallel
from pmoe.training.parallel import Meshes, is_expert, make_meshes, reduce_gradients
from tests.pool import GROUP_TIMEOUT_SECONDS, ranks
from tests.reference import relative_error
from tests.spread import spread

ROOT = Path(__file__).resolve().parents[2]

# B sequences of S tokens on a rank, M = D_MODEL columns.
D_MODEL, D_HIDDEN, HEAD, VOCABULARY = 8, 12, 4, 10
AUX, MAX_NORM, STEPS, TOLERANCE = 0.3, 0.8, 3, 1e-10
SEQUENCES = {1: (2,), 2: (1, 2), 4: (2, 0, 1, 3), 8: (1, 2, 0, 1, 1, 2, 1, 1)}
"""B of each rank, by number of ranks; a rank may have none."""


@dataclass(frozen=True)
class Case:
    """The sizes of the meshes and of the model.

    dense: how ranks share the dense part: "copies"; "ddp"; over "mp"; "sequence" (norms are DTensors) or
        "plain sequence" (they are not), where each rank's tokens stay its own to the end; or "gathered",
        where tokens are split for the MoE layer only and the ranks of "mp" compute one loss.
    """

    world: int
    mp: int = 1
    ep: int = 1
    esp: int = 1
    num_experts: int = 4
    dense: str = "copies"
    optimizer: str = "SGD"
    norm_type: float = 2.0
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = f"{self.world}-mp{self.mp}-ep{self.ep}-esp{self.esp}-E{self.num_experts}"
        return f"{sizes}-{self.dense}-{self.optimizer}"


class Attention(nn.Module):
    """Softmax attention. Each head has HEAD columns; the rank's columns are divided into such heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(D_MODEL, D_MODEL) for _ in range(3))
        self.k = nn.Linear(D_MODEL, D_MODEL, bias=False)  # softmax takes no notice of one

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(HEAD)).softmax(-1)
        y: Tensor = self.o((scores @ v).transpose(1, 2).flatten(-2))
        return y


class Model(nn.Module):
    """A model of one block, from tokens to logits.

    ``extra`` is used only if the sequences of the first rank are computed.
    """

    def __init__(self, case: Case, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D_MODEL)
        self.norm1, self.norm2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.attention = Attention()
        self.moe = pmoe.MoELayer(D_MODEL, D_HIDDEN, case.num_experts, 1, mesh=mesh, **case.options)
        self.extra = nn.Linear(D_MODEL, D_MODEL)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(D_MODEL, VOCABULARY)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens: Tensor, extra: bool, parts: int = 1) -> tuple[Tensor, Tensor]:
        """Returns logits, and the sum of the auxiliary losses over ``parts`` equal parts of the sequences."""
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x))
        x = x + (self.extra(x).tanh() if extra else 0.0)
        outs, aux = [], torch.zeros((), dtype=torch.float64)
        for part in self.norm2(x).chunk(parts, dim=1):
            outs.append(self.moe(part))
            aux = aux + self.moe.l_aux
        return self.head(x + torch.cat(outs, dim=1)), aux


def build(case: Case, mesh: DeviceMesh | None) -> Model:
    """Builds a model from one seed: ranks have the same dense part, and together the experts of one
    process.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(7)
        model = Model(case, mesh)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        model.moe.gate.weight *= 3
        for norm in (model.norm1, model.norm2):  # else their gradients could hide behind ones and zeros
            norm.weight.copy_(torch.rand(D_MODEL) + 0.5)
    return model


def batch(case: Case, step: int) -> list[tuple[Tensor, Tensor]]:
    """Returns for each place on "dp" the tokens (B, S), and the factors of the logits in the loss."""
    generator = torch.Generator().manual_seed(100 + step)
    found = []
    for sequences in SEQUENCES[case.world // case.mp]:
        tokens = torch.randint(VOCABULARY, (sequences, 6), generator=generator)
        shape = (sequences, 6, VOCABULARY)
        found.append((tokens, torch.randn(shape, generator=generator, dtype=torch.float64)))
    return found


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    kind: Any = getattr(torch.optim, case.optimizer)
    return kind(trained, lr=0.1 if case.optimizer == "SGD" else 0.01)


# ---- one process ----------------------------------------------------------------------------------


def expected(case: Case) -> dict[str, Any]:
    """Returns the results that torch alone computes for the sequences of all ranks, rank by rank."""
    model = build(case, None)
    optimizer = make_optimizer(case, model)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in model.parameters():
            each.grad = torch.zeros_like(each) if each.requires_grad else None
        count = case.world // case.mp
        for at, (tokens, factor) in enumerate(batch(case, step)):
            logits, aux = model(tokens, extra=at == 0, parts=case.mp)
            # The gathered loss is one of the "mp" group; else it is the mean of its ranks'.
            share = 1 if case.dense == "gathered" else 1 / case.mp
            (((logits * factor).sum() * share + AUX * aux / case.mp) / count).backward()
        if step == 0:
            found["gradients"] = gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, case.norm_type)
        if step == 0:
            found |= {"norm": norm, "clipped": gradients(model)}
        optimizer.step()
    return {**found, "parameters": {name: each.detach() for name, each in model.named_parameters()}}


# ---- many -----------------------------------------------------------------------------------------


def share(case: Case, model: Model, meshes: Meshes) -> Any:
    """Returns the model with its dense part shared as the case says."""
    if case.dense == "copies":
        return model
    if case.dense == "ddp":
        experts = [name for name, each in model.named_parameters() if is_expert(each)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh, split = meshes.dense["mp"], Shard(1)
    columns = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    if case.dense == "gathered":
        inner = {"input_layouts": Replicate(), "desired_input_layouts": split, "use_local_output": True}
        plan: dict[str, Any] = {
            **columns,
            "attention.o": RowwiseParallel(),
            "moe": PrepareModuleInput(**inner),
        }
        parallelize_module(model, mesh, plan)
        outer = PrepareModuleOutput(output_layouts=split, desired_output_layouts=Replicate())
        return parallelize_module(model, mesh, {"moe": outer})
    whole = PrepareModuleInput(input_layouts=split, desired_input_layouts=Replicate())
    plan = {**columns, "attention": whole, "attention.o": RowwiseParallel(output_layouts=split)}
    if case.dense == "sequence":
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=split)
        return parallelize_module(model, mesh, {**plan, "embed": rows})
    return parallelize_module(model, mesh, plan)


def loss_of(case: Case, model: Any, meshes: Meshes, step: int) -> Tensor:
    """Returns this rank's loss."""
    at, own = meshes.dense.get_local_rank("dp"), meshes.dense.get_local_rank("mp")
    tokens, factor = batch(case, step)[at]
    if case.dense in ("copies", "ddp", "plain sequence"):
        tokens = tokens.chunk(case.mp, dim=1)[own]
    logits, aux = model(tokens, extra=at == 0)
    if case.dense == "gathered":
        return (logits * factor).sum() + AUX * aux / case.mp
    return (logits * factor.chunk(case.mp, dim=1)[own]).sum() + AUX * aux


def trained(rank: int, world: int, case: Case) -> dict[str, Any]:
    meshes = make_meshes(mp=case.mp, ep=case.ep, esp=case.esp)
    model = build(case, meshes.experts)
    shared = share(case, model, meshes)
    optimizer = make_optimizer(case, model)
    arguments: dict[str, Any] = {"experts_only": case.dense == "ddp"}
    if case.dense == "gathered":
        arguments["divide_by"] = world // case.mp
        arguments["replicated"] = [
            each
            for name, each in model.named_parameters()
            if not name.startswith(("moe.", "attention.")) and each.requires_grad
        ]
    found: dict[str, Any] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(case, shared, meshes, step).backward()
        reduce_gradients(model, meshes, **arguments)
        for each in model.parameters():  # a gradient lies as its parameter does
            assert not isinstance(each, DTensor) or each.grad.placements == each.placements
        if step == 0:
            found["gradients"] = gradients(model)
        norm = pmoe.clip_grad_norm_(model, MAX_NORM, case.norm_type)
        if step == 0:
            found |= {"norm": norm, "clipped": gradients(model)}
        optimizer.step()
    return {**found, "parameters": {name: whole(each) for name, each in model.named_parameters()}}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if each.grad is None else whole(each.grad).clone()
        for name, each in model.named_parameters()
    }


def part_of(case: Case, name: str, value: Tensor, rank: int) -> Tensor:
    """Returns the part of a parameter of the whole model that a rank holds."""
    if ".experts." not in name:
        return value
    local = case.num_experts // case.ep
    first = rank // case.esp % case.ep * local
    value = value[first : first + local]
    if name.endswith("b2"):
        return value
    if name.endswith("w2"):
        return value.chunk(case.esp, dim=2)[rank % case.esp]
    return torch.cat(
        [half.chunk(case.esp, dim=1)[rank % case.esp] for half in value.split(D_HIDDEN, dim=1)], 1
    )


def check(case: Case) -> None:
    wanted = expected(case)
    assert wanted["norm"] > 2 * MAX_NORM
    for rank, got in enumerate(ranks(case.world).run(trained, case)):
        assert abs(got["norm"] / wanted["norm"] - 1) < 1e-12, (rank, got["norm"], wanted["norm"])
        for kind in ("gradients", "clipped", "parameters"):
            assert set(got[kind]) == set(wanted[kind])
            for name, value in wanted[kind].items():
                if value is None or got[kind][name] is None:  # DDP leaves out what no rank has used
                    assert name == "frozen" or (name.startswith("unused.") and case.dense == "ddp")
                    continue
                error = relative_error(got[kind][name], part_of(case, name, value, rank))
                assert error < TOLERANCE, f"rank {rank}, {kind} of {name}: {error}"


TILINGS = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (4, 2, 1), (4, 1, 2), (4, 4, 1), (4, 2, 2), (4, 1, 4)]
"""(world, ep, esp)"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world, ep, esp, optimizer", spread(TILINGS, ["SGD", "AdamW"], every=2))
def test_every_tiling_trains_like_one_process(world: int, ep: int, esp: int, optimizer: str) -> None:
    check(Case(world, 1, ep, esp, optimizer=optimizer))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world, ep, esp, num_experts", [(2, 1, 2, 1), (4, 2, 2, 2), (4, 1, 4, 1), (4, 1, 2, 1)]
)
def test_fewer_experts_than_ranks(world: int, ep: int, esp: int, num_experts: int) -> None:
    check(Case(world, 1, ep, esp, num_experts))


@pytest.mark.slow
def test_the_layers_options_change_nothing() -> None:
    shared = {"shared_expert": 5, "shared_gate": True}
    check(Case(4, 1, 2, 2, options={"expert": "swiglu", "pipeline": 2, "memory_reuse": "S4"}))
    check(Case(4, 1, 1, 2, options={**shared, "pipeline": 2, "bias": False}))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_norms_of_any_order(norm_type: float) -> None:
    check(Case(4, 1, 1, 2, norm_type=norm_type))
    check(Case(4, 2, 2, 2, dense="sequence", norm_type=norm_type))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world, ep, esp", [(2, 2, 1), (4, 2, 1), (4, 2, 2)])
def test_the_dense_part_may_be_left_to_distributed_data_parallel(world: int, ep: int, esp: int) -> None:
    check(Case(world, 1, ep, esp, dense="ddp"))


DENSE = ["sequence", "plain sequence", "gathered"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world, ep, esp, dense", spread([(2, 2, 1), (2, 1, 2), (4, 1, 2), (4, 4, 1)], DENSE, every=3)
)
def test_attention_over_mp_beside_experts_on_other_meshes(world: int, ep: int, esp: int, dense: str) -> None:
    check(Case(world, 2, ep, esp, dense=dense))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dense, optimizer", spread(DENSE, ["SGD", "AdamW"], every=2))
def test_figure_2_trains_like_one_process(dense: str, optimizer: str) -> None:
    check(Case(4, 2, 2, 2, 2, dense, optimizer))


@pytest.mark.nightly
@pytest.mark.parametrize("dense", DENSE)
def test_eight_ranks(dense: str) -> None:
    check(Case(8, 2, 2, 2, dense=dense))
    check(Case(8, 2, 4, 2, dense=dense))
    check(Case(8, 1, 2, 2))


# ---- meshes ---------------------------------------------------------------------------------------


def laid_out(rank: int, world: int, sizes: dict[str, int]) -> dict[str, list[int]]:
    meshes = make_meshes(**sizes)
    return {
        name: dist.get_process_group_ranks(meshes.group(name)) for name in ("dp", "mp", "edp", "ep", "esp")
    }


def test_figure_2_lays_neighbours_out_over_mp_and_esp() -> None:
    found = ranks(4).run(laid_out, {"mp": 2, "ep": 2, "esp": 2})
    assert found == [
        {"dp": [0, 2], "mp": [0, 1], "edp": [0], "ep": [0, 2], "esp": [0, 1]},
        {"dp": [1, 3], "mp": [0, 1], "edp": [1], "ep": [1, 3], "esp": [0, 1]},
        {"dp": [0, 2], "mp": [2, 3], "edp": [2], "ep": [0, 2], "esp": [2, 3]},
        {"dp": [1, 3], "mp": [2, 3], "edp": [3], "ep": [1, 3], "esp": [2, 3]},
    ]


def test_what_the_experts_leave_is_data_parallel_outermost() -> None:
    found = ranks(4).run(laid_out, {"esp": 2})
    assert [each["edp"] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each["dp"] for each in found] == [[0, 1, 2, 3]] * 4


def timeouts(rank: int, world: int) -> list[timedelta | None]:
    meshes = make_meshes(mp=2, ep=2)
    return [timeout_of(meshes.group(name)) for name in ("dp", "mp", "edp", "ep", "esp")]


def test_a_lost_rank_ends_every_group_of_the_meshes_in_time() -> None:
    """Torch would give the groups of a mesh half an hour, whatever the default group has."""
    for found in ranks(4).run(timeouts):
        assert set(found) == {timedelta(seconds=GROUP_TIMEOUT_SECONDS)}


def groups_made(rank: int, world: int) -> list[int]:
    sizes = {"mp": 2, "ep": 2}
    first = make_meshes(**sizes)
    pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, mesh=first.experts)
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    for _ in range(3):
        assert make_meshes(**sizes) is first
        pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, mesh=first.experts)
    return [before, len(torch.distributed.distributed_c10d._world.pg_map)]


def test_meshes_made_again_make_no_groups() -> None:
    for before, after in ranks(2).run(groups_made):
        assert before == after


def refusals(rank: int, world: int) -> list[str]:
    meshes = make_meshes(ep=2)
    model = build(Case(world, ep=2), meshes.experts)
    stranger = nn.Parameter(torch.zeros(1))
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    other = nn.Linear(2, 2)
    parallelize_module(other, make_meshes(mp=2).dense["mp"], ColwiseParallel())
    calls: list[Any] = [
        lambda: make_meshes(mp=3),
        lambda: make_meshes(ep=2, esp=2),
        lambda: reduce_gradients(model, make_meshes(esp=2)),
        lambda: reduce_gradients(model, meshes, divide_by=0),
        lambda: reduce_gradients(model, meshes, replicated=[stranger]),
        lambda: reduce_gradients(model, meshes, replicated=list(model.moe.experts.parameters())),
        lambda: reduce_gradients(other, make_meshes(mp=2), replicated=[other.weight]),
        lambda: reduce_gradients(other, meshes),
        lambda: reduce_gradients(sparse, meshes),
        lambda: pmoe.clip_grad_norm_(model, -1.0),
        lambda: pmoe.clip_grad_norm_(model, 1.0, norm_type=0),
    ]
    found = []
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        found.append(str(error.value))
    return found


def test_what_does_not_fit_is_refused() -> None:
    for found in ranks(2).run(refusals):
        assert found == [
            "mp (3) must divide the number of ranks (2)",
            "ep * esp (2 * 2) must divide the number of ranks (2)",
            "moe (a MoELayer of ep 2, esp 1) must be built with mesh=meshes.experts (ep 1, esp 2)",
            "divide_by (0) must be None or a positive number, below 2**63",
            "replicated (1 of 1 unknown) must be parameters of the model",
            "replicated (moe.experts.w1, an expert's) must be plain dense parameters",
            "replicated (weight, a DTensor) must be plain dense parameters",
            'weight (a DTensor over ranks [0, 1]) must be on meshes.dense["mp"]; where a wrapper reduces its '
            "gradient, use experts_only=True",
            "the gradient of weight (torch.sparse_coo) must be dense (torch.strided)",
            "max_norm (-1.0) must be a number of at least 0",
            "norm_type (0.0) must be positive, or inf",
        ]


# ---- gradients ------------------------------------------------------------------------------------


def mixed(rank: int, world: int, bucket_bytes: int) -> tuple[int, list[Tensor]]:
    """Reduces gradients of two types: of many sizes, strided, and missing on a rank.

    Returns the number of all-reduces, and the sums.
    """
    dtypes = [torch.float64, torch.bfloat16, torch.float64, torch.float64, torch.bfloat16, torch.float64]
    shapes = [(3,), (4, 2), (2, 3), (), (0, 5), (40,)]
    model = nn.ParameterList(torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
    for each in model:
        each.grad = torch.full_like(each, rank + 1)
    model[2].grad = torch.full((3, 2), rank + 1.0, dtype=torch.float64).t()
    if rank:
        model[0].grad = None
    kept = model[3].grad
    with (
        mock.patch.object(parallel, "BUCKET_BYTES", bucket_bytes),
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted,
    ):
        reduce_gradients(model, make_meshes(), divide_by=torch.tensor(0.5))
    assert model[3].grad is kept
    return counted.call_count, [each.grad for each in model]


@pytest.mark.parametrize("bucket_bytes, calls", [(1 << 20, 2), (64, 4), (1, 6)])
def test_gradients_of_any_type_share_few_reductions(bucket_bytes: int, calls: int) -> None:
    for count, found in ranks(2).run(mixed, bucket_bytes):
        assert count == calls
        assert [each.unique().tolist() for each in found] == [[2.0], [6.0], [6.0], [6.0], [], [6.0]]


def of_experts_alone(rank: int, world: int, divide_by: int | torch.Tensor) -> list[int]:
    """Returns how often a reduction has written each gradient of experts that no other rank holds."""
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.allreduce = False
        parameter.grad = torch.ones_like(parameter)
    reduce_gradients(model, make_meshes(ep=world), divide_by=divide_by)
    return [parameter.grad._version for parameter in model.parameters()]


def test_a_division_by_one_does_not_write_the_gradients() -> None:
    """Gradients of experts that no other rank holds were read and written for nothing."""
    assert ranks(2).run(of_experts_alone, 1) == [[0, 0]] * 2
    assert ranks(2).run(of_experts_alone, 2) == [[1, 1]] * 2


def collectives(rank: int, world: int, sizes: dict[str, int]) -> list[int]:
    meshes = make_meshes(**sizes)
    case = Case(world, dense="sequence", **sizes)
    model = build(case, meshes.experts)
    share(case, model, meshes)
    loss_of(case, model, meshes, 0).backward()
    counts = []
    for call in (lambda: reduce_gradients(model, meshes), lambda: pmoe.clip_grad_norm_(model, 1.0)):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
            call()
        counts.append(counted.call_count)
    return counts


def test_each_group_is_asked_once_and_the_norm_is_one_reduction() -> None:
    assert ranks(4).run(collectives, {"mp": 2, "ep": 2, "esp": 1}) == [[3, 1]] * 4  # all, "dp", "edp"
    assert ranks(4).run(collectives, {"mp": 2, "ep": 2, "esp": 2}) == [[2, 1]] * 4  # "edp" is one rank


def not_finite(rank: int, world: int) -> tuple[str, float]:
    model = nn.Linear(2, 2)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    if rank == 1:
        model.bias.grad[0] = float("nan")
    norm = pmoe.clip_grad_norm_(copy.deepcopy(model), 1.0)
    for each in model.parameters():
        each.grad = torch.full_like(each, float("nan") if rank == 1 else 1.0)
    with pytest.raises(RuntimeError) as error:
        pmoe.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    return str(error.value), norm.item()


def test_a_norm_that_is_not_finite_raises_on_every_rank_where_asked_to() -> None:
    for message, _ in ranks(2).run(not_finite):
        assert message == (
            "the norm of order 2.0 of all gradients (nan) must be finite, or error_if_nonfinite False"
        )


def norms_of_nothing(rank: int, world: int) -> list[float]:
    model = nn.Linear(2, 2)
    found = [pmoe.clip_grad_norm_(model, 1.0).item()]
    if rank:  # another rank has none at all
        model.weight.grad = torch.full((2, 2), 3.0)
    norm = pmoe.clip_grad_norm_(model, 1.0, math.inf)
    return [*found, norm.item()]


def test_a_norm_of_no_gradients_is_0_and_hangs_nobody() -> None:
    assert ranks(2).run(norms_of_nothing) == [[0.0, 3.0]] * 2


def not_reduced(rank: int, world: int) -> str:
    meshes = make_meshes(mp=2)
    norm = parallelize_module(nn.LayerNorm(4), meshes.dense["mp"], SequenceParallel(use_local_output=True))
    norm(torch.ones(1, 2, 4)).sum().backward()
    with pytest.raises(ValueError) as error:
        pmoe.clip_grad_norm_(norm, 1.0)
    return str(error.value)


def test_a_summand_of_a_gradient_is_not_clipped() -> None:
    for message in ranks(2).run(not_reduced):
        assert (
            message == "the gradient of weight (a summand on each rank) must be reduced before it is clipped"
        )


@pytest.mark.slow
def test_the_example_trains_and_ends_cleanly() -> None:
    launch = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 4"
    script = [str(ROOT / "examples" / "parallel_block.py"), "--steps", "6"]
    found = subprocess.run(
        [sys.executable, *launch.split(), *script],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr
    first, *steps = found.stdout.splitlines()
    assert first == "4 ranks: dp 2 x mp 2; edp 1 x ep 2 x esp 2"
    losses = [float(re.findall(r"loss ([\d.]+), gradient norm [\d.]+$", line)[0]) for line in steps]
    assert losses[-1] < losses[0] - 0.5


def replaced(rank: int, world: int) -> tuple[list[str], bool]:
    """Experts' parameters that a user assigned or swapped: which gradients and norms then differ."""
    wrong = []
    for meshes in (make_meshes(), make_meshes(ep=world)):
        results = []
        for replaces in (False, True):
            torch.manual_seed(3)
            layer = pmoe.MoELayer(6, 8, 4, 2, mesh=meshes.experts, dtype=torch.float64)
            if replaces:
                layer.experts.w1 = nn.Parameter(layer.experts.w1.detach().clone())
                torch.utils.swap_tensors(layer.experts.w2, nn.Parameter(layer.experts.w2.detach().clone()))
            torch.manual_seed(rank)
            layer(torch.randn(5, 6, dtype=torch.float64)).square().sum().backward()
            reduce_gradients(layer, meshes)
            norm = pmoe.clip_grad_norm_(layer, 1.0)
            results.append([norm, *(parameter.grad for parameter in layer.parameters())])
        pairs = zip(*results, strict=True)
        wrong += [str(at) for at, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    layer.experts.w1 = nn.Parameter(layer.experts.w1.detach().clone())
    return wrong, "experts.w1" in pmoe.GradientReducer(layer).names


def test_assigned_and_swapped_parameters_are_still_those_of_experts() -> None:
    """A new Parameter has no mark. It was taken for a dense one, so unlike gradients were summed."""
    assert ranks(2).run(replaced) == [([], False), ([], False)]

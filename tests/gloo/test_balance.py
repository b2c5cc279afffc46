"""``balance``: other ranks compute a part of busy experts' rows, with copies of their weights.

Output and every gradient are those of the same layer without copies, to the order of sums.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import warn
from pmoe.call.decision import BalanceReport
from pmoe.choose.search import learned_degrees
from pmoe.choose.solve import step_costs
from pmoe.comm.ranks import Ranks
from pmoe.experts.operands import local_part
from pmoe.gates import ReplayGate, TopKGate
from pmoe.gates.forced import ForcedGate
from pmoe.measure.profile import PROFILES
from pmoe.planner import timeline
from pmoe.planner.copies import CopyPlan, plan_copies
from pmoe.planner.copy_work import NO_COPIES, CopyWork
from pmoe.planner.costs import LineCost
from pmoe.planner.degree_search import StepCosts
from pmoe.planner.layer_seconds import step_seconds
from pmoe.planner.layer_sizes import LayerSizes
from tests.fuzz.cases import Call, Case
from tests.fuzz.run import outcome
from tests.gloo.kit import counted_collectives, error_of
from tests.gloo.test_faults_everywhere import LAYERS, what_is_wrong
from tests.kit import AUX, tokens
from tests.pool import ranks
from tests.reference import relative_error
from tests.spread import spread
from tests.switched import switched_layer
from tests.unit.test_profile import MADE

M, H = 6, 10
TOKENS = {2: (40, 65), 4: (37, 0, 64, 20)}


def build(
    num_experts: int,
    top_k: int,
    share: float,
    busy: tuple[int, ...],
    dtype: Any = torch.float64,
    **options: Any,
) -> pmoe.MoELayer:
    """A layer whose gate sends ``share`` of the rows to the busy experts."""
    torch.manual_seed(7)
    gate = ForcedGate(TopKGate(M, num_experts, top_k, dtype=dtype), num_experts, busy=busy, share=share)
    return switched_layer(M, H, num_experts, top_k, gate=gate, dtype=dtype, **options)


def step(layer: pmoe.MoELayer, rank: int, world: int, run: Any = None) -> dict[str, Tensor | None]:
    """y, the rows of each expert, and every gradient."""
    dtype = layer.experts.w1.dtype
    count = TOKENS[world][rank]
    x = tokens(count, 10 + rank, dtype).requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = (run or layer)(x)
    ((y * tokens(count, 20 + rank, dtype)).sum() + AUX * layer.l_aux).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "rows": layer.tokens_per_expert, "x": x.grad, **gradients}


def differences(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], limit: float) -> list[str]:
    """The names of the values that differ."""
    assert set(got) == set(wanted)
    wrong = []
    for name, value in wanted.items():
        other = got[name]
        if value is None or other is None:
            wrong += [name] if (value is None) is not (other is None) else []
        elif not relative_error(other.double(), value.double()) <= limit:
            wrong.append(f"{name}: {relative_error(other.double(), value.double())}")
    return wrong


def compared_job(
    rank: int, world: int, balance: int, case: tuple[Any, ...], options: dict[str, Any]
) -> tuple[list[str], BalanceReport | None]:
    key = (Ranks().name, torch.device("cpu"), torch.float64)
    with mock.patch.dict(PROFILES, {key: MADE}):
        without = step(build(*case, **options), rank, world)
        layer = build(*case, balance=balance, **options)
        wrong = differences(step(layer, rank, world), without, 1e-12)
    assert layer.ran is not None
    return wrong, layer.ran.balance


CASES = [
    (2, 1, (4, 1, 0.8, (0,))),
    (2, 1, (4, 2, 0.5, (3,))),
    (2, 2, (8, 2, 0.9, (4, 5))),
    (4, 1, (4, 1, 0.9, (2,))),
    (4, 2, (8, 2, 0.8, (0, 1))),
    (4, 3, (8, 1, 0.95, (0,))),
    (4, 2, (8, 2, 0.7, (1, 6))),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": {"pipeline": 2},
    "more chunks": {"pipeline": 4, "bias": False},
    "S4": {"pipeline": 2, "memory_reuse": "S4"},
    "keep": {"memory_reuse": pmoe.Restore("keep", "keep"), "pipeline": 3},
    "T_M again": {"memory_reuse": pmoe.Restore("keep", "recompute"), "pipeline": 2, "expert": "swiglu"},
    "T_DI again": {"memory_reuse": pmoe.Restore("communicate", "keep"), "expert": "swiglu"},
    "capacity": {"capacity_factor": 1.5, "pipeline": 2},
    "shared expert": {"shared_expert": 4, "pipeline": 2},
    "all rows travel": {"bypass_local": False},
    "S1": {"pipeline": 2, "memory_reuse": "S1"},
    "S2": {"pipeline": 4, "memory_reuse": "S2"},
    "S3": {"memory_reuse": "S3", "expert": "swiglu"},
    "T_DI offloaded": {"pipeline": 2, "memory_reuse": pmoe.Restore("offload", "keep")},
    "T_M offloaded": {"pipeline": 2, "memory_reuse": pmoe.Restore("keep", "offload")},
    "n by rule": {"pipeline": True},
    "pair by rates": {"pipeline": 2, "memory_reuse": True},
    "n and pair": {"pipeline": True, "memory_reuse": True},
    "solver": {"pipeline": "solve"},
    "more chunks in backward": {"pipeline": 2, "pipeline_backward": 4, "memory_reuse": "S4"},
    "fewer chunks in backward": {"pipeline": 4, "pipeline_backward": 2},
    "unlike chunks": {"pipeline": 2, "pipeline_backward": 3, "memory_reuse": "S1"},
    "unlike chunks, kept": {"pipeline": 3, "pipeline_backward": 2, "expert": "swiglu"},
}


HIERARCHICAL: dict[str, dict[str, Any]] = {
    "1D": {"dispatch": "hierarchical_1d", "nodes": 2, "pipeline": 2},
    "2D": {"dispatch": "hierarchical_2d", "nodes": 2, "pipeline": 2, "memory_reuse": "S4"},
    "one way": {"dispatch": "hierarchical_2d", "combine": "flat", "nodes": 2, "pipeline": 2},
    "uneven nodes": {"dispatch": "hierarchical_1d", "nodes": [0, 0, 0, 1], "pipeline": 3},
    "all rows travel": {"dispatch": "hierarchical_2d", "nodes": [0, 1, 0, 1], "bypass_local": False},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", HIERARCHICAL)
def test_rows_may_travel_in_steps_to_copies(name: str) -> None:
    for balance, case in ((2, (8, 2, 0.8, (0, 1))), (1, (4, 1, 0.9, (2,)))):
        for wrong, report in ranks(4).run(compared_job, balance, case, HIERARCHICAL[name]):
            assert not wrong and report is not None and report.copies > 0


@pytest.mark.sampled(6)
@pytest.mark.parametrize("world, balance, case, name", spread(CASES, list(OPTIONS), every=3))
def test_output_and_gradients_are_those_without_copies(
    world: int, balance: int, case: tuple[Any, ...], name: str
) -> None:
    found = ranks(world).run(compared_job, balance, case, OPTIONS[name])
    for rank, (wrong, report) in enumerate(found):
        assert not wrong, f"rank {rank}: {wrong}"
        assert report is not None and report.copies > 0
        assert report.after < report.before


def rows_job(rank: int, world: int, balance: int, n: int) -> list[list[int]]:
    layer = build(8, 2, 0.8, (0, 1), balance=balance, pipeline=n)
    layer(tokens(2000, rank))
    counts = layer.row_counts
    assert counts is not None
    return counts.joined(n).recv.sum((1, 2)).tolist()


@pytest.mark.parametrize("world", [2, 4])
def test_every_chunk_of_every_rank_has_equally_many_rows(world: int) -> None:
    n = 4
    for rows in ranks(world).run(rows_job, 3, n):
        for of_chunk in rows:
            assert abs(of_chunk - 2000 * 2 / n) < 0.05 * 2000 * 2 / n


def travelled_job(rank: int, world: int, of_ranks: tuple[int, ...], options: dict[str, Any]) -> list[int]:
    """The rows that this rank computes, by the rank of their tokens. 80 % of all rows go to expert 0."""
    layer = build(4, 1, 0.8, (0,), balance=1, **options)
    layer(tokens(of_ranks[rank], rank))
    counts = layer.row_counts
    assert counts is not None
    return counts.recv.sum((0, 2)).tolist()


@pytest.mark.parametrize("options", [{"pipeline": 2}, {"pipeline": 2, "memory_reuse": "S4"}], ids=str)
def test_a_host_computes_its_own_rows_for_a_copied_expert(options: dict[str, Any]) -> None:
    # Expert 0 gets 3,200 of 4,000 rows. Ranks 0 and 1 have 1,600 of them, and compute 1,733 and 1,467.
    for rank, rows in enumerate(ranks(2).run(travelled_job, (2000, 2000), options)):
        assert abs(sum(rows) - 2000) < 0.05 * 2000
        assert rows[1 - rank] < 0.15 * 2000


def test_rows_of_unequal_ranks_are_divided_evenly() -> None:
    for rows in ranks(2).run(travelled_job, (4000, 0), {"pipeline": 2}):
        assert abs(sum(rows) - 2000) < 0.05 * 2000


def grouped_job(rank: int, world: int, options: dict[str, Any]) -> tuple[list[str], float, list[int]]:
    """What differs from a step without copies, the experts that this rank sends, and the rows it computes."""
    layers = [build(4, 1, 0.9, (2,), balance=balance, **options) for balance in (0, 1)]
    found = [step(layer, rank, world) for layer in layers]
    experts_sent = layers[1].traffic.weights / EXPERT_BYTES
    with torch.no_grad():
        layers[1](tokens(1000, rank))
    counts = layers[1].row_counts
    assert counts is not None
    return differences(found[1], found[0], 1e-12), experts_sent, counts.recv.sum((0, 2)).tolist()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options", [{}, {"pipeline": 3, "memory_reuse": "S1"}, {"pipeline": 2, "pipeline_backward": 4}], ids=str
)
def test_hosts_on_another_node_get_an_expert_once_and_keep_rows_on_their_node(
    options: dict[str, Any],
) -> None:
    found = ranks(4).run(grouped_job, {**options, "nodes": 2})
    assert not any(wrong for wrong, _, _ in found)
    # Rank 2 sends expert 2 to rank 3, and its halves to ranks 0 and 1. These send each other their halves. In
    # backward they send each other halves of gradients, and then sums of halves to rank 2.
    assert [sent for _, sent, _ in found] == [1.5, 1.5, 2.0, 1.0]
    for rank, (_, _, rows) in enumerate(found):
        assert abs(sum(rows) - 1000) <= 50
        of_other_node = rows[2:] if rank < 2 else rows[:2]
        assert sum(of_other_node) < 150  # about 500 if every rank divided its rows in the same way


def learnt_job(rank: int, world: int, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Steps that search n by trials, under a skewed and an even load; the tables of n that they learnt."""
    found = []
    key = (Ranks().name, torch.device("cpu"), torch.float64)
    with (
        mock.patch.dict(PROFILES, {key: MADE}),
        mock.patch("pmoe.choose.trials.MIN_ROWS", 8),
        mock.patch("pmoe.choose.part_of_batch.MIN_TOKENS", 8),
    ):
        for balance in (0, 1):
            layer = build(4, 1, 0.8, (0,), balance=balance, pipeline=True, **options)
            found.append(step(layer, rank, world))
        assert layer.ran is not None and layer.ran.balance is not None and layer.ran.balance.copies
        layer.gate.share = Fraction(1, 4)
        step(layer, rank, world)
        assert layer.ran.balance.copies == 0
        tables = learned_degrees(layer.layer_modules).tables
    return differences(found[1], found[0], 1e-12), sorted(name for name in tables if tables[name].ranges)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"memory_reuse": "S4"}], ids=str)
def test_n_is_learnt_apart_for_calls_with_copies(options: dict[str, Any]) -> None:
    for wrong, tables in ranks(2).run(learnt_job, options):
        assert not wrong
        assert tables == ["torch.float64", "torch.float64, 1 copies"]


def priced_job(rank: int, world: int, pipeline: Any) -> list[CopyWork]:
    """What copies add to the step that is predicted for a skewed load, and for an even one."""
    found = []

    def of_search(sizes: LayerSizes, *others: Any) -> float:
        found.append(sizes.copy_work)
        return step_seconds(sizes, *others)

    def of_solver(*arguments: Any) -> StepCosts:
        found.append(arguments[-1])
        return step_costs(*arguments)

    key = (Ranks().name, torch.device("cpu"), torch.float64)
    works = []
    with (
        mock.patch.dict(PROFILES, {key: MADE}),
        mock.patch("pmoe.choose.trials.MIN_ROWS", 8),
        mock.patch("pmoe.choose.part_of_batch.MIN_TOKENS", 8),
        mock.patch("pmoe.choose.search.step_seconds", of_search),
        mock.patch("pmoe.choose.solve.step_costs", of_solver),
    ):
        # No other test has such experts: layers that are equal share what they have learnt.
        options = {"expert": "swiglu", "balance": 1, "pipeline": pipeline}
        layer = build(4, 1, 0.8, (0,), **options)
        for share in (Fraction(4, 5), Fraction(1, 4)):
            layer.gate.share = share
            step(layer, rank, world)
            works.append(found[-1])
    return works


@pytest.mark.parametrize("pipeline", [True, "solve"])
def test_the_predicted_step_counts_the_messages_of_copies(pipeline: Any) -> None:
    for skewed, even in ranks(2).run(priced_job, pipeline):
        assert skewed == CopyWork(scattered=1.0, computed=1.0)
        assert even == NO_COPIES


def skewed_step(options: dict[str, Any], rank: int, world: int) -> tuple[Any, pmoe.MoELayer]:
    """A step of a layer with a gate of its own, as a budget needs it; four of five rows go to expert 0."""
    torch.manual_seed(7)
    layer = pmoe.MoELayer(M, H, 4, 1, dtype=torch.float64, **options)
    count = TOKENS[world][rank]
    x = tokens(count, 10 + rank)
    x[:, 0] = torch.where(torch.arange(count) % 5 > 0, 1.0, -1.0)
    with torch.no_grad():
        layer.gate.weight[0, 0] = 50
    x.requires_grad_()
    y = layer(x)
    (y * tokens(count, 20 + rank)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}, layer


def budget_job(
    rank: int, world: int, options: dict[str, Any], margin: float
) -> tuple[list[int], list[str], list[str]]:
    """Copies with a budget of a byte less than a layer needs with them, and of ``margin`` times the need.

    Also the names of wrong values, and the warnings.
    """
    warn.GIVEN.clear()
    key = (Ranks().name, torch.device("cpu"), torch.float64)
    copies = []
    wrong = []
    with mock.patch.dict(PROFILES, {key: MADE}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        without, plain = skewed_step({"pipeline": 2, "memory_reuse": "S4"}, rank, world)
        plain.balance = 1
        need = plain.predict_memory(80).promised
        for budget in (need - 1, int(margin * need)):
            for _ in range(2):
                found, layer = skewed_step({**options, "balance": 1, "memory_budget": budget}, rank, world)
                wrong += differences(found, without, 1e-12)
            assert layer.ran is not None and layer.ran.balance is not None
            copies.append(layer.ran.balance.copies)
    return copies, wrong, [str(each.message) for each in caught if "no room" in str(each.message)]


@pytest.mark.parametrize(
    "options, margin",
    [({"pipeline": 2, "memory_reuse": "S4"}, 1.0), ({"pipeline": True, "memory_reuse": True}, 1.5)],
    ids=["pair is given", "pair is chosen"],
)
def test_a_budget_without_room_for_a_copy_has_none_and_says_so_once(
    options: dict[str, Any], margin: float
) -> None:
    for copies, wrong, messages in ranks(2).run(budget_job, options, margin):
        assert not wrong and copies[1] == 1
        if options["pipeline"] == 2:  # with other n and pairs there may be room
            assert copies[0] == 0 and len(messages) == 1
            assert re.search(r"memory_budget \(\d+\) leaves no room for copies of busy", messages[0])


def nodes_job(rank: int, world: int) -> list[list[tuple[int, int]]]:
    """The copies, as pairs (expert, rank), with the nodes from the option and from the environment."""
    found = []
    plans: list[CopyPlan] = []

    def recorded(*args: Any) -> CopyPlan:
        plans.append(plan_copies(*args))
        return plans[-1]

    with mock.patch("pmoe.decide.balanced_counts.plan_copies", recorded):
        for nodes, local in (([0, 1, 0, 1], ""), (2, ""), (None, "2"), (None, "")):
            with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": local} if local else {}):
                layer = build(4, 1, 0.8, (0, 3), balance=1, nodes=nodes)
                layer(tokens(200, rank))
            found.append(sorted(plans[-1].pairs))
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    return found


def test_copies_are_on_the_own_node_first() -> None:
    for apart, beside, by_variable, _ in ranks(4).run(nodes_job):
        assert apart == [(0, 2), (3, 1)]
        assert beside == by_variable == [(0, 1), (3, 2)]


def unequal_nodes_job(rank: int, world: int) -> str:
    layer = build(4, 1, 0.8, (0,), balance=1, nodes=1 + rank)
    return error_of(lambda: layer(tokens(20, rank)))


def test_nodes_that_differ_between_ranks_are_named() -> None:
    for message in ranks(2).run(unequal_nodes_job):
        assert (
            message
            == "ValueError: nodes (1) must be the same on every rank of the group: rank 1 has nodes (2)"
        )


# ---- values and gradients that are not wanted


def frozen_job(rank: int, world: int) -> tuple[list[str], int, int]:
    layers = [build(4, 1, 0.8, (0,), balance=balance) for balance in (0, 1)]
    for layer in layers:
        layer.experts.requires_grad_(False)
    without, found = (step(layer, rank, world) for layer in layers)
    learning = build(4, 1, 0.8, (0,), balance=1)
    step(learning, rank, world)
    return differences(found, without, 1e-12), layers[1].traffic.weights, learning.traffic.weights


def test_no_gradients_of_frozen_experts_go_home() -> None:
    expert_bytes = 8 * (H * M + M * H + H + M)
    (wrong, sent, of_owner), (other_wrong, received, of_host) = ranks(2).run(frozen_job)
    assert not wrong and not other_wrong
    assert (sent, received) == (expert_bytes, 0)
    assert (of_owner, of_host) == (expert_bytes, expert_bytes)


def partly_frozen_job(rank: int, world: int) -> list[str]:
    found = []
    for balance in (0, 1):
        layer = build(4, 1, 0.8, (0,), balance=balance)
        layer.experts.w1.requires_grad_(rank == 1)  # the busy expert is rank 0's
        layer.experts.b2.requires_grad_(False)
        found.append(step(layer, rank, world))
    return differences(found[1], found[0], 1e-12)


def test_frozen_parameters_of_some_ranks_get_no_gradients() -> None:
    assert ranks(2).run(partly_frozen_job) == [[], []]


def nan_job(rank: int, world: int) -> tuple[bool, bool]:
    found = []
    for balance in (0, 2):
        layer = build(8, 2, 0.8, (0, 1), balance=balance)
        with torch.no_grad():
            if rank == 0:
                layer.experts.w1[0, 0, 0] = torch.nan
        found.append(layer(tokens(TOKENS[world][rank], rank)).isnan())
    return torch.equal(*found), bool(found[0].any())


def test_nan_in_a_copied_experts_weights_is_seen_where_it_is_without_copies() -> None:
    found = ranks(4).run(nan_job)
    assert all(is_same for is_same, _ in found) and any(is_there for _, is_there in found)


def nan_gradients_job(rank: int, world: int, place: str) -> list[str]:
    """The gradients that are finite elsewhere, or that differ where they are finite."""
    found = []
    for balance in (0, 2):
        layer = build(8, 1, 0.8, (0, 1), balance=balance, pipeline=2, nodes=2)
        x = tokens(TOKENS[world][rank], rank).requires_grad_()
        grad = tokens(TOKENS[world][rank], 50 + rank)
        with torch.no_grad():
            if place == "weight" and rank == 0:
                layer.experts.w2[1, 0, 0] = torch.inf
            elif place == "gradient" and rank == 2:
                grad[4, 1] = torch.nan
        layer(x).backward(grad)
        found.append({"x": x.grad, **{name: each.grad for name, each in layer.named_parameters()}})
    without, with_copies = (
        {name: None if value is None else value.nan_to_num(0, 0, 0) for name, value in each.items()}
        for each in found
    )
    wrong = differences(with_copies, without, 1e-12)
    for name, value in found[0].items():
        other = found[1][name]
        if value is not None and other is not None and not value.isfinite().equal(other.isfinite()):
            wrong.append(f"{name}: not finite elsewhere")
    return wrong


@pytest.mark.parametrize("place", ["weight", "gradient"])
def test_gradients_are_not_finite_where_they_are_not_without_copies(place: str) -> None:
    assert ranks(4).run(nan_gradients_job, place) == [[]] * 4


def narrow_job(rank: int, world: int, n: int) -> dict[str, list[dict[str, Tensor | None]]]:
    """Steps in bfloat16 without and with copies, and in float64 with the same values."""
    found = []
    for dtype, balance in ((torch.bfloat16, 0), (torch.bfloat16, 2), (torch.float64, 0)):
        layer = build(8, 2, 0.8, (0, 1), dtype=torch.bfloat16, balance=balance, pipeline=n).to(dtype)
        found.append(step(layer, rank, world))
    return [{name: value for name, value in each.items() if name != "rows"} for each in found]


@pytest.mark.parametrize("world, n", [(2, 1), (4, 2)])
def test_errors_in_bfloat16_are_those_without_copies(world: int, n: int) -> None:
    for without, found, exact in ranks(world).run(narrow_job, n):
        for name, value in exact.items():
            scale = value.abs().max().item() if value.numel() else 0.0
            errors = [
                (each[name].double() - value.double()).abs().max().item() if scale else 0.0
                for each in (found, without)
            ]
            assert errors[0] <= 2 * errors[1] + 2**-8 * scale, name


# ---- calls


def collectives_job(rank: int, world: int) -> list[list[str]]:
    """The collectives of calls with and without copies, with and without gradients."""
    layer = build(8, 2, 0.8, (0, 1), balance=2, pipeline=2)
    even = build(8, 2, 0.25, (0, 1), balance=2, pipeline=2)
    for each in (layer, even):
        each(tokens(4, rank))
    names = []
    for each in (layer, even):
        with counted_collectives() as calls:
            step(each, rank, world)
            with torch.no_grad():
                each(tokens(TOKENS[world][rank], rank))
        names.append(list(calls))
    return names


def test_collectives_are_the_same_on_every_rank_also_without_tokens() -> None:
    found = ranks(4).run(collectives_job)
    assert all(each == found[0] for each in found)
    with_copies, even = found[0]
    # V, VR, VGR and VG of the step, and the second row counts of both calls: the other call has the copies
    assert with_copies.count("all_to_all_single") == even.count("all_to_all_single") + 6
    assert with_copies.count("all_reduce") == even.count("all_reduce") == 2


def replayed_job(rank: int, world: int, way: str) -> list[str]:
    layers = [build(8, 2, 0.8, (0, 1), balance=balance, pipeline=2) for balance in (0, 2)]
    options: dict[str, Any] = {"use_reentrant": way == "reentrant"}
    if way == "contexts":
        options["context_fn"] = pmoe.checkpoint_contexts
    without, found = (
        step(layer, rank, world, lambda x, layer=layer: checkpoint(layer, x, **options)) for layer in layers
    )
    return differences(found, without, 1e-12)


@pytest.mark.parametrize("way", ["contexts", "plain", "reentrant"])
def test_activation_checkpoints_repeat_the_plan(way: str) -> None:
    assert ranks(2).run(replayed_job, way) == [[], []]


@pytest.mark.parametrize("way", ["contexts", "plain", "reentrant"])
def test_a_checkpoint_repeats_its_plan_after_other_calls_had_copies(way: str) -> None:
    """Between both passes of the checkpoint, evaluation of another batch makes copies that stay."""
    calls = (Call(tokens=(5, 9, 2, 1), checkpoint=way), Call(tokens=(9, 2, 1, 5), between="eval"))
    options = {"balance": 1, "num_experts": 12, "top_k": 3}
    case = Case(seed=1, world=4, dtype="bfloat16", options=options, calls=calls, order=(1, 0))
    assert outcome(case, ranks) == []


def gradients_of_two_calls(layer: pmoe.MoELayer, rank: int, world: int) -> dict[str, Any]:
    """Returns all gradients of two calls. Backward runs in the order of the calls, twice for the first."""
    x = [tokens(TOKENS[world][rank], seed).requires_grad_() for seed in (rank, 10 + rank)]
    first, second = (layer(each).square().sum() for each in x)
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"x0": x[0].grad, "x1": x[1].grad, **gradients}


def orders_job(rank: int, world: int) -> list[str]:
    without, balanced = (
        gradients_of_two_calls(build(8, 1, 0.8, (0,), balance=balance, pipeline=2), rank, world)
        for balance in (0, 2)
    )
    return differences(balanced, without, 1e-12)


def test_several_calls_may_run_backward_in_any_order_and_twice() -> None:
    assert ranks(4).run(orders_job) == [[]] * 4


def autocast_job(rank: int, world: int) -> list[str]:
    found = []
    for balance in (0, 2):
        layer = build(8, 2, 0.8, (0, 1), dtype=torch.float32, balance=balance, pipeline=2)

        def run(x: Tensor, layer: pmoe.MoELayer = layer) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return layer(x)

        found.append(step(layer, rank, world, run))
    return differences(found[1], found[0], 0.03)


def test_copies_compute_in_the_type_of_autocast() -> None:
    assert ranks(2).run(autocast_job) == [[], []]


def parallelized_job(rank: int, world: int, wrapper: str) -> list[str]:
    """Two SGD steps of a model whose experts are DTensors and whose dense part is wrapped."""
    found = []
    for balance in (0, 2):
        layer = build(8, 2, 0.8, (0, 1), balance=balance, pipeline=2, group=Ranks.single())
        model = torch.nn.Sequential(torch.nn.Linear(M, M, dtype=torch.float64), layer)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
        pmoe.parallelize(model, mesh)
        if wrapper == "FSDP2":
            fully_shard(model, ignored_params=pmoe.expert_parameters(model))
        wrapped = DistributedDataParallel(model) if wrapper == "DDP" else model
        optimizer = torch.optim.SGD(pmoe.parameter_groups(model), 0.1)
        for seed in range(2):
            optimizer.zero_grad()
            y = wrapped(tokens(TOKENS[world][rank], 10 * rank + seed))
            y.square().sum().backward()
            optimizer.step()
        assert layer.ran is not None
        assert (layer.ran.balance is not None and layer.ran.balance.copies > 0) == bool(balance)
        values = {name: local_part(value) for name, value in model.named_parameters()}
        found.append({"y": y.detach(), **values})
    return differences(found[1], found[0], 1e-12)


@pytest.mark.parametrize("wrapper", ["FSDP2", "DDP"])
def test_wrappers_and_optimizers_see_one_expert(wrapper: str) -> None:
    assert ranks(2).run(parallelized_job, wrapper) == [[], []]


def chosen_job(rank: int, world: int) -> list[int]:
    """Copies with balance=True, where a copy costs next to nothing, and where it costs too much."""
    copies = []
    layer = build(4, 1, 0.8, (0,), balance=True)
    key = (layer.ranks.name, torch.device("cpu"), torch.float64)
    for message in (LineCost(0.0, 1e-15), LineCost(1.0, 0.0)):
        profile = replace(MADE, compute=LineCost(0.0, 1e-9), message=message)
        with mock.patch.dict(PROFILES, {key: profile}):
            step(layer, rank, world)
        assert layer.ran is not None and layer.ran.balance is not None
        copies.append(layer.ran.balance.copies)
    return copies


def test_true_makes_copies_where_they_are_predicted_to_pay() -> None:
    for cheap, dear in ranks(2).run(chosen_job):
        assert cheap == 1 and dear == 0


def prices_job(rank: int, world: int) -> list[int]:
    """Prices of a copy behind a slow link: kept until backward, sent again with S4, and of frozen experts."""
    prices = []

    def recorded(*args: Any) -> CopyPlan:
        prices.append(args[3].near)
        return plan_copies(*args)

    profile = replace(MADE, compute=LineCost(0.0, 1e-15), message=LineCost(0.0, 1e-9))
    for options, trains in (({}, True), ({"memory_reuse": "S4"}, True), ({}, False)):
        layer = build(4, 1, 0.8, (0,), balance=True, pipeline=2, **options)
        layer.experts.requires_grad_(trains)
        key = (layer.ranks.name, torch.device("cpu"), torch.float64)
        planned = mock.patch("pmoe.decide.balanced_counts.plan_copies", recorded)
        with mock.patch.dict(PROFILES, {key: profile}), planned:
            step(layer, rank, world)
    return prices


def test_a_copy_is_priced_by_what_is_sent() -> None:
    """The weights that S4 sends a second time were not counted."""
    # Weights and gradients are 4 H M numbers, and half of the rows send 4 M; with S4 6 H M and 5 M.
    for kept, sent_again, frozen in ranks(2).run(prices_job):
        assert kept == pytest.approx(2 * H, abs=1)
        assert sent_again == pytest.approx(2.4 * H, abs=1)
        assert frozen == pytest.approx(H, abs=1)


def accumulated_prices_job(rank: int, world: int) -> list[int]:
    """Prices of a copy behind a slow link: in three micro-batches of a step, and in the next step."""
    prices = []

    def recorded(*args: Any) -> CopyPlan:
        prices.append(args[3].near)
        return plan_copies(*args)

    profile = replace(MADE, compute=LineCost(0.0, 1e-15), message=LineCost(0.0, 1e-9))
    layer = build(4, 1, 0.8, (0,), balance=True, memory_reuse="S4")
    key = (layer.ranks.name, torch.device("cpu"), torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    planned = mock.patch("pmoe.decide.balanced_counts.plan_copies", recorded)
    with mock.patch.dict(PROFILES, {key: profile}), planned:
        for call in range(4):
            layer(tokens(4000, 10 * rank + call)).square().sum().backward()
            if call == 2:
                optimizer.step()
    return prices


def test_a_copy_for_the_next_micro_batches_is_priced_as_sent_once() -> None:
    """S4 sends weights twice, but not those of copies that later calls use. They were priced as if it did."""
    for prices in ranks(2).run(accumulated_prices_job):
        first, second, third, next_step = prices
        assert first == pytest.approx(2.4 * H, abs=1)  # 6 H M numbers of a copy against 5 M / 2 of a row
        assert second == next_step == pytest.approx(1.6 * H, abs=1)  # 4 H M
        # The copies of the second call are there. Other copies must be 3 % of the mean better.
        assert third == second + 0.03 * 4000


# ---- copies that stay


EXPERT_BYTES = 8 * (H * M + M * H + H + M)


def sent_in(layer: pmoe.MoELayer, call: Any) -> int:
    """How many experts' weights this rank sends in a call. On 2 ranks, gradients go the other way."""
    before = layer.traffic.weights
    call()
    return (layer.traffic.weights - before) // EXPERT_BYTES


def accumulated_job(rank: int, world: int, options: dict[str, Any]) -> tuple[list[list[int]], list[str]]:
    """Two SGD steps of three micro-batches each; the weights that are sent in each forward pass."""
    found = []
    sent: list[list[int]] = []
    for balance in (0, 1):
        layer = build(4, 1, 0.8, (0,), balance=balance, **options)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        sent = []
        values: dict[str, Tensor | None] = {}
        for seed in range(2):
            optimizer.zero_grad()
            losses = []

            def forward(seed: int, layer: pmoe.MoELayer = layer, losses: list[Tensor] = losses) -> None:
                losses.append(layer(tokens(TOKENS[world][rank], seed)).square().sum())

            sent.append([])
            for micro_batch in range(3):
                seed_of_call = 100 * seed + 10 * rank + micro_batch
                sent[-1].append(sent_in(layer, lambda seed=seed_of_call, run=forward: run(seed)))
                if micro_batch:  # the first backward pass comes after the second forward pass
                    losses.pop(0).backward()
            losses.pop(0).backward()
            optimizer.step()
        values = {name: value.detach().clone() for name, value in layer.named_parameters()}
        found.append(values)
    return sent, differences(found[1], found[0], 1e-12)


@pytest.mark.parametrize("options", [{"pipeline": 2}, {"memory_reuse": "S4"}], ids=str)
def test_copies_stay_from_one_micro_batch_of_a_step_to_the_next(options: dict[str, Any]) -> None:
    (sent, wrong), (of_host, other_wrong) = ranks(2).run(accumulated_job, options)
    assert not wrong and not other_wrong
    # The layer learns in the first step that several calls have the same weights.
    assert sent == [[1, 1, 0], [1, 0, 0]]
    assert of_host == [[0] * 3] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"pipeline": 2}, {"memory_reuse": "S4"}], ids=str)
def test_copies_on_two_nodes_stay_from_one_micro_batch_to_the_next(options: dict[str, Any]) -> None:
    found = ranks(4).run(accumulated_job, {**options, "nodes": 2})
    assert not any(wrong for _, wrong in found)
    sent, _ = found[
        0
    ]  # rank 0 owns the busy expert, and sends it to the other rank of its node and to two more
    assert sent == [[2, 2, 0], [2, 0, 0]]


def unlike_hooks_job(rank: int, world: int) -> list[str]:
    """Micro-batches of which one rank offloads what autograd saves, as only its memory is short."""
    found = []
    for balance in (0, 1):
        layer = build(4, 1, 0.8, (0,), balance=balance, memory_reuse="S4")
        for micro_batch in range(4):
            hooks = torch.autograd.graph.save_on_cpu() if rank == 0 else contextlib.nullcontext()
            with hooks:
                loss = layer(tokens(TOKENS[world][rank], 10 * rank + micro_batch)).square().sum()
            loss.backward()
        found.append({name: parameter.grad for name, parameter in layer.named_parameters()})
        if balance:
            assert layer.ran is not None and layer.ran.balance is not None and layer.ran.balance.copies
            assert layer.cache.kept_copies is None
    return differences(found[1], found[0], 1e-12)


def test_copies_stay_only_if_they_may_on_every_rank() -> None:
    """With S4 only the rank with hooks sent its copies again, and gloo ended both processes."""
    assert ranks(2).run(unlike_hooks_job) == [[], []]


def single_steps_job(rank: int, world: int) -> tuple[list[int], bool]:
    layer = build(4, 1, 0.8, (0,), balance=1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    sent = []
    for _ in range(3):
        sent.append(sent_in(layer, lambda: step(layer, rank, world)))
        optimizer.step()
    return sent, layer.cache.kept_copies is None


def test_nothing_stays_where_every_step_has_one_call() -> None:
    (_, first_is_free), (sent_by_host, host_is_free) = ranks(2).run(single_steps_job)
    assert first_is_free and host_is_free
    assert sent_by_host == [1, 1, 1]  # gradients


def evaluated_job(rank: int, world: int) -> tuple[list[int], list[bool], list[int]]:
    """Calls in evaluation, between which something changes: what is sent, and whether results are right."""
    layer = build(4, 1, 0.8, (0,), balance=1).eval()
    plain = build(4, 1, 0.8, (0,)).eval()
    sent = []
    right = []
    bytes_told = []

    def change(what: str) -> None:
        for each in (layer, plain):
            experts = each.experts
            if what == "in place" and rank == 1:
                experts.w2.mul_(2)
            elif what == "by data" and rank == 0:
                experts.w1.data[0] *= 3
            elif what == "rows swapped" and rank == 0:
                experts.w1.data[0] = experts.w1.data[0].flip(0)
            elif what == "signs" and rank == 0:
                experts.w1.data[0].neg_()
            elif what == "replaced" and rank == 0:
                experts.w1 = torch.nn.Parameter(2 * experts.w1.detach())
            elif what == "even":
                each.gate.share = Fraction(1, 4)
            elif what == "less":
                each.gate.share = Fraction(7, 10)

    changes = (
        *("", "", "in place", "", "by data", "", "rows swapped", "", "signs", "", "replaced", ""),
        *("even", "less"),
    )
    for what in changes:
        with torch.no_grad():
            change(what)
            x = tokens(TOKENS[world][rank], 10 + rank)
            outputs: list[Tensor] = []
            sent.append(sent_in(layer, lambda x=x, outputs=outputs: outputs.append(layer(x))))
            right.append(relative_error(outputs[0], plain(x)) <= 1e-12)
        assert layer.ran is not None and layer.ran.balance is not None
        bytes_told.append(layer.ran.balance.weight_bytes // EXPERT_BYTES)
    with torch.inference_mode():
        layer(tokens(7, rank))
    step(layer, rank, world)
    return sent, right, bytes_told


def test_copies_stay_in_evaluation_until_any_rank_changes_its_experts() -> None:
    (sent, right, told), (_, also_right, _) = ranks(2).run(evaluated_job)
    assert all(right) and all(also_right)
    assert sent == [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0]
    assert told == sent


def stored_job(rank: int, world: int) -> list[str]:
    """Calls whose copies stay, between which the experts change by other ways; which results are wrong."""
    both = [build(4, 1, 0.8, (0,), balance=balance).eval() for balance in (1, 0)]
    wrong = []

    def check(what: str, layers: list[pmoe.MoELayer]) -> None:
        for again in ("", " again"):
            with torch.no_grad():
                y, wanted = (layer(tokens(TOKENS[world][rank], rank)) for layer in layers)
            if not relative_error(y, wanted) <= 1e-12 or not layers[0].ran.balance.copies:
                wrong.append(what + again)
        assert layers[0].cache.kept_copies is not None

    check("first", both)
    for is_assigned in (False, True):
        for layer in both:
            state = {name: 2 * v if name[:3] == "exp" else v for name, v in layer.state_dict().items()}
            layer.load_state_dict(state, assign=is_assigned)
        check(f"load_state_dict, assign={is_assigned}", both)
    for layer in both:
        optimizer = torch.optim.Adam(layer.experts.parameters(), 0.1, foreach=True)
        layer(tokens(TOKENS[world][rank], rank)).square().sum().backward()
        optimizer.step()
        layer.zero_grad()
    check("optimizer", both)
    other_values = {
        f"experts.{name}": (2 if rank == 0 else 1) * value.detach()
        for name, value in both[0].experts.named_parameters()
    }
    with torch.no_grad():
        x = tokens(TOKENS[world][rank], rank)
        y, wanted = (torch.func.functional_call(layer, other_values, (x,)) for layer in both)
    if not relative_error(y, wanted) <= 1e-12:
        wrong.append("functional_call")
    check("after functional_call", both)
    copied = copy.deepcopy(both)
    stored = io.BytesIO()
    torch.save(both, stored)
    stored.seek(0)
    for what, layers in (("deepcopy", copied), ("pickle", torch.load(stored, weights_only=False))):
        for layer in layers:
            layer.experts.w1.data.mul_(3)
        check(what, layers)
    check("originals", both)
    return wrong


def test_copies_that_stay_are_never_older_than_their_experts() -> None:
    assert ranks(2).run(stored_job) == [[], []]


def shared_job(rank: int, world: int) -> list[str]:
    """Two layers with the same experts, called one after the other; gradients add up over two calls."""
    found = []
    for balance in (0, 1):
        first, second = (build(4, 1, 0.8, (0,), balance=balance) for _ in range(2))
        second.experts = first.experts
        model = torch.nn.Sequential(first, second)
        x = tokens(TOKENS[world][rank], rank).requires_grad_()
        for _ in range(2):
            y = model(x)
            y.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({"y": y.detach(), "x": x.grad, **gradients})
    return differences(found[1], found[0], 1e-12)


def test_two_layers_may_share_experts_with_copies() -> None:
    assert ranks(2).run(shared_job) == [[], []]


def three_job(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    """Three experts on each of three ranks; the second rank has no tokens and the busiest experts."""
    wrong = []
    with mock.patch.dict(TOKENS, {3: (30, 0, 41)}):
        for case, balance in (((9, 3, 0.9, (3, 4, 5)), 2), ((9, 1, 1.0, (3,)), 6)):
            without = step(build(*case, **options), rank, world)
            layer = build(*case, balance=balance, **options)
            wrong += differences(step(layer, rank, world), without, 1e-12)
            assert layer.ran is not None and layer.ran.balance is not None and layer.ran.balance.copies == 2
    return wrong


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": 2, "memory_reuse": "S4"},
        pytest.param({"pipeline": 3}, marks=pytest.mark.slow),
        pytest.param({"capacity_factor": 1.0, "pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_without_tokens_may_own_the_busiest_experts(options: dict[str, Any]) -> None:
    assert ranks(3).run(three_job, options) == [[]] * 3


def unsteady_job(rank: int, world: int) -> tuple[list[int], list[int], bool]:
    """Calls with changing loads; the copies of each call and the weights that all ranks send."""
    gate = ForcedGate(TopKGate(M, 8, 1, dtype=torch.float64), 8, busy=(0,), share=0.5)
    layers = []
    for balance in (0, 1):
        torch.manual_seed(7)
        layers.append(switched_layer(M, H, 8, 1, gate=gate, dtype=torch.float64, balance=balance).eval())
    copies, sent, right = [], [], True
    for share in (Fraction(1, 2), Fraction(4, 10), Fraction(1, 8), Fraction(45, 100)):
        gate.share = share
        x = tokens(40, rank)
        outputs: list[Tensor] = []
        with torch.no_grad():
            sent.append(sent_in(layers[1], lambda x=x, outputs=outputs: outputs.append(layers[1](x))))
            right = right and relative_error(outputs[0], layers[0](x)) <= 1e-12
        assert layers[1].ran is not None and layers[1].ran.balance is not None
        copies.append(layers[1].ran.balance.copies)
    return copies, sent, right


def test_copies_that_stay_may_have_no_rows() -> None:
    found = ranks(4).run(unsteady_job)
    assert all(right for _, _, right in found)
    copies, sent, _ = found[0]
    assert copies[0] >= 2 and sent[0] == 1
    assert sent[1:] == [0, 0, 0]  # fewer rows of expert 0 need no other copies
    assert copies[2] == 0


TWENTIES = ((17, 1, 1, 1), (17, 1, 1, 1), (7, 5, 5, 3), (11, 3, 3, 3))
"""Rows of each of 4 experts, of 20, in four calls. The third call needs one of the copies of the first."""


def unsteady_steps_job(rank: int, world: int, n: int) -> tuple[list[str], list[int]]:
    """Gradients of several micro-batches in one step, which do not all need the same copies."""
    count = (40, 0, 60, 20)[rank]
    pattern = [torch.arange(4).repeat_interleave(torch.tensor(rows)) for rows in TWENTIES]
    calls = [choices.repeat(count // 20).view(-1, 1) for choices in pattern]
    found = []
    copies: list[int] = []
    for balance in (0, 1):
        torch.manual_seed(7)
        gate = ReplayGate(TopKGate(M, 4, 1, dtype=torch.float64), calls)
        layer = switched_layer(M, H, 4, 1, gate=gate, dtype=torch.float64, balance=balance, pipeline=n)
        copies = []
        for seed in range(len(calls)):
            layer(tokens(count, 10 * rank + seed)).square().sum().backward()
            if balance:
                assert layer.ran is not None and layer.ran.balance is not None
                copies.append(layer.ran.balance.copies)
        found.append({name: value.grad for name, value in layer.named_parameters()})
    return differences(found[1], found[0], 1e-12), copies


@pytest.mark.parametrize("n", [1, 2])
def test_gradients_are_right_where_copies_that_stay_have_no_rows(n: int) -> None:
    for wrong, copies in ranks(4).run(unsteady_steps_job, n):
        assert not wrong
        assert copies == [3, 3, 1, 3]


# ---- faults and refusals


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ending", ["raises", pytest.param("dies", marks=pytest.mark.slow)])
@pytest.mark.parametrize("direction, task", [("forward", "V"), ("backward", "VG")])
def test_a_rank_that_ends_while_weights_travel_is_named_in_time(
    direction: str, task: str, ending: str
) -> None:
    assert what_is_wrong(2, LAYERS["copies"], direction, task, ending) == ""


OTHER_LAYERS: dict[str, dict[str, Any]] = {
    "without balance": {"pipeline": 4},
    "with more copies": {"pipeline": 4, "balance": 2},
    "with slots": {"pipeline": 2, "memory_reuse": "S4"},
    # As many bins as the first layer's, so that the messages of row counts have one size.
    "with slots and copies": {"pipeline": 1, "memory_reuse": "S4", "balance": 1, "slack": 2.0},
}


def other_layer_job(rank: int, world: int, options: dict[str, Any]) -> tuple[str, bool]:
    """Calls two layers in turns. In one call the ranks are in different layers with equal messages."""
    layers = [build(4, 1, 0.8, (0,), **options) for options in ({"balance": 1, "pipeline": 4}, options)]
    for layer in layers:
        step(layer, rank, world)
    message = error_of(lambda: layers[rank](tokens(TOKENS[world][rank], rank)))
    step(layers[0], rank, world)  # the group is whole
    return message, layers[0].ran is not None


@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_a_rank_in_another_layer_is_named_before_loads_are_summed(name: str) -> None:
    for message, is_whole in ranks(2).run(other_layer_job, OTHER_LAYERS[name]):
        assert message.startswith("FaultError: every rank must call the layers of a group in the same order")
        assert "rank 0: number" in message and is_whole


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fused": ({"fused": True}, r"kernels are fused \(fused=True\)"),
    "persistent": ({"fused": "persistent"}, "a pass is one persistent kernel"),
    "padded": ({"pad_to_capacity": True, "capacity_factor": 1.0}, "rows are padded to capacity"),
    "wire_combine": ({"wire_combine": "bfloat16"}, "results return in another form"),
}


def refused_job(rank: int, world: int) -> dict[str, str]:
    found = {
        name: error_of(lambda options=options: pmoe.MoELayer(M, H, 4, 2, balance=1, **options))
        for name, (options, _) in REFUSED.items()
    }
    found["too many"] = error_of(lambda: pmoe.MoELayer(M, H, 4, 2, balance=3))
    layer = pmoe.MoELayer(M, H, 4, 2, fused=True)
    found["set later"] = error_of(lambda: setattr(layer, "balance", 1))
    assert layer.balance is False
    return found


def test_what_copies_do_not_support_is_refused_by_name() -> None:
    for found in ranks(2).run(refused_job):
        for name, (_, sentence) in REFUSED.items():
            assert re.match(rf"ValueError: .*balance \(1\) must be False where .*{sentence}", found[name]), (
                name
            )
        assert "balance (3) must be at most 2, the number of experts of the other ranks" in found["too many"]
        assert "balance (1) must be False where kernels are fused (fused=True)" in found["set later"]


# ---- many calls


def soak_job(rank: int, world: int, calls: int) -> tuple[int, int]:
    """Bytes that the process holds after a tenth of the calls, and after all of them."""
    layer = pmoe.MoELayer(64, 128, 8, 2, pipeline=2, balance=2)
    held = []
    for call in range(calls):
        generator = torch.Generator().manual_seed(call)
        with torch.no_grad():
            layer.gate.weight.copy_(torch.randn(8, 64, generator=generator) * (call % 5))
        layer.zero_grad(set_to_none=True)
        layer(tokens(64 + call % 7, rank + call, torch.float32, 64)).sum().backward()
        if call in (calls // 10, calls - 1):
            pmoe.pool("cpu").trim()
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    return held[0], held[1]


@pytest.mark.nightly
def test_memory_stays_flat_over_many_calls_with_changing_loads() -> None:
    for early, late in ranks(2).run(soak_job, 2000):
        assert late - early < 8 << 20


# ---- what users are shown


def shown_job(rank: int, world: int) -> tuple[Any, str, set[str]]:
    layer = build(8, 2, 0.8, (0, 1), balance=2, pipeline=2)
    step(layer, rank, world)
    with pmoe.recording() as journal:
        step(layer, rank, world)
    statistics = pmoe.stats(layer, all_ranks=True, journal=journal)
    spans = [
        span for direction in ("forward", "backward") for span in journal.last(layer.experts, direction) or ()
    ]
    timeline.draw(io.BytesIO(), {"step": timeline.bars(spans)}, "a step")
    return statistics.layers[0], str(statistics), {span.name for span in spans}


@pytest.mark.slow
def test_statistics_and_timelines_show_copies() -> None:
    for of_layer, text, tasks in ranks(4).run(shown_job):
        balance = of_layer.balance
        assert balance.before > 3 and balance.after < 1.05 and balance.copies >= 3
        assert balance.weight_bytes == balance.copies * 8 * (2 * H * M + H + M)
        assert of_layer.predicted is not None and of_layer.predicted.tensors["copies"] > 0
        assert f"{balance.copies} copies of busy experts" in text and f"{balance.before:.2f} without" in text
        assert {"V", "VR", "L2", "LKW2", "KW0", "VGR", "VG", "VA"} <= tasks

"""The choices of a layer: n by trials, the restore pair by the cost model, and both under a budget."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import pmoe
from pmoe.call.sizes import agreed_sizes
from pmoe.choose import search
from pmoe.choose.open_choice import copies_within_budget
from pmoe.engine.passes import base as passes_base
from pmoe.measure import profile
from pmoe.planner.degree import DEGREES
from pmoe.schedule.restore import STRATEGIES
from tests.gloo.kit import build, counted_collectives, error_of
from tests.own_experts import mlp
from tests.pool import ranks
from tests.reference import relative_error
from tests.spread import named, spread

D_MODEL = 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a cache for several tests, so that this machine is measured once for each number of ranks."""
    return tmp_path_factory.mktemp("measured")


def batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, count, D_MODEL, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), dy


def step(layer: pmoe.MoELayer, count: int, seed: int) -> dict[str, Tensor]:
    x, dy = batch(count, seed)
    layer.zero_grad(set_to_none=True)
    y = layer(x)
    (y * dy).sum().backward()
    return {
        "y": y.detach(),
        "x": x.grad,
        **{name: parameter.grad for name, parameter in layer.named_parameters()},
    }


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listen() -> Told:
    told = Told()
    log = logging.getLogger("pmoe")
    log.handlers = [told]
    log.setLevel(logging.INFO)
    return told


# ---- the same on all ranks -------------------------------------------------------------------------


def frozen_gate_job(rank: int, world: int, freezes: tuple[bool, ...]) -> tuple[Any, list[str]]:
    """Rank 1 alone freezes its gate before some steps: the sizes that decide, and wrong gradients."""
    layer = build(memory_reuse=True)
    plain = build()
    wrong = []
    for at, is_frozen in enumerate(freezes):
        for each in (layer, plain):
            each.gate.requires_grad_(not (is_frozen and rank == 1))
        got = step(layer, 16, rank)
        wanted = step(plain, 16, rank)
        for name, value in wanted.items():
            if value is not None and relative_error(got[name], value) > 1e-12:
                wrong.append(f"step {at}: {name}")
    layer.gate.requires_grad_(rank == 0)
    return agreed_sizes(layer.layer_modules, batch(3, rank)[0]), wrong


@pytest.mark.parametrize(
    "freezes", [(), pytest.param((False, True), marks=pytest.mark.slow)], ids=["sizes", "steps"]
)
def test_a_rank_that_freezes_its_gate_chooses_as_the_others(freezes: tuple[bool, ...]) -> None:
    """It looked for another restore pair in trials, which no other rank ran: all waited for each other."""
    first, second = ranks(2).run(frozen_gate_job, freezes)
    assert first[0] == second[0]
    assert first[1] == second[1] == []


def copies_job(rank: int, world: int) -> list[int]:
    """Rank 1 alone has frozen its layer: how many copies of busy experts fit into some budgets."""
    found = []
    wide = {"d_hidden": 200, "dtype": torch.bfloat16}  # where sums of weight gradients are widened
    x = batch(1, rank)[0].bfloat16()
    for budget in range(50_000, 58_000, 250):
        layer = build(balance=2, memory_reuse="S4", memory_budget=budget, **wide)
        layer.requires_grad_(rank == 0)
        found.append(copies_within_budget(layer.layer_modules, x, 2, 2))
    return found


def test_ranks_plan_copies_within_a_budget_alike() -> None:
    """A rank without gradients of parameters had room for more copies, and planned others than its peers."""
    first, second = ranks(2).run(copies_job)
    assert first == second
    assert set(first) == {0, 1}


# ---- n ---------------------------------------------------------------------------------------------


@mock.patch.dict(os.environ, PMOE_CACHE="")  # no file of another test answers
def search_job(rank: int, world: int, counts: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    search._LEARNED.clear()  # the process may have results of another test
    told = listen()
    layer = build(pipeline=True, top_k=1, **options)
    got = step(layer, counts[rank], rank)
    first = layer.traffic.rows
    one = step(build(top_k=1, pipeline=1, **options), counts[rank], rank)
    with counted_collectives() as again:
        step(layer, counts[rank], rank)
    with counted_collectives() as other_layer:
        step(build(pipeline=True, top_k=1, **options), counts[rank], rank)
    [table] = search.learned_degrees(layer.layer_modules).tables.values()
    degrees = table.lookup(max(counts))
    return {
        "degrees": degrees,
        "calls": [len(again), len(other_layer)],
        "told": [line.split()[1] for line in told.lines if line.startswith("pipeline=True")],
        "traffic": (first, layer.traffic.rows),
        "errors": {name: relative_error(got[name], one[name]) for name in one},
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"memory_reuse": "S4"}], ids=["no reuse", "S4"])
@pytest.mark.parametrize("counts", [(4096, 3), (0, 4200)])
def test_a_batch_size_is_tried_once_and_every_rank_takes_the_same_n(
    counts: tuple[int, ...], options: dict[str, Any]
) -> None:
    """With 2,048 tokens and S4, fewer than 240 would fit beside the routing, so no trial would run."""
    found = ranks(2).run(search_job, counts, options)
    for got in found:
        assert got["degrees"] == found[0]["degrees"]
        assert got["degrees"].forward in DEGREES and got["degrees"].backward in DEGREES
        assert set(got["told"][:-1]) == {"tries"} and got["told"][-1] == "takes"
        again, other_layer = got["calls"]
        assert got["calls"] == found[0]["calls"]
        assert other_layer == again + 1 < 150  # rank 0 tells what was found
        assert max(got["errors"].values()) < 1e-12, got["errors"]
        assert got["traffic"][1] == 2 * got["traffic"][0]  # no trial is counted


def small_job(rank: int, world: int) -> list[int]:
    layer = build(pipeline=True, top_k=1)
    calls = []
    for count in (3, 5):
        with counted_collectives() as seen:
            step(layer, count, rank)
        calls.append(len(seen))
    with counted_collectives() as seen, torch.no_grad():
        layer(batch(9000, 0)[0])
    return [*calls, len(seen)]


def test_small_batches_and_inference_are_not_tried() -> None:
    """n = 1 for few rows: counts, weights, S and R, and the same back without counts.

    9000 tokens without gradients get n = 8, by the rule.
    """
    assert ranks(2).run(small_job) == [[7, 7, 18]] * 2


def saved_job(rank: int, world: int, folder: str) -> list[Any]:
    layer = build(pipeline=True, top_k=1)
    step(layer, 3000, rank)
    path = f"{folder}/{rank}.json"
    layer.save_degrees(path)
    keys = set(layer.state_dict())
    other = build(pipeline=True, top_k=1)
    with counted_collectives() as loading:
        other.load_degrees(path)
    wrong = error_of(lambda: build(pipeline=True, top_k=2).load_degrees(path))
    return [keys == set(build().state_dict()), len(loading), wrong.partition(" ")[0]]


def test_what_was_learnt_is_saved_and_loaded_and_no_part_of_the_state_dict(tmp_path: Path) -> None:
    for is_plain, collectives, wrong in ranks(2).run(saved_job, str(tmp_path)):
        assert is_plain and collectives > 0 and wrong == "ValueError:"


# ---- the pair --------------------------------------------------------------------------------------


def pair_job(rank: int, world: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    import os

    os.environ["PMOE_CACHE"] = folder
    profile.PROFILES.clear()
    told = listen()
    used: list[str] = []
    original = passes_base.plan_schedule

    def watched(plan: Any, *args: Any) -> Any:
        used.append(str(plan.restore))
        return original(plan, *args)

    passes_base.plan_schedule = watched
    try:
        layer = build(pipeline=2, memory_reuse=True, **options)
        got = step(layer, 40 + rank, rank)
        step(layer, 41 - rank, rank)
    finally:
        passes_base.plan_schedule = original
    plain = step(build(pipeline=2, **options), 40 + rank, rank)
    return {
        "used": set(used),
        "told": [line for line in told.lines if "memory_reuse=True" in line],
        "errors": {name: relative_error(got[name], plain[name]) for name in plain},
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "world, options", spread([1, 2], [{}, {"expert": mlp}, {"expert": "swiglu"}], every=2), ids=named
)
def test_true_takes_the_cheapest_of_the_four_strategies_on_every_rank_alike(
    world: int, options: dict[str, Any], measured: Path
) -> None:
    found = ranks(world).run(pair_job, str(measured), options)
    for got in found:
        assert got["used"] == found[0]["used"] and len(got["used"]) == 1
        assert got["used"] <= {str(pair) for pair in STRATEGIES.values()}
        assert len(got["told"]) == 1 and all(str(pair) in got["told"][0] for pair in STRATEGIES.values())
        assert max(got["errors"].values()) < 1e-12, got["errors"]


# ---- the budget ------------------------------------------------------------------------------------


def budget_job(rank: int, world: int, folder: str, budget: Any, options: dict[str, Any], skew: bool) -> Any:
    import os

    os.environ["PMOE_CACHE"] = folder
    told = listen()
    layer = build(memory_budget=budget, **options)
    plain = build(pipeline=1)
    if skew:
        with torch.no_grad():
            for each in (layer, plain):
                each.gate.weight[-1] = 0
                each.gate.weight[-1, 0] = 1e3
    x, dy = batch(64, rank)
    with torch.no_grad():
        x[:, 0] = x[:, 0].abs() + 1

    def run(each: pmoe.MoELayer) -> dict[str, Tensor]:
        x.grad = None
        y = each(x)
        (y * dy).sum().backward()
        return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in each.named_parameters()}}

    message = error_of(lambda: layer(x))
    if message:
        return message
    layer.zero_grad(set_to_none=True)
    got, expected = run(layer), run(plain)
    return {
        # Rank 0 alone also tells that it measures the machine, if this is the first test of a process.
        "told": [line for line in told.lines if "memory_budget" in line],
        "errors": {name: relative_error(got[name], expected[name]) for name in expected},
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("skew", [False, True], ids=["even", "all to one expert"])
@pytest.mark.parametrize("options", [{}, {"pipeline": 4}, {"pipeline": True, "memory_reuse": True}], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_a_budget_is_kept_or_refused_on_every_rank_with_the_least_that_would_do(
    world: int, options: dict[str, Any], skew: bool, measured: Path
) -> None:
    messages = ranks(world).run(budget_job, str(measured), 1, options, skew)
    assert len(set(messages)) == 1
    assert messages[0].startswith("ValueError: memory_budget (1 bytes) must be at least ")
    least = int(messages[0].split("at least ")[1].split()[0])
    found = ranks(world).run(budget_job, str(measured), least, options, skew)
    for got in found:
        assert got["told"] == found[0]["told"] and got["told"]
        assert max(got["errors"].values()) < 1e-12, got["errors"]
    assert all(
        isinstance(m, str) for m in ranks(world).run(budget_job, str(measured), least - 1, options, skew)
    )


def one_sided_job(rank: int, world: int) -> list[str]:
    layer = build(dtype=torch.float32, pipeline=2)
    x = torch.randn(9, D_MODEL)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank == 0):
        message = error_of(lambda: layer(x))
    layer(x)  # and the layer stays usable
    return [message]


def test_autocast_on_one_rank_alone_is_an_error_on_all() -> None:
    for (message,) in ranks(2).run(one_sided_job):
        assert message == (
            "FaultError: rows must have one dtype on all ranks (autocast on all or on none): rank 0: "
            "torch.bfloat16; rank 1: torch.float32"
        )

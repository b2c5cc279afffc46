"""`pmoe simulate scale` against numbers by hand, bounds that no schedule beats, and the memory model."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pmoe import cli
from pmoe.cli.cluster import load_cluster
from pmoe.cli.simulate import _models
from pmoe.comm.counts import RankCounts
from pmoe.papers.scale import DEGREES, LIMITS, S4, TOKENS, ScaledModel, ScaledStep, scaling_ends, slowed
from pmoe.planner.costs import LineCost
from pmoe.planner.layer_seconds import even_task_costs
from pmoe.planner.memory import predict
from pmoe.planner.rows_per_pass import counted_rows
from pmoe.planner.simulator import task_seconds
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.tasks import Kind, Lane, Stages, Task

ROOT = Path(__file__).resolve().parents[2]
STAGES = Stages(local=True, remote=True, gradients=True)
RATES = load_cluster(ROOT / "pmoe" / "cli" / "scale_cluster.toml", None)
MODELS = _models()
WORDS = {"Mixtral 8x7B": 32000, "DeepSeek-V3": 129280, "Qwen3-235B-A22B": 151936}


def step_of(model: str, ranks: int, tokens: int = TOKENS, n: int = 1, **more: Any) -> ScaledStep:
    here = replace(RATES, machines=ranks // RATES.ranks_per_machine)
    return ScaledStep(**{"model": MODELS[model], "rates": here, "tokens": tokens, "n": n, "passes": 1} | more)


STEPS = [
    step_of(model, ranks, tokens, n)
    for model, ranks, tokens, n in itertools.product(MODELS, (8, 32, 512), (1024, 8192), DEGREES)
]


def told(step: ScaledStep) -> str:
    return f"{step.model.layers} layers, {step.rates.num_ranks} ranks, {step.tokens} tokens, n={step.n}"


def close(value: object) -> object:
    return pytest.approx(value, rel=1e-12)


def expert(model: ScaledModel) -> int:
    return 3 * model.layer["d_model"] * model.layer["d_hidden"]


def test_models_have_the_parameters_that_they_are_known_by() -> None:
    total = [each.dense + each.layers * each.layer["num_experts"] * expert(each) for each in MODELS.values()]
    assert [round(each / 1e9) for each in total] == [47, 671, 235]
    active = [each.dense + each.layers * each.layer["top_k"] * expert(each) for each in MODELS.values()]
    assert [round(each / 1e9) for each in active] == [13, 37, 22]


def test_dense_parts_are_counted_from_the_published_sizes() -> None:
    attention = 7168 * (1536 + 512 + 64) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    dense = {
        "Mixtral 8x7B": 32 * 4096 * (2 * 4096 + 2 * 1024),
        "DeepSeek-V3": 61 * attention + 3 * 7168 * (58 * 2048 + 3 * 18432),
        "Qwen3-235B-A22B": 94 * 4096 * (2 * 8192 + 2 * 512),
    }
    scores = {"Mixtral 8x7B": 32 * 32 * 256, "DeepSeek-V3": 61 * 128 * 320, "Qwen3-235B-A22B": 94 * 64 * 256}
    for name, model in MODELS.items():
        embedding = WORDS[name] * model.layer["d_model"]
        assert model.dense == dense[name] + 2 * embedding
        assert model.dense_products == dense[name] + embedding + 4096 // 2 * scores[name]


def test_a_step_of_one_chunk_by_hand() -> None:
    """Mixtral on one machine: 16,384 rows, evenly routed, of which an eighth stay on their rank."""
    step, model = step_of("Mixtral 8x7B", 8, skew=0.0), MODELS["Mixtral 8x7B"]
    assert step.busiest_tokens == 8192
    product = 4096 * 14336 / 200e12  # of a row, one of an expert's three
    away, stay = 14336, 2048
    sent, weights = (7 * 0.5e-6 + size / 300e9 for size in (away * 4096 * 2, away * 4))
    ring = 2 * (2 * model.dense / 32 * 7 / 8 / 300e9 + 3 * 0.5e-6)
    both, local = 20e-6 + 3 * product * away, 20e-6 + 3 * product * stay
    forward = sent + weights + both + max(local, sent)  # S, P, C, then L beside R
    dense = 8192 * model.dense_products / 32 / 200e12
    costs = {"sent": sent, "weights": weights, "both": both, "local": local, "ring": ring}
    backward = backward_by_hand(**costs, again=20e-6 + 2 * product * away, remade=20e-6 + 2 * product * stay)
    counts = 7 * 0.5e-6 + 4 * 8 / 300e9
    assert step.seconds == pytest.approx(32 * (forward + backward + 4 * dense + counts) + ring, rel=1e-6)


def backward_by_hand(
    sent: float, weights: float, both: float, local: float, ring: float, again: float, remade: float
) -> float:
    """Returns the seconds of a backward pass of one chunk, from the seconds of its tasks.

    SI and S run first, then M, C and R with W beside R. L, LM and LW run last, while GAR and the routing
    weights' gradients are sent.
    """
    tasks = rotating("backward", 1, STAGES, restore=S4).tasks
    took = {"SI": sent, "S": sent, "R": sent, "P": weights, "GAR": ring}
    took |= {"M": again, "C": both, "W": both, "L": local, "LM": remade, "LW": local}
    ends: dict[str, float] = {}
    free: dict[str, float] = {}
    for task in tasks:
        begin = max([free.get(task.lane, 0.0), *(ends[name] for name in task.waits)])
        ends[task.name] = free[task.lane] = begin + took.get(task.kind.value, 0.0)
    return max(ends.values())


def together(tasks: Sequence[Task], classes: Sequence[Mapping[Kind, float]]) -> float:
    """Returns the time at which the last rank has ended a pass.

    A collective begins when its last rank comes, and ends for all ranks when the slowest one has ended.

    classes: for each class of equal ranks, the seconds by kind of task.
    """
    costs = [task_seconds(each) for each in classes]
    free: dict[Lane, Any] = {}
    ends: dict[str, Any] = {}
    for task in tasks:
        begin = functools.reduce(
            np.maximum, [ends[name] for name in task.waits], free.get(task.lane, np.zeros(len(costs)))
        )
        took = np.array([each(task) for each in costs])
        meets = task.lane == Lane.COMMUNICATE
        end = np.full_like(took, begin.max() + took.max()) if meets else begin + took
        ends[task.name] = free[task.lane] = end
    return float(np.maximum.reduce(list(ends.values())).max())


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_busiest_rank_is_the_one_that_all_ranks_wait_for(direction: str) -> None:
    for step in STEPS[::3]:
        machines = -(-step.sizes.num_ranks // 8)
        profile = replace(step.rates, machines=machines).profile("flat", 1, "bfloat16")
        busy, sharing = step.busiest_tokens, step.sizes.num_ranks
        others = int((sharing * step.tokens - busy) / (sharing - 1))
        classes = [even_task_costs(step.sizes, profile, each, step.n) for each in (others, busy, others)]
        tasks = rotating(direction, step.n, STAGES, restore=S4).tasks
        assert together(tasks, classes) == close(together(tasks, classes[1:2]))


@pytest.mark.parametrize("step", STEPS, ids=told)
def test_a_straggler_costs_at_most_what_it_computes_longer(step: ScaledStep) -> None:
    slow = slowed(step, "compute", 2).seconds
    assert step.seconds <= slow <= 2 * step.seconds
    nothing = replace(step, rates=replace(step.rates, compute=LineCost(0.0, 0.0))).seconds
    assert slow >= 2 * (step.seconds - nothing) and nothing > 0


@pytest.mark.parametrize("step", STEPS, ids=told)
def test_no_step_beats_what_its_busiest_rank_and_links_can_do(step: ScaledStep) -> None:
    model, sharing = step.model, step.sizes.num_ranks
    rows = step.busiest_tokens * model.layer["top_k"]
    multiplied = 3 * rows * expert(model) * model.layers + 4 * step.tokens * model.dense_products
    assert step.seconds >= multiplied / 200e12
    row_bytes, local = 2 * model.layer["d_model"], 8
    inside = rows * row_bytes * (local - 1) / sharing / 300e9
    outside = rows * row_bytes * (sharing - local) / sharing / 40e9
    assert step.seconds >= 5 * model.layers * max(inside, outside)  # S, R, and SI, S, R


def test_a_lossy_link_between_machines_costs_nothing_inside_one() -> None:
    def lossy(step: ScaledStep) -> float:
        return slowed(step, "outside", 1.61).seconds / step.seconds

    assert lossy(step_of("Mixtral 8x7B", 8)) == 1.0
    assert 1 < lossy(step_of("Qwen3-235B-A22B", 32)) < 1.61


def test_what_takes_no_time_makes_a_step_shorter_by_at_most_what_it_took() -> None:
    step = step_of("DeepSeek-V3", 512, n=4)
    saved = {free: step.seconds - replace(step, free=free).seconds for free in LIMITS}
    assert saved["all-to-alls"] > 0 and min(saved.values()) >= -1e-9
    tasks = [rotating(each, 4, STAGES, restore=S4).tasks for each in ("forward", "backward")]
    launched = sum(task.lane == Lane.COMPUTE for each in tasks for task in each)
    assert saved["launches"] <= 58 * launched * 20e-6
    nothing = LineCost(0.0, 0.0)
    links = replace(step.rates, compute=nothing)
    assert saved["all-to-alls"] + saved["gradients"] <= replace(step, rates=links).seconds


@pytest.mark.parametrize("model", MODELS)
def test_the_worst_rank_holds_what_the_memory_model_says_of_its_rows(model: str) -> None:
    """The memory model counts the rows of each rank, and predicts the same peak, up to a factor of 1.5.

    The simulation assumes as many sent rows, and more rows that stay on their rank.
    """
    step = step_of(model, 8, 4096, 4)
    experts, sizes = MODELS[model].layer["num_experts"], step.sizes
    z = np.random.default_rng(0).standard_normal(experts)
    shares = np.tile(np.exp(0.3 * z) / np.exp(0.3 * z).sum(), 4) / 4
    ends = [0, *(round(each) for each in shares.cumsum() * 4096 * sizes.top_k)]
    rows = torch.tensor([b - a for a, b in itertools.pairwise(ends)]).view(4, 8, -1)
    peaks = []
    for rank in range(8):
        recv = rows[:, rank : rank + 1].expand_as(rows)
        counts = RankCounts(send=rows, recv=recv, recv_device=recv, max_tokens=4096, needs_grad=True)
        passed = counted_rows(sizes, counts, rank, 4)
        peaks.append(predict(sizes, sizes.call(4096), passed, passed, S4))
    states = step.peak_bytes - sum(experts_and_dense(step))
    assert states > 0
    exact = max(each.promised - each.saved for each in peaks) + MODELS[model].layers * (
        max(each.saved for each in peaks) + 4096 * sizes.d_model * 2
    )
    assert exact <= states <= 1.5 * exact


def experts_and_dense(step: ScaledStep) -> tuple[int, int]:
    """Returns (bytes of the experts' states, bytes of the dense part's states) of a rank, on 8 ranks.

    States are parameters, gradients and those of the optimizer, which all ranks share for the dense part.
    """
    held = step.model.layers * step.sizes.expert_parameters
    return (4 + 12) * held, 4 * step.model.dense + 12 * (step.model.dense // 8)


def test_scaling_ends_where_the_rule_says() -> None:
    def rows(*speeds: float) -> list[dict[str, object]]:
        return [{"model": "m", "ranks": 8 << i, "ktokens/s": speed} for i, speed in enumerate(speeds)]

    assert scaling_ends(rows(1, 2, 3.1, 4.6, 9), strong=True) == {"m": rows(0, 0, 0, 4.6)[3]}
    assert scaling_ends(rows(1, 1.1, 2.1, 3.9), strong=False) == {"m": rows(0, 0, 0, 3.9)[3]}
    assert scaling_ends(rows(1, 2, 4), strong=True) == scaling_ends(rows(1, 1.5, 2.1), strong=False) == {}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return dict(cli.simulate.TABLES["scale"]())


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_more_ranks_are_never_more_than_proportionally_faster(kind: str, found: dict[str, Any]) -> None:
    rows = found[kind]
    numbers = [8 << i for i in range(10)]
    assert [(row["model"], row["ranks"]) for row in rows] == list(itertools.product(MODELS, numbers))
    for before, row in itertools.pairwise(rows):
        if before["model"] == row["model"]:
            assert row["ktokens/s"] <= 2.0001 * before["ktokens/s"]
            assert row["GiB"] <= before["GiB"]  # fewer experts and less optimizer state on each
        assert row["even_seconds"] <= row["seconds"] <= row["lossy_seconds"]
        assert row["waits for"] in {*LIMITS, "skew"} and 0 <= row["%"] < 100


def test_the_command_prints_both_tables_and_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "scale", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert set(fields) == {"weak", "weak ends", "strong", "strong ends", "assumptions"}
    assert "straggler" in fields["assumptions"]
    assert cli.main(["simulate", "scale", "--assumptions"]) == 0
    assert "straggler " in capsys.readouterr().out


def test_the_page_says_what_is_printed(found: dict[str, Any]) -> None:
    page = " ".join((ROOT / "docs" / "cluster.md").read_text(encoding="utf-8").split())
    rows = found["weak"]
    (row,) = (row for row in rows if row["model"] == "Mixtral 8x7B" and row["ranks"] == 64)
    ratios = [row[f"slow n={n}"] for n in DEGREES]
    assert "with n = 1, 4 and 8 takes {:.2f}, {:.2f} and {:.2f} times as long".format(*ratios) in page
    assert f"{TOKENS:,} tokens a rank" in page
    weak, strong = found["weak ends"], found["strong ends"]
    assert {end["model"] for end in strong} == set(MODELS)
    assert {end["model"] for end in weak} == set(MODELS) - {"Mixtral 8x7B"}
    for end in (*weak, *strong):
        assert f"{end['ranks']:,}" in page.partition("stops scaling")[2], end

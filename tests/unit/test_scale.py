"""bench/scale.py: by hand, against bounds that no schedule beats, and against the memory model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.scale import (
    COLLECTIVE,
    DEGREES,
    FLOPS,
    LAUNCH,
    LIMITS,
    LOSSY,
    MODELS,
    NUMBERS,
    S4,
    SLACK,
    STRAGGLER,
    TOKENS,
    Case,
    class_seconds,
    cut_degree,
    layer_memory,
    lines,
    popularity,
    rank_shares,
    repeated,
    routed_sizes,
    run_together,
    scaled_seconds,
    scaling,
    scaling_ends,
    worst_bytes,
)
from pmoe.comm.counts import RankCounts, Slots, num_bins
from pmoe.planner.memory import predict
from pmoe.planner.pass_rows import counted_rows
from pmoe.planner.simulator import makespan, simulate
from pmoe.schedule.rings import rotating
from pmoe.schedule.tasks import Lane, Stages

ROOT = Path(__file__).resolve().parents[2]
STAGES = Stages(local=True, remote=True, gradients=True)
CASES = [
    Case(model, ranks, tokens, n)
    for model, ranks, tokens, n in itertools.product(MODELS, (8, 32, 512), (1024, 8192), DEGREES)
]


def close(value: object) -> object:
    return pytest.approx(value, rel=1e-12)


def test_models_have_the_parameters_that_they_are_known_by() -> None:
    total = [each.dense + each.layers * each.num_experts * each.expert for each in MODELS.values()]
    assert [round(each / 1e9) for each in total] == [47, 671, 235]
    active = [each.dense + each.layers * each.top_k * each.expert for each in MODELS.values()]
    assert [round(each / 1e9) for each in active] == [13, 37, 22]


def test_a_forward_pass_of_an_ordinary_rank_by_hand() -> None:
    """Mixtral on one machine: 16,384 rows, of which an eighth stay; one chunk, evenly routed."""
    case = Case("Mixtral 8x7B", 8, 8192, 1, skewed=False)
    assert cut_degree(case) == 1
    multiplied = 2 * 3 * 4096 * 14336
    received, stay = (20e-6 + rows * multiplied / 400e12 for rows in (14336, 2048))
    sent = 20e-6 + 7 * 0.5e-6 + 14336 * 4096 * 2 / 300e9
    weights = 20e-6 + 7 * 0.5e-6 + 14336 * 4 / 300e9
    seconds, tasks = class_seconds(case), rotating("forward", 1, STAGES, restore=S4).tasks
    by_hand = sent + weights + received + max(stay, sent)  # S, P, C, then L beside R
    assert list(run_together(tasks, seconds, np.zeros(4))) == close([by_hand] * 4)
    assert seconds["GAR"] == close(
        [40e-6 + 2 * (2 * MODELS[case.model].dense / 32 * 7 / 8 / 300e9 + 3 * 5e-6)] * 4
    )


def test_a_straggler_is_waited_for_in_each_collective_by_hand() -> None:
    tasks = rotating("forward", 1, STAGES, restore=S4).tasks
    seconds = {"S": [1, 1], "R": [1, 1], "P": [0, 0], "C": [4, 8], "L": [1, 2]}
    ends = run_together(tasks, {name: np.array(each, float) for name, each in seconds.items()}, np.zeros(2))
    assert list(ends) == [10, 11]  # R begins at 9, when the slow one has its C; its L ends at 11


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_ranks_that_do_the_same_are_one_rank_of_the_simulator(direction: str) -> None:
    for case in CASES[:6]:
        tasks, seconds = rotating(direction, case.n, STAGES, restore=S4).tasks, class_seconds(case)
        alone = simulate(tasks, lambda task, by_kind=seconds: by_kind.get(task.kind, np.zeros(1))[0])
        equal = {name: np.repeat(each[:1], 4) for name, each in seconds.items()}
        assert list(run_together(tasks, equal, np.zeros(4))) == close([makespan(alone)] * 4)


def test_layers_that_are_not_simulated_are_as_those_that_are() -> None:
    case = replace(CASES[4], straggler=True, lossy=True)
    tasks, seconds = rotating("backward", case.n, STAGES, restore=S4).tasks, class_seconds(case)

    def layer(start: np.ndarray) -> np.ndarray:
        return run_together(tasks, seconds, start) + 3 * seconds["dense"]

    end = np.zeros(4)
    for times in range(1, 12):
        end = layer(end)
        assert list(repeated(layer, times, np.zeros(4))) == pytest.approx(list(end), rel=1e-9)


def computed_seconds(case: Case, at: int) -> float:
    """What a class computes in a step."""
    seconds, n, total = class_seconds(case), cut_degree(case), 0.0
    for direction in ("forward", "backward"):
        tasks = rotating(direction, n, STAGES, restore=S4).tasks
        total += sum(
            seconds[task.kind][at] for task in tasks if task.lane == Lane.COMPUTE and task.kind in seconds
        )
    return MODELS[case.model].layers * (total + 4 * seconds["dense"][at])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_straggler_costs_at_most_what_it_computes_longer(case: Case) -> None:
    """Whatever n: 2 x as slow is at most 2 x as long."""
    alone, slow = scaled_seconds(case), scaled_seconds(replace(case, straggler=True))
    assert alone * (1 - 1e-9) <= slow <= alone + (STRAGGLER - 1) * computed_seconds(case, 2) + 1e-9
    assert slow <= STRAGGLER * alone
    assert slow >= computed_seconds(replace(case, straggler=True), 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_step_beats_what_its_ranks_and_links_can_do(case: Case) -> None:
    model = MODELS[case.model]
    seconds, rows = class_seconds(case), case.tokens * model.top_k
    multiplied = 6 * case.tokens * (model.dense - model.words * model.d_model)
    multiplied += 6 * rows * model.expert * model.layers  # once in forward, twice in backward
    step = scaled_seconds(case)
    assert step >= multiplied / FLOPS
    assert step >= computed_seconds(case, 1)
    hottest = rank_shares(case).max() * rows * (case.sharing - 1)
    away = hottest * max(0, case.sharing - 8) / (case.sharing - 1) / 40e9
    inside = hottest * (min(case.sharing, 8) - 1) / (case.sharing - 1) / 300e9
    assert step >= 5 * model.layers * model.d_model * 2 * max(away, inside)  # S, R, and SI, S, R
    assert all((each >= 0).all() for each in seconds.values())


@pytest.mark.parametrize("strong", [False, True])
def test_more_ranks_are_never_more_than_proportionally_faster(strong: bool) -> None:
    rows = scaling(strong)
    assert [(row["model"], row["ranks"]) for row in rows] == list(itertools.product(MODELS, NUMBERS))
    for before, row in itertools.pairwise(rows):
        if before["model"] == row["model"]:
            assert row["ktokens/s"] <= 2.0001 * before["ktokens/s"]
            assert row["GiB"] <= before["GiB"]  # fewer experts and less optimizer state on each
        assert row["lossy ms"] >= row["ms"] - 1e-9 and row["even ms"] <= row["ms"]
        assert row["waits for"] in {*LIMITS, "skew"} and 0 <= row["%"] < 100


def test_a_lossy_link_between_machines_costs_nothing_inside_one() -> None:
    inside, between = Case("Mixtral 8x7B", 8, 8192, 1), Case("Qwen3-235B-A22B", 32, 8192, 1)
    assert scaled_seconds(replace(inside, lossy=True)) == scaled_seconds(inside)
    lossy, well = (scaled_seconds(replace(between, lossy=each)) for each in (True, False))
    assert 1 < lossy / well < LOSSY


def rows_of_every_chunk(case: Case, n: int) -> torch.Tensor:
    """(n, P, E / P): whole rows, whose sums are those of exact shares, as near as whole numbers can be."""
    model = MODELS[case.model]
    shares = np.tile(popularity(model.num_experts, case.skewed), n) / n
    ends = [0, *(round(each) for each in shares.cumsum() * case.tokens * model.top_k)]
    return torch.tensor([b - a for a, b in itertools.pairwise(ends)]).view(n, case.sharing, -1)


@pytest.mark.parametrize("model", MODELS)
def test_the_worst_rank_holds_what_the_memory_model_says_of_every_rank(model: str) -> None:
    case = Case(model, 16, 4096, 4)
    sizes, n = routed_sizes(case), cut_degree(case)
    rows, found = rows_of_every_chunk(case, n), []
    assert rows.sum() == case.tokens * MODELS[model].top_k
    for rank in range(case.sharing):
        recv = rows[:, rank : rank + 1].expand_as(rows)
        counts = RankCounts(send=rows, recv=recv, recv_device=recv, max_tokens=case.tokens, needs_grad=True)
        passed = counted_rows(sizes, counts, rank, n)
        found.append(predict(sizes, sizes.call(case.tokens), passed, passed, S4).promised)
    assert layer_memory(case).promised == max(found) > min(found)
    experts = MODELS[model].layers * MODELS[model].expert * MODELS[model].num_experts // case.sharing
    states = 4 * (MODELS[model].dense + experts) + 12 * (MODELS[model].dense // 16)
    states += 12 * experts * case.sharing // 16
    layers = (layer_memory(case).saved + case.tokens * MODELS[model].d_model * 2) * MODELS[model].layers
    assert worst_bytes(case) == states + layers + max(found) - layer_memory(case).saved


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_chunks_are_cut_as_the_engine_cuts_them(case: Case) -> None:
    model, rank = MODELS[case.model], int(rank_shares(case).argmax())
    bins = num_bins((case.n,), case.sharing, model.num_experts)
    total = case.sharing * case.tokens * model.top_k * rank_shares(case)[rank]
    ends = [round(total * i / (bins * case.sharing)) for i in range(bins * case.sharing + 1)]
    recv = torch.tensor([b - a for a, b in itertools.pairwise(ends)]).view(bins, case.sharing, 1)
    slots = Slots(slack=SLACK, top_k=model.top_k, degrees=(case.n,), own_rank=rank)
    (depth,) = slots.depths(recv, torch.tensor(case.tokens))
    assert cut_degree(case) == case.n << int(depth)


def test_what_takes_no_time_takes_none() -> None:
    case = Case("DeepSeek-V3", 512, 8192, 4)
    seconds, free = class_seconds(case), {each: class_seconds(replace(case, free=each)) for each in LIMITS}
    assert all((free["all-to-alls"][name] == 0).all() for name in ("S", "SI", "R", "P", "counts"))
    assert (free["gradients"]["GAR"] == 0).all() and (free["launches"]["GAR"] == seconds["GAR"]).all()
    assert (seconds["C"] - free["launches"]["C"]).tolist() == pytest.approx([LAUNCH] * 4)
    assert seconds["counts"].min() > COLLECTIVE


def test_scaling_ends_where_the_rule_says() -> None:
    def rows(*speeds: float) -> list[dict[str, object]]:
        return [{"model": "m", "ranks": 8 << i, "ktokens/s": speed} for i, speed in enumerate(speeds)]

    assert scaling_ends(rows(1, 2, 3.1, 4.6, 9), strong=True) == {"m": rows(0, 0, 0, 4.6)[3]}
    assert scaling_ends(rows(1, 1.1, 2.1, 3.9), strong=False) == {"m": rows(0, 0, 0, 3.9)[3]}
    assert scaling_ends(rows(1, 2, 4), strong=True) == scaling_ends(rows(1, 1.5, 2.1), strong=False) == {}


def test_the_page_says_what_is_printed() -> None:
    out, page = "\n".join(lines()), (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    for strong in (False, True):
        for model, end in scaling_ends(scaling(strong), strong).items():
            assert f"{model} stops at {end['ranks']} ranks: {end['waits for']}" in out
    (row,) = (row for row in scaling(False) if row["model"] == "Mixtral 8x7B" and row["ranks"] == 64)
    told = " ".join(page.split())
    ratios = [row[f"straggler n={n}"] for n in DEGREES]
    assert "with n = 1, 4 and 8 a step takes {:.2f}, {:.2f} and {:.2f} times as long".format(*ratios) in told
    assert f"{TOKENS:,} tokens a rank" in told
    weak, hard = (scaling_ends(scaling(strong), strong) for strong in (False, True))
    assert "Mixtral 8x7B" not in weak
    for model, ends in (
        ("DeepSeek-V3", (weak, hard)),
        ("Qwen3-235B-A22B", (weak, hard)),
        ("Mixtral 8x7B", (hard,)),
    ):
        for end in ends:
            assert f"{end[model]['ranks']:,}" in told.partition("stops scaling")[2], model

"""The simulation of COMET's fused kernels: by hand, the order of tiles, the best division, the paper's
figures.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pmoe import cli
from pmoe.kernels.comet.launcher import Division
from pmoe.papers.assumptions import assumptions
from pmoe.papers.comet_figures import (
    ASSUMPTIONS,
    H800,
    beside,
    best_division,
    chunked_run,
    figure8,
    fused_bars,
    fused_run,
    min_seconds,
    moves,
    panels,
    table3,
)
from pmoe.papers.comet_tasks import (
    TILE_COLUMNS,
    TILE_ROWS,
    Arriving,
    DeviceRates,
    Model,
    Returning,
    Tile,
    even_layer,
    fused_combine_tasks,
    fused_dispatch_tasks,
    tile_order,
)
from pmoe.planner.block_split import chunk_candidates
from pmoe.planner.simulator import makespan
from pmoe.planner.timeline import FUSED_LANES, LEGEND, draw

# A tile of reduction 4 takes a second. A piece of 16 such rows has 128 bytes: half a second to read, half to
# write here, one to write to a peer, half on the link.
BY_HAND = DeviceRates(
    blocks=3,
    block_flops=2 * 128 * 256 * 4,
    block_local_bytes=256,
    block_peer_bytes=128,
    link_bytes=256,
    signal_seconds=0.25,
)
FREE = {"block_local_bytes": math.inf, "block_peer_bytes": math.inf, "link_bytes": math.inf}


def fused_seconds(layer: Arriving | Returning, machine: DeviceRates, n_c: int, width: int = 256) -> float:
    return makespan(fused_run(layer, machine, n_c, width))


def spans(layer: Arriving | Returning, machine: DeviceRates, n_c: int, width: int = 256) -> dict[str, tuple]:
    run = fused_run(layer, machine, n_c, width)
    return {item.task.name: (item.start, item.end) for item in run}


def arriving(rows_WE: Sequence[Sequence[int]], columns: int = 512) -> Arriving:
    return Arriving(rows_WE=tuple(map(tuple, rows_WE)), reduction=4, columns=columns)


def returning(rows_E: Sequence[int], partials_W: Sequence[int], tokens: int, columns: int = 512) -> Returning:
    return Returning(
        rows_E=tuple(rows_E), partials_W=tuple(partials_W), tokens=tokens, reduction=4, columns=columns
    )


def random_arriving(seed: int, most: int = 400) -> Arriving:
    pick = random.Random(seed)
    ranks, experts = pick.randint(1, 4), pick.randint(1, 4)
    rows = [[pick.choice((0, pick.randint(1, most))) for _ in range(experts)] for _ in range(ranks)]
    return arriving(rows, columns=pick.randint(1, 1500))


def random_returning(seed: int) -> Returning:
    pick = random.Random(seed)
    rows = [pick.choice((0, pick.randint(1, 400))) for _ in range(pick.randint(1, 4))]
    ranks = pick.randint(1, 4)
    partials = [pick.randint(0, sum(rows) // ranks) for _ in range(ranks)]
    partials[0] = max(partials[0], min(sum(rows), 1))
    return returning(rows, partials, max(partials) + pick.randint(0, 50), columns=pick.randint(1, 1500))


# ---- layer 0 ----


def test_a_tile_waits_for_the_last_of_its_pieces() -> None:
    """16 rows of this rank and 16 of rank 1 make one row of tiles, with two tiles."""
    layer = arriving([[16], [16]])
    assert spans(layer, BY_HAND, 1) == {
        "S0": (0, 1),  # read and written here
        "S1": (1, 2.5),
        "NS1": (2.5, 3),
        "A0.0": (3, 3.25),
        "T0": (3.25, 4.25),  # two blocks
        "T1": (3.25, 4.25),
    }
    assert spans(layer, BY_HAND, 2) == {
        "S0": (0, 1),
        "S1": (0, 1.5),
        "NS1": (1.5, 2),
        "A0.0": (2, 2.25),
        "T0": (2.25, 3.25),  # one block
        "T1": (3.25, 4.25),
    }


def test_local_tiles_run_while_other_rows_travel() -> None:
    """Eight pieces of this rank are computed by 8 s, eight for a peer by 20 s.

    The link ends half a second later.
    """
    found = spans(arriving([[128], [128]], columns=256), BY_HAND, 1)
    assert found["T0"] == (8.25, 9.25)
    assert found["NS15"] == (20, 20.5)
    assert found["T1"] == (20.75, 21.75)


def test_a_block_writes_no_further_than_one_piece_ahead_of_the_link() -> None:
    found = spans(arriving([[0], [64]]), replace(BY_HAND, link_bytes=12.8), 1)
    assert [found[f"S{i}"] for i in range(4)] == [(0, 1.5), (1.5, 3), (11.5, 13), (21.5, 23)]
    assert [found[f"NS{i}"][1] for i in range(4)] == [11.5, 21.5, 31.5, 41.5]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_tiles_is_that_of_a_plain_sort(seed: int) -> None:
    layer = random_arriving(seed, most=6000)
    ranks = len(layer.rows_WE)

    def level(expert: int, row: int) -> int:
        arrived = itertools.accumulate(rows[expert] for rows in layer.rows_WE)
        full = (level for level, rows in enumerate(arrived) if rows >= (row + 1) * TILE_ROWS)
        return next(full, ranks - 1)

    tiles = [
        (level(expert, row), expert, row, column)
        for expert, rows in enumerate(layer.rows_E)
        for row in range(math.ceil(rows / TILE_ROWS))
        for column in range(math.ceil(layer.columns / TILE_COLUMNS))
    ]
    first: dict[tuple[int, int], int] = {}
    for lev, expert, row, _ in tiles:
        first[lev, expert] = min(row, first.get((lev, expert), row))
    tiles.sort(key=lambda each: (*each[:2], (each[2] - first[each[:2]]) // 16, each[3], each[2]))
    order = tile_order(layer)
    assert order == [Tile(level=lev, expert=e, row=row, column=column) for lev, e, row, column in tiles]


@pytest.mark.parametrize("seed", range(6))
def test_no_tile_begins_before_each_of_its_rows_has_arrived(seed: int) -> None:
    layer, n_c = random_arriving(seed), 1 + seed % 2
    found = spans(layer, BY_HAND, n_c)
    there: dict[tuple[int, int], float] = {}  # (expert, row) -> when
    piece, seen = itertools.count(), [0] * len(layer.rows_E)
    for level, rows_E in enumerate(layer.rows_WE):
        for expert, rows in enumerate(rows_E):
            for row in range(rows):
                if row % 16 == 0:
                    p = next(piece)
                there[expert, seen[expert]] = found[f"NS{p}" if level else f"S{p}"][1]
                seen[expert] += 1
    for i, tile in enumerate(tile_order(layer)):
        rows = range(tile.row * 128, min(tile.row * 128 + 128, seen[tile.expert]))
        arrived = max(there[tile.expert, row] for row in rows)
        before = found[f"T{i - (3 - n_c)}"][1] if i >= 3 - n_c else 0.0
        assert found[f"T{i}"][0] == max(arrived + 0.25, before)


# ---- layer 1 ----


def test_chunks_leave_as_they_are_computed_and_are_summed_a_chunk_later() -> None:
    """16 rows: one for each of 8 tokens of this rank and 8 of rank 1. 8 sums of a chunk have 4096 bytes."""
    machine = DeviceRates(
        blocks=2,
        block_flops=2 * 128 * 256 * 4,
        block_local_bytes=4096,
        block_peer_bytes=2048,
        link_bytes=4096,
        signal_seconds=0.5,
    )
    layer = returning([16], [8, 8], tokens=8)
    assert spans(layer, machine, 1) == {
        "E0.0": (0, 1),
        "D0": (1, 1),
        "R0.0.0": (1, 3),
        "R0.1.0": (3, 6),
        "NR0.1.0": (6, 7),
        "A0": (7, 7.5),
        "E1.0": (1, 2),
        "D1": (2, 2),
        "R1.0.0": (6, 8),
        "R1.1.0": (8, 11),
        "NR1.1.0": (11, 12),
        "A1": (12, 12.5),
        "O0.0": (11, 14),  # two sums of each token read, one written
        "O1.0": (14, 17),
    }
    whole = spans(layer, machine, 1, width=512)
    assert (whole["E0.0"], whole["R0.1.0"], whole["O0.0"]) == ((0, 2), (6, 12), (14.5, 20.5))


def test_what_a_block_does_of_a_chunk_is_all_that_there_is() -> None:
    for seed in range(10):
        layer = random_returning(seed)
        for n_c, width in ((1, 256), (3, 512), (9, 1024)):
            machine = replace(BY_HAND, blocks=10)
            tasks = fused_combine_tasks(layer, machine, n_c, width)
            of = {
                kind: sum(t.seconds for t in tasks if t.kind == kind and t.lane != "link") for kind in "ERO"
            }
            row_tiles = sum(math.ceil(rows / 128) for rows in layer.rows_E)
            assert of["E"] == row_tiles * math.ceil(layer.columns / 256)
            rows, here, partials = sum(layer.rows_E), layer.partials_W[0], sum(layer.partials_W)
            row_bytes = layer.columns * 2
            signals = 0.25 * math.ceil(layer.columns / width) if partials else 0
            moved = row_bytes * ((rows + here) / 256 + (partials - here) / 128)
            assert of["R"] == pytest.approx(moved + signals)
            assert of["O"] == pytest.approx(row_bytes * (partials + layer.tokens) / 256)
            link = sum(t.seconds for t in tasks if t.lane == "link")
            assert link == pytest.approx(row_bytes * (partials - here) / 256)


# ---- facts ----


@pytest.mark.parametrize("make", [random_arriving, random_returning])
def test_a_faster_machine_is_never_slower(make) -> None:
    for seed in range(8):
        layer, machine = make(seed), replace(BY_HAND, blocks=6)
        seconds = fused_seconds(layer, machine, 2)
        for name in ("block_flops", "block_local_bytes", "block_peer_bytes", "link_bytes"):
            for faster in (2 * getattr(machine, name), math.inf):
                assert fused_seconds(layer, replace(machine, **{name: faster}), 2) <= seconds * (1 + 1e-12)
        assert fused_seconds(layer, replace(machine, signal_seconds=0.0), 2) <= seconds


@pytest.mark.parametrize("make", [random_arriving, random_returning])
def test_where_communication_is_free_one_block_communicates_and_tiles_are_all(make) -> None:
    machine = replace(BY_HAND, blocks=8, signal_seconds=0.0, **FREE)
    for seed in range(8):
        layer = make(seed)
        rows_E = layer.rows_E
        tiles = sum(math.ceil(rows / 128) for rows in rows_E) * math.ceil(layer.columns / 256)
        division, seconds = best_division(layer, machine)
        assert (division.n_c, seconds) == (1, math.ceil(tiles / 7))


def test_of_one_rank_nothing_passes_the_link() -> None:
    tasks = fused_dispatch_tasks(arriving([[300, 5]]), BY_HAND, 1)
    tasks += fused_combine_tasks(returning([300, 5], [200], tokens=200), BY_HAND, 1, 256)
    assert "link" not in {task.lane for task in tasks}
    assert {task.kind for task in tasks} == {"S", "L", "E", "R", "O"}


def test_without_rows_nothing_is_computed() -> None:
    nothing = arriving([[0, 0], [0, 0]])
    assert fused_dispatch_tasks(nothing, BY_HAND, 1) == []
    assert best_division(nothing, BY_HAND)[0].n_c == 1
    found = best_division(returning([0], [0, 0], tokens=0), BY_HAND)
    assert found == (Division(1, 512), 0.0)
    # tokens whose experts are all on other ranks that send nothing: an output of zeros is written
    assert {t.kind for t in fused_combine_tasks(returning([0], [0], 4), BY_HAND, 1, 256) if t.seconds} == {
        "O"
    }


def test_experts_without_rows_change_nothing() -> None:
    assert fused_seconds(arriving([[0, 40, 0], [0, 200, 0]]), BY_HAND, 1) == fused_seconds(
        arriving([[40], [200]]), BY_HAND, 1
    )
    assert fused_seconds(returning([0, 70, 0], [40, 20], 40), BY_HAND, 1) == fused_seconds(
        returning([70], [40, 20], 40), BY_HAND, 1
    )


# ---- the best division ----


@pytest.mark.parametrize("make", [random_arriving, random_returning])
@pytest.mark.parametrize("seed", range(6))
def test_the_best_division_is_that_of_brute_force(make, seed: int) -> None:
    layer = make(seed)
    pick = random.Random(seed)
    machine = DeviceRates(
        blocks=9,
        block_flops=2 * 128 * 256 * 4,
        block_local_bytes=pick.choice((1e3, 1e4, 1e5)),
        block_peer_bytes=pick.choice((1e3, 1e4)),
        link_bytes=pick.choice((1e3, 1e5)),
        signal_seconds=pick.choice((0.0, 0.3)),
    )
    chunks = chunk_candidates(layer.columns) if isinstance(layer, Returning) else [256]
    seconds = {
        (n_c, width): fused_seconds(layer, machine, n_c, width) for n_c in range(1, 9) for width in chunks
    }
    for (n_c, width), each in seconds.items():
        assert min_seconds(layer, machine, n_c, width) <= each * (1 + 1e-12)
    n_c, width = min(seconds, key=lambda each: (seconds[each], each[0], -each[1]))
    division = Division(n_c, width) if isinstance(layer, Returning) else Division(n_c)
    assert best_division(layer, machine) == (division, seconds[n_c, width])


def test_the_best_of_given_chunks() -> None:
    layer = random_returning(3)
    division, _ = best_division(layer, BY_HAND, chunks=[512])
    seconds = {n_c: fused_seconds(layer, BY_HAND, n_c, 512) for n_c in (1, 2)}
    assert division == Division(min(seconds, key=seconds.__getitem__), 512)
    assert chunk_candidates(1100) == [256, 512, 1024, 1280]
    assert chunk_candidates(4096) == [256, 512, 1024, 4096]
    assert chunk_candidates(10) == [256]


# ---- shapes ----


def test_an_even_layer_with_tensor_parallelism() -> None:
    """A rank of TP = 4 and EP = 2 has 4 of 8 experts. 22 of the 28 pairs of two experts have one of the 4."""
    first, second = even_layer(Model(E=8, topk=2, N=4096, K=14336), 16384, ep=2, tp=4)
    assert first.rows_WE == ((512,) * 4,) * 8
    assert (first.reduction, first.columns) == (4096, 3584)
    assert second.rows_E == (4096,) * 4
    hit = sum(min(pair) < 4 for pair in itertools.combinations(range(8), 2))
    assert second.partials_W == (round(2048 * hit / 28),) * 8
    assert (second.tokens, second.reduction, second.columns) == (2048, 3584, 4096)


def test_an_even_layer_loses_no_row() -> None:
    for tokens, experts, ep in ((64, 6, 2), (40, 10, 5), (16, 8, 8), (0, 4, 2)):
        first, second = even_layer(Model(E=experts, topk=3, N=8, K=16), tokens, ep=ep, tp=2)
        assert abs(sum(first.rows_E) - tokens * 3 / ep) <= ep * 2  # less than a row a source
        assert max(second.partials_W) <= second.tokens
        assert sum(second.partials_W) <= sum(second.rows_E)


# ---- the figures ----


def test_table_3_is_the_papers() -> None:
    assert len(table3()) == 6
    for size in table3():
        assert size["computed_bytes"] == size["paper_bytes"]


@pytest.mark.slow
def test_figure_8_as_it_came_out() -> None:
    """The simulated numbers of communicating blocks in Fig. 8 do not move as the paper's do.

    `pmoe simulate comet` prints where they differ. The test holds today's numbers, so that a change is
    noticed.
    """
    cases = figure8()
    assert [(case["tp"], case["tokens"], case["paper"]) for case in cases] == [
        (8, 4096, 18),
        (8, 16384, 26),
        (4, 4096, None),
        (4, 16384, 46),
    ]
    assert [case["model"] for case in cases] == [18, 14, 12, 11]
    assert [case["half_rate"] for case in cases] == [25, 24, 20, 18]
    for case in cases:
        assert case["paper_seconds"] is None or case["paper_seconds"] >= case["seconds"]
    assert [move["same way"] for move in moves(cases)] == [False, False]
    moved = [case | {"model": case["paper"] or 0} for case in cases]
    assert [move["same way"] for move in moves(moved)] == [True, True]


def test_the_chunked_layer_by_hand() -> None:
    """No rows stay on their rank. G, S, C, R and O run one after another in one chunk; two chunks overlap."""
    first = arriving([[0], [256]], columns=1024)
    second = Returning(rows_E=(256,), partials_W=(0, 256), tokens=256, reduction=8, columns=4)
    machine = replace(BY_HAND, link_bytes=1024)
    gather, sent, out = 2 * 256 * 8 / 768, 256 * 8 / 1024 + 0.25, (256 + 256) * 8 / 768
    products = math.ceil(2 * 4 / 3) * 1 + math.ceil(2 * 1 / 3) * 2
    run = chunked_run(first, second, machine, 1)
    assert {item.task.name: item.end - item.start for item in run} == pytest.approx(
        {"P": 0, "G0": gather, "S0": sent, "C0": products, "R0": sent, "O0": out}
    )
    assert makespan(run) == pytest.approx(gather + 2 * sent + products + out)
    two = {item.task.name: item for item in chunked_run(first, second, machine, 2)}
    assert two["S1"].start <= two["C0"].start < two["R0"].start < two["C1"].end
    assert sum(two[f"S{i}"].end - two[f"S{i}"].start for i in range(2)) == pytest.approx(sent + 0.25)


def test_the_rows_that_stay_are_in_one_piece_or_two_as_in_the_schedule() -> None:
    layers = even_layer(Model(E=8, topk=2, N=64, K=256), 4096, ep=8)
    for n in (1, 2, 4):
        run = chunked_run(*layers, H800, n)
        pieces = [item.task.name for item in run if item.task.kind.value == "L"]
        assert pieces == ["L0", "L1"][: min(n, 2)]
    alone = even_layer(Model(E=8, topk=2, N=64, K=256), 4096, ep=1)
    assert {item.task.kind.value for item in chunked_run(*alone, H800, 4)} == {"L", "O"}


def test_bars_hold_the_busy_time_of_the_blocks() -> None:
    first, second = even_layer(Model(E=8, topk=2, N=1024, K=2048), 8192, ep=8)
    for layer in (first, second):
        run = fused_run(layer, H800, 8)
        drawn = fused_bars(run, 8, origin=1.0)
        for lane, prefix, blocks in (("computing blocks", "block", 124), ("communicating blocks", "comm", 8)):
            busy = sum(item.end - item.start for item in run if item.task.lane.startswith(prefix))
            bars = [bar for bar in drawn if bar.lane == lane]
            assert sum(bar.share * (bar.end - bar.start) for bar in bars) * blocks == pytest.approx(
                busy, rel=0.05
            )
        assert all(bar.base + bar.share < 1.05 and bar.start >= 1 for bar in drawn)
        assert max(bar.end for bar in drawn) <= 1 + makespan(run) * (1 + 1e-9)
        assert {bar.lane for bar in drawn} == set(FUSED_LANES[:3])
        assert {bar.kind for bar in drawn} <= set(LEGEND)
    assert fused_bars([], 8) == []


def test_the_drawing_has_the_fused_layer_above_the_chunked_ones() -> None:
    pytest.importorskip("matplotlib")
    fused, _, two, *_ = beside()
    drawn = panels()
    names = list(drawn)
    assert names[0].startswith("fused, n_c = ") and "chunked, n = 2" in names
    assert max(bar.end for bar in drawn[names[0]]) == pytest.approx(fused["seconds"], rel=0.01)
    assert max(bar.end for bar in drawn["chunked, n = 2"]) == pytest.approx(two["seconds"])
    to = io.BytesIO()
    draw(to, drawn, "a layer")
    assert to.getvalue().startswith(b"\x89PNG")


# ---- the command ----


@pytest.mark.slow
def test_simulate_comet_prints_both_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "comet.png"
    assert cli.main(["simulate", "comet", "--json", "--draw", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["paper_bytes"] / 2**20 for each in found["table3"]] == [32, 16, 32, 64, 32, 64]
    assert [each["paper"] for each in found["figure8"]] == [18, 26, None, 46]
    seconds = {row["way"]: row["seconds"] for row in found["beside"]}
    assert seconds["chunked, n = 1"] > seconds["fused"] > 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["simulate", "comet"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 110
    assert re.search(r"^Qwen2-MoE +8192 +32\.00 +32\.00$", out, re.MULTILINE)
    for case in found["figure8"]:
        paper = case["paper"] or ""
        assert re.search(rf"^ *{case['tp']} +{case['tokens']} +{paper} +{case['model']} ", out, re.MULTILINE)
    for move in found["moves"]:
        assert re.search(rf"^{move['move']} +{move['paper']} +{move['model']} +no$", out, re.MULTILINE)
    assert all(told in " ".join(out.split()) for told in assumptions("comet, why").values())


def test_simulate_comet_tells_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "comet", "--assumptions", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == dict(ASSUMPTIONS)
    cli.main(["simulate", "comet", "--assumptions"])
    words = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {told}" in words for name, told in ASSUMPTIONS.items())


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["comet", "--contention", "1.5"], "--contention (1.5) is for fsmoe, not for comet"),
        (["fsmoe", "--draw", "x.png"], "--draw (x.png) is for comet, flashdmoe, without --assumptions"),
        (["comet", "--assumptions", "--draw", "x.png"], "--draw (x.png) is for comet"),
    ],
)
def test_simulate_refuses_what_belongs_to_the_other(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["simulate", *argv])
    assert stopped.value.code == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_drawing_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit):
        cli.main(["simulate", "comet", "--draw", str(tmp_path / "no" / "comet.png")])
    assert "must be a file to write" in capsys.readouterr().err

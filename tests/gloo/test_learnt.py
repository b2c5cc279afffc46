"""The n that pipeline=True finds is kept between runs if a cache folder is set: all ranks use rank 0's
file.
"""

from __future__ import annotations

import gc
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pmoe
from pmoe.choose import search
from pmoe.planner import degree_trials
from pmoe.planner.granularity import rounded
from pmoe.warn import GIVEN
from tests.gloo.kit import build
from tests.gloo.test_choices import listen, step
from tests.pool import ranks


def run_job(rank: int, world: int, folders: tuple[str, ...], counts: tuple[int, ...]) -> dict[str, Any]:
    """Runs once, as a new process that has learned nothing.

    folders: $PMOE_CACHE of each rank, "" for none.
    """
    search._LEARNED.clear()
    GIVEN.clear()
    told = listen()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setenv("PMOE_CACHE", folders[rank])
        patch.setattr(degree_trials, "MOST_ROUNDS", 1)
        layer, found = build(pipeline=True, top_k=1), []
        for count in counts:
            step(layer, count, rank)
            found.append((layer.ran.forward, layer.ran.backward))
    return {
        "n": found,
        "tried": [
            int(line.split(" for ")[1].split()[0])
            for line in told.lines
            if line.startswith("pipeline=True takes")
        ],
        "warned": [str(each.message) for each in caught if "trials" in str(each.message)],
    }


def stored(folder: Path) -> list[Path]:
    return sorted(folder.glob("degrees_*.json"))


KNOWN = [2048, 5120, 2, [[4, 4, 0.0, 0.0]]]
"""A range from 2048 to 5120 tokens, by two measurements, with n = 4."""


def rewrite(path: Path) -> None:
    """Changes a file as if trials had found another n."""
    held = json.loads(path.read_text())
    (table,) = held["tables"].values()
    table["ranges"] = [KNOWN]
    path.write_text(json.dumps(held))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file that a run has written."""
    folder, other = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for got in ranks(2).run(run_job, (str(folder), str(other)), (2048,)):
        assert got["tried"] == [2048]
    [path] = stored(folder)
    assert not stored(other)
    return path


@pytest.fixture
def folders(tmp_path: Path, first_run: Path) -> tuple[str, str]:
    """Returns the folders of two ranks: rank 0 has a file with n = 4 for 2048 to 5120 tokens, rank 1 has
    none.
    """
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    path = tmp_path / "first" / first_run.name
    path.write_text(first_run.read_text())
    rewrite(path)
    return str(tmp_path / "first"), str(tmp_path / "second")


def test_the_next_run_tries_nothing_again_nor_between_two_numbers_of_tokens(
    folders: tuple[str, str],
) -> None:
    for got in ranks(2).run(run_job, folders, (2048, 3000, 5000)):
        assert got == {"n": [(4, 4)] * 3, "tried": [], "warned": []}


def test_the_next_run_tries_what_lies_outside_and_keeps_it_beside(folders: tuple[str, str]) -> None:
    for got in ranks(2).run(run_job, folders, (3000, 16000)):
        assert got["tried"] == [16000] and got["n"][0] == (4, 4)
    (table,) = json.loads(stored(Path(folders[0]))[0].read_text())["tables"].values()
    assert sum(measured for _, _, measured, _ in table["ranges"]) == 3
    assert table["ranges"][0][0] == 2048 and table["ranges"][-1][1] >= rounded(16000)


def test_a_file_of_version_2_is_read_where_there_is_none_of_this_version(folders: tuple[str, str]) -> None:
    """It has a table of measured points for each restore pair, and is not changed."""
    [path] = stored(Path(folders[0]))
    held = json.loads(path.read_text())
    tables = {
        "keep/keep, torch.float64": {"points": [[2048, 4, 4]]},
        "communicate/recompute, torch.float64": {"points": [[5000, 4, 4]]},
    }
    older = path.with_name(path.name.replace("_v3", "_v2"))
    older.write_text(json.dumps({**held, "format": 2, "tables": tables}))
    before = older.read_bytes()
    path.unlink()
    for got in ranks(2).run(run_job, folders, (2048, 3000, 5000)):
        assert got == {"n": [(4, 4)] * 3, "tried": [], "warned": []}
    for got in ranks(2).run(run_job, folders, (3000, 16000)):
        assert got["tried"] == [16000]
    assert older.read_bytes() == before and stored(Path(folders[0])) == sorted((older, path))
    for got in ranks(2).run(run_job, folders, (3000, 16000)):
        assert got["tried"] == []


def test_a_file_that_only_another_rank_has_is_not_taken(folders: tuple[str, str]) -> None:
    first, second = ranks(2).run(run_job, folders[::-1], (3000,))
    assert first == second and first["tried"] == [3000]


def test_where_nobody_names_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for got in ranks(2).run(run_job, ("", str(tmp_path)), (3000,)):
        assert got["tried"] == [3000]
    assert not list(tmp_path.iterdir())


def another_key(text: str) -> str:
    return text.replace('"slack": "1.25"', '"slack": "1.5"')


BAD = {
    "no JSON": (lambda text: text[:-9], "no JSON"),
    "another layer's": (another_key, "slack '1.5', here '1.25'"),
    "cut in half": (lambda text: text[: len(text) // 2], "no JSON"),
    "another format": (
        lambda text: text.replace('"format": 3', '"format": 4'),
        "format (4) must be 1, 2 or 3",
    ),
    "no such n": (lambda text: text.replace("[4, 4, 0.0", "[5, 4, 0.0"), "found n=5/4, expected"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spoil, why", BAD.values(), ids=BAD)
def test_a_corrupt_or_foreign_file_is_named_and_measured_anew(
    folders: tuple[str, str], spoil: Any, why: str
) -> None:
    [path] = stored(Path(folders[0]))
    good = path.read_text().replace("\n", "")
    path.write_text(spoil(good))
    assert path.read_text() != good
    first, second = ranks(2).run(run_job, folders, (3000,))
    assert first["tried"] == second["tried"] == [3000] and first["n"] == second["n"]
    [warning] = first["warned"]
    assert f"{path}: " in warning and why in warning and not second["warned"]
    again = ranks(2).run(run_job, folders, (3000,))
    assert [each["tried"] for each in again] == [[], []] and again[0]["n"] == first["n"]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    first, second = ranks(2).run(run_job, (str(file / "below"), str(tmp_path)), (3000,))
    assert first["tried"] == second["tried"] == [3000]
    assert "could not be kept" in " ".join(first["warned"])


def apart_job(rank: int, world: int) -> list[int]:
    """Returns n of a layer that has learned, of an equal one, and of three that are not equal."""
    search._LEARNED.clear()
    layers = [
        build(pipeline=True, **{"top_k": 1, **options})
        for options in ({}, {}, {"activation": "relu"}, {"send_once": True, "top_k": 2}, {"slack": 2.0})
    ]
    told = listen()
    tried = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(degree_trials, "MOST_ROUNDS", 1)
        for layer in layers:
            step(layer, 3000, rank)
            tried.append(len(told.lines))
    return tried


def test_only_layers_that_are_alike_learn_together() -> None:
    for tried in ranks(2).run(apart_job):
        assert tried[0] == tried[1] < tried[2] < tried[3] < tried[4]


def changing_job(rank: int, world: int, folder: str, reuse: bool) -> dict[str, Any]:
    """Runs 2,000 steps with another number of tokens in each. Returns numbers of searches, ranges, live
    tensors, and the bytes that the pool of buffers keeps.

    reuse: the layer's ``memory_reuse``.
    """
    search._LEARNED.clear()
    told = listen()
    draw = random.Random(0)  # the same sizes on every rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PMOE_CACHE", folder)
        layer = build(pipeline=True, top_k=1, memory_reuse=reuse)
        held, known, kept, rooms = [], [], [], []
        for number in range(2000):
            step(layer, draw.randrange(2048, 6000), rank)
            if number % 500 == 499:
                gc.collect()
                held.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
                known.append(len(layer.layer_modules.cache.choosers))
                kept.append(pmoe.pool("cpu").device.kept_bytes)
                rooms.append(len(search.learned_degrees(layer.layer_modules).with_enough_memory))
    [table] = search.learned_degrees(layer.layer_modules).tables.values()
    tried = [line for line in told.lines if line.startswith("pipeline=True takes")]
    return {
        "searches": len(tried),
        "ranges": [(each.lower, each.upper, each.degrees) for each in table.ranges.values()],
        "answers": len(table.answers),
        "tensors": held,
        "choosers": known,
        "kept": kept,
        "rooms": rooms,
        "in_use": pmoe.pool("cpu").device.bytes_in_use,
    }


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("reuse", [False, True])
def test_batch_sizes_that_change_in_every_step_need_few_searches_and_no_more_memory(
    reuse: bool, tmp_path: Path
) -> None:
    """There are 27 entries from 2,048 to 6,000 tokens, each of which is searched at most once."""
    first, second = ranks(2).run(changing_job, str(tmp_path), reuse, timeout=400)
    assert (first["ranges"], first["searches"]) == (second["ranges"], second["searches"])
    assert 1 <= len(first["ranges"]) <= first["searches"] <= 27 and first["answers"] <= 27
    for got in (first, second):
        assert len(set(got["choosers"])) == 1
        # Tensors of earlier tests in this process may disappear meanwhile.
        assert got["tensors"][-1] - min(got["tensors"]) <= 20, got["tensors"]
        assert got["kept"][-1] <= 1.02 * got["kept"][-2], got["kept"]  # it has stopped to grow
        assert got["kept"][-1] <= 1.50 * got["kept"][0] and got["in_use"] == 0, got["kept"]
        assert max(got["rooms"]) <= 27 * 5 * 4  # entries, numbers of chunks, restore pairs


# ---- batches on which no trial can run


def small_job(rank: int, world: int, counts: tuple[int, ...]) -> dict[str, Any]:
    """Steps of a layer whose smallest step has room for trials of fewer than 256 of about 1,200 tokens."""
    search._LEARNED.clear()
    told = listen()
    asked = []
    find = search.search

    def searching(known: Any, batch: Any, *rest: Any, **options: Any) -> Any:
        asked.append(batch.counts.max_tokens)
        return find(known, batch, *rest, **options)

    torch.manual_seed(0)
    layer = pmoe.MoELayer(32, 64, 8, top_k=2, pipeline=True, memory_reuse="S1")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(degree_trials, "MOST_ROUNDS", 1)
        patch.setattr(search, "search", searching)
        for count in counts:
            layer(torch.randn(count, 32, requires_grad=True)).sum().backward()
            assert layer.ran is not None
            found.append((layer.ran.forward, layer.ran.backward))
    lines = [line for line in told.lines if line.startswith("pipeline=True")]
    search._LEARNED.clear()
    return {"n": found, "asked": asked, "lines": lines}


def test_a_batch_too_small_for_trials_takes_the_n_of_the_rule_and_asks_for_none_again() -> None:
    for got in ranks(2).run(small_job, (1210, 1300, 1210, 1300)):
        assert got == {"n": [(2, 2)] * 4, "asked": [1210, 1300], "lines": []}


def test_a_measurement_makes_batches_too_small_for_trials_ask_once_more() -> None:
    for got in ranks(2).run(small_job, (1210, 6000, 1210, 1210)):
        assert got["asked"] == [1210, 6000, 1210] and got["n"][::2] == [(2, 2)] * 2
        assert all("for 6000 tokens" in line for line in got["lines"]) and got["lines"]


# ---- results in a checkpoint of a training


def checkpoint_job(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """A training stores what trials found. Rank 0 has it later, and a layer with ``options`` takes it."""
    search._LEARNED.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PMOE_CACHE", raising=False)
        patch.setattr(degree_trials, "MOST_ROUNDS", 1)
        layers = [build(pipeline=True, top_k=1), build(pipeline=True, top_k=1), build(pipeline=4, top_k=1)]
        for layer in layers:
            step(layer, 2048, rank)
        saved = json.loads(json.dumps(search.results_for_checkpoint(each.layer_modules for each in layers)))
        before = (layers[0].ran.forward, layers[0].ran.backward)
        search._LEARNED.clear()
        told = listen()
        resumed = build(**{"pipeline": True, "top_k": 1, **options})
        search.take_results([resumed.layer_modules], saved if rank == 0 else [])
        step(resumed, 2048, rank)
        search._LEARNED.clear()
    return {
        "entries": len(saved),
        "same": (resumed.ran.forward, resumed.ran.backward) == before,
        "tried": [line for line in told.lines if line.startswith("pipeline=True tries")],
        "again": [line for line in told.lines if line.startswith("pipeline=True searches again")],
    }


def test_a_layer_takes_what_trials_found_before_a_checkpoint() -> None:
    """Two equal layers share one entry, and a layer with a fixed n has no entry."""
    for got in ranks(2).run(checkpoint_job, {}):
        assert got == {"entries": 1, "same": True, "tried": [], "again": []}


def test_a_layer_of_another_kind_than_the_checkpoints_searches_again_and_says_why() -> None:
    first, second = ranks(2).run(checkpoint_job, {"memory_reuse": "S4"})
    assert first["tried"] == second["tried"] != []
    [line] = first["again"]
    assert "holds the degrees of another layer, group or machine: memory_reuse" in line
    assert second["again"] == []


@pytest.mark.parametrize(
    "entry",
    ["text", None, [1], {}, {"format": 4}, {"format": 3, "key": {}, "tables": {"torch.float32": {}}}],
    ids=str,
)
def test_an_entry_that_is_no_result_of_trials_is_left_out_without_an_error(entry: Any) -> None:
    """An error would end a resumed training on every rank."""
    assert search._saved_tables([entry], {}, (1, 2, 4)) == {}

"""bench_program: it measures all of its passes, and two ranks at n = 4 are among them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import bench_program
from pmoe import program as package
from pmoe.program.records import CallNumber, ChunkNumber, Operand, Record, chunk_number
from pmoe.schedule.restore import STRATEGIES
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.tasks import Stages
from tests.programs import library

ROOT = Path(__file__).resolve().parents[2]


def test_each_pass_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_program, "compile_library", lambda path: None)
    monkeypatch.setattr(bench_program, "load_library", lambda path: library())
    found = bench_program.main(["--rounds", "1", "--calls", "2", "--json", str(tmp_path / "program.json")])
    assert len(found) == 2 * len(bench_program.CASES) and (2, 4) in bench_program.CASES
    assert all(one["median_microseconds"] > 0 and one["calls"] > one["n"] for one in found)
    assert "passes" in (tmp_path / "program.json").read_text()


def test_the_runner_launches_few_operators_around_a_program() -> None:
    """An index becomes int32, once for both passes, and the gradients of two weights are rounded."""
    parts = bench_program.runners_part(1, 4, 2)
    assert {name: part["operators"] for name, part in parts.items()} == {"forward": 1, "backward": 2}
    assert all(part["microseconds"] > 0 for part in parts.values())
    page = " ".join((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").split())
    assert "1 launch in a forward pass and 2 in a backward pass" in page


@pytest.mark.parametrize("heaps", [False, True])
def test_the_page_shows_the_calls_of_each_pass_and_the_predicted_time(heaps: bool) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    _, _, rest = page.partition(f"<!-- calls of programs{' over heaps' * heaps} -->\n")
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in rest.partition("\n\n")[0].splitlines()[2:]
    ]
    table = bench_program.prediction_table(library(), heaps=heaps)
    counted = [line.split() for line in table.splitlines()[1:]]
    assert shown == counted


def test_the_page_shows_what_a_graph_holds_and_what_its_replay_is_predicted_to_take() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("<!-- replays of programs over heaps -->\n")
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in rest.partition("\n\n")[0].splitlines()[2:]
    ]
    assert shown == [line.split() for line in bench_program.replay_table(library()).splitlines()[1:]]
    assert f"{bench_program.REPLAY_MICROSECONDS:.0f} us for the launch of a graph" in page


@pytest.mark.parametrize(
    ("heaps", "direction", "goal"),
    [(False, "forward", 190), (False, "backward", 295), (True, "forward", 120), (True, "backward", 205)],
)
def test_the_predictions_for_two_ranks_and_four_chunks_meet_their_goals(
    heaps: bool, direction: str, goal: int
) -> None:
    calls = bench_program.host_calls(library(), 2, 4, direction, heaps=heaps)
    assert calls.predicted_microseconds <= goal


@pytest.mark.parametrize(
    ("file", "name", "number"),
    [
        ("permute/launch.h", "kMostCopies", bench_program.PLACES_OF_LAUNCH),
        ("program/cuda_backend.h", "kMostUnsummed", bench_program.SUMS_OF_LAUNCH),
        ("program/push.h", "kMostMessages", bench_program.EXCHANGES_OF_LAUNCH),
    ],
)
def test_the_prediction_shares_launches_as_the_source_does(file: str, name: str, number: int) -> None:
    source = (ROOT / "cuda" / file).read_text(encoding="utf-8")
    assert re.findall(rf"constexpr \w+ {name} = (\d+);", source) == [str(number)]


def test_the_package_shows_the_first_records_of_a_program() -> None:
    """The example in the docstring of `pmoe.program` is that of the benchmark's layer on two ranks."""
    records = bench_program.compiled(2, 2, "forward").records
    tasks = rotating("forward", 2, Stages(local=True, remote=True), restore=STRATEGIES["S4"]).tasks
    conditions = {int(number): number.name.removeprefix("MESSAGE_IS_") for number in CallNumber} | {
        chunk_number(number, i): f"{number.name}.{i}" for number in ChunkNumber for i in range(2)
    }

    def words(number: int, record: Record) -> list[str]:
        task = [tasks[record.task].name] if record.task >= 0 else []
        condition = conditions[record.condition].replace("ONE", "")
        events = [*map(str, record.waits), str(record.signal) if record.signal >= 0 else ""]
        return [str(number), *task, record.lane.value, record.kernel.name.lower(), condition, *events]

    def is_shown(operand: Operand) -> bool:
        return operand.name not in ("NOWHERE", "ENDS")

    assert package.__doc__ is not None
    lines = re.findall(r"^    (\d+ .*)$", package.__doc__, re.MULTILINE)
    assert len(lines) == 12
    for number, (line, record) in enumerate(zip(lines, records, strict=False)):
        call = re.search(r"\S+(?:, \S+)* -> \S+", line)
        assert call is not None
        assert re.split(r", | -> ", call.group()) == [each.name for each in record.operands if is_shown(each)]
        rest = line.replace(call.group(), "").split()
        assert rest == [word for word in words(number, record) if word]

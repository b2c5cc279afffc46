"""The simulator against numbers by hand, the rule for n, and what the timeline draws."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from bench.chrome_trace import chrome_trace
from pmoe.call.options import LayerOptions
from pmoe.choose.trials import adaptive_degree
from pmoe.planner import timeline
from pmoe.planner.degree import check_pipeline
from pmoe.planner.simulator import makespan, simulate
from pmoe.planner.timeline import bars, draw
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, Lane, Stages, sequential


@dataclass(frozen=True)
class Made:
    name: str
    lane: str
    waits: tuple[str, ...] = ()


def spans_of(tasks, seconds):
    return [(item.task.name, item.start, item.end) for item in simulate(tasks, seconds)]


def test_a_task_waits_for_its_lane_and_for_the_tasks_it_names() -> None:
    tasks = [
        Made("S0", "communicate"),
        Made("S1", "communicate"),
        Made("L", "compute"),
        Made("C0", "compute", ("S0",)),
        Made("R0", "communicate", ("C0",)),
        Made("C1", "compute", ("S1",)),
        Made("R1", "communicate", ("C1",)),
    ]
    seconds = {"S0": 2, "S1": 2, "L": 1, "C0": 3, "R0": 2, "C1": 3, "R1": 2}
    assert spans_of(tasks, lambda task: seconds[task.name]) == [
        ("S0", 0, 2),
        ("S1", 2, 4),
        ("L", 0, 1),
        ("C0", 2, 5),
        ("R0", 5, 7),
        ("C1", 5, 8),
        ("R1", 8, 10),
    ]


def equal_lanes(task) -> float:
    """Returns the seconds of a task on a machine on which all tasks of a chunk cost the same.

    Rows that stay cost what sent rows cost, and messages what experts cost.
    """
    return {Kind.DISPATCH: 1, Kind.COMBINE: 1, Kind.COMPUTE: 1, Kind.LOCAL: 1}.get(task.kind, 0)


@pytest.mark.parametrize("n, expected", [(1, 3), (2, 4), (4, 8), (8, 16)])
def test_forward_hides_all_but_the_ideal_where_communication_costs_what_computation_costs(
    n: int, expected: int
) -> None:
    # 2n units of work on each lane. From n = 2 on neither lane ever idles: the last chunk's own rows cover
    # the drain of the last R. A single chunk can hide its S only.
    schedule = forward_schedule(n, Stages(local=True, remote=True))
    assert makespan(simulate(schedule.tasks, equal_lanes)) == expected


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_sequential_schedule_takes_the_sum_of_its_tasks(n: int) -> None:
    for build in (forward_schedule, backward_schedule):
        schedule = sequential(build(n, Stages(local=True, remote=True)))
        assert makespan(simulate(schedule.tasks, lambda task: 1.0)) == len(schedule.tasks)


def test_weight_gradients_hide_the_return_of_gradients_even_in_one_chunk() -> None:
    seconds = {Kind.DISPATCH: 1, Kind.COMBINE: 1, Kind.COMPUTE: 1, Kind.LOCAL: 1, Kind.WGRAD: 1}
    seconds[Kind.LOCAL_WGRAD] = 1
    schedule = backward_schedule(1, Stages(local=True, remote=True))
    assert makespan(simulate(schedule.tasks, lambda task: seconds.get(task.kind, 0))) == 4


def test_the_adaptive_degree_leaves_enough_rows_in_a_chunk() -> None:
    rows = (0, 1023, 2047, 2048, 4096, 8191, 8192, 10**6)
    assert [adaptive_degree(r, 2) for r in rows] == [1, 1, 1, 2, 4, 4, 8, 16]
    assert adaptive_degree(10**6, 1) == 1


def test_the_pipeline_argument_means_what_it_says() -> None:
    specs = [LayerOptions(d_model=1, d_hidden=1, num_experts=1, pipeline=p) for p in (False, True, 1, 5)]
    assert [spec.fixed_degree for spec in specs] == [1, None, 1, 5]
    with pytest.raises(ValueError, match=r"pipeline \(0\) must be"):
        check_pipeline(0)
    with pytest.raises(ValueError, match=r"pipeline \(-2\) must be"):
        check_pipeline(-2)
    with pytest.raises(TypeError, match=r"pipeline \('yes'\) must be"):
        check_pipeline("yes")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Spanned:
    name: str
    lane: str
    start: float
    end: float
    direction: str = "forward"
    kind: str = "S"
    chunk: int = 0


def test_a_message_is_drawn_from_when_its_lane_was_free() -> None:
    drawn = bars(
        [
            Spanned("S0", "communicate", 10.0, 12.0),
            Spanned("S1", "communicate", 10.5, 14.0),
            Spanned("L0", "compute", 10.5, 11.0),
        ]
    )
    assert [(bar.name, bar.start, bar.end) for bar in drawn] == [("S0", 0, 2), ("S1", 2, 4), ("L0", 0.5, 1)]


def test_the_drawing_and_the_trace_hold_every_bar(tmp_path) -> None:
    panels = {
        "measured": bars([Spanned("S0", "communicate", 0, 1), Spanned("L0", "compute", 0, 2, kind="L")])
    }
    draw(tmp_path / "step.png", panels, "a step")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    chrome_trace(tmp_path / "step.json", panels)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events] == [
        ("S0", "communicate", 0, 1e6),
        ("L0", "compute", 0, 2e6),
    ]


def test_every_kind_of_task_and_every_lane_can_be_drawn() -> None:
    for kind in Kind:
        assert timeline.SHARED.get(kind.value, kind.value) in timeline.LEGEND, kind
    assert {lane.value for lane in Lane} == set(timeline.LANES)

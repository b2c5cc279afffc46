"""A simulated fused kernel as bars of a timeline: the shares of its blocks that are at work, and the link."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pmoe.papers.comet_layers import DeviceRates
from pmoe.papers.comet_tasks import FusedTask
from pmoe.planner.simulator import Simulated, makespan
from pmoe.planner.timeline import Bar

_RESOLUTION = 200


def busy_bars(
    run: Sequence[Simulated[FusedTask]], device: DeviceRates, n_c: int, origin: float = 0.0
) -> list[Bar]:
    """A fused kernel on three lanes: the share of the computing and of the communicating blocks that is at
    work on each level or chunk, and the link. origin: when it begins, in seconds.

    Time is cut into 200 steps; neighbours that look alike are one bar.
    """
    total = makespan(run)
    drawn: list[Bar] = []
    if not total:
        return drawn
    for lane, prefix, size in (
        ("link", "link", 1),
        ("communicating blocks", "comm ", n_c),
        ("computing blocks", "block ", device.blocks - n_c),
    ):
        here = [item for item in run if item.task.lane.startswith(prefix) and item.end > item.start]
        work: dict[tuple[str, int], list[float]] = {}
        for item in here:
            busy = work.setdefault((item.task.kind, item.task.part), [0.0] * _RESOLUTION)
            first, last = item.start / total * _RESOLUTION, item.end / total * _RESOLUTION
            for step in range(int(first), min(math.ceil(last), _RESOLUTION)):
                busy[step] += (min(last, step + 1) - max(first, step)) / size
        drawn += _stacked(work, lane, origin, total / _RESOLUTION)
    return drawn


def _stacked(work: dict[tuple[str, int], list[float]], lane: str, origin: float, seconds: float) -> list[Bar]:
    open_bars: dict[tuple[str, int], tuple[int, float, float]] = {}  # -> first step, base, share
    drawn = []

    def close(key: tuple[str, int], end: int) -> None:
        first, base, share = open_bars.pop(key)
        kind, part = key
        drawn.append(
            Bar(
                direction="forward",
                name=kind if kind == "L" else f"{kind}{part}",
                kind=kind,
                chunk=part,
                lane=lane,
                start=origin + first * seconds,
                end=origin + end * seconds,
                base=base,
                share=share,
            )
        )

    for step in range(_RESOLUTION):
        base = 0.0
        for key, busy in work.items():
            share = busy[step]
            if key in open_bars:
                _, was_base, was_share = open_bars[key]
                if max(abs(was_base - base), abs(was_share - share)) > 0.04 or share < 1e-9:
                    close(key, step)
            if share >= 1e-9 and key not in open_bars:
                open_bars[key] = (step, base, share)
            base += share
    for key in list(open_bars):
        close(key, _RESOLUTION)
    return sorted(drawn, key=lambda bar: bar.start)

"""The numbers of a run by layer and step, and a summary of the run."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from pmoe.integrations.report.charts import NONE, median
from pmoe.integrations.run_folder import PASSES, TIME, Curve, Row, Run

LONG_NAME = 24
"""Longest layer name, in characters, for which a phone's screen has room."""

COMMUNICATION = ("communication", "exposed")


@dataclass(frozen=True)
class History:
    """Rows of a run by layer, with the short names of layers."""

    run: Run
    by_layer: dict[str, list[Row]]

    @property
    def latest(self) -> dict[str, Row]:
        """Last row of each layer."""
        return {name: rows[-1] for name, rows in self.by_layer.items()}

    @property
    def last_step(self) -> int:
        """Last step that has any number."""
        ends: list[int] = [row.step for row in self.latest.values()]
        return max(ends + [curve.steps[-1] for curve in self.run.scalars.values()])

    def last(self, name: str) -> float | None:
        """Returns the last value of a scalar; None if there is no scalar of this name."""
        return self.run.scalars[name].values[-1] if name in self.run.scalars else None

    @property
    def loss(self) -> tuple[str, Curve] | None:
        """Name and curve of the scalar "loss", else of the first scalar with "loss" in its name."""
        return min(self.losses.items(), key=lambda named: named[0] != "loss", default=None)

    @property
    def last_losses(self) -> list[float]:
        """Last fiftieth of the loss's finite values, at least one. Their mean is the loss of the run."""
        finite = [value for value in self.loss[1].values if math.isfinite(value)] if self.loss else []
        return finite[-max(1, len(finite) // 50) :]

    @property
    def losses(self) -> dict[str, Curve]:
        """All scalars with "loss" in their names."""
        return {name: curve for name, curve in self.run.scalars.items() if "loss" in name.lower()}

    @property
    def imbalance(self) -> float | None:
        """Largest of the layers' latest imbalances."""
        return max((row.imbalance for row in self.latest.values() if row.imbalance is not None), default=None)

    @property
    def drop_rate(self) -> float | None:
        """Latest drop rate of all layers together: dropped rows / rows before any were dropped."""
        rows = self.latest.values()
        slots = [
            (row.num_slots, row.drop_rate) for row in rows if row.num_slots and row.drop_rate is not None
        ]
        total = sum(num for num, _ in slots)
        return sum(num * rate for num, rate in slots) / total if total else None

    @property
    def seconds_per_step(self) -> float | None:
        """Median seconds per step from one set of statistics to the next.

        A median, because a pause between two sessions would distort a mean.
        """
        times = self.run.scalars.get(TIME, Curve())
        pairs = itertools.pairwise(zip(times.steps, times.values, strict=True))
        return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] > a[0])

    def seconds_by_step(self, name: str) -> Curve:
        """Seconds of both passes, summed over all layers, at the recorded steps.

        name: one of `COMMUNICATION`.
        """
        seconds = defaultdict[int, float](float)
        for row in itertools.chain.from_iterable(self.by_layer.values()):
            times = [value for way in PASSES if (value := getattr(row, f"{way}_{name}")) is not None]
            if times:
                seconds[row.step] += sum(times)
        return Curve(sorted(seconds), [seconds[step] for step in sorted(seconds)])

    def median_seconds(self, name: str) -> float | None:
        """Median over the recorded steps of `seconds_by_step`."""
        return median(self.seconds_by_step(name).values)


def history_of(run: Run) -> History:
    """Returns the rows of a run by layer. If a step has several rows of a layer, the last one counts."""
    by_layer: dict[str, dict[int, Row]] = {}
    for row in run.rows:
        by_layer.setdefault(row.layer, {})[row.step] = row
    names = short_names(list(by_layer))
    return History(run, {names[name]: list(rows.values()) for name, rows in by_layer.items()})


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Returns the name that each layer has on the page. Long names lose the parts at both ends that all have
    in common.

    Example: "model.decoder.layers.0.feed_forward" and "model.decoder.layers.1.feed_forward" become "layer 0"
    and "layer 1".
    """
    parts = [name.split(".") for name in names]
    ahead = behind = 0
    if len(names) > 1 and max(map(len, names)) > LONG_NAME:
        shortest = min(map(len, parts))
        ahead = min(len(commonprefix(parts)), shortest - 1)
        behind = min(len(commonprefix([name_parts[::-1] for name_parts in parts])), shortest - ahead - 1)
    shortened = [
        ".".join(name_parts[ahead : len(name_parts) - behind]) or "(the model)" for name_parts in parts
    ]
    return {
        name: f"layer {short}" if short.isdecimal() else short
        for name, short in zip(names, shortened, strict=True)
    }


def stretches(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Returns the ranges of steps over which a layer ran in the same way: (steps, path, n, n of backward,
    restore pair).
    """
    groups = [(how, [row.step for row in group]) for how, group in itertools.groupby(rows, _how)]
    return [(f"{steps[0]:,}" + f" – {steps[-1]:,}" * (len(steps) > 1), *how) for how, steps in groups]


def _how(row: Row) -> tuple[str, ...]:
    """Returns how a layer ran at a step, in words: path, n of both passes, restore pair."""
    n_forward, n_backward = (NONE if n is None else str(n) for n in (row.n_forward, row.n_backward))
    is_kept = row.path == "pipeline" and row.n_backward is not None
    return (row.path, n_forward, n_backward, row.restore or ("kept" if is_kept else NONE))


def summary(run: Run) -> dict[str, Any]:
    """Returns the latest numbers and a median step's seconds as plain data.

    None stands for a number that is not known.
    """
    history = history_of(run)
    losses = history.last_losses
    return {
        "steps": history.last_step,
        "loss": sum(losses) / len(losses) if losses else None,
        "layers": len(history.latest),
        "imbalance": history.imbalance,
        "drop_rate": history.drop_rate,
        **{f"{name}_seconds": history.median_seconds(name) for name in COMMUNICATION},
    }

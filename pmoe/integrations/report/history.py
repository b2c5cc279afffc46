"""The data of a training run, arranged for the report: statistics by layer, losses, main numbers.

A log line is a line of layers.csv, read as a `Row`: the statistics of one layer at one step. It is not one of
the rows that experts compute, which are copies of tokens.
"""

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
"""Longest name of a layer, in characters, that fits on a phone's screen. Longer names are shortened."""

COMMUNICATION = ("communication", "exposed")


@dataclass(frozen=True)
class History:
    """The log lines of a run, by layer, and numbers computed from them.

    A log line has the statistics of one layer at one step.

    run: all data of the run.
    by_layer: the log lines of each layer by ascending step, under the name that the layer has on the page.
    """

    run: Run
    by_layer: dict[str, list[Row]]

    @property
    def latest(self) -> dict[str, Row]:
        """The last log line of each layer, by the layer's name on the page."""
        return {name: rows[-1] for name, rows in self.by_layer.items()}

    @property
    def shortened(self) -> tuple[str, str] | None:
        """The short and the full name of the first layer whose name was shortened; None if there is none."""
        names = ((name, row.layer) for name, row in self.latest.items())
        return next(((name, full) for name, full in names if full and name != full), None)

    @property
    def last_step(self) -> int:
        """The last step for which any number was logged."""
        ends: list[int] = [row.step for row in self.latest.values()]
        return max(ends + [curve.steps[-1] for curve in self.run.scalars.values()])

    def last(self, name: str) -> float | None:
        """Returns the last value of the scalar ``name``; None if no scalar of this name was logged."""
        return self.run.scalars[name].values[-1] if name in self.run.scalars else None

    @property
    def loss(self) -> tuple[str, Curve] | None:
        """Name and values of the run's main loss; None if there is no loss.

        The main loss is the scalar "loss", or else the first scalar with "loss" in its name.
        """
        return min(self.losses.items(), key=lambda named: named[0] != "loss", default=None)

    @property
    def last_losses(self) -> list[float]:
        """The last 2 percent of the main loss's finite values, at least one value. Empty if there is no loss.

        The page shows their mean as the loss of the run, because a single value may be noisy.
        """
        finite = [value for value in self.loss[1].values if math.isfinite(value)] if self.loss else []
        return finite[-max(1, len(finite) // 50) :]

    @property
    def losses(self) -> dict[str, Curve]:
        """All scalars with "loss" in their names."""
        return {name: curve for name, curve in self.run.scalars.items() if "loss" in name.lower()}

    @property
    def imbalance(self) -> float | None:
        """The worst imbalance of any layer at its last logged step; None if experts had nothing to compute.

        Imbalance is token copies of the busiest expert / mean token copies of an expert.
        """
        return max((row.imbalance for row in self.latest.values() if row.imbalance is not None), default=None)

    @property
    def drop_rate(self) -> float | None:
        """Share of (token, choice) pairs that all layers together dropped at their last logged steps.

        None if no layer has logged its drop rate.
        """
        rows = self.latest.values()
        slots = [
            (row.num_slots, row.drop_rate) for row in rows if row.num_slots and row.drop_rate is not None
        ]
        total = sum(num for num, _ in slots)
        return sum(num * rate for num, rate in slots) / total if total else None

    @property
    def seconds_per_step(self) -> float | None:
        """Median seconds of a training step; None with fewer than two steps with statistics.

        It is a median, because a pause between two sessions of the run would distort a mean.
        """
        times = self.run.scalars.get(TIME, Curve())
        pairs = itertools.pairwise(zip(times.steps, times.values, strict=True))
        return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] > a[0])

    def seconds_by_step(self, name: str) -> Curve:
        """Returns the seconds of communication in both passes, summed over all layers, for each step.

        Only steps with recorded times are in the result.

        name: "communication" for all communication; "exposed" for communication while nothing is computed.
        """
        seconds = defaultdict[int, float](float)
        for row in itertools.chain.from_iterable(self.by_layer.values()):
            times = [value for way in PASSES if (value := getattr(row, f"{way}_{name}")) is not None]
            if times:
                seconds[row.step] += sum(times)
        return Curve(sorted(seconds), [seconds[step] for step in sorted(seconds)])

    def median_seconds(self, name: str) -> float | None:
        """Returns the median seconds of communication in a step, over all steps with recorded times.

        Returns None if no step has recorded times.

        name: "communication" for all communication; "exposed" for communication while nothing is computed.
        """
        return median(self.seconds_by_step(name).values)


def history_of(run: Run) -> History:
    """Returns a run's log lines by layer, under short names of the layers.

    If a layer has several log lines for one step, only the last of these is in the result.
    """
    by_layer: dict[str, dict[int, Row]] = {}
    for row in run.rows:
        by_layer.setdefault(row.layer, {})[row.step] = row
    names = short_names(list(by_layer))
    return History(run, {names[name]: list(rows.values()) for name, rows in by_layer.items()})


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Returns for each layer's full name a shorter one, to be shown on the page.

    If any name is longer than `LONG_NAME`, "…" replaces parts at both ends that all names have in common. If
    the rest of a name would begin with a number, the part before it stays, too, because it names the list of
    modules that the number belongs to.

    Example: "model.decoder.layers.0.feed_forward" and "model.decoder.layers.1.feed_forward" become
    "…layers.0…" and "…layers.1…".
    """
    parts = [name.split(".") for name in names]
    ahead = behind = 0
    if len(names) > 1 and max(map(len, names)) > LONG_NAME:
        shortest = min(map(len, parts))
        ahead = min(len(commonprefix(parts)), shortest - 1)
        behind = min(len(commonprefix([name_parts[::-1] for name_parts in parts])), shortest - ahead - 1)
        if ahead and all(name_parts[ahead].isdecimal() for name_parts in parts):
            ahead -= 1
    before, after = "…" * (ahead > 0), "…" * (behind > 0)
    shortened = [".".join(name_parts[ahead : len(name_parts) - behind]) for name_parts in parts]
    return {
        name: f"{before}{short}{after}" if name else "(the model)"
        for name, short in zip(names, shortened, strict=True)
    }


def stretches(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Returns the ranges of steps in which a layer ran with the same settings, as texts for a table.

    Each range is (steps, path, n of forward, n of backward, restore pair): path is the code that ran, n the
    number of chunks. The restore pair says how backward got the dispatched rows (T_DI) and the hidden
    activation (T_M): kept, offloaded, sent or computed again.

    rows: the rows of one layer, by ascending step.
    """
    groups = [(how, [row.step for row in group]) for how, group in itertools.groupby(rows, _how)]
    return [(f"{steps[0]:,}" + f" – {steps[-1]:,}" * (len(steps) > 1), *how) for how, steps in groups]


def _how(row: Row) -> tuple[str, ...]:
    """Returns a layer's settings at a step as texts: path, n of forward, n of backward, restore pair.

    Path is the code that ran, n the number of chunks. The restore pair says how backward got the dispatched
    rows (T_DI) and the hidden activation (T_M): kept, offloaded, sent or computed again.

    row: a row of the layer.
    """
    n_forward, n_backward = (NONE if n is None else str(n) for n in (row.n_forward, row.n_backward))
    is_kept = row.path == "pipeline" and row.n_backward is not None
    return (row.path, n_forward, n_backward, row.restore or ("kept" if is_kept else NONE))


def summary(run: Run) -> dict[str, Any]:
    """Returns the main numbers of a run as plain data, for JSON.

    They are the latest values, except that seconds are medians over steps. A number that is not known is
    None.
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

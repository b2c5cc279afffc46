"""The page about a run: what is on it, in which order, and how much of it.

Numbers that are missing leave their section out, or a sentence in its place: a run may have losses alone,
one row, or layers whose rows never travel. Long runs are thinned (`charts`), many layers are folded away
behind the first.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pmoe.integrations.report.charts import (
    COLOURS,
    MOST_COLUMNS,
    STYLE,
    Band,
    Heat,
    Line,
    bar_chart,
    heat_legend,
    heat_map,
    line_chart,
)
from pmoe.integrations.report.numbers import (
    NONE,
    byte_unit,
    median,
    time_unit,
    told,
    told_bytes,
    told_seconds,
    told_share,
)
from pmoe.integrations.run_folder import (
    HOST_POOL_PEAK,
    POOL_PEAK,
    TENSORS,
    TIME,
    Curve,
    LayerRow,
    Run,
)
from pmoe.planner.drawing import Markup, Part, Table, markup, page

MOST_LINES = 6
"""Layers that have a line of their own; of more, the middle and the ends are drawn."""

LONG_NAME = 24
"""Characters of a layer's name that a phone has room for."""

MOST_SHOWN = 6
"""Heat maps and bars that are shown at once; the rest is folded away."""


@dataclass(frozen=True)
class _Layers:
    """The rows of a run by layer and by step. steps: those that have any, ascending."""

    by_layer: dict[str, list[LayerRow]]
    steps: list[int]

    @property
    def names(self) -> list[str]:
        return list(self.by_layer)

    @property
    def recorded(self) -> list[LayerRow]:
        return [row for rows in self.by_layer.values() for row in rows if row.passes]

    @property
    def latest(self) -> list[LayerRow]:
        return [rows[-1] for rows in self.by_layer.values()]


def _layers_of(run: Run) -> _Layers:
    by_layer: dict[str, dict[int, LayerRow]] = {}
    for row in run.rows:
        by_layer.setdefault(row.layer, {})[row.step] = row
    steps = sorted({row.step for row in run.rows})
    names = short_names(list(by_layer))
    return _Layers({names[name]: list(rows.values()) for name, rows in by_layer.items()}, steps)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Of each layer; where they are long, without the parts at both ends that all have in common.

    Example: of "model.decoder.layers.0.feed_forward" and "model.decoder.layers.1.feed_forward" layer 0 and
    layer 1.
    """
    parts = [name.split(".") for name in names]
    least = min(map(len, parts), default=0)
    ahead = behind = 0
    if len(names) > 1 and max(map(len, names)) > LONG_NAME:
        while ahead < least - 1 and len({each[ahead] for each in parts}) == 1:
            ahead += 1
        while behind < least - ahead - 1 and len({each[-1 - behind] for each in parts}) == 1:
            behind += 1
    shortened = [".".join(each[ahead : len(each) - behind]) or "(the model)" for each in parts]
    return {
        name: f"layer {short}" if short.isdecimal() else short
        for name, short in zip(names, shortened, strict=True)
    }


def run_page(run: Run) -> str:
    """The page, as HTML that needs no other file."""
    layers = _layers_of(run)
    name = run.folder.resolve().name
    content: list[Part] = [
        Markup(f'<p class="lead">{html.escape(_lead(run))}</p>'),
        Markup(_tiles(run, layers)),
    ]
    sections: list[tuple[str, list[str]]] = [
        ("Loss", _losses(run)),
        ("Load of the experts", _load(layers)),
        ("Chosen n and restore pair", _choices(layers)),
        ("Communication", _communication(layers)),
        ("Memory", _memory(run, layers)),
        ("Other numbers", _others(run)),
        ("Settings and versions", _settings(run)),
    ]
    for title, parts in sections:
        if parts:
            content.append(Markup(f"<h2>{html.escape(title)}</h2>\n" + "\n".join(parts)))
    return page(f"pmoe report: {name}", content, STYLE + PAGE_STYLE)


def summary(run: Run) -> dict[str, Any]:
    """The latest numbers, and the median step's seconds, as plain data; None where there is none."""
    layers = _layers_of(run)
    latest = layers.latest
    loss = _main_loss(run)
    return {
        "steps": _last_step(run, layers),
        "loss": None if loss is None else _last_finite(loss[1]),
        "layers": len(latest),
        "imbalance": _largest(row.imbalance for row in latest),
        "drop_rate": _drop_rate(latest),
        **{f"{name}_seconds": median(list(_by_step(layers, name).values())) for name in COMMUNICATION},
    }


# ---- the head


def _lead(run: Run) -> str:
    if not run.sessions:
        return "When and with what this ran is not known: there is no run.json."
    newest = run.sessions[-1]
    versions = newest.get("versions") or {}
    ranks = newest.get("ranks", 1)
    began = str(run.sessions[0].get("when", "")).replace("T", " ")[:16]
    again = len(run.sessions) - 1
    parts = [
        f"Began {began}" if began else "",
        f"went on {again} time{'s' * (again > 1)} since" if again else "",
        f"{ranks} rank{'s' * (ranks != 1)}",
        str(newest.get("device") or ""),
        f"pmoe {versions.get('pmoe')}, torch {versions.get('torch')}" if versions else "",
    ]
    return " · ".join(part for part in parts if part)


def _tiles(run: Run, layers: _Layers) -> str:
    """The numbers that people look for first."""
    latest, loss = layers.latest, _main_loss(run)
    tiles = [("steps", f"{_last_step(run, layers):,}", "")]
    if loss is not None:
        name, curve = loss
        finite = [value for value in curve.values if math.isfinite(value)]
        last = finite[-max(1, len(finite) // 50) :]
        how = "last" if len(last) == 1 else f"mean of the last {len(last):,}"
        tiles.append((name, told(sum(last) / len(last)) if last else NONE, how))
    seconds = _seconds_per_step(run)
    if seconds is not None:
        tiles.append(("time a step", told_seconds(seconds), "median"))
    if latest:
        worst = _largest(row.imbalance for row in latest)
        if worst is not None:
            tiles.append(("imbalance", told(worst), "max / mean, the worst layer"))
        dropped = _drop_rate(latest)
        if dropped is not None:
            tiles.append(("dropped rows", told_share(dropped), "of all layers"))
    communication, exposed = (median(list(_by_step(layers, name).values())) for name in COMMUNICATION)
    if communication and exposed is not None:
        hidden = told_share(max(0.0, 1 - exposed / communication))
        tiles.append(("exposed", told_seconds(exposed), f"of communication a step; {hidden} is hidden"))
    pool = run.scalars.get(POOL_PEAK)
    if pool is not None and pool.values[-1]:
        tiles.append(("pool's peak", told_bytes(pool.values[-1]), "ring slots of rank 0"))
    cells = "".join(
        f'<div class="tile"><span class="what">{html.escape(what)}</span>'
        f'<span class="number">{html.escape(number)}</span><span class="how">{html.escape(how)}</span></div>'
        for what, number, how in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _last_step(run: Run, layers: _Layers) -> int:
    return max([*layers.steps[-1:], *(curve.steps[-1] for curve in run.scalars.values())])


def _seconds_per_step(run: Run) -> float | None:
    """The median over neighbouring statistics; pauses between sessions are seldom the median."""
    times = run.scalars.get(TIME, Curve())
    points = list(zip(times.steps, times.values, strict=True))
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(points, points[1:], strict=False) if b[0] > a[0]]
    return median(rates)


def _drop_rate(rows: Sequence[LayerRow]) -> float | None:
    """Of all layers together."""
    slots = [(row.num_slots, row.drop_rate) for row in rows if row.num_slots and row.drop_rate is not None]
    total = sum(num for num, _ in slots)
    return sum(num * rate for num, rate in slots) / total if total else None


COMMUNICATION = ("communication", "exposed")


def _by_step(layers: _Layers, name: str) -> dict[int, float]:
    """Seconds of both passes of all layers, at the steps that were recorded."""
    found: dict[int, float] = {}
    for row in layers.recorded:
        found[row.step] = found.get(row.step, 0.0) + sum(getattr(each, name) for each in row.passes)
    return found


def _largest(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _last_finite(curve: Curve) -> float | None:
    return next((value for value in reversed(curve.values) if math.isfinite(value)), None)


# ---- sections: charts as markup


def _main_loss(run: Run) -> tuple[str, Curve] | None:
    """The scalar "loss", else the first whose name says so."""
    names = [name for name in run.scalars if "loss" in name.lower()]
    if "loss" in run.scalars:
        return "loss", run.scalars["loss"]
    return (names[0], run.scalars[names[0]]) if names else None


def _losses(run: Run) -> list[str]:
    curves = {name: curve for name, curve in run.scalars.items() if "loss" in name.lower()}
    if not curves:
        return []
    lines = [
        Line(name=name, xs=curve.steps, ys=curve.values, colour=i % COLOURS, smoothed=True)
        for i, (name, curve) in enumerate(curves.items())
    ]
    return [line_chart("Loss", lines)]


def _others(run: Run) -> list[str]:
    charts = [
        line_chart(name, [Line(name=name, xs=curve.steps, ys=curve.values)])
        for name, curve in run.scalars.items()
        if "loss" not in name.lower() and name not in (TIME, POOL_PEAK, HOST_POOL_PEAK)
    ]
    return [_grid(charts[:12]), *_folded(charts[12:], "other numbers")] if charts else []


def _load(layers: _Layers) -> list[str]:
    if not layers.names:
        return []
    imbalance = _by_layer_chart(
        "Imbalance: rows of the busiest expert",
        layers,
        lambda row: row.imbalance,
        unit="over the mean",
        least=1,
    )
    of_ranks = _by_layer_chart(
        "Imbalance: rows of the busiest rank",
        layers,
        lambda row: row.rank_imbalance,
        unit="over the mean",
        least=1,
    )
    drops = any(row.drop_rate for rows in layers.by_layer.values() for row in rows)
    dropped = drops and _by_layer_chart(
        "Dropped rows", layers, lambda row: row.drop_rate, unit="share", least=0, is_share=True
    )
    return [_grid([each for each in (imbalance, of_ranks, dropped) if each]), *_heat_maps(layers)]


def _by_layer_chart(
    title: str,
    layers: _Layers,
    value_of: Callable[[LayerRow], float | None],
    *,
    unit: str,
    least: float,
    is_share: bool = False,
) -> str:
    """A line a layer; of many layers the median between the least and the greatest. "" where there is no
    value."""
    values = {
        name: [(row.step, value) for row in rows if (value := value_of(row)) is not None]
        for name, rows in layers.by_layer.items()
    }
    values = {name: points for name, points in values.items() if points}
    if not values:
        return ""
    if len(values) <= MOST_LINES:
        lines = [
            Line(name=name, xs=[step for step, _ in points], ys=[value for _, value in points], colour=i)
            for i, (name, points) in enumerate(values.items())
        ]
        return line_chart(title, lines, unit=unit, least=least, is_share=is_share)
    by_step: dict[int, list[float]] = {}
    for points in values.values():
        for step, value in points:
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    middle = Line(name="median of layers", xs=steps, ys=[median(by_step[step]) or 0.0 for step in steps])
    ends = Band(
        name="all layers",
        xs=steps,
        lows=[min(by_step[step]) for step in steps],
        highs=[max(by_step[step]) for step in steps],
    )
    last, name = max((points[-1][1], name) for name, points in values.items())
    note = (
        f"{len(values)} layers. Greatest at the end: {name}, {told_share(last) if is_share else told(last)}."
    )
    return line_chart(title, [middle], bands=[ends], unit=unit, least=least, is_share=is_share, note=note)


def _heat_maps(layers: _Layers) -> list[str]:
    """Of many layers those whose last row is the most uneven are shown, in the model's order."""
    ran = {name: rows for name, rows in layers.by_layer.items() if any(map(_num_rows, rows))}
    if not ran:
        return []
    worst = sorted(ran, key=lambda name: ran[name][-1].imbalance or 0.0, reverse=True)[:MOST_SHOWN]
    shown, rest = (
        [_heat_map(name, rows) for name, rows in ran.items() if (name in worst) == is_shown]
        for is_shown in (True, False)
    )
    whose = f"; the {len(worst)} most uneven layers" if rest else ""
    head = heat_legend(f"Rows of each expert, against an even share of its layer's rows{whose}")
    return [head, _grid(shown), *_folded(rest, "more layers")]


def _num_rows(row: LayerRow) -> int:
    return sum(row.tokens_per_expert)


def _heat_map(name: str, rows: Sequence[LayerRow]) -> str:
    """Steps are joined where there are too many: rows are added up."""
    width = -(-len(rows) // MOST_COLUMNS)
    steps, columns = [], []
    num_experts = len(rows[-1].tokens_per_expert)
    rows = [row for row in rows if len(row.tokens_per_expert) == num_experts]
    for i in range(0, len(rows), width):
        joined = rows[i : i + width]
        steps.append(sum(row.step for row in joined) / len(joined))
        summed = [sum(each) for each in zip(*(row.tokens_per_expert for row in joined), strict=True)]
        even = sum(summed) / num_experts
        columns.append([rows / even if even else None for rows in summed])
    cells = list(zip(*columns, strict=True))
    last = rows[-1].tokens_per_expert
    note = ""
    if sum(last):
        busiest, idle = max(range(num_experts), key=last.__getitem__), sum(1 for each in last if not each)
        share = told_share(last[busiest] / sum(last))
        note = f"At step {rows[-1].step:,}: expert {busiest} has {share} of {sum(last):,} rows"
        note += f"; {idle} of {num_experts} experts have none." if idle else ", and every expert has some."
    return heat_map(name, Heat(steps=steps, cells=cells, y_label="expert"), note)


def _choices(layers: _Layers) -> list[str]:
    """How layers ran, by stretches of steps; layers that always ran alike share their lines."""
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name, rows in layers.by_layer.items():
        alike.setdefault(tuple(_stretches(rows)), []).append(name)
    lines = []
    for stretches, names in alike.items():
        shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)} layers)"
        left_out = len(stretches) - MOST_STRETCHES
        for i, stretch in enumerate(stretches[-MOST_STRETCHES:]):
            first = shown + (f" (after {left_out} changes)" if left_out > 0 else "")
            lines.append([first if i == 0 else "", *stretch])
    if not lines:
        return []
    header = ["layer", "steps", "computed by", "n forward", "n backward", "T_DI / T_M"]
    about = (
        "What was really run at the steps that were logged, after fallbacks and after chunks were cut finer. "
        "n: micro-batches of a pass. T_DI / T_M: what became of them between the passes."
    )
    return [markup(about), markup(Table(header=header, rows=lines, words=3))]


MOST_STRETCHES = 8


def _stretches(rows: Sequence[LayerRow]) -> list[tuple[str, ...]]:
    found: list[tuple[int, int, tuple[str, ...]]] = []
    for row in rows:
        n_forward, n_backward = (NONE if n is None else str(n) for n in (row.n_forward, row.n_backward))
        is_kept = row.path == "pipeline" and row.n_backward is not None
        how = (row.path, n_forward, n_backward, row.restore or ("kept" if is_kept else NONE))
        first = found.pop()[0] if found and found[-1][2] == how else row.step
        found.append((first, row.step, how))
    return [(f"{a:,}" if a == b else f"{a:,} – {b:,}", *how) for a, b, how in found]


def _communication(layers: _Layers) -> list[str]:
    total, exposed = (_by_step(layers, name) for name in COMMUNICATION)
    if not layers.names:
        return []
    if not total:
        return [markup(f"No pass of the {len(layers.steps):,} logged steps was recorded.")]
    if not any(total.values()):
        return [markup("Nothing travelled in the passes that were recorded.")]
    unit = time_unit(max(total.values()))
    steps = sorted(total)
    lines = [
        Line(name=name, xs=steps, ys=[of[step] / unit.scale for step in steps], colour=colour, fills=True)
        for name, of, colour in (("something travels", total, 0), ("and nothing is computed", exposed, 1))
    ]
    note = (
        "Both passes of all layers; means over the ranks. Of a layer that a step calls several times, only "
        "the last call is in it; the exchange of row counts is not."
    )
    whole = line_chart("Communication of a step", lines, unit=unit.name, least=0, note=note)
    small = time_unit(max((each.exposed for row in layers.recorded for each in row.passes), default=0.0))
    parts = [
        _by_layer_chart(
            f"Exposed communication, {direction}",
            layers,
            lambda row, direction=direction: _exposed(row, direction, small.scale),  # type: ignore[misc]
            unit=small.name,
            least=0,
        )
        for direction in ("forward", "backward")
    ]
    return [_grid([whole, *(each for each in parts if each)])]


def _exposed(row: LayerRow, direction: str, scale: float) -> float | None:
    found = row.forward if direction == "forward" else row.backward
    return None if found is None else found.exposed / scale


def _memory(run: Run, layers: _Layers) -> list[str]:
    rows = [(name, of[-1]) for name, of in layers.by_layer.items() if of[-1].tensors]
    parts = []
    if rows:
        unit = byte_unit(max(sum(row.tensors.values()) for _, row in rows))
        bars = [(name, [row.tensors.get(each, 0) / unit.scale for each in TENSORS]) for name, row in rows]
        note = "Of rank 0 at the last logged step, each tensor as a whole. T_DO is never kept for backward."
        shown = bar_chart("Memory by tensor", bars[: 2 * MOST_SHOWN], TENSORS, unit=unit.name, note=note)
        parts += [shown]
        rest = bars[2 * MOST_SHOWN :]
        if rest:
            parts += _folded(
                [bar_chart("Memory by tensor", rest, TENSORS, unit=unit.name)], "more layers", len(rest)
            )
    predicted = [(name, row) for name, row in rows if row.predicted]
    if predicted:
        names = ("saved", "temporary", "peak", "host")
        header = ["layer", "T_DI / T_M", "held between the passes", "added by a pass", "peak", "on the host"]
        lines = [
            [name, row.restore or "kept", *(told_bytes(row.predicted.get(each)) for each in names)]
            for name, row in predicted
        ]
        table = markup(Table(header=header, rows=lines[: 2 * MOST_SHOWN], words=2))
        parts += [
            markup("Predicted for the rows that came, on rank 0, parameters and input not counted:"),
            table,
        ]
        if lines[2 * MOST_SHOWN :]:
            rest_table = markup(Table(header=header, rows=lines[2 * MOST_SHOWN :], words=2))
            parts += _folded([rest_table], "more layers", len(lines) - 2 * MOST_SHOWN)
    host = run.scalars.get(HOST_POOL_PEAK)
    pool = run.scalars.get(POOL_PEAK)
    if pool is not None and host is not None and (pool.values[-1] or host.values[-1]):
        parts.append(
            markup(
                f"The pool that all layers of rank 0 share held at most {told_bytes(pool.values[-1])} on the "
                f"device and {told_bytes(host.values[-1])} on the host."
            )
        )
    return parts


def _settings(run: Run) -> list[str]:
    if not run.sessions:
        return []
    newest = run.sessions[-1]
    versions = newest.get("versions") or {}
    told_of = [(name, newest.get(name)) for name in ("when", "ranks", "backend", "device", "parameters")]
    given = newest.get("settings") or {}
    parts = [_pairs("Run", [*told_of, *versions.items()])]
    if given:
        parts.append(_pairs("Settings", list(given.items())))
    layers = newest.get("layers") or []
    found = [_grid(parts)]
    if layers:
        header = list(layers[0])
        # What all layers have in common is told once.
        same = [name for name in header[1:] if len({str(each.get(name)) for each in layers}) == 1]
        common = ", ".join(f"{name} = {layers[0][name]}" for name in same)
        found.append(markup(f"MoE layers: {len(layers)}; {common}."))
        differ = [name for name in header if name not in same]
        if len(differ) > 1:
            lines = [[str(each.get(name)) for name in differ] for each in layers]
            found += _folded([markup(Table(header=differ, rows=lines, words=1))], "layers", len(lines))
    return found


def _pairs(title: str, pairs: Sequence[tuple[str, Any]]) -> str:
    lines = "".join(
        f"<dt>{html.escape(str(name))}</dt><dd>{html.escape(_told_setting(value))}</dd>"
        for name, value in pairs
        if value is not None
    )
    return f'<div class="pairs"><b>{html.escape(title)}</b><dl>{lines}</dl></div>'


def _told_setting(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _grid(parts: Sequence[str]) -> str:
    return f'<div class="grid">{"".join(parts)}</div>' if parts else ""


def _folded(parts: Sequence[str], what: str, num: int | None = None) -> list[str]:
    if not parts:
        return []
    count = len(parts) if num is None else num
    return [f"<details><summary>{count} {html.escape(what)}</summary>{_grid(parts)}</details>"]


PAGE_STYLE = """
.lead { color: var(--soft); margin-top: -.4rem }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .8rem }
.grid { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)) }
.grid { margin: .8rem 0 } .grid > * { min-width: 0 }
.tiles { display: grid; gap: .6rem; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)) }
.tile { background: var(--panel); border-radius: .6rem; padding: .6rem .8rem }
.tile span { display: block }
.what, .how { color: var(--soft); font-size: .85rem } .number { font-size: 1.35rem; font-weight: 600 }
.number { font-variant-numeric: tabular-nums }
details { margin: .8rem 0 } summary { cursor: pointer; color: var(--soft); padding: .4rem 0 }
.pairs { background: var(--panel); border-radius: .6rem; padding: .8rem .9rem; min-width: 0 }
dl { display: grid; grid-template-columns: auto 1fr; gap: .15rem 1rem; margin: .5rem 0 0; font-size: .9rem }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
.wide th, .wide td { white-space: nowrap }
@media (max-width: 36rem) {
  body { margin-top: 1rem } .number { font-size: 1.2rem } th, td { padding: .15rem .5rem }
}
"""

"""The granularity search on real steps: MPipeMoE's searchBestGran(B), and what layers learn together.

Layers of one key on one group share what they learn. A trial runs both passes of the experts' part of a
layer on the batch at hand, through the plan that the layer itself would make, and leaves nothing behind.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from pmoe.comm.ranks import Ranks, digest, from_first, largest
from pmoe.engine.autograd import Runner
from pmoe.engine.passes import Inputs
from pmoe.measure.rounds import begin_together, clock_of, median_seconds
from pmoe.measure.store import PathLike, cache_path, load_json, save_json
from pmoe.planner.granularity import GranularityTable, PassDegrees
from pmoe.schedule.restore import Restore
from pmoe.warn import log, warn_once

# ---- the file of what trials found: a table for each restore pair and type of rows


C = TypeVar("C")

FORMAT = 2
"""Of the file; another one is refused. 2: a key of all that changes the time, several tables."""

Tables = dict[str, GranularityTable]
"""By restore pair and type of rows, in words."""


def kept_path(key: Mapping[str, Any]) -> Path | None:
    """Where layers of this key keep what they learn between runs: in $PMOE_CACHE; None without one."""
    if not os.environ.get("PMOE_CACHE"):
        return None
    whose = [key["device"], f"{key['num_ranks']} ranks", key["backend"], f"torch {key['versions']['torch']}"]
    text = json.dumps(dict(key), sort_keys=True)
    return cache_path(["degrees", *whose, f"{digest([text]):x}", f"v{FORMAT}"])


def save_degrees(tables: Mapping[str, GranularityTable], path: PathLike, key: Mapping[str, Any]) -> None:
    """Writes the whole file or none. key: says where the numbers hold (device, ranks, options).

    Raises OSError where it cannot be written, TypeError for a key that JSON cannot hold.
    """
    held = {name: table.to_fields() for name, table in tables.items() if table.points}
    save_json(path, {"format": FORMAT, "key": dict(key), "tables": held})


def load_degrees(path: PathLike, key: Mapping[str, Any], candidates: Sequence[int] | None = None) -> Tables:
    """The tables that were saved at ``path`` with this key. candidates: the n that they may name; None all.

    Raises ValueError, naming the path, for a file that holds no tables, of another format or another key;
    OSError where it cannot be read.
    """
    here = json.loads(json.dumps(dict(key)))

    def parse(fields: Mapping[str, Any]) -> Tables:
        if fields.get("format") != FORMAT:
            raise ValueError(f"format ({fields.get('format')!r}) must be {FORMAT}")
        _check_key(fields.get("key"), here)
        tables = fields.get("tables")
        if not isinstance(tables, dict):
            raise ValueError(f"no granularity table: tables ({tables!r}) must be an object")
        found = {name: GranularityTable.from_fields(table) for name, table in tables.items()}
        for degrees in (each for table in found.values() for each in table.points.values()):
            if candidates is not None and not {degrees.forward, degrees.backward} <= set(candidates):
                raise ValueError(f"found {degrees}, expected degrees among {tuple(candidates)}")
        return found

    return load_json(path, parse)


def _check_key(found: Any, here: Mapping[str, Any]) -> None:
    """Raises ValueError with the first two fields that differ."""
    if not isinstance(found, dict):
        raise ValueError(f"key ({found!r}) must be an object")
    names = [name for name in sorted({*found, *here}) if found.get(name) != here.get(name)]
    if names:
        told = "; ".join(f"{name} {found.get(name)!r}, here {here.get(name)!r}" for name in names[:2])
        raise ValueError(f"holds the degrees of another layer, group or machine: {told}")


# ---- trials


REPEATS, CLOSE, MORE = 3, 1.15, 7
"""Runs of each candidate, and then of those that take at most so many times the fastest one's seconds."""


@dataclass
class Learnt:
    """What trials have found for layers of one key on one group: alike on all of its ranks.

    key: all that changes the time. path: where rank 0 keeps it between runs; None elsewhere, or where nobody
    asked for it.
    """

    key: Mapping[str, Any]
    tables: Tables = field(default_factory=dict)
    path: Path | None = None

    def table(self, restore: Restore, dtype: torch.dtype) -> GranularityTable:
        """Of calls that restore so, on rows of this type."""
        return self.tables.setdefault(f"{restore}, {dtype}", GranularityTable())

    def keep(self) -> None:
        """Writes the file, if any. Warns where that fails: an error would stop rank 0 alone."""
        if self.path is not None:
            try:
                save_degrees(self.tables, self.path, self.key)
            except OSError as error:
                warn_once(f"what trials found could not be kept, and will be measured again: {error}")


_learnt: dict[tuple[str, str], Learnt] = {}


def learnt_by(ranks: Ranks, key: Mapping[str, Any], candidates: Sequence[int]) -> Learnt:
    """What rank 0 knows of layers of this key, from this process or from their file, on every rank alike.

    Collective. A file that is corrupt or of something else is named in a warning and replaced when more is
    learnt.
    """
    return _from_first(ranks, key, lambda here: here.tables or _kept(here.path, key, candidates))


def load_learnt(ranks: Ranks, key: Mapping[str, Any], path: str | Path, candidates: Sequence[int]) -> Learnt:
    """As `learnt_by`, of the file at ``path``. Raises on every rank what `load_degrees` raises on rank 0."""
    return _from_first(ranks, key, lambda here: load_degrees(path, key, candidates))


def _from_first(ranks: Ranks, key: Mapping[str, Any], read: Callable[[Learnt], Tables]) -> Learnt:
    """Rank 0's key is everyone's too: what describes a layer may hold what differs by rank."""
    sent: tuple[Mapping[str, Any], Tables | Exception] = (key, {})
    if ranks.rank == 0:
        try:
            sent = (key, read(held(ranks, key, kept_path(key))))
        except Exception as error:  # a warning that is made an error, too: all ranks wait for this one
            sent = (key, error)
    key, tables = from_first(ranks, sent, stage="sharing what trials found")
    if isinstance(tables, Exception):
        raise tables
    found = held(ranks, key)
    found.tables = tables  # layers hold what is filled here
    return found


def held(ranks: Ranks, key: Mapping[str, Any], path: Path | None = None) -> Learnt:
    """What this process knows of layers of this key. Not collective."""
    return _learnt.setdefault((ranks.name, json.dumps(key, sort_keys=True)), Learnt(key, path=path))


def _kept(path: Path | None, key: Mapping[str, Any], candidates: Sequence[int]) -> Tables:
    """Of the file; none where there is no file, or, with a warning, where it cannot be used."""
    try:
        return {} if path is None else load_degrees(path, key, candidates)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warn_once(f"what trials found before is not used, and measured anew: {error}", for_each_reason=True)
        return {}


def search(
    known: GranularityTable,
    max_tokens: int,
    candidates: Sequence[int],
    runner_of: Callable[[PassDegrees], Runner | None],
    inputs: Inputs,
    ranks: Ranks,
) -> PassDegrees:
    """Finds by trials the degrees for ``max_tokens`` tokens, the largest number of a rank, and records them.

    runner_of: what runs a call with these degrees, None where a layer does not allow them. First every n for
    both passes; then, if forward and backward have different best n, that pair.
    """
    forward, backward, seconds = {}, {}, {}
    log.info("pipeline=True tries n=%s for %d tokens a rank", ", ".join(map(str, candidates)), max_tokens)
    same = [PassDegrees(n, n) for n in candidates]
    for degrees, (ahead, back) in zip(same, trials(same, runner_of, inputs, ranks), strict=True):
        forward[degrees.forward], backward[degrees.backward] = ahead, back
        seconds[degrees] = ahead + back
    apart = PassDegrees(min(forward, key=lambda n: forward[n]), min(backward, key=lambda n: backward[n]))
    if apart not in seconds and runner_of(apart) is not None:
        ((ahead, back),) = trials([apart], runner_of, inputs, ranks)
        seconds[apart] = ahead + back
    best = known.record(max_tokens, seconds)
    told = ", ".join(f"{d.forward}/{d.backward}: {s * 1e3:.3g} ms" for d, s in seconds.items())
    log.info(
        "pipeline=True takes n=%d/%d for %d tokens a rank (%s)", best.forward, best.backward, max_tokens, told
    )
    return best


def trials(
    candidates: Sequence[C],
    runner_of: Callable[[C], Runner | None],
    inputs: Inputs,
    ranks: Ranks,
) -> list[tuple[float, float]]:
    """Median seconds of forward and backward for each of candidates: one untimed step each, then in turns.

    Those close to the fastest run again: a step on a CPU differs by a tenth from the next like it. All ranks
    take the slowest rank's medians, and so the same candidates again.
    """
    device = inputs.x_TM.device
    clock = clock_of(device)
    runs = [functools.partial(_run_both, runner_of(each), inputs, clock) for each in candidates]
    agree = functools.partial(largest, ranks, device, stage="agreeing on the fastest trials")
    timed = functools.partial(median_seconds, begin=begin_together(ranks), agree=agree)
    found = timed(runs, REPEATS)
    close = [at for at, each in enumerate(found) if sum(each) <= CLOSE * min(map(sum, found))]
    if len(close) > 1:
        for at, each in zip(close, timed([runs[at] for at in close], MORE, warm_up=0), strict=True):
            found[at] = each
    return [(ahead, back) for ahead, back in found]


@torch.no_grad()
def _run_both(runner: Runner | None, inputs: Inputs, now: Callable[[], float]) -> tuple[float, float]:
    """Runs both passes, T_O as its own gradient, and drops all results: the seconds of each."""
    assert runner is not None
    start = now()
    y_TM, saved = runner.forward(inputs, keep=True)
    middle = now()
    assert saved is not None
    wanted = [tensor is not None and tensor.requires_grad for tensor in inputs.all]
    saved.backward(saved.tensors, wanted, y_TM)
    return middle - start, now() - middle

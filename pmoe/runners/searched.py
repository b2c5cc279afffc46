"""The granularity search on real steps: MPipeMoE's searchBestGran(B), and what layers learn together.

Layers of one key on one group share what they learn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pmoe.arguments import check_path
from pmoe.comm.agreement import digest, from_first
from pmoe.comm.ranks import Ranks
from pmoe.measure.store import PathLike, cache_path, found_or, load_json, save_json
from pmoe.planner.degree import Choice
from pmoe.planner.granularity import GranularityTable, PassDegrees
from pmoe.runners.trials import Batch, adaptive_degree, tried_seconds
from pmoe.schedule.restore import Restore
from pmoe.warn import log, warn_once

# ---- the file of what trials found: a table for each restore pair and type of rows


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
    check_path(path=path)
    held = {name: table.to_fields() for name, table in tables.items() if table.points}
    save_json(path, {"format": FORMAT, "key": dict(key), "tables": held})


def load_degrees(path: PathLike, key: Mapping[str, Any], candidates: Sequence[int] | None = None) -> Tables:
    """The tables that were saved at ``path`` with this key. candidates: the n that they may name; None all.

    Raises ValueError, naming the path, for a file that holds no tables, of another format or another key;
    OSError where it cannot be read.
    """
    check_path(path=path)
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

    return load_json(path, parse, "save_degrees, or trials, write it")


def _check_key(found: Any, here: Mapping[str, Any]) -> None:
    """Raises ValueError with the first two fields that differ."""
    if not isinstance(found, dict):
        raise ValueError(f"key ({found!r}) must be an object")
    names = [name for name in sorted({*found, *here}) if found.get(name) != here.get(name)]
    if names:
        told = "; ".join(f"{name} {found.get(name)!r}, here {here.get(name)!r}" for name in names[:2])
        raise ValueError(f"holds the degrees of another layer, group or machine: {told}")


# ---- what is learnt


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


def learnt_by(
    ranks: Ranks, key: Mapping[str, Any], candidates: Sequence[int], path: str | Path | None = None
) -> Learnt:
    """What rank 0 knows of layers of this key, on every rank alike: from the file at ``path``, or, without
    one, from this process or from their own file.

    Collective. Their own file, where it is corrupt or of something else, is named in a warning and replaced
    when more is learnt. Raises on every rank what `load_degrees` raises of ``path`` on rank 0.
    """
    # Rank 0's key is everyone's too: what describes a layer may hold what differs by rank.
    sent: tuple[Mapping[str, Any], Tables | Exception] = (key, {})
    if ranks.rank == 0:
        try:
            here = held(ranks, key, kept_path(key))
            if path is not None:
                sent = (key, load_degrees(path, key, candidates))
            else:
                sent = (key, here.tables or _kept(here.path, key, candidates))
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
    about = "what trials found before is not used, and measured anew"
    return {} if path is None else found_or({}, about, lambda: load_degrees(path, key, candidates))


def degrees(batch: Batch, restore: Restore, learnt: Learnt | None) -> PassDegrees:
    """n known for this many tokens, or found by trials where they are worth it; else by a rule. learnt: None
    where nothing was tried."""
    modules, counts = batch.modules, batch.counts
    ruled = adaptive_degree(batch.rows, 2 if modules.rotates else modules.grid.all.size)
    if learnt is None:
        return PassDegrees(ruled, ruled)
    known = learnt.table(restore, batch.inputs.x_TM.dtype)
    found = known.lookup(counts.max_tokens)
    if found is not None or not batch.may_be_tried:
        return found or PassDegrees(ruled, ruled)

    def seconds_of(tried: Sequence[PassDegrees]) -> list[tuple[float, float]]:
        return tried_seconds(batch, [Choice(**vars(each), restore=restore) for each in tried])

    found = search(known, counts.max_tokens, batch.degrees, seconds_of, apart=batch.apart)
    learnt.keep()
    return found


def search(
    known: GranularityTable,
    max_tokens: int,
    candidates: Sequence[int],
    seconds_of: Callable[[Sequence[PassDegrees]], list[tuple[float, float]]],
    *,
    apart: bool,
) -> PassDegrees:
    """Finds by trials the degrees for ``max_tokens`` tokens, the largest number of a rank, and records them.

    seconds_of: of both passes with each of some degrees. First every n for both passes; then, if forward and
    backward have different best n, and a layer allows that (``apart``), these.
    """
    forward, backward, seconds = {}, {}, {}
    log.info("pipeline=True tries n=%s for %d tokens a rank", ", ".join(map(str, candidates)), max_tokens)
    same = [PassDegrees(n, n) for n in candidates]
    for degrees, (ahead, back) in zip(same, seconds_of(same), strict=True):
        forward[degrees.forward], backward[degrees.backward] = ahead, back
        seconds[degrees] = ahead + back
    each = PassDegrees(min(forward, key=lambda n: forward[n]), min(backward, key=lambda n: backward[n]))
    if each not in seconds and apart:
        ((ahead, back),) = seconds_of([each])
        seconds[each] = ahead + back
    best = known.record(max_tokens, seconds)
    told = ", ".join(f"{d.forward}/{d.backward}: {s * 1e3:.3g} ms" for d, s in seconds.items())
    log.info(
        "pipeline=True takes n=%d/%d for %d tokens a rank (%s)", best.forward, best.backward, max_tokens, told
    )
    return best

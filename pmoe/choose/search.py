"""What a layer has learnt by trials (MPipeMoE, Algorithm 1): n of ``pipeline=True``.

Layers of one key on one group share what they learn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pmoe.arguments import check_path
from pmoe.call.description import options_in_words
from pmoe.call.modules import Parts
from pmoe.choose.trials import Batch, adaptive_degree, tried_seconds
from pmoe.comm.agreement import digest, from_first
from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import identity
from pmoe.measure.store import PathLike, cache_path, found_or, load_json, save_json
from pmoe.planner.degree import Choice
from pmoe.planner.granularity import GranularityTable, PassDegrees
from pmoe.schedule.restore import Restore
from pmoe.warn import log, warn_once

# ---- the search


def tried_degrees(batch: Batch, restore: Restore) -> PassDegrees:
    """n known for this many tokens, or found by trials where they are worth it; else by a rule. Collective
    where trials are made."""
    parts, spec, known = batch.parts, batch.parts.spec, GranularityTable()
    learnt = learnt_of(parts) if batch.may_be_tried else parts.known.choosers.get(_name(parts))
    if learnt is not None:
        known = learnt.table(restore, batch.inputs.x_TM.dtype)
    found = known.lookup(batch.counts.max_tokens)
    if found is None and learnt is not None and batch.may_be_tried:
        found = search(known, batch, restore, spec.degrees, apart=spec.rotates and not spec.send_once)
        learnt.keep()
    if found is None:
        n = adaptive_degree(batch.rows, 2 if spec.rotates else parts.ranks.size)
        found = PassDegrees(n, n)
    return found


def search(
    known: GranularityTable, batch: Batch, restore: Restore, candidates: Sequence[int], *, apart: bool
) -> PassDegrees:
    """Finds by trials the degrees for the largest number of any rank's tokens, and records them.

    First it tries every n for both passes; then, if forward and backward have different best n, and a layer
    allows that (``apart``), these.
    """
    max_tokens, seconds = batch.counts.max_tokens, dict[PassDegrees, tuple[float, float]]()
    log.info("pipeline=True tries n=%s for %d tokens a rank", ", ".join(map(str, candidates)), max_tokens)

    def measure(tried: Sequence[PassDegrees]) -> None:
        choices = [Choice(**vars(each), restore=restore) for each in tried]
        seconds.update(zip(tried, tried_seconds(batch, choices), strict=True))

    same = [PassDegrees(n, n) for n in candidates]
    measure(same)
    ahead, back = (min(same, key=lambda each: seconds[each][way]) for way in (0, 1))
    best_of_each = PassDegrees(ahead.forward, back.backward)
    if apart and best_of_each not in seconds:
        measure([best_of_each])
    took = {each: sum(of_passes) for each, of_passes in seconds.items()}
    best = known.record(max_tokens, took)
    told = ", ".join(f"{d.forward}/{d.backward}: {s * 1e3:.3g} ms" for d, s in took.items())
    log.info(
        "pipeline=True takes n=%d/%d for %d tokens a rank (%s)", best.forward, best.backward, max_tokens, told
    )
    return best


# ---- what layers of one key have learnt


def learnt_of(parts: Parts, path: str | Path | None = None) -> Learnt:
    """What trials have found for layers like this one on this group. Collective the first time, and with a
    ``path`` (`pmoe.MoELayer.load_degrees`), from where it is taken then."""
    choosers, name = parts.known.choosers, _name(parts)
    if path is not None or name not in choosers:
        choosers[name] = learnt_by(parts.ranks, key_of(parts), parts.spec.degrees, path)
    found: Learnt = choosers[name]
    return found


def _name(parts: Parts) -> tuple[object, ...]:
    """Of what a layer knows: its modules stay, its options may be set."""
    return ("trials", parts.spec)


def key_of(parts: Parts) -> dict[str, Any]:
    """All that changes the time of a layer's trials, beside what `Learnt.table` takes: layers of one key
    learn together."""
    like = torch.empty(0) if parts.like is None else parts.like
    options = options_in_words(parts, of_users=True)
    del options["pipeline"]
    topologies = [getattr(each, "topology", None) for each in (parts.dispatch, parts.combine)]
    return {
        **asdict(identity(parts.ranks, like.device, like.dtype)),
        **options,
        "mesh": [parts.grid.across.size, parts.grid.inside.size],
        "nodes": [None if each is None else each.members for each in topologies],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


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
    found = {name: table.to_fields() for name, table in tables.items() if table.points}
    save_json(path, {"format": FORMAT, "key": dict(key), "tables": found})


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


@dataclass
class Learnt:
    """What trials have found for layers of one key on one group: the same on all of its ranks.

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
    about = "what trials found before is not used, and measured again"
    return {} if path is None else found_or({}, about, lambda: load_degrees(path, key, candidates))

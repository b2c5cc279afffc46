"""The trial search for n (MPipeMoE, Algorithm 1): the degrees of ``pipeline=True``.

Layers with equal keys (`key_of_degrees`) on one process group share their results. If $PMOE_CACHE is set,
rank 0 also keeps them in a file for later runs.
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
from pmoe.call.modules import LayerModules
from pmoe.choose.trials import TrialBatch, adaptive_degree, measure_trials
from pmoe.comm.agreement import digest, from_first
from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import identity
from pmoe.measure.store import PathLike, cache_path, load_json, read_or_default, save_json
from pmoe.planner.degree import Choice
from pmoe.planner.granularity import GranularityTable, PassDegrees
from pmoe.schedule.restore import Restore
from pmoe.warn import log, warn_once

# ---- the search


def degrees_by_search(batch: TrialBatch, restore: Restore) -> PassDegrees:
    """Returns n of both passes for this batch: recorded, measured by trials, or given by a rule.

    1. The table of earlier trials, if one of its ranges holds the number of tokens.
    2. New trials, if `TrialBatch.trials_allowed`. They are recorded, and kept in the file.
    3. `adaptive_degree`, the same n for both passes.

    Collective if it runs trials, and the first time for a layer that allows them.
    """
    modules = batch.modules
    options = batch.modules.options
    table = GranularityTable()
    learned = learned_degrees(modules) if batch.trials_allowed else modules.cache.choosers.get(_name(modules))
    if learned is not None:
        table = learned.table(restore, batch.inputs.x_TM.dtype)
    degrees = table.lookup(batch.counts.max_tokens)
    if degrees is None and learned is not None and batch.trials_allowed:
        degrees = search(
            table, batch, restore, options.degrees, apart=options.rotates and not options.send_once
        )
        learned.keep()
    if degrees is None:
        n = adaptive_degree(batch.rows, 2 if options.rotates else modules.ranks.size)
        degrees = PassDegrees(n, n)
    return degrees


def search(
    known: GranularityTable, batch: TrialBatch, restore: Restore, candidates: Sequence[int], *, apart: bool
) -> PassDegrees:
    """Returns the fastest degrees by trials on this batch, and records them. Collective.

    First each n of ``candidates`` runs in both passes. If forward is then fastest with another n than
    backward, and ``apart`` is true, one more trial combines the two.

        known        table that records the degrees, for the tokens of the rank that has most
        batch        routed batch that the trials run on
        restore      restore pair of all trials
        candidates   numbers of chunks to try
        apart        whether forward and backward may have different n
    """
    max_tokens = batch.counts.max_tokens
    seconds = dict[PassDegrees, tuple[float, float]]()  # (forward, backward)
    log.info("pipeline=True tries n=%s for %d tokens a rank", ", ".join(map(str, candidates)), max_tokens)

    def measure(tried: Sequence[PassDegrees]) -> None:
        choices = [Choice(**vars(degrees), restore=restore) for degrees in tried]
        seconds.update(zip(tried, measure_trials(batch, choices), strict=True))

    equal_degrees = [PassDegrees(n, n) for n in candidates]
    measure(equal_degrees)
    fastest_forward, fastest_backward = (
        min(equal_degrees, key=lambda degrees: seconds[degrees][pass_index]) for pass_index in (0, 1)
    )
    combined = PassDegrees(fastest_forward.forward, fastest_backward.backward)
    if apart and combined not in seconds:
        measure([combined])
    step_seconds = {degrees: sum(both_passes) for degrees, both_passes in seconds.items()}
    best = known.record(max_tokens, step_seconds)
    timings = ", ".join(f"{d.forward}/{d.backward}: {s * 1e3:.3g} ms" for d, s in step_seconds.items())
    log.info(
        "pipeline=True takes n=%d/%d for %d tokens a rank (%s)",
        best.forward,
        best.backward,
        max_tokens,
        timings,
    )
    return best


# ---- results shared by layers of one key


def learned_degrees(modules: LayerModules, path: str | Path | None = None) -> LearnedDegrees:
    """Returns the results of trials for layers with this layer's key on this group.

    path: file that replaces the results (`pmoe.MoELayer.load_degrees`). None uses those that this process
        has, or else those of the key's own file.

    Collective with a ``path``, and the first time without one. Raises as `load_learned` does.
    """
    choosers = modules.cache.choosers
    name = _name(modules)
    if path is not None or name not in choosers:
        choosers[name] = load_learned(modules.ranks, key_of_degrees(modules), modules.options.degrees, path)
    learned: LearnedDegrees = choosers[name]
    return learned


def _name(modules: LayerModules) -> tuple[object, ...]:
    """Returns the key of the results in the layer's `LayerCache.choosers`.

    It holds the options, because a layer's options may change. A layer's modules do not.
    """
    return ("trials", modules.options)


def key_of_degrees(modules: LayerModules) -> dict[str, Any]:
    """Returns everything that changes the seconds of a layer's trials, as values that JSON can hold.

    Layers with equal keys share their results. Two things are not in the key, because each key has a table
    for each of them: the restore pair and the dtype of the rows (`LearnedDegrees.table`).
    """
    reference = torch.empty(0) if modules.reference_parameter is None else modules.reference_parameter
    options = options_in_words(modules, of_users=True)
    del options["pipeline"]
    topologies = [getattr(side, "topology", None) for side in (modules.dispatch, modules.combine)]
    return {
        **asdict(identity(modules.ranks, reference.device, reference.dtype)),
        **options,
        "mesh": [modules.grid.ep.size, modules.grid.esp.size],
        "nodes": [None if side is None else side.members for side in topologies],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


# ---- the file of results: one table for each restore pair and dtype of the rows


FORMAT = 2
"""Version of the file's format. Files of other versions are refused.

Since version 2 the key holds everything that changes the seconds, and a file has several tables.
"""

Tables = dict[str, GranularityTable]
"""Tables by restore pair and dtype of the rows, both in one text (`LearnedDegrees.table`)."""


def stored_path(key: Mapping[str, Any]) -> Path | None:
    """Returns the file in $PMOE_CACHE that keeps the results of a key between runs.

    None if $PMOE_CACHE is not set.
    """
    if not os.environ.get("PMOE_CACHE"):
        return None
    machine = [
        key["device"],
        f"{key['num_ranks']} ranks",
        key["backend"],
        f"torch {key['versions']['torch']}",
    ]
    key_text = json.dumps(dict(key), sort_keys=True)
    return cache_path(["degrees", *machine, f"{digest([key_text]):x}", f"v{FORMAT}"])


def save_degrees(tables: Mapping[str, GranularityTable], path: PathLike, key: Mapping[str, Any]) -> None:
    """Writes the tables and their key to a file, completely or not at all. Empty tables are left out.

    key: says for which device, ranks and options the degrees hold (`key_of_degrees`).

    Raises OSError if the file cannot be written, and TypeError if JSON cannot hold the key.
    """
    check_path(path=path)
    table_fields = {name: table.to_fields() for name, table in tables.items() if table.points}
    save_json(path, {"format": FORMAT, "key": dict(key), "tables": table_fields})


def load_degrees(path: PathLike, key: Mapping[str, Any], candidates: Sequence[int] | None = None) -> Tables:
    """Returns the tables that `save_degrees` wrote to ``path`` with an equal key.

    candidates: numbers of chunks that the tables may hold; None allows all.

    Raises OSError if the file cannot be read. Raises ValueError, which names the path, for a file without
    tables, of another format, with another key, or with other numbers of chunks.
    """
    check_path(path=path)
    # The key in the file has been through JSON, which makes lists of tuples.
    expected_key = json.loads(json.dumps(dict(key)))

    def parse(fields: Mapping[str, Any]) -> Tables:
        if fields.get("format") != FORMAT:
            raise ValueError(f"format ({fields.get('format')!r}) must be {FORMAT}")
        _check_key(fields.get("key"), expected_key)
        tables = fields.get("tables")
        if not isinstance(tables, dict):
            raise ValueError(f"no granularity table: tables ({tables!r}) must be an object")
        parsed = {name: GranularityTable.from_fields(table) for name, table in tables.items()}
        for degrees in (point for table in parsed.values() for point in table.points.values()):
            if candidates is not None and not {degrees.forward, degrees.backward} <= set(candidates):
                raise ValueError(f"found {degrees}, expected degrees among {tuple(candidates)}")
        return parsed

    return load_json(path, parse, "save_degrees, or trials, write it")


def _check_key(found: Any, here: Mapping[str, Any]) -> None:
    """Raises ValueError if the key of a file is not this layer's. The message has the first two differences.

    found: key in the file.
    here: key of this layer.
    """
    if not isinstance(found, dict):
        raise ValueError(f"key ({found!r}) must be an object")
    names = [name for name in sorted({*found, *here}) if found.get(name) != here.get(name)]
    if names:
        differences = "; ".join(f"{name} {found.get(name)!r}, here {here.get(name)!r}" for name in names[:2])
        raise ValueError(f"holds the degrees of another layer, group or machine: {differences}")


@dataclass
class LearnedDegrees:
    """Results of trials for layers of one key on one group. All ranks of the group hold equal tables.

    key      everything that changes the seconds of trials (`key_of_degrees`)
    tables   degrees by number of tokens, for each restore pair and dtype of the rows
    path     file in which rank 0 keeps the tables between runs; None on other ranks, and if $PMOE_CACHE is
             not set
    """

    key: Mapping[str, Any]
    tables: Tables = field(default_factory=dict)
    path: Path | None = None

    def table(self, restore: Restore, dtype: torch.dtype) -> GranularityTable:
        """Returns the table of calls with this restore pair and rows of this dtype; a new one at first."""
        return self.tables.setdefault(f"{restore}, {dtype}", GranularityTable())

    def keep(self) -> None:
        """Writes the tables to ``path``, if there is one. Warns if they cannot be written.

        It does not raise OSError, because that would stop rank 0 while the other ranks go on.
        """
        if self.path is not None:
            try:
                save_degrees(self.tables, self.path, self.key)
            except OSError as error:
                warn_once(f"what trials found could not be kept, and will be measured again: {error}")


_LEARNED: dict[tuple[str, str], LearnedDegrees] = {}  # by name of the group and key as JSON


def load_learned(
    ranks: Ranks, key: Mapping[str, Any], candidates: Sequence[int], path: str | Path | None = None
) -> LearnedDegrees:
    """Returns rank 0's results for layers of this key, the same on every rank. Collective.

    ranks: group of the layer.
    key: key of the layer (`key_of_degrees`). Rank 0's key counts on every rank.
    candidates: numbers of chunks that a file may hold.
    path: file to load. None takes the results that rank 0's process has, or else those of the key's own
        file (`stored_path`).

    Raises on every rank what `load_degrees` raises for ``path`` on rank 0. Warns about a key's own file that
    cannot be used. The next trials replace it.
    """
    # Rank 0's key is sent too, because keys may differ by rank: they hold settings of users' modules.
    sent: tuple[Mapping[str, Any], Tables | Exception] = (key, {})
    if ranks.rank == 0:
        try:
            own = learned_in_this_process(ranks, key, stored_path(key))
            if path is not None:
                sent = (key, load_degrees(path, key, candidates))
            else:
                sent = (key, own.tables or _stored_tables(own.path, key, candidates))
        except Exception as error:
            # Any error is sent, also a warning that was made an error, because all ranks wait for rank 0.
            sent = (key, error)
    key, tables = from_first(ranks, sent, stage="sharing what trials found")
    if isinstance(tables, Exception):
        raise tables
    learned = learned_in_this_process(ranks, key)
    learned.tables = tables  # other layers hold the same object and get the tables too
    return learned


def learned_in_this_process(ranks: Ranks, key: Mapping[str, Any], path: Path | None = None) -> LearnedDegrees:
    """Returns this process's results for layers of this key; empty ones the first time. Not collective.

    path: file of new results. Results that exist keep theirs.
    """
    return _LEARNED.setdefault((ranks.name, json.dumps(key, sort_keys=True)), LearnedDegrees(key, path=path))


def _stored_tables(path: Path | None, key: Mapping[str, Any], candidates: Sequence[int]) -> Tables:
    """Returns the tables of the key's own file; none if there is no file or it cannot be used.

    Warns about a file that cannot be used.
    """
    about = "what trials found before is not used, and measured again"
    return {} if path is None else read_or_default({}, about, lambda: load_degrees(path, key, candidates))

"""Chooses the number of chunks n for ``pipeline=True`` by trials: timed runs (MPipeMoE, Algorithm 1).

A chunk is a micro-batch. Tables keep the results of trials: the fastest n for each number of tokens. Layers
whose groups have the same ranks in the same order share a table if they are equal in everything that changes
the seconds of a step (`key_of_degrees`). If $PMOE_CACHE is set, rank 0 also keeps the tables in a file for
later runs.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pmoe.arguments import check_path
from pmoe.call.description import options_in_words
from pmoe.call.modules import LayerModules
from pmoe.choose.part_of_batch import (
    from_first_with_enough_memory,
    has_enough_tokens,
    measure_in_stages,
    with_enough_memory,
)
from pmoe.choose.trials import TrialBatch, adaptive_degree, smallest_with_enough_memory
from pmoe.comm.agreement import digest, from_first
from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import identity
from pmoe.measure.store import PathLike, cache_path, load_json, read_or_default, save_json, save_or_warn
from pmoe.planner.degree import DEGREES, Choice, all_choices
from pmoe.planner.degree_trials import times_by_trials
from pmoe.planner.granularity import GranularityTable, PassDegrees, points_of, rounded
from pmoe.planner.layer_seconds import step_seconds
from pmoe.planner.timed_rounds import MOST_ROUNDS, PassTimes
from pmoe.schedule.restore import Restore
from pmoe.warn import log

# ---- the search


def degrees_by_search(batch: TrialBatch, restore: Restore) -> PassDegrees:
    """Returns the number of chunks n of each pass, found by trials, or by a rule if no trials can run.

    Trials are timed runs of both passes with several n.

    1. If earlier trials found the fastest n for about this number of tokens, this n is taken.
    2. Otherwise new trials run, if they are allowed (`TrialBatch.trials_allowed`). Their result is recorded
       for later batches, and written to a file if $PMOE_CACHE is set.
    3. If no trials run, `adaptive_degree` computes one n for both passes from the number of rows. If trials
       were allowed but too little memory was left for them, this n is recorded too, so that later batches of
       this size attempt no trials.

    If trials are allowed, the memory of a step of this batch with this n is tested: it may need more memory
    than the trials. If the memory is enough, this n is returned, else a larger n (`n_with_enough_memory`).

    batch: the routed batch, on which trials run.
    restore: the restore pair of the call: whether dispatched rows and hidden activation are kept, offloaded
        or made again for backward.

    Collective if trials run or memory is tested, and at the first call for a layer that allows trials.
    """
    modules = batch.modules
    options = batch.modules.options
    learned = learned_degrees(modules) if batch.trials_allowed else modules.cache.choosers.get(_name(modules))
    hosted = batch.hosted_copies
    table = GranularityTable() if learned is None else learned.table(batch.inputs.x_TM.dtype, hosted)
    degrees = table.lookup(batch.counts.max_tokens)
    if learned is None or not batch.trials_allowed:
        return degrees or degrees_by_rule(batch)
    rounded_tokens = rounded(batch.counts.max_tokens)
    tested = (modules.ranks.name, str(batch.inputs.x_TM.dtype), hosted, rounded_tokens, restore)
    if degrees is None:
        degrees = search(
            table, batch, restore, options.degrees, apart=options.rotates and not options.send_once
        )
        if degrees is None:
            degrees = degrees_by_rule(batch)
            table.remember(batch.counts.max_tokens, degrees)
        else:
            learned.keep()
    # A search tests the memory of the fastest numbers only. It may return others that are about as fast.
    key = (*tested, degrees)
    if key not in learned.with_enough_memory:
        learned.with_enough_memory[key] = n_with_enough_memory(batch, restore, degrees)
    return learned.with_enough_memory[key]


def n_with_enough_memory(batch: TrialBatch, restore: Restore, degrees: PassDegrees) -> PassDegrees:
    """Returns numbers of chunks with which a step has enough memory on every rank. Collective.

    The result is ``degrees`` if the memory is enough for these numbers. Otherwise the numbers are larger,
    because more chunks need less memory. To test the memory, most of a step's predicted peak is allocated and
    freed again: `pmoe.choose.part_of_batch.TESTED` times the peak without the layer's output. Without this
    test, one rank could run out of memory in a step, and the other ranks would wait for it.

    batch: the routed batch.
    restore: the restore pair of the call: whether dispatched rows and hidden activation are kept, offloaded
        or made again for backward.
    degrees: the numbers of chunks of both passes that are tested first.

    Raises OutOfMemoryError on every rank, with the bytes that would be enough, if some rank has too little
    memory with every number of chunks.
    """
    options = batch.modules.options
    numbers = [n for n in options.degrees if n in DEGREES or not options.solves]
    chosen_first = all_choices([(degrees.forward, degrees.backward)], [restore])
    larger = all_choices([(n, n) for n in numbers if n > max(degrees.forward, degrees.backward)], [restore])
    # With the solver, rows must be counted for the chunks that are tested. No count is for all of them.
    tests = [chosen_first, larger] if options.solves else [[*chosen_first, *larger]]
    for choices in filter(None, tests):
        counted = batch.counted_for(choices)  # not in the block below: only one rank may lack memory for it
        try:
            chosen = from_first_with_enough_memory(counted, choices)[0]
            return PassDegrees(chosen.forward, chosen.backward)
        except torch.OutOfMemoryError:  # raised on every rank
            continue
    every_choice = all_choices([(n, n) for n in numbers], [restore])
    chosen = smallest_with_enough_memory(batch.counted_for(every_choice), every_choice)
    return PassDegrees(chosen.forward, chosen.backward)


def degrees_by_rule(batch: TrialBatch) -> PassDegrees:
    """Returns numbers of chunks by a rule of thumb, without timed runs: at least 1024 rows in each chunk.

    Both passes get the same number: the largest of `DEGREES` (1, 2, 4, 8, 16) with at least 1024 rows in each
    chunk (`adaptive_degree`). If there are too few rows for two chunks, the number is 1. On a single rank
    there are no messages to overlap, so chunks can only save memory: the number is 1 unless the layer reuses
    memory.

    batch: the routed batch.
    """
    num_ranks = 2 if batch.modules.options.rotates else batch.modules.ranks.size
    n = adaptive_degree(batch.rows, num_ranks)
    return PassDegrees(n, n)


def search(
    known: GranularityTable, batch: TrialBatch, restore: Restore, numbers: Sequence[int], *, apart: bool
) -> PassDegrees | None:
    """Finds the fastest numbers of chunks by trials on this batch, records and returns them. Collective.

    A trial is a timed run of both passes with some numbers of chunks. It must not need more memory than the
    layer's later steps, and these steps may use the number of chunks that needs the least memory. So a trial
    may take only as much memory as a step with that number. It runs on the first tokens of the batch, as many
    as fit into this memory.

    If all trials run out of memory, larger numbers of chunks are tried, because they need less memory. If
    those trials run out of memory too, the number that needs the least memory is returned without a trial,
    and is not recorded. Every rank first allocates and frees the memory of a step with this number, to test
    that there is enough.

    known: the table in which the result is recorded. Its key is the number of tokens of the rank that has
        most.
    batch: the routed batch, on which the trials run.
    restore: the restore pair of all trials: whether dispatched rows and hidden activation are kept, offloaded
        or made again for backward.
    numbers: the numbers of chunks to choose from, in rising order. `pmoe.planner.degree_trials` decides which
        of them are tried.
    apart: whether forward and backward may have different numbers of chunks.

    Returns None if too few tokens fit for a meaningful measurement (`has_enough_tokens`).

    Raises OutOfMemoryError on every rank if some rank has too little memory even for the number of chunks
    that needs the least.
    """
    max_tokens = batch.counts.max_tokens
    every_choice = all_choices([(n, n) for n in numbers], [restore])
    if not has_enough_tokens(batch, every_choice):
        return None
    predicted = predicted_seconds(batch, restore, numbers)

    lacked_tokens = False
    too_large: list[PassDegrees] = []
    measured: set[PassDegrees] = set()

    def by_degrees(times: Mapping[Choice, PassTimes]) -> dict[PassDegrees, PassTimes]:
        return {PassDegrees(choice.forward, choice.backward): timed for choice, timed in times.items()}

    def measure(tried: Sequence[PassDegrees], most_rounds: int) -> dict[PassDegrees, PassTimes]:
        nonlocal lacked_tokens
        if lacked_tokens:
            return {}  # results of further trials would have nothing to be compared with
        log.info("pipeline=True tries n=%s for %d tokens a rank", ", ".join(map(str, tried)), max_tokens)
        choices = [Choice(**vars(degrees), restore=restore) for degrees in tried]
        # `times_by_trials` asks for further numbers together with the fastest number so far, so the step will
        # run with one of them.
        one_is_taken = not measured.isdisjoint(tried)
        try:
            times = by_degrees(measure_in_stages(batch, choices, most_rounds, one_is_taken))
            lacked_tokens = lacked_tokens or not (times or measured)
            measured.update(times)
            return times
        except torch.OutOfMemoryError:
            too_large.extend(tried)
            return {}

    def where_there_is_room(times: Mapping[PassDegrees, PassTimes]) -> dict[PassDegrees, PassTimes]:
        of_choices = {Choice(**vars(degrees), restore=restore): timed for degrees, timed in times.items()}
        try:
            return by_degrees(with_enough_memory(batch, of_choices))
        except torch.OutOfMemoryError:
            too_large.extend(times)
            return {}

    times = times_by_trials(known, max_tokens, numbers, measure, predicted=predicted, apart=apart)
    if lacked_tokens:
        return None
    times = where_there_is_room(times)
    if not times and too_large:
        # More chunks need less memory, so the numbers of chunks that are larger than all failed numbers are
        # tried.
        most = max(degrees.forward for degrees in too_large)
        larger = [PassDegrees(n, n) for n in numbers if n > most]
        times = where_there_is_room(measure(larger, MOST_ROUNDS)) if larger else {}
        if not times:
            least = smallest_with_enough_memory(batch, every_choice)
            return PassDegrees(least.forward, least.backward)
    if not times:
        return None
    best = known.record(max_tokens, times)
    timings = ", ".join(f"{degrees}: {timed.step * 1e3:.3g} ms" for degrees, timed in times.items())
    log.info("pipeline=True takes n=%s for %d tokens a rank (%s)", best, max_tokens, timings)
    return best


def predicted_seconds(batch: TrialBatch, restore: Restore, numbers: Sequence[int]) -> dict[int, float] | None:
    """Returns the simulated seconds of a step for each number of chunks; None without a good profile.

    The simulation needs a profile: the measured rates of this machine. If no profile is stored, none is
    measured here, because that would take longer than timed runs of all ``numbers``. A profile that describes
    the machine badly (`Profile.doubt`) predicts nothing: a wrong prediction would leave out the fastest n.

    batch: the routed batch.
    restore: the restore pair of the call: whether dispatched rows and hidden activation are kept, offloaded
        or made again for backward.
    numbers: the numbers of chunks, each for both passes.

    Collective the first time for these ranks and this dtype.
    """
    profile = batch.stored_profile()
    if profile is None or profile.doubt:
        return None
    simulated = functools.partial(step_seconds, batch.sizes, profile, batch.counts.max_tokens)
    return {n: simulated(Choice(forward=n, backward=n, restore=restore)) for n in numbers}


# ---- results of trials, shared by layers with equal keys


def learned_degrees(
    modules: LayerModules, path: str | Path | None = None, saved: Sequence[Mapping[str, Any]] | None = None
) -> LearnedDegrees:
    """Returns the results of trials for this layer: the fastest numbers of chunks by number of tokens.

    Trials are timed runs of both passes. Layers whose groups have the same ranks in the same order share the
    results if they have equal keys. A key contains everything that changes the seconds of a step
    (`key_of_degrees`).

    modules: the modules and options of the layer.
    path: a file whose results replace the present results (`pmoe.MoELayer.load_degrees`). If it is None, the
        results come from the first of these that has any: this process, the file in $PMOE_CACHE, ``saved``.
    saved: results from a training checkpoint, an entry for each key (`results_for_checkpoint`). Only the
        entry with this layer's key is used. None without a checkpoint.

    Collective at the first call for a layer, and at each call with ``path`` or ``saved``. Raises OSError or
    ValueError on every rank if rank 0 cannot use ``path``.
    """
    choosers = modules.cache.choosers
    name = _name(modules)
    if path is not None or saved is not None or name not in choosers:
        key = key_of_degrees(modules)
        choosers[name] = load_learned(modules.ranks, key, modules.options.degrees, path, saved or ())
    learned: LearnedDegrees = choosers[name]
    return learned


def _name(modules: LayerModules) -> tuple[object, ...]:
    """Returns the key under which the layer's own cache has the results of its trials.

    A trial is a timed run of both passes. The key contains the options, because a layer's options may change
    while its cache stays.
    """
    return ("trials", modules.options)


def key_of_degrees(modules: LayerModules) -> dict[str, Any]:
    """Returns everything that changes the seconds of a layer's step, as a key for the results of trials.

    Trials are timed runs that find the fastest numbers of chunks. Layers with equal keys share their results.
    The values can be written as JSON. Two things change the seconds but are not in the key:

    - the dtype of the rows, and how many copies of busy experts a rank hosts, because each combination has a
      table of its own;
    - the restore pair that ``memory_reuse=True`` chooses (how backward gets the rows and the hidden
      activation), because all pairs share a table: trials for each pair would gain little
      (`LearnedDegrees.table`).

    modules: the modules and options of the layer.
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


# ---- the file of results: one table for each dtype of the rows


FORMAT = 3
"""Version of the format in which files with results of trials are written.

Files of all versions are read:

    1   one table with the fastest n for single numbers of tokens. Its key lacks some things that change the
        seconds
    2   a table for each restore pair and dtype of the rows, with the fastest n for single numbers of tokens
    3   a table for each dtype of the rows and each number of copies that a rank hosts, with the fastest n for
        ranges of numbers of tokens
"""

Tables = dict[str, GranularityTable]
"""Type of a dict of tables. A table has the fastest numbers of chunks by number of tokens.

A key is a text with the dtype of the rows and, if ranks host copies of busy experts, the number of copies.
"""


def stored_path(key: Mapping[str, Any], version: int = FORMAT) -> Path | None:
    """Returns the path of the file that keeps the results of trials with this key between runs.

    Trials are timed runs that find the fastest numbers of chunks. The file is in the folder $PMOE_CACHE.
    Returns None if $PMOE_CACHE is not set.

    key: everything that changes the seconds of trials (`key_of_degrees`).
    version: version of the file's format, 2 or 3. $PMOE_CACHE never has files of version 1; users may have
        saved files of version 1 elsewhere, and `load_degrees` reads them.
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
    return cache_path(["degrees", *machine, f"{digest([key_text]):x}", f"v{version}"])


def save_degrees(tables: Mapping[str, GranularityTable], path: PathLike, key: Mapping[str, Any]) -> None:
    """Writes results of trials and their key to a file. Empty tables are left out.

    Trials are timed runs that find the fastest numbers of chunks. If writing fails, an older file at this
    path stays unchanged.

    tables: for each dtype of rows, the fastest numbers of chunks by number of tokens.
    path: the file.
    key: everything that changes the seconds of trials, such as the device, the ranks and the options
        (`key_of_degrees`). `load_degrees` refuses the file for a layer with a different key.

    Raises OSError if the file cannot be written, and TypeError if JSON cannot hold the key.
    """
    check_path(path=path)
    save_json(path, to_fields(tables, key))


def to_fields(tables: Mapping[str, GranularityTable], key: Mapping[str, Any]) -> dict[str, Any]:
    """Returns results of trials and their key as data for JSON. Empty tables are left out.

    Trials are timed runs that find the fastest numbers of chunks.

    tables: for each dtype of rows, the fastest numbers of chunks by number of tokens.
    key: everything that changes the seconds of trials (`key_of_degrees`).
    """
    table_fields = {name: table.to_fields() for name, table in tables.items() if table.ranges}
    return {"format": FORMAT, "key": dict(key), "tables": table_fields}


def load_degrees(path: PathLike, key: Mapping[str, Any], candidates: Sequence[int] | None = None) -> Tables:
    """Returns the results of trials that `save_degrees` wrote to ``path``, if the file has the same key.

    A trial is a timed run of both passes. The results are the fastest numbers of chunks by number of tokens,
    a table for each dtype of rows.

    path: the file, of any version of the format.
    key: everything that changes the seconds of trials (`key_of_degrees`).
    candidates: numbers of chunks that the tables may contain; None allows all.

    Raises OSError if the file cannot be read. Raises ValueError, which names the path, if the file has no
    tables, an unknown format, a key that differs from ``key``, or numbers of chunks not in ``candidates``.
    """
    check_path(path=path)
    return load_json(
        path, lambda fields: from_fields(fields, key, candidates), "save_degrees, or trials, write it"
    )


def from_fields(
    fields: Mapping[str, Any], key: Mapping[str, Any], candidates: Sequence[int] | None = None
) -> Tables:
    """Reads results of trials from data that `to_fields` of this or an older version of pmoe returned.

    A trial is a timed run of both passes. The results are the fastest numbers of chunks by number of tokens,
    a table for each dtype of rows.

    fields: the data.
    key: everything that changes the seconds of trials (`key_of_degrees`).
    candidates: numbers of chunks that the tables may contain; None allows all.

    Raises ValueError if the data has no tables, an unknown format, a key that differs from ``key``, or
    numbers of chunks not in ``candidates``.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"data ({fields!r}) must be an object")
    # The key in the data has been through JSON, which turns tuples into lists.
    expected_key = json.loads(json.dumps(dict(key)))
    version = fields.get("format")
    if version == 1:
        parsed = _tables_of_version_1(fields, expected_key)
    elif version in (2, FORMAT):
        _check_key(fields.get("key"), expected_key)
        tables = fields.get("tables")
        if not isinstance(tables, dict):
            raise ValueError(f"no granularity table: tables ({tables!r}) must be an object")
        parsed = (
            _tables_of_version_2(tables)
            if version == 2
            else {name: GranularityTable.from_fields(table) for name, table in tables.items()}
        )
    else:
        raise ValueError(f"format ({version!r}) must be 1, 2 or {FORMAT}")
    for degrees in (degrees for table in parsed.values() for degrees in table.all_degrees()):
        if candidates is not None and not {degrees.forward, degrees.backward} <= set(candidates):
            raise ValueError(f"found n={degrees}, expected numbers among {tuple(candidates)}")
    return parsed


def _tables_of_version_2(tables: Mapping[str, Any]) -> Tables:
    """Converts the tables of a file of version 2. Returns one table for each dtype of the rows.

    The file has a table for each restore pair and dtype; the tables of one dtype are merged. If two restore
    pairs have different fastest numbers of chunks for the same number of tokens, the merged table lists all
    of these numbers as equally fast.

    tables: {"RESTORE, DTYPE": {"points": [[B, forward, backward], ...]}, ...}. RESTORE is the restore pair
        (how backward gets the rows and the hidden activation), B the number of tokens, forward and backward
        are the fastest numbers of chunks of the two passes.
    """
    by_dtype: dict[str, dict[int, set[PassDegrees]]] = {}
    for name, table in tables.items():
        merged = by_dtype.setdefault(name.rpartition(", ")[2], {})
        for B, fastest in points_of(table).items():
            merged.setdefault(B, set()).add(fastest)
    return {dtype: GranularityTable.from_points(points) for dtype, points in by_dtype.items()}


def _tables_of_version_1(fields: Mapping[str, Any], key: Mapping[str, Any]) -> Tables:
    """Converts the table of a file of version 1. Returns a dict {dtype of this layer: table}.

    The key in the file has the layer's sizes, experts, parameters and use of memory, but not the machine.
    Only the entries that the file's key has are compared with the key of this layer.

    fields: {"key": ..., "points": [[B, forward, backward], ...]}. B is the number of tokens, forward and
        backward are the fastest numbers of chunks of the two passes.
    key: the key of this layer.

    Raises ValueError if the key in the file differs from the key of this layer.
    """
    old_key = fields.get("key")
    if not isinstance(old_key, dict):
        raise ValueError(f"key ({old_key!r}) must be an object")
    current_key = dict(key)
    if "d_model" in key:  # the key of a layer
        rotates = key["memory_reuse"] != "False" or key["memory_budget"] != "None"
        bypass_local = "bypass_local=True" in key["switches"]
        current_key["sizes"] = [int(key[name]) for name in ("d_model", "d_hidden", "num_experts", "top_k")]
        current_key["sizes"] += [key["num_ranks"]]
        current_key["experts"] = key["experts"].partition("(")[0]
        current_key["parameters"] = f"torch.{key['dtype']} on {key['device_type']}"
        current_key["strategy"] = f"{key['memory_reuse']}, rotates={rotates}, bypass_local={bypass_local}"
    _check_key(old_key, {name: value for name, value in current_key.items() if name in old_key})
    points = {B: {fastest} for B, fastest in points_of(fields).items()}
    return {f"torch.{key.get('dtype', 'float32')}": GranularityTable.from_points(points)}


def _check_key(old_key: Any, current_key: Mapping[str, Any]) -> None:
    """Raises ValueError if the key in a file of trials' results is not the key of this layer.

    A trial is a timed run of both passes. The message names the first two differences.

    old_key: the key in the file: everything that changes the seconds of trials (`key_of_degrees`).
    current_key: the key of this layer.
    """
    if not isinstance(old_key, dict):
        raise ValueError(f"key ({old_key!r}) must be an object")
    names = [name for name in sorted({*old_key, *current_key}) if old_key.get(name) != current_key.get(name)]
    if names:
        differences = "; ".join(
            f"{name} {old_key.get(name)!r}, here {current_key.get(name)!r}" for name in names[:2]
        )
        raise ValueError(f"holds the degrees of another layer, group or machine: {differences}")


@dataclass
class LearnedDegrees:
    """The results of trials of one or more layers: the fastest number of chunks n by number of tokens.

    A trial is a timed run of both passes. Layers with equal keys share one object if their groups have the
    same ranks in the same order. The tables are equal on all ranks.

    key: everything that changes the seconds of trials (`key_of_degrees`).
    tables: for each dtype of the rows, the fastest n of both passes by number of tokens.
    path: the file in which rank 0 keeps the tables between runs; None on other ranks, and if $PMOE_CACHE is
        not set.
    with_enough_memory: results of earlier memory tests (`n_with_enough_memory`), so that none is repeated. A
        key of this dict is (name of the group, dtype of the rows, copies on a rank, rounded number of tokens,
        restore pair, n of both passes from the table). The value is the n to use: the same n if every rank
        had enough memory for it, otherwise a larger n. The restore pair says how backward gets the rows and
        the hidden activation.
    """

    key: Mapping[str, Any]
    tables: Tables = field(default_factory=dict)
    path: Path | None = None
    with_enough_memory: dict[tuple[object, ...], PassDegrees] = field(default_factory=dict)

    def table(self, dtype: torch.dtype, hosted_copies: int = 0) -> GranularityTable:
        """Returns the table for a dtype of the rows: the fastest number of chunks n by number of tokens.

        The table is empty at first. Each dtype has its own table, because the dtype changes the seconds of
        messages and of matrix products by different factors. Calls in which ranks host copies of busy experts
        have tables of their own, because copies spread the rows more evenly over ranks, and their weights are
        sent in addition.

        dtype: dtype of the rows.
        hosted_copies: the most copies of busy experts that a rank hosts in the call.

        All restore pairs share a table. (The restore pair says whether dispatched rows and hidden activation
        are kept, offloaded or made again for backward.) Trials for each pair would take several times as
        long, and would gain little: a step with the n that was found for another pair takes 1.5 % longer on
        average than with the best n of its own pair (bench/bench_search.py). With ``memory_reuse=True`` the
        pair depends on the number of tokens; where the pair changes, both pairs take nearly the same time.
        """
        name = f"{dtype}, {hosted_copies} copies" if hosted_copies else str(dtype)
        return self.tables.setdefault(name, GranularityTable())

    def keep(self) -> None:
        """Writes the tables of the fastest numbers of chunks to the file `path`.

        Only rank 0 has a path; other ranks write nothing. If writing fails, this method only warns, because
        an error would stop rank 0 while the other ranks go on.
        """
        if self.path is not None:
            path = self.path
            save_or_warn(
                "what trials found could not be kept, and will be measured again",
                lambda: save_degrees(self.tables, path, self.key),
            )


_LEARNED: dict[tuple[str, str], LearnedDegrees] = {}
"""The results of trials of this process: {(the global ranks as text, key as JSON): results}.

Two groups of the same ranks share results. Results stay valid if the process group is made again, because its
ranks take those of rank 0 (`load_learned`).
"""


def load_learned(
    ranks: Ranks,
    key: Mapping[str, Any],
    candidates: Sequence[int],
    path: str | Path | None = None,
    saved: Sequence[Mapping[str, Any]] = (),
) -> LearnedDegrees:
    """Returns rank 0's results of trials for layers with this key, the same on every rank. Collective.

    Trials are timed runs that find the fastest numbers of chunks. The results come from ``path`` if it is a
    file. If ``path`` is None, they come from the first of these sources that has results: the memory of rank
    0's process, the file in $PMOE_CACHE (`stored_path`), ``saved``. If no source has results, the tables are
    empty.

    ranks: the process group of the layer.
    key: everything that changes the seconds of trials (`key_of_degrees`). Every rank uses the key of rank 0.
    candidates: numbers of chunks that a file may contain.
    path: a file that the user loads, or None.
    saved: results from a training checkpoint, an entry for each key (`results_for_checkpoint`). Only the
        entry with ``key`` is used.

    Raises OSError or ValueError on every rank if rank 0 cannot use ``path`` (`load_degrees`). If the file in
    $PMOE_CACHE cannot be used, the function only warns, because the next trials write a new one.
    """
    # Rank 0's key is sent too, because keys hold settings of users' modules, which may differ between ranks.
    sent: tuple[Mapping[str, Any], Tables | Exception] = (key, {})
    if ranks.rank == 0:
        try:
            own = learned_in_this_process(ranks, key, stored_path(key))
            if path is not None:
                sent = (key, load_degrees(path, key, candidates))
            else:
                tables = {name: table for name, table in own.tables.items() if table.ranges}
                tables = tables or _stored_tables(own.path, key, candidates)
                sent = (key, tables or _saved_tables(saved, key, candidates))
        except Exception as error:
            # All ranks wait for rank 0. So rank 0 sends any error, even a warning that the user's warning
            # filter has turned into an exception.
            sent = (key, error)
    key, agreed = from_first(ranks, sent, stage="sharing what trials found")
    if isinstance(agreed, Exception):
        raise agreed
    learned = learned_in_this_process(ranks, key)
    learned.tables = agreed  # other layers hold the same object and get the tables too
    return learned


def learned_in_this_process(ranks: Ranks, key: Mapping[str, Any], path: Path | None = None) -> LearnedDegrees:
    """Returns this process's results of trials for layers with this key. Not collective.

    Trials are timed runs that find the fastest numbers of chunks. If the process has no results for the key,
    an empty object is made. Later calls return the same object.

    ranks: the process group of the layer.
    key: everything that changes the seconds of trials (`key_of_degrees`).
    path: the file in which new results will be kept; None for no file. Only the first call of this process
        for these ranks and this key uses ``path``, also if the process group is made again later.
    """
    name = (str(ranks.members), json.dumps(key, sort_keys=True))
    return _LEARNED.setdefault(name, LearnedDegrees(key, path=path))


def _stored_tables(path: Path | None, key: Mapping[str, Any], candidates: Sequence[int]) -> Tables:
    """Returns the results of trials from the file in $PMOE_CACHE; an empty dict if there is no file.

    Trials are timed runs that find the fastest numbers of chunks. If the file cannot be used, warns and
    returns an empty dict.

    path: the file in the present format (`stored_path`); None if $PMOE_CACHE is not set. If this file does
        not exist, the file that an older pmoe wrote for the same key (format version 2) is read.
    key: everything that changes the seconds of trials (`key_of_degrees`). A file with a different key is not
        used.
    candidates: numbers of chunks that the file may contain.
    """
    about = "what trials found before is not used, and measured again"
    if path is None:
        return {}
    older = stored_path(key, 2)
    source = older if older is not None and older.exists() and not path.exists() else path
    return read_or_default({}, about, lambda: load_degrees(source, key, candidates))


# ---- results of trials in a training checkpoint


def results_for_checkpoint(layers: Iterable[LayerModules]) -> list[dict[str, Any]]:
    """Returns the results of trials of some layers, to be saved in a training checkpoint. Not collective.

    Trials are timed runs that find the fastest numbers of chunks. Their results are returned as data for
    JSON, one entry for each key (`key_of_degrees`). `take_results` gives them to the layers when the training
    is resumed.

    layers: the modules and options of each layer. Layers without results are left out.
    """
    learned = [modules.cache.choosers.get(_name(modules)) for modules in layers]
    distinct = {id(results): results for results in learned if results is not None}
    return [to_fields(results.tables, results.key) for results in distinct.values() if results.tables]


def take_results(layers: Iterable[LayerModules], saved: Sequence[Mapping[str, Any]]) -> None:
    """Gives layers the results of trials from a checkpoint, so that they need no trials. Collective.

    Trials are timed runs that find the fastest numbers of chunks. A layer takes the entry with its own key
    (`key_of_degrees`). If the checkpoint has no such entry, for example because it was written on another
    machine or with another number of ranks, the layer's next steps run trials. If this process or the file in
    $PMOE_CACHE already has results, the layer uses them, because they are at least as new as the checkpoint's
    results.

    layers: the modules and options of each layer, the same layers on every rank.
    saved: the data that `results_for_checkpoint` returned. All ranks use the data of rank 0.
    """
    for modules in layers:
        if modules.options.pipeline is True and modules.ranks.size > 1:
            learned_degrees(modules, saved=saved)


def _saved_tables(
    saved: Sequence[Mapping[str, Any]], key: Mapping[str, Any], candidates: Sequence[int]
) -> Tables:
    """Returns the results of trials with this key from a checkpoint; an empty dict if there are none.

    Trials are timed runs that find the fastest numbers of chunks.

    saved: the data that `results_for_checkpoint` returned, an entry for each key.
    key: everything that changes the seconds of trials (`key_of_degrees`).
    candidates: numbers of chunks that the results may contain.
    """
    refusal = None
    for fields in saved:
        try:
            return from_fields(fields, key, candidates)
        except ValueError as error:
            refusal = error
    if refusal is not None:
        log.info("pipeline=True searches again, because what the checkpoint's trials found %s", refusal)
    return {}

"""The granularity search on real steps: MPipeMoE's searchBestGran(B), and what layers learn together.

Layers of one key on one group share what they learn. A trial runs both passes of the experts' part of a
layer on the batch at hand, through the plan that the layer itself would make, and leaves nothing behind.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pmoe.comm.agree import from_first, largest
from pmoe.comm.ranks import Ranks
from pmoe.engine.autograd import Runner
from pmoe.engine.passes import Inputs
from pmoe.measure.degrees_file import Tables, kept_path, load_degrees, save_degrees
from pmoe.measure.rounds import begin_together, clock_of, median_seconds
from pmoe.planner.granularity import GranularityTable, PassDegrees
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once

log = logging.getLogger("pmoe")

REPEATS = 3


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

    runner_of: what runs a call with these degrees, None where a layer does not allow them. inputs: rows,
    routing weights and parameters as both passes take them. First every n for both passes; then, if forward
    and backward have different best n, that pair. All ranks run the same trials and agree on the slowest
    rank's medians.
    """
    forward, backward, seconds = {}, {}, {}
    same = [PassDegrees(n, n) for n in candidates]
    for degrees, (ahead, back) in zip(same, _trials(same, runner_of, inputs, ranks), strict=True):
        forward[degrees.forward], backward[degrees.backward] = ahead, back
        seconds[degrees] = ahead + back
    apart = PassDegrees(min(forward, key=lambda n: forward[n]), min(backward, key=lambda n: backward[n]))
    if apart not in seconds and runner_of(apart) is not None:
        ((ahead, back),) = _trials([apart], runner_of, inputs, ranks)
        seconds[apart] = ahead + back
    before = known.ranges.contradictions
    best = known.record(max_tokens, seconds)
    told = ", ".join(f"{d.forward}/{d.backward}: {s * 1e3:.3g} ms" for d, s in seconds.items())
    log.info(
        "pipeline=True takes n=%d/%d for %d tokens a rank (%s)", best.forward, best.backward, max_tokens, told
    )
    if known.ranges.contradictions > before:
        log.info("n does not grow with the number of tokens here; the latest measurement holds")
    return best


def _trials(
    candidates: Sequence[PassDegrees],
    runner_of: Callable[[PassDegrees], Runner | None],
    inputs: Inputs,
    ranks: Ranks,
) -> list[tuple[float, float]]:
    """Median seconds of forward and backward for each of candidates: one untimed step each, then in turns."""
    device = inputs.x_TM.device
    clock = clock_of(device)

    def trial(degrees: PassDegrees) -> Callable[[], tuple[float, float]]:
        runner = runner_of(degrees)
        assert runner is not None
        return functools.partial(_run_both, runner, inputs, clock)

    agree = functools.partial(largest, ranks, device, stage="agreeing on a number of chunks")
    medians = median_seconds(
        [trial(degrees) for degrees in candidates], REPEATS, begin=begin_together(ranks), agree=agree
    )
    return [(ahead, back) for ahead, back in medians]


@torch.no_grad()
def _run_both(runner: Runner, inputs: Inputs, now: Callable[[], float]) -> tuple[float, float]:
    """Runs both passes, T_O as its own gradient, and drops all results: the seconds of each."""
    start = now()
    y_TM, saved = runner.forward(inputs, keep=True)
    middle = now()
    assert saved is not None
    wanted = [tensor is not None and tensor.requires_grad for tensor in inputs.all]
    saved.backward(saved.tensors, wanted, y_TM)
    return middle - start, now() - middle

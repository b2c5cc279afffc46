"""The granularity search on real steps: MPipeMoE's searchBestGran(B), and the tables that layers share.

Layers of one shape on one group learn together. A trial runs both passes of the experts' part of a layer on
the batch at hand, through the plan that the layer itself would make, and leaves nothing behind.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pmoe.comm.agree import from_first, largest
from pmoe.comm.ranks import Ranks
from pmoe.engine.autograd import Runner
from pmoe.engine.passes import Inputs
from pmoe.measure.degrees_file import load_degrees
from pmoe.measure.rounds import begin_together, clock_of, median_seconds
from pmoe.planner.granularity import GranularityTable, PassDegrees

log = logging.getLogger("pmoe")

REPEATS = 3

_tables: dict[tuple[str, str], GranularityTable] = {}


def granularity_table(ranks: Ranks, key: Mapping[str, Any]) -> GranularityTable:
    """What is known of layers like this one on this group. key: sizes, types and strategy."""
    return _tables.setdefault(_name(ranks, key), GranularityTable())


def load_table(ranks: Ranks, key: Mapping[str, Any], path: str | Path, candidates: Sequence[int]) -> None:
    """Takes the table at ``path`` as rank 0 finds it, on every rank alike. See `load_degrees`."""
    found: GranularityTable | Exception | None = None
    if ranks.rank == 0:
        try:
            loaded = load_degrees(path, key)
            unknown = [
                degrees
                for degrees in loaded.ranges.points.values()
                if not {degrees.forward, degrees.backward} <= set(candidates)
            ]
            if unknown:
                raise ValueError(f"{path}: found {unknown[0]}, expected degrees among {tuple(candidates)}")
            found = loaded
        except (OSError, ValueError) as error:
            found = error
    found = from_first(ranks, found, stage="sharing a table of degrees")
    if isinstance(found, Exception):
        raise found
    assert found is not None
    granularity_table(ranks, key).take(found)  # layers hold the table itself


def _name(ranks: Ranks, key: Mapping[str, Any]) -> tuple[str, str]:
    return ranks.name, json.dumps(key, sort_keys=True)


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

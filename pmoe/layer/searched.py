"""n by trials (MPipeMoE, Algorithm 1): what ``pipeline=True`` takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pmoe.engine.autograd import Runner
from pmoe.layer.alike import options_in_words
from pmoe.layer.choose import Batch
from pmoe.layer.parts import Parts
from pmoe.measure.bench import identity
from pmoe.planner.degree import DEGREES, Choice
from pmoe.planner.granularity import PassDegrees
from pmoe.runners.pipeline import PipelineRunner
from pmoe.runners.searched import Learnt, held, learnt_by, load_learnt, save_degrees, search, trials
from pmoe.schedule.restore import Restore

MIN_ROWS = 1024
"""Below this many rows a chunk, smaller products cost more than finer overlap hides
(bench/bench_overlap.py: n = 2 to 4 is best at 4096 rows a rank)."""


def adaptive_degree(max_rows: int, num_ranks: int) -> int:
    """n by a rule, from numbers that all ranks share: the largest that leaves MIN_ROWS a chunk; 1 where
    nothing travels. max_rows: the largest T * K of a rank."""
    return 1 if num_ranks == 1 else max(n for n in DEGREES if n == 1 or max_rows >= n * MIN_ROWS)


def degrees(batch: Batch, restore: Restore) -> PassDegrees:
    """n known for this many tokens, or found by trials where they are worth it.

    Where nothing is differentiated, chunks would be small, nothing travels, or experts are modules, which a
    trial might change, a rule decides instead.
    """
    parts, spec, counts = batch.parts, batch.parts.spec, batch.counts
    max_tokens, ranks = counts.max_tokens, parts.ranks
    rows = max_tokens * spec.top_k
    ruled = adaptive_degree(rows, 2 if spec.rotates else ranks.size)
    tries = _tries(batch)
    learnt = learnt_of(parts) if tries else parts.known.choosers.get(_name(parts))
    if learnt is None:
        return PassDegrees(ruled, ruled)
    known = learnt.table(restore, batch.inputs.x_TM.dtype)
    found: PassDegrees | None = known.lookup(max_tokens)
    if found is not None or not tries:
        return found or PassDegrees(ruled, ruled)

    def runner_of(degrees: PassDegrees) -> Runner | None:
        if degrees.forward != degrees.backward and (not spec.rotates or spec.send_once):
            return None
        return PipelineRunner(batch.plan_for(degrees.forward, degrees.backward, restore))

    with _no_traffic(parts):
        found = search(known, max_tokens, spec.degrees, runner_of, batch.inputs, ranks)
    learnt.keep()
    return found


def _tries(batch: Batch) -> bool:
    """Whether trials are worth it, and change nothing that lasts."""
    parts, spec = batch.parts, batch.parts.spec
    rows, shared = batch.counts.max_tokens * spec.top_k, parts.shared_expert
    worth = batch.counts.needs_grad and parts.ranks.size > 1 and rows >= 2 * MIN_ROWS
    modules = parts.experts.are_modules or (shared is not None and shared.are_modules)
    return worth and not (modules or parts.hooks is not None or spec.switches.sequential)


@contextlib.contextmanager
def _no_traffic(parts: Parts) -> Iterator[None]:
    """What is sent in the block is no traffic of the model."""
    traffic = replace(parts.traffic)
    yield
    vars(parts.traffic).update(vars(traffic))


def tried_seconds(batch: Batch, choices: Sequence[Choice]) -> list[tuple[float, float]] | None:
    """Of both passes with each choice, the slowest rank's; None where trials are not for this layer.
    Collective."""
    if not _tries(batch) or batch.parts.gradients is not None or batch.counts.host_shortage:
        return None  # a choice that offloads would fail on the rank alone whose host is full

    def runner_of(choice: Choice) -> Runner:
        return PipelineRunner(batch.plan_for(choice.forward, choice.backward, choice.restore))

    with _no_traffic(batch.parts):
        return trials(choices, runner_of, batch.inputs, batch.parts.ranks)


def learnt_of(parts: Parts) -> Learnt:
    """What trials have found for layers like this one on this group. Collective the first time."""
    choosers, name = parts.known.choosers, _name(parts)
    if name not in choosers:
        choosers[name] = learnt_by(parts.ranks, key_of(parts), parts.spec.degrees)
    found: Learnt = choosers[name]
    return found


def take_degrees(parts: Parts, path: str | Path) -> None:
    """As `pmoe.MoELayer.load_degrees`."""
    parts.known.choosers[_name(parts)] = load_learnt(parts.ranks, key_of(parts), path, parts.spec.degrees)


def write_degrees(parts: Parts, path: str | Path) -> None:
    """As `pmoe.MoELayer.save_degrees`."""
    key = key_of(parts)
    save_degrees(held(parts.ranks, key).tables, path, key)


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

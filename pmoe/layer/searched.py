"""n by trials (MPipeMoE, Algorithm 1): what ``pipeline=True`` takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pmoe.engine.autograd import Runner
from pmoe.layer.choose import Batch
from pmoe.layer.parts import Parts
from pmoe.measure.degrees_file import save_degrees
from pmoe.planner.degree import MIN_ROWS, adaptive_degree
from pmoe.planner.granularity import GranularityTable, PassDegrees
from pmoe.runners.pipeline import PipelineRunner
from pmoe.runners.searched import granularity_table, load_table, search
from pmoe.schedule.restore import Restore


def degrees(batch: Batch, restore: Restore) -> PassDegrees:
    """n known for this many tokens, or found by trials where they are worth it.

    Where nothing is differentiated, chunks would be small, nothing travels, or experts are modules, which a
    trial might change, a rule decides instead.
    """
    parts, spec, counts = batch.parts, batch.parts.spec, batch.counts
    max_tokens, ranks = counts.max_tokens, parts.ranks
    rows = max_tokens * spec.top_k
    ruled = adaptive_degree(rows, 2 if spec.rotates else ranks.size)
    known = granularity(parts)
    found = known.lookup(max_tokens)
    if found is not None:
        return found
    worth = counts.needs_grad and ranks.size > 1 and rows >= 2 * MIN_ROWS
    shared = parts.shared_expert
    modules = parts.experts.are_modules or (shared is not None and shared.are_modules)
    if not worth or modules or parts.hooks is not None or spec.switches.sequential:
        return PassDegrees(ruled, ruled)

    def runner_of(degrees: PassDegrees) -> Runner | None:
        if degrees.forward != degrees.backward and (not spec.rotates or spec.send_once):
            return None
        return PipelineRunner(batch.plan_for(degrees.forward, degrees.backward, restore))

    traffic = replace(parts.traffic)
    found = search(known, max_tokens, spec.degrees, runner_of, batch.inputs, ranks)
    vars(parts.traffic).update(vars(traffic))  # trials are no traffic of the model
    return found


def granularity(parts: Parts) -> GranularityTable:
    """What trials have found, shared by all layers like this one on this group."""
    return granularity_table(parts.ranks, key_of(parts))


def load_learnt(parts: Parts, path: str | Path) -> None:
    """As `pmoe.MoELayer.load_degrees`."""
    load_table(parts.ranks, key_of(parts), path, parts.spec.degrees)


def save_learnt(parts: Parts, path: str | Path) -> None:
    """As `pmoe.MoELayer.save_degrees`."""
    save_degrees(granularity(parts), path, key_of(parts))


def key_of(parts: Parts) -> dict[str, Any]:
    """Which layers learn together."""
    spec, like = parts.spec, parts.like
    switches = spec.switches
    return {
        "sizes": [spec.d_model, spec.d_hidden, spec.num_experts, spec.top_k, parts.ranks.size],
        "experts": type(parts.experts).__name__,
        "parameters": "none" if like is None else f"{like.dtype} on {like.device.type}",
        "strategy": f"{spec.restore}, rotates={spec.rotates}, bypass_local={switches.bypass_local}",
    }

"""What a layer has learnt by trials (MPipeMoE, Algorithm 1): n of ``pipeline=True``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pmoe.layer.alike import options_in_words
from pmoe.layer.parts import Parts
from pmoe.measure.bench import identity
from pmoe.planner.granularity import PassDegrees
from pmoe.runners import searched
from pmoe.runners.searched import Learnt, held, learnt_by, save_degrees
from pmoe.runners.trials import Batch
from pmoe.schedule.restore import Restore


def tried_degrees(parts: Parts, batch: Batch, restore: Restore) -> PassDegrees:
    """As `pmoe.runners.searched.degrees`. Collective where trials are made."""
    learnt = learnt_of(parts) if batch.may_be_tried else parts.known.choosers.get(_name(parts))
    return searched.degrees(batch, restore, learnt)


def learnt_of(parts: Parts) -> Learnt:
    """What trials have found for layers like this one on this group. Collective the first time."""
    choosers, name = parts.known.choosers, _name(parts)
    if name not in choosers:
        choosers[name] = learnt_by(parts.ranks, key_of(parts), parts.spec.degrees)
    found: Learnt = choosers[name]
    return found


def take_degrees(parts: Parts, path: str | Path) -> None:
    """As `pmoe.MoELayer.load_degrees`."""
    parts.known.choosers[_name(parts)] = learnt_by(
        parts.ranks, key_of(parts), parts.spec.degrees, "" if path is None else path
    )


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

"""Where data-parallel gradients are all-reduced in the backward pass (FSMoE, Section 5).

An all-reduce between nodes hides beside the dense part of a layer, and beside experts where all-to-alls leave
the lane idle. Step 1 fills what costs nothing; step 2 (`pmoe.planner.gradient_evolution`) gives the rest to
experts' parts, where a longer all-reduce may pay for another degree, or leaves it for the end.

The paper's Eq. 4 drops a layer's own gradient, and the inverse of its line is negative below alpha. What is
meant, and done here: every byte is placed once, in a layer whose backward pass comes after its gradient is
made, or at the end; the exposed seconds are minimised.

Layers are in the order of the backward pass: the last of the model is the first here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pmoe.arguments import check_int, check_not_negative
from pmoe.planner.costs import LineCost
from pmoe.planner.gradient_evolution import ExposedSeconds, evolve
from pmoe.planner.stage_costs import GeneralizedLayer, Share, all_reduce_seconds, bytes_within


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Where all bytes go, and the predicted seconds that they add to the backward pass.

    shares: of each layer. end_bytes: those left for the end. plain_seconds: one all-reduce of everything at
    the end. filled_seconds: after step 1. exposed_seconds: after step 2, never more than either.
    """

    shares: tuple[Share, ...]
    end_bytes: int
    plain_seconds: float
    filled_seconds: float
    exposed_seconds: float


def partition(layers: Sequence[GeneralizedLayer], all_reduce: LineCost, ready_bytes: int = 0) -> Partition:
    """Section 5's two steps: bytes for each layer's dense and MoE part, and for the end.

    all_reduce: seconds of bytes. ready_bytes: gradients that are there before the first layer, such as those
    of the model's head. Dozens of layers take a tenth of a second.

    Raises ValueError for no layers, negative bytes, or a line with a negative number.
    Example: one layer, 1000 bytes ready, 1 s a byte, 300 s dense, nothing idle beside its experts -> 300
    bytes beside the dense part, 700 at the end.
    """
    if not layers:
        raise ValueError("layers (none) must hold at least one")
    check_int(ready_bytes=ready_bytes)
    check_not_negative(ready_bytes=ready_bytes, **vars(all_reduce))
    sources = (ready_bytes, *(layer.gradient_bytes for layer in layers))
    made = list(itertools.accumulate(sources))[:-1]  # bytes that are there when a layer's backward begins
    dense, moe = _filled(layers, all_reduce, made)
    placed = itertools.accumulate(a + b for a, b in zip(dense, moe, strict=True))
    spare = [there - gone for there, gone in zip(made, placed, strict=True)]
    rooms = [min(spare[at:]) for at in range(len(spare))]  # what one takes, no later layer has
    nothing = [0] * len(layers)
    filled = ExposedSeconds(layers, all_reduce, dense, moe, sum(sources))
    plain = ExposedSeconds(layers, all_reduce, nothing, nothing, sum(sources))
    candidates = [(filled, nothing), (filled, evolve(filled, rooms)), (plain, nothing)]
    chosen, extra = min(candidates, key=lambda each: each[0].exposed(each[1]))
    shares = [chosen.share(at, more) for at, more in enumerate(extra)]
    left = chosen.left(extra)
    if chosen.joins(left):
        shares[-1] = replace(shares[-1], dense_bytes=shares[-1].dense_bytes + left)
        left = 0
    return Partition(
        shares=tuple(shares),
        end_bytes=left,
        plain_seconds=all_reduce_seconds(all_reduce, sum(sources)),
        filled_seconds=filled.exposed(nothing),
        exposed_seconds=chosen.exposed(extra),
    )


def _filled(
    layers: Sequence[GeneralizedLayer], all_reduce: LineCost, made: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Step 1 (Eq. 3, 4): bytes beside each dense and each MoE part that cost nothing, as early as they
    can."""
    dense, moe = [], []
    gone = 0
    for layer, there in zip(layers, made, strict=True):
        dense.append(min(there - gone, bytes_within(all_reduce, layer.dense_seconds)))
        gone += dense[-1]
        moe.append(min(there - gone, bytes_within(all_reduce, layer.hidden_seconds)))
        gone += moe[-1]
    return dense, moe

"""Where data-parallel gradients are all-reduced in the backward pass (FSMoE, Section 5).

An all-reduce between nodes hides beside the dense part of a layer, and beside experts where all-to-alls leave
the lane idle. Step 1 fills what costs nothing; step 2 (`evolve`) gives the rest to experts' parts, where a
longer all-reduce may pay for another degree, or leaves it for the end.

The paper's Eq. 4 drops a layer's own gradient, and the inverse of its line is negative below alpha. What is
meant, and done here: every byte is placed once, in a layer whose backward pass comes after its gradient is
made, or at the end; the exposed seconds are minimised.

Layers are in the order of the backward pass: the last of the model is the first here. D layers, S candidates.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pmoe.planner.costs import GeneralizedLayer, LineCost, Share, all_reduce_seconds, bytes_within


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

    Example: one layer, 1000 bytes ready, 1 s a byte, 300 s dense, nothing idle beside its experts -> 300
    bytes beside the dense part, 700 at the end.
    """
    sources = (ready_bytes, *(layer.gradient_bytes for layer in layers))
    made = list(itertools.accumulate(sources))[:-1]  # bytes that are there when a layer's backward begins
    # Step 1 (Eq. 3, 4): beside each dense and each MoE part what costs nothing, as early as it can.
    dense, moe, spare, gone = list[int](), list[int](), list[int](), 0
    for layer, there in zip(layers, made, strict=True):
        dense.append(min(there - gone, bytes_within(all_reduce, layer.dense_seconds)))
        gone += dense[-1]
        moe.append(min(there - gone, bytes_within(all_reduce, layer.hidden_seconds)))
        gone += moe[-1]
        spare.append(there - gone)
    rooms = [min(spare[at:]) for at in range(len(spare))]  # what one takes, no later layer has
    nothing = [0] * len(layers)
    filled = ExposedSeconds(layers, all_reduce, dense, moe, sum(sources))
    plain = ExposedSeconds(layers, all_reduce, nothing, nothing, sum(sources))
    candidates = [(filled, nothing), (filled, evolve(filled, rooms)), (plain, nothing)]
    chosen, extra = min(candidates, key=lambda each: each[0].exposed(each[1]))
    shares, left = chosen.placed(extra)
    return Partition(
        shares=tuple(shares),
        end_bytes=left,
        plain_seconds=all_reduce_seconds(all_reduce, sum(sources)),
        filled_seconds=filled.exposed(nothing),
        exposed_seconds=chosen.exposed(extra),
    )


# ---- step 2 (Section 5.3). Eq. 5 as printed is least where nothing is placed


SEED = 0
"""Of the differential evolution: ranks that share the numbers find the same partition."""

GENERATIONS = 100
"""At most; it ends earlier where all candidates are equal."""


@dataclass(frozen=True)
class ExposedSeconds:
    """Eq. 5: exposed seconds as a function of the bytes that each MoE part carries beyond step 1.

    dense, moe: bytes of each part after step 1. total: bytes of all gradients.
    """

    layers: Sequence[GeneralizedLayer]
    all_reduce: LineCost
    dense: Sequence[int]
    moe: Sequence[int]
    total: int

    def placed(self, extra: Sequence[int]) -> tuple[list[Share], int]:
        """What each layer carries, and the bytes that are left for the end."""
        shares = []
        for layer, dense, moe, more in zip(self.layers, self.dense, self.moe, extra, strict=True):
            t_gar = all_reduce_seconds(self.all_reduce, moe + more)
            degree = layer.best(t_gar).degree
            shares.append(Share(moe_bytes=moe + more, dense_bytes=dense, t_gar=t_gar, degree=degree))
        left, last = self.left(extra), self.layers[-1]
        joined = all_reduce_seconds(self.all_reduce, self.dense[-1] + left) - last.dense_seconds
        # One message behind the last dense part, unless the last layer's own gradients come after that.
        if not last.gradient_bytes and max(0.0, joined) < all_reduce_seconds(self.all_reduce, left):
            return [*shares[:-1], replace(shares[-1], dense_bytes=self.dense[-1] + left)], 0
        return shares, left

    def exposed(self, extra: Sequence[int]) -> float:
        """Seconds over those of a backward pass without gradients."""
        return float(self.of_candidates(np.array(extra, dtype=float)[:, None])[0])

    def left(self, extra: Sequence[int]) -> int:
        return self.total - sum(self.dense) - sum(self.moe) - sum(extra)

    @functools.cached_property
    def of_candidates(self) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        """Of many candidates at once: extra bytes (D, S) -> seconds (S,)."""
        line, last = self.all_reduce, self.layers[-1]
        alone_D = np.array([layer.best(0.0).alone for layer in self.layers])[:, None]
        moe_D = np.array(self.moe, dtype=float)[:, None]
        max_degrees = max(len(layer.degrees) for layer in self.layers)
        rows = [
            [*layer.degrees, *[layer.degrees[-1]] * (max_degrees - len(layer.degrees))]
            for layer in self.layers
        ]
        each_DN1 = np.array([[each.alone for each in row] for row in rows])[:, :, None]
        beside_DN1 = np.array([[each.beside for each in row] for row in rows])[:, :, None]
        total = self.left([0] * len(self.layers))

        def all_reduced(num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.where(num_bytes > 0, line.alpha_seconds + line.beta_seconds * num_bytes, 0.0)

        def seconds(extra_DS: NDArray[np.float64]) -> NDArray[np.float64]:
            t_gar_DS = all_reduced(moe_D + extra_DS)
            pass_DS = np.maximum(each_DN1, beside_DN1 + t_gar_DS[:, None, :]).min(axis=1)
            left_S = total - extra_DS.sum(axis=0)
            end_S = all_reduced(left_S)
            if not last.gradient_bytes:
                longer_S = np.maximum(all_reduced(self.dense[-1] + left_S) - last.dense_seconds, 0.0)
                end_S = np.minimum(end_S, longer_S)
            return np.asarray((pass_DS - alone_D).sum(axis=0) + end_S)

        return seconds


def evolve(problem: ExposedSeconds, rooms: Sequence[int]) -> list[int]:
    """Extra bytes of each MoE part by scipy's differential evolution, as the paper does.

    A candidate is a share of what is still to be had in each layer, between 0 and 1, so that all candidates
    are possible. Where two degrees change places the function has steps and plateaus, whose ends an evolution
    comes near but does not hit: the end of every plateau is tried last, layer by layer.
    """
    if not any(rooms):
        return [0] * len(rooms)
    from scipy.optimize import differential_evolution  # not needed to import pmoe

    seconds = problem.of_candidates

    def decoded(shares_DS: NDArray[np.float64]) -> NDArray[np.float64]:
        extra_DS = np.zeros_like(shares_DS)
        gone_S = np.zeros(shares_DS.shape[1])
        for at, room in enumerate(rooms):
            extra_DS[at] = np.floor(np.clip(shares_DS[at], 0, 1) * np.maximum(room - gone_S, 0))
            gone_S += extra_DS[at]
        return extra_DS

    found: Any = differential_evolution(
        lambda shares_DS: seconds(decoded(shares_DS)),
        [(0.0, 1.0)] * len(rooms),
        rng=SEED,
        maxiter=GENERATIONS,
        polish=False,
        vectorized=True,
        updating="deferred",
    )
    extra = [int(each) for each in decoded(found.x[:, None])[:, 0]]
    return _polished(problem, rooms, extra)


def _polished(problem: ExposedSeconds, rooms: Sequence[int], extra: list[int]) -> list[int]:
    """Each layer in turn takes the end of that plateau which helps most, until none does."""
    seconds, best = problem.of_candidates, problem.exposed(extra)
    for _ in range(len(rooms) + 1):
        before = best
        for at, layer in enumerate(problem.layers):
            # Bytes with which a degree's longest path begins to have the gradients on it.
            ends = (bytes_within(problem.all_reduce, each.alone - each.beside) for each in layer.degrees)
            free = _free(rooms, extra, at)
            tried = sorted({min(max(end - problem.moe[at], 0), free) for end in ends} | {0, free})
            columns = np.repeat(np.array(extra, dtype=float)[:, None], len(tried), axis=1)
            columns[at] = tried
            found = seconds(columns)
            fastest = int(np.argmin(found))
            if found[fastest] < best * (1 - 1e-12):
                best, extra = float(found[fastest]), [*extra[:at], tried[fastest], *extra[at + 1 :]]
        if best >= before:
            break
    return extra


def _free(rooms: Sequence[int], extra: Sequence[int], at: int) -> int:
    """The most that layer ``at`` may take beside what all others take: no layer takes bytes not yet made."""
    taken = list(itertools.accumulate([*extra[:at], 0, *extra[at + 1 :]]))
    return max(0, min(room - gone for room, gone in zip(rooms[at:], taken[at:], strict=True)))

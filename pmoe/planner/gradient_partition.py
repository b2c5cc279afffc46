"""The gradient partition: places the all-reduce of data-parallel gradients in the backward pass.

It is FSMoE's (Section 5). An all-reduce between nodes can hide beside the dense part of a layer, and beside
experts while all-to-alls leave the inter-node lane idle.

- Step 1 fills all places where gradients cost nothing.
- Step 2 (`evolve`) gives the rest to MoE parts, where a longer all-reduce may make another degree pay off,
  or leaves it for the end.

    backward     | dense 0 | MoE 0 | dense 1 | MoE 1 | ... | end
    may carry    | gradients that  | and those of    |     | all that
                 | were ready      | layer 0         |     | is left

The paper's Eq. 4 drops a layer's own gradient, and the inverse of its line is negative below alpha. This
file does what is meant: every byte is placed exactly once, in a layer whose backward comes after the
gradient is made, or at the end; and the exposed seconds are minimized.

Layers are in the order of backward: the model's last layer comes first. Letters: D layers, S candidates.
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
    """Places of all gradient bytes, and the predicted seconds that they add to the backward pass.

    shares: what each layer carries.
    end_bytes: bytes that are all-reduced after backward.
    plain_seconds: added seconds of a single all-reduce at the end.
    filled_seconds: added seconds after step 1.
    exposed_seconds: added seconds after step 2, never more than either of the above.
    """

    shares: tuple[Share, ...]
    end_bytes: int
    plain_seconds: float
    filled_seconds: float
    exposed_seconds: float


def partition(layers: Sequence[GeneralizedLayer], all_reduce: LineCost, ready_bytes: int = 0) -> Partition:
    """Returns the places of all gradients, by Section 5's two steps.

    Args:
        layers: in the order of backward.
        all_reduce: seconds of an all-reduce by bytes.
        ready_bytes: gradients that are ready before the first layer's backward, such as those of the
            model's head.

    With dozens of layers it takes a tenth of a second.

    Example: one layer, 1000 bytes ready, 1 s per byte, 300 s dense, no idle time beside its experts -> 300
    bytes beside the dense part, 700 at the end.
    """
    sources = (ready_bytes, *(layer.gradient_bytes for layer in layers))
    # Bytes that are ready when each layer's backward starts.
    ready_before = list(itertools.accumulate(sources))[:-1]
    # Step 1 (Eq. 3, 4): each part takes, as early as possible, as many bytes as cost it nothing.
    dense = list[int]()
    moe = list[int]()
    spare = list[int]()
    placed = 0
    for layer, ready in zip(layers, ready_before, strict=True):
        dense.append(min(ready - placed, bytes_within(all_reduce, layer.dense_seconds)))
        placed += dense[-1]
        moe.append(min(ready - placed, bytes_within(all_reduce, layer.hidden_seconds)))
        placed += moe[-1]
        spare.append(ready - placed)
    # Bytes that a layer takes are missing in all later layers: it may take only what each of them can spare.
    rooms = [min(spare[at:]) for at in range(len(spare))]
    nothing = [0] * len(layers)
    filled = ExposedSeconds(layers, all_reduce, dense, moe, sum(sources))
    plain = ExposedSeconds(layers, all_reduce, nothing, nothing, sum(sources))
    candidates = [(filled, nothing), (filled, evolve(filled, rooms)), (plain, nothing)]
    chosen, extra = min(candidates, key=lambda candidate: candidate[0].exposed(candidate[1]))
    shares, left = chosen.placed(extra)
    return Partition(
        shares=tuple(shares),
        end_bytes=left,
        plain_seconds=all_reduce_seconds(all_reduce, sum(sources)),
        filled_seconds=filled.exposed(nothing),
        exposed_seconds=chosen.exposed(extra),
    )


# ---- step 2 (Section 5.3). Eq. 5 as the paper prints it has its minimum where nothing is placed


SEED = 0
"""Seed of the differential evolution. With the same numbers all ranks find the same partition."""

GENERATIONS = 100
"""Maximum number of generations. The evolution ends earlier if all candidates are equal."""


@dataclass(frozen=True)
class ExposedSeconds:
    """Eq. 5: exposed seconds as a function of the bytes that each MoE part carries beyond step 1.

    layers: in the order of backward.
    all_reduce: seconds of an all-reduce by bytes.
    dense, moe: bytes that each dense part and each MoE part carries after step 1.
    total: bytes of all gradients.
    """

    layers: Sequence[GeneralizedLayer]
    all_reduce: LineCost
    dense: Sequence[int]
    moe: Sequence[int]
    total: int

    def placed(self, extra: Sequence[int]) -> tuple[list[Share], int]:
        """Returns what each layer carries, and the bytes that are left for the end.

        extra: bytes of each MoE part beyond step 1.
        """
        shares = []
        for layer, dense, moe, more in zip(self.layers, self.dense, self.moe, extra, strict=True):
            t_gar = all_reduce_seconds(self.all_reduce, moe + more)
            degree = layer.best(t_gar).degree
            shares.append(Share(moe_bytes=moe + more, dense_bytes=dense, t_gar=t_gar, degree=degree))
        left = self.left(extra)
        last = self.layers[-1]
        joined = all_reduce_seconds(self.all_reduce, self.dense[-1] + left) - last.dense_seconds
        # The rest joins the message of the last dense part if that is faster. It cannot if the last layer
        # makes gradients itself, because these are ready only later.
        if not last.gradient_bytes and max(0.0, joined) < all_reduce_seconds(self.all_reduce, left):
            return [*shares[:-1], replace(shares[-1], dense_bytes=self.dense[-1] + left)], 0
        return shares, left

    def exposed(self, extra: Sequence[int]) -> float:
        """Returns the seconds that gradients add to a backward pass."""
        return float(self.of_candidates(np.array(extra, dtype=float)[:, None])[0])

    def left(self, extra: Sequence[int]) -> int:
        """Returns the bytes that are left for the end."""
        return self.total - sum(self.dense) - sum(self.moe) - sum(extra)

    @functools.cached_property
    def of_candidates(self) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        """A function that evaluates many candidates at once: extra bytes (D, S) -> exposed seconds (S,)."""
        line = self.all_reduce
        last = self.layers[-1]
        alone_D = np.array([layer.best(0.0).alone for layer in self.layers])[:, None]
        moe_D = np.array(self.moe, dtype=float)[:, None]
        max_degrees = max(len(layer.degrees) for layer in self.layers)
        rows = [
            [*layer.degrees, *[layer.degrees[-1]] * (max_degrees - len(layer.degrees))]
            for layer in self.layers
        ]
        alone_DN1 = np.array([[option.alone for option in row] for row in rows])[:, :, None]
        beside_DN1 = np.array([[option.beside for option in row] for row in rows])[:, :, None]
        total = self.left([0] * len(self.layers))

        def all_reduced(num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.where(num_bytes > 0, line.alpha_seconds + line.beta_seconds * num_bytes, 0.0)

        def seconds(extra_DS: NDArray[np.float64]) -> NDArray[np.float64]:
            t_gar_DS = all_reduced(moe_D + extra_DS)
            pass_DS = np.maximum(alone_DN1, beside_DN1 + t_gar_DS[:, None, :]).min(axis=1)
            left_S = total - extra_DS.sum(axis=0)
            end_S = all_reduced(left_S)
            if not last.gradient_bytes:
                longer_S = np.maximum(all_reduced(self.dense[-1] + left_S) - last.dense_seconds, 0.0)
                end_S = np.minimum(end_S, longer_S)
            return np.asarray((pass_DS - alone_D).sum(axis=0) + end_S)

        return seconds


def evolve(problem: ExposedSeconds, rooms: Sequence[int]) -> list[int]:
    """Returns the extra bytes of each MoE part, found by scipy's differential evolution as in the paper.

    A candidate is a fraction between 0 and 1 for each layer, of the bytes that the layer may still take. So
    every candidate is valid.

    The function has steps and plateaus where another degree becomes best. An evolution comes near the end
    of a plateau but does not hit it, so the ends of all plateaus are tried at last, layer by layer.

    rooms: the most extra bytes of each layer.
    """
    if not any(rooms):
        return [0] * len(rooms)
    from scipy.optimize import differential_evolution  # not needed to import pmoe

    seconds = problem.of_candidates

    def decoded(shares_DS: NDArray[np.float64]) -> NDArray[np.float64]:
        extra_DS = np.zeros_like(shares_DS)
        taken_S = np.zeros(shares_DS.shape[1])
        for at, room in enumerate(rooms):
            extra_DS[at] = np.floor(np.clip(shares_DS[at], 0, 1) * np.maximum(room - taken_S, 0))
            taken_S += extra_DS[at]
        return extra_DS

    result: Any = differential_evolution(
        lambda shares_DS: seconds(decoded(shares_DS)),
        [(0.0, 1.0)] * len(rooms),
        rng=SEED,
        maxiter=GENERATIONS,
        polish=False,
        vectorized=True,
        updating="deferred",
    )
    extra = [int(num_bytes) for num_bytes in decoded(result.x[:, None])[:, 0]]
    return _polished(problem, rooms, extra)


def _polished(problem: ExposedSeconds, rooms: Sequence[int], extra: list[int]) -> list[int]:
    """Moves each layer in turn to the end of a plateau that helps most, until none helps."""
    seconds = problem.of_candidates
    best = problem.exposed(extra)
    for _ in range(len(rooms) + 1):
        best_before = best
        for at, layer in enumerate(problem.layers):
            # With these bytes the gradients just reach the longest path of a degree: the end of its plateau.
            ends = (
                bytes_within(problem.all_reduce, option.alone - option.beside) for option in layer.degrees
            )
            free = _free(rooms, extra, at)
            candidates = sorted({min(max(end - problem.moe[at], 0), free) for end in ends} | {0, free})
            columns = np.repeat(np.array(extra, dtype=float)[:, None], len(candidates), axis=1)
            columns[at] = candidates
            candidate_seconds = seconds(columns)
            fastest = int(np.argmin(candidate_seconds))
            if candidate_seconds[fastest] < best * (1 - 1e-12):
                best = float(candidate_seconds[fastest])
                extra = [*extra[:at], candidates[fastest], *extra[at + 1 :]]
        if best >= best_before:
            break
    return extra


def _free(rooms: Sequence[int], extra: Sequence[int], at: int) -> int:
    """Returns the most bytes that layer ``at`` may take beside those of all other layers.

    No layer may take bytes that are not made yet.
    """
    taken = list(itertools.accumulate([*extra[:at], 0, *extra[at + 1 :]]))
    return max(0, min(room - gone for room, gone in zip(rooms[at:], taken[at:], strict=True)))

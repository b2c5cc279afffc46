"""The gradient partition: when the gradients of data-parallel layers are all-reduced during backward.

The method is FSMoE's (Section 5). An all-reduce between nodes costs no time while the dense part of a layer
runs backward. It also costs no time while experts compute and no all-to-all uses the link between nodes.

- Step 1 places gradients wherever their all-reduce costs no time.
- Step 2 (`evolve`) places some of the other gradients beside MoE parts. This makes an MoE part slower, but
  costs less time than an all-reduce at the end. The MoE part may then use a different number of chunks than
  without an all-reduce.
- All other gradients are all-reduced at the end.

    backward     | dense 0 | MoE 0 | dense 1 | MoE 1 | ... | end
    may reduce   | gradients that  | also gradients  |     | all that
                 | were ready      | of layer 0      |     | is left

The paper's equations are changed in two places. First, the paper's Eq. 4 does not count a layer's own
gradient among the bytes to be placed. This file counts the gradient: it may be placed in any layer that runs
backward later, or at the end. Every byte is placed exactly once. Second, by the paper (t - alpha) / beta
bytes can be reduced in t seconds, where alpha is the fixed time of an all-reduce. This number is negative if
t < alpha. In this file it is then 0.

The search minimizes the exposed seconds: the time of all-reduces that no computation hides.

Layers are in the order of backward: the model's last layer comes first. Letters in shapes: D layers, S
candidate partitions that are evaluated at once, N numbers of chunks.
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
    """The result of `partition`: when gradients are all-reduced, and how much longer backward takes.

    shares: for each layer, in the order of backward, the bytes of gradients that are all-reduced during its
        backward pass, and its number of chunks.
    end_bytes: bytes that are all-reduced after the backward pass.
    plain_seconds: for comparison, seconds that all-reduces add to backward if all gradients are reduced at
        the end.
    filled_seconds: for comparison, seconds that all-reduces add to backward with step 1 only: gradients are
        reduced wherever their all-reduce costs no time, and all other gradients at the end.
    exposed_seconds: seconds that all-reduces add to backward with this partition; never more than
        plain_seconds or filled_seconds.
    """

    shares: tuple[Share, ...]
    end_bytes: int
    plain_seconds: float
    filled_seconds: float
    exposed_seconds: float


def partition(layers: Sequence[GeneralizedLayer], all_reduce: LineCost, ready_bytes: int = 0) -> Partition:
    """Returns when to all-reduce the gradients of each layer, by the two steps of FSMoE's Section 5.

    Step 1 places gradients where their all-reduce costs no time. Step 2 places some of the remaining
    gradients beside MoE parts, where their all-reduce costs less time than at the end. With dozens of layers
    the function takes a tenth of a second.

    Args:
        layers: MoE layers, each with the dense layers up to the next MoE layer, in the order of backward.
        all_reduce: seconds of an all-reduce by bytes.
        ready_bytes: bytes of gradients that are ready before the backward pass of the first layer in
            ``layers``, such as those of the model's head.

    Example: one layer, 1000 bytes ready, an all-reduce takes 1 s per byte, the dense part takes 300 s, and
    the MoE part uses the link all the time -> 300 bytes beside the dense part, 700 bytes at the end.
    """
    sources = (ready_bytes, *(layer.gradient_bytes for layer in layers))
    # Bytes that are ready when each layer's backward starts.
    ready_before = list(itertools.accumulate(sources))[:-1]
    # Step 1 (Eq. 3, 4): each part takes, as early as possible, as many bytes as cost no time.
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
    # ``spare``: for each layer, the ready bytes that it and the layers before it have not placed. Bytes that
    # a layer takes in step 2 are missing in all later layers. So a layer may take only as many bytes as every
    # later layer has to spare.
    rooms = [min(spare[at:]) for at in range(len(spare))]
    nothing = [0] * len(layers)
    filled = ExposedSeconds(layers, all_reduce, dense, moe, sum(sources))
    plain = ExposedSeconds(layers, all_reduce, nothing, nothing, sum(sources))
    candidates = [(filled, nothing), (filled, evolve(filled, rooms)), (plain, nothing)]
    chosen, extra = min(candidates, key=lambda candidate: candidate[0].exposed(candidate[1]))
    shares, end_bytes = chosen.placed(extra)
    return Partition(
        shares=tuple(shares),
        end_bytes=end_bytes,
        plain_seconds=all_reduce_seconds(all_reduce, sum(sources)),
        filled_seconds=filled.exposed(nothing),
        exposed_seconds=chosen.exposed(extra),
    )


# ---- step 2 (Section 5.3). Eq. 5 as the paper prints it has its minimum where nothing is placed


SEED = 0
"""Seed of the differential evolution. All ranks use the same seed, so they find the same partition."""

GENERATIONS = 100
"""The most generations of the differential evolution. The evolution ends earlier if all candidates are equal.
"""


@dataclass(frozen=True)
class ExposedSeconds:
    """Computes how many seconds all-reduces add to backward: FSMoE's Eq. 5.

    Step 1 has placed some gradient bytes where their all-reduce costs no time (``dense``, ``moe``). Further
    bytes that are all-reduced while a layer's MoE part runs are called extra bytes. The methods of this class
    get the extra bytes of each layer as an argument, and compute how many seconds they add.

    layers: MoE layers, each with the dense layers up to the next MoE layer, in the order of backward.
    all_reduce: seconds of an all-reduce by bytes.
    dense, moe: for each layer, the bytes that cost no time beside its dense part and beside its MoE part.
    total: bytes of all gradients.
    """

    layers: Sequence[GeneralizedLayer]
    all_reduce: LineCost
    dense: Sequence[int]
    moe: Sequence[int]
    total: int

    def placed(self, extra: Sequence[int]) -> tuple[list[Share], int]:
        """Returns (the all-reduces during each layer's backward pass, the bytes left for the end).

        extra: for each layer, the bytes that are all-reduced beside its MoE part and add time. The bytes that
            fit beside it without adding time are all-reduced there too, and are not counted in this number.
        """
        shares = []
        for layer, dense, moe, more in zip(self.layers, self.dense, self.moe, extra, strict=True):
            t_gar = all_reduce_seconds(self.all_reduce, moe + more)
            degree = layer.best(t_gar).degree
            shares.append(Share(moe_bytes=moe + more, dense_bytes=dense, t_gar=t_gar, degree=degree))
        end_bytes = self.remaining_bytes(extra)
        last = self.layers[-1]
        joined = all_reduce_seconds(self.all_reduce, self.dense[-1] + end_bytes) - last.dense_seconds
        # The bytes that are left join the all-reduce beside the last dense part if that is faster. This is
        # impossible if the last layer has gradients of its own, which are ready only after its backward pass.
        if not last.gradient_bytes and max(0.0, joined) < all_reduce_seconds(self.all_reduce, end_bytes):
            return [*shares[:-1], replace(shares[-1], dense_bytes=self.dense[-1] + end_bytes)], 0
        return shares, end_bytes

    def exposed(self, extra: Sequence[int]) -> float:
        """Returns the seconds that the all-reduces of all gradients add to the backward pass.

        extra: for each layer, the bytes that are all-reduced beside its MoE part and add time. The bytes that
            fit beside it without adding time are all-reduced there too, and are not counted in this number.
        """
        return float(self.of_candidates(np.array(extra, dtype=float)[:, None])[0])

    def remaining_bytes(self, extra: Sequence[int]) -> int:
        """Returns the bytes of gradients that are left for an all-reduce after the backward pass.

        extra: for each layer, the bytes that are all-reduced beside its MoE part and add time. The bytes that
            fit beside it without adding time are all-reduced there too, and are not counted in this number.
        """
        return self.total - sum(self.dense) - sum(self.moe) - sum(extra)

    @functools.cached_property
    def of_candidates(self) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        """A function that computes the seconds that all-reduces add to backward, for many candidates at once.

        A candidate says for each layer how many extra gradient bytes are all-reduced beside its MoE part, on
        top of the bytes that cost no time there. For D layers and S candidates, the argument of the function
        is (D, S), the extra bytes, with a column for each candidate. The result is (S,), the added seconds of
        each candidate.
        """
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
        total = self.remaining_bytes([0] * len(self.layers))

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
    """Finds how many extra gradient bytes to all-reduce during each MoE part, by differential evolution.

    Some bytes can be all-reduced while an MoE part runs without making the pass longer. Extra bytes are bytes
    beyond these. The evolution (scipy's; FSMoE uses the same method) minimizes the seconds that all extra
    bytes add to the backward pass. A candidate has one number from 0 to 1 for each layer. Layers take bytes
    one after another, and a layer takes this fraction of the bytes that the layers before it have left for
    it. So every candidate is valid. Example: rooms (100, 100), candidate (0.4, 0.5) -> 40 and 30 bytes.

    The added seconds are not smooth: as a layer takes more bytes, the seconds stay equal up to some number of
    bytes, and rise from that number on. The evolution comes near this number, but does not find it exactly.
    So a last step computes the number for each layer and tries it (`_polished`).

    problem: computes the seconds that candidates add to the backward pass.
    rooms: for each layer, the most extra bytes that it may take.
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
    """Improves extra gradient bytes: each layer in turn takes the number of bytes that adds fewest seconds.

    Extra bytes are all-reduced beside the MoE part of a layer, on top of the bytes that cost no time beside
    it. If a layer takes more and more bytes, the added seconds stay equal up to some limit, and rise beyond
    the limit, because the all-reduce then takes longer than the MoE part hides. Each number of chunks has
    another limit. For each layer the function tries all these limits, 0 bytes, and the most bytes that the
    layer may take. The function goes over the layers again until no change helps.

    problem: computes the seconds that all-reduces add to the backward pass.
    rooms: for each layer, the most extra bytes that it may take.
    extra: the extra bytes of each layer to start from.
    """
    seconds = problem.of_candidates
    best = problem.exposed(extra)
    for _ in range(len(rooms) + 1):
        best_before = best
        for at, layer in enumerate(problem.layers):
            # The limit for each number of chunks: the most bytes whose all-reduce does not yet make the pass
            # with this number of chunks longer.
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
    """Returns the most extra gradient bytes that one layer may take if the other layers keep their bytes.

    Extra bytes are all-reduced beside the MoE part of a layer, on top of the bytes that cost no time beside
    it. A layer may not take gradients that are not computed yet, nor gradients that another layer has taken.

    rooms: for each layer, the most extra bytes that it may take if all other layers take none.
    extra: the extra bytes of each layer.
    at: index of the layer, in the order of backward.
    """
    taken = list(itertools.accumulate([*extra[:at], 0, *extra[at + 1 :]]))
    return max(0, min(room - gone for room, gone in zip(rooms[at:], taken[at:], strict=True)))

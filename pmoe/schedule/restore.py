"""Restore pairs: whether T_DI and T_M are kept, moved away or made again between forward and backward.

T_DI is the dispatched input (N x M: the N rows that a rank's experts received). T_M is the hidden activation
before the nonlinearity (N x C). M is d_model, and C is d_hidden, or 2 d_hidden for SwiGLU. A pair has one
word (a "fate") for each of the two tensors, which says what is done with the tensor between the passes. A
kept tensor stays in memory for all N rows. Any other tensor is held chunk by chunk, in one or two reused
buffers (ring slots), and backward restores it.

The price of each fate, for one row of T_DI or T_M, with n chunks and s bytes an element:

    tensor  fate         device bytes saved  work added                           lane
    T_DI    keep         0                   none                                 none
            offload      M s (1 - 2/n)       M s bytes out, M s in; M s on host   copy out, copy in
            communicate  M s (1 - 2/n)       a dispatch in backward: M s bytes    communicate
    T_M     keep         0                   none                                 none
            offload      C s (1 - 2/n)       C s bytes out, C s in; C s on host   copy out, copy in
            recompute    C s (1 - 1/n)       C M multiply-adds in backward        compute

Recomputing repeats the experts' first product, which reads T_DI, so T_DI is restored first. Copies out run in
forward, copies in during backward. On one rank a repeated dispatch is only a gather on the compute lane.

The term 1/n or 2/n is for the ring slots. A tensor has one slot, or two if one slot is filled or emptied
while the experts use the other. They hold at most N rows together, so with n = 1 nothing is saved. The price
of a pair is the sum of its two fates. `pmoe.planner.memory` predicts the bytes of a whole layer,
`pmoe.planner.cost_model` its seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DispatchedFate = Literal["keep", "offload", "communicate"]
"""What is done with T_DI, the experts' input, between forward and backward.

"keep": it stays on the device. "offload": it goes to the host and back. "communicate": it is sent again.
"""
HiddenFate = Literal["keep", "offload", "recompute"]
"""What is done with T_M, the hidden activation, between forward and backward.

"keep": it stays on the device. "offload": it goes to the host and back. "recompute": it is computed again.
"""

CopiesFate = Literal["keep", "communicate", "present"]
"""How ranks that host copies of busy experts have the copies' weights in forward and backward.

"keep": sent in forward and kept until backward. "communicate": sent in forward, and sent again in backward.
"present": kept from an earlier call, so not sent at all.
"""

StrategyName = Literal["S1", "S2", "S3", "S4"]
"""MPipeMoE's names of four restore pairs (`STRATEGIES`). MoELayer's ``memory_reuse`` accepts them."""


@dataclass(frozen=True)
class Restore:
    """A restore pair: how backward gets the experts' input (T_DI) and hidden activation (T_M) of forward.

    dispatched: for T_DI: "keep" (it stays on the device), "offload" (it is copied to the host and back), or
        "communicate" (it is sent again in backward).
    hidden: for T_M: "keep", "offload", or "recompute" (it is computed again from T_DI in backward).

    Raises ValueError for another value. As a text a pair is both words, such as "communicate/recompute".
    """

    dispatched: DispatchedFate
    hidden: HiddenFate

    def __post_init__(self) -> None:
        for name, fate, allowed in (
            ("dispatched", self.dispatched, get_args(DispatchedFate)),
            ("hidden", self.hidden, get_args(HiddenFate)),
        ):
            if not isinstance(fate, str) or fate not in allowed:
                raise ValueError(f"{name} ({fate!r}) must be one of {', '.join(allowed)}")

    def __str__(self) -> str:
        return f"{self.dispatched}/{self.hidden}"

    @property
    def strategy(self) -> StrategyName | None:
        """MPipeMoE's name of the pair, "S1" to "S4"; None for the five pairs without a name."""
        return next((name for name, pair in STRATEGIES.items() if pair == self), None)

    @property
    def offloads(self) -> bool:
        """Whether the dispatched rows (T_DI) or the hidden activation (T_M) are copied to the host.

        The schedule then has lanes for these copies, and the layer needs host memory.
        """
        return "offload" in (self.dispatched, self.hidden)


STRATEGIES: dict[StrategyName, Restore] = {
    "S1": Restore("offload", "offload"),
    "S2": Restore("communicate", "offload"),
    "S3": Restore("offload", "recompute"),
    "S4": Restore("communicate", "recompute"),
}
"""MPipeMoE's strategies (Table II): the four of the nine pairs that keep neither T_DI nor T_M."""

KEEP = Restore("keep", "keep")
"""The pair that keeps both T_DI and T_M until backward: it saves no memory and adds no work."""

ALL_PAIRS: tuple[Restore, ...] = tuple(
    Restore(dispatched, hidden) for dispatched in get_args(DispatchedFate) for hidden in get_args(HiddenFate)
)
"""All nine restore pairs, sorted by the word for T_DI, then by the word for T_M."""


def parse_restore(memory_reuse: bool | str | Restore) -> Restore | bool:
    """Checks MoELayer's argument ``memory_reuse``, and replaces "S1" to "S4" by their restore pairs.

    False (no reuse), True (the cost model chooses) and restore pairs are returned as they are.

    Raises ValueError for another text, TypeError for another type.
    Example: "S4" -> Restore("communicate", "recompute").
    """
    if isinstance(memory_reuse, (bool, Restore)):
        return memory_reuse
    rule = f"must be False, True, a Restore or one of {', '.join(STRATEGIES)}"
    if not isinstance(memory_reuse, str):
        raise TypeError(f"memory_reuse ({memory_reuse!r}) {rule}")
    for name, pair in STRATEGIES.items():
        if memory_reuse == name:
            return pair
    raise ValueError(f"memory_reuse ({memory_reuse!r}) {rule}")

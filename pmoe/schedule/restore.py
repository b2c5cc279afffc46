"""What becomes of T_DI and T_M between forward and backward: kept, moved away, or made again.

T_DI is the dispatched input (N x M: the rows that a rank's experts received), T_M the hidden activation
(N x C, before the nonlinearity; C = H, or 2H for SwiGLU). What is kept stays for all N rows. What is not
rotates through the slots of a ring, a slot for one of n chunks, and is restored in the backward pass.

The price of each fate, for a row of T_DI and its row of T_M, with s bytes an element:

    tensor  fate         device bytes saved  work added                           lane
    T_DI    keep         0                   none                                 none
            offload      M s (1 - 2/n)       M s bytes out, M s in; M s on host   copy out, copy in
            communicate  M s (1 - 2/n)       a dispatch in backward: M s bytes    communicate
    T_M     keep         0                   none                                 none
            offload      C s (1 - 2/n)       C s bytes out, C s in; C s on host   copy out, copy in
            recompute    C s (1 - 1/n)       C M multiply-adds in backward        compute

Recompute repeats the experts' first product, which reads T_DI, so T_DI is restored before. Copies out run
in forward, copies in during backward. A dispatch that is repeated is a gather on the compute lane where
W = 1. A ring has one slot, or two where one is filled or emptied while the other computes; it is never
larger than N rows, so at n = 1 nothing is saved. A pair pays the sum of its two fates. For bytes of a whole
layer ask the memory model, for seconds the cost model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DispatchedFate = Literal["keep", "offload", "communicate"]
HiddenFate = Literal["keep", "offload", "recompute"]

StrategyName = Literal["S1", "S2", "S3", "S4"]
"""MPipeMoE's names of four pairs, `STRATEGIES`: what MoELayer's argument ``memory_reuse`` takes."""


@dataclass(frozen=True)
class Restore:
    """One fate for T_DI and one for T_M. ``str`` gives "communicate/recompute".

    Raises ValueError for a fate that the tensor does not have.
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
        """The paper's name, "S1" to "S4", or None for the five pairs that it does not name."""
        return next((name for name, pair in STRATEGIES.items() if pair == self), None)

    @property
    def offloads(self) -> bool:
        """Whether anything is copied to the host, so that copy lanes and host memory are needed."""
        return "offload" in (self.dispatched, self.hidden)


STRATEGIES: dict[StrategyName, Restore] = {
    "S1": Restore("offload", "offload"),
    "S2": Restore("communicate", "offload"),
    "S3": Restore("offload", "recompute"),
    "S4": Restore("communicate", "recompute"),
}
"""MPipeMoE's four, Table II: those of the nine in which neither tensor stays on the device."""

KEEP = Restore("keep", "keep")
"""No reuse: nothing saved, nothing added."""

ALL_PAIRS: tuple[Restore, ...] = tuple(
    Restore(dispatched, hidden) for dispatched in get_args(DispatchedFate) for hidden in get_args(HiddenFate)
)
"""All nine, in the order of the fates (T_DI, then T_M)."""


def parse_restore(memory_reuse: bool | str | Restore) -> Restore | bool:
    """The argument of a layer: False and True pass through, "S1" to "S4" become their pair.

    False is no reuse, True leaves the choice to the cost model. Raises ValueError for another word and
    TypeError for another type. Example: "S4" -> Restore("communicate", "recompute").
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

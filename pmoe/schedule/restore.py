"""Restore pairs: whether T_DI and T_M are kept, moved away or made again between forward and backward.

T_DI is the dispatched input (N x M: the N rows that a rank's experts received). T_M is the hidden activation
before the nonlinearity (N x C). M is d_model, and C is d_hidden, or 2 d_hidden for SwiGLU. A pair has one
word (a "fate") for each of the two tensors, which says what becomes of the tensor between the passes. A kept
tensor stays in memory for all N rows. Any other tensor is in memory chunk by chunk, in one or two reused
buffers (ring slots), and backward restores it. With two of the fates, a narrower form of all N rows stays in
memory, too: "message" keeps the messages in which T_DI arrived, and "e4m3" keeps T_M in this float8 type.

The price of each fate, for one row of T_DI or T_M, with n chunks and s bytes an element. w is the bytes of a
row's message (`pmoe.schedule.wire`), and e = C + 4 C / 128 the bytes of a row of T_M in e4m3:

    tensor  fate         device bytes saved  work added                           lane
    T_DI    keep         0                   none                                 none
            offload      M s (1 - 2/n)       M s bytes out, M s in; M s on host   copy out, copy in
            communicate  M s (1 - 2/n)       a dispatch in backward: M s bytes    communicate
            message      M s (1 - 1/n) - w   unpacking in backward                compute
    T_M     keep         0                   none                                 none
            offload      C s (1 - 2/n)       C s bytes out, C s in; C s on host   copy out, copy in
            recompute    C s (1 - 1/n)       C M multiply-adds in backward        compute
            e4m3         C s (1 - 1/n) - e   packing in forward, unpacking        compute

Recomputing repeats the experts' first product, which reads T_DI, so T_DI is restored first. Forward copies
tensors out to the host, and backward copies them in. On one rank "communicate" sends nothing: backward
gathers the rows from T_I again, on the compute lane. With "message", rows that stay on their rank have no
message. Backward copies them from T_I again, which sends no bytes.

A restored tensor has the same bits as in forward, with one exception: "e4m3" rounds T_M. Forward's output is
not affected, but gradients are. "message" rounds nothing, because forward has computed with the same
messages.

The term 1/n or 2/n is for the ring slots. A tensor has one slot, or two if one slot is filled or emptied
while the experts use the other. With n = 1 the slots have room for all N rows, so nothing is saved. The price
of a pair is the sum of its two fates. `pmoe.planner.memory` predicts the bytes of a whole layer,
`pmoe.planner.cost_model` its seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DispatchedFate = Literal["keep", "offload", "communicate", "message"]
"""What becomes of T_DI, the experts' input, until backward.

"keep": it stays on the device. "offload": it goes to the host and back. "communicate": it is sent again.
"message": the messages in which it arrived stay on the device (a layer with ``wire`` sends rows as messages).
"""
HiddenFate = Literal["keep", "offload", "recompute", "e4m3"]
"""What becomes of T_M, the hidden activation, until backward.

"keep": it stays on the device. "offload": it goes to the host and back. "recompute": it is computed again.
"e4m3": it stays on the device, rounded to e4m3 with a scale for each 128 columns.
"""

GATHERED_AGAIN: tuple[DispatchedFate, ...] = ("communicate", "message")
"""The fates of T_DI with which backward copies rows from the layer's input T_I again.

With "communicate" it copies all rows, with "message" only the rows that stay on their rank.
"""

AllowName = Literal["e4m3"]
"""The value of MoELayer's argument ``allow``, apart from None."""

CopiesFate = Literal["keep", "communicate", "present"]
"""How the ranks that host copies of busy experts get the weights of these copies, in both passes.

"keep": the weights are sent in forward and kept until backward. "communicate": they are sent in forward, and
sent again in backward. "present": they were kept from an earlier call, so they are not sent at all.
"""

StrategyName = Literal["S1", "S2", "S3", "S4"]
"""MPipeMoE's names of four restore pairs (`STRATEGIES`). MoELayer's ``memory_reuse`` accepts them."""


@dataclass(frozen=True)
class Restore:
    """A restore pair: how backward gets the experts' input (T_DI) and hidden activation (T_M) of forward.

    dispatched: what becomes of T_DI: "keep" on the device, "offload" to the host, "communicate", which sends
        T_DI again in backward, or "message", which keeps the messages in which T_DI arrived (in a layer with
        ``wire``).
    hidden: what becomes of T_M: "keep", "offload", "recompute" from T_DI in backward, or "e4m3", which rounds
        T_M and keeps it in fewer bytes.

    ``str(pair)`` is both words, such as "communicate/recompute". Raises ValueError for another word.
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
        """MPipeMoE's name of the pair, "S1" to "S4"; None for a pair without a name."""
        return next((name for name, pair in STRATEGIES.items() if pair == self), None)

    @property
    def offloads(self) -> bool:
        """Whether the dispatched rows (T_DI) or the hidden activation (T_M) are copied to the host.

        The schedule then has lanes for these copies, and the layer needs host memory.
        """
        return "offload" in (self.dispatched, self.hidden)

    @property
    def rounds(self) -> bool:
        """Whether the pair changes gradients, because backward reads a rounded T_M."""
        return self.hidden == "e4m3"

    @property
    def is_narrow(self) -> bool:
        """Whether T_DI or T_M stays on the device in fewer bytes: T_DI as messages, or T_M in e4m3."""
        return self.dispatched == "message" or self.hidden == "e4m3"


STRATEGIES: dict[StrategyName, Restore] = {
    "S1": Restore("offload", "offload"),
    "S2": Restore("communicate", "offload"),
    "S3": Restore("offload", "recompute"),
    "S4": Restore("communicate", "recompute"),
}
"""MPipeMoE's strategies (Table II): the four of `ALL_PAIRS` that keep neither T_DI nor T_M."""

KEEP = Restore("keep", "keep")
"""The pair that keeps both T_DI and T_M until backward: it saves no memory and adds no work."""


def fate_of_copies(restore: Restore, *, stay: bool, are_present: bool = False) -> CopiesFate:
    """Returns how the ranks that host copies of busy experts get the weights of these copies.

    If backward sends rows (T_DI) again, it also sends the weights of copies again, unless ``stay`` is True.
    The layer, the price of a copy, the simulation of a step and the memory model all ask this function. The
    results are explained at `CopiesFate`.

    restore: the restore pair of the call.
    stay: whether the weights stay on the copies' ranks until backward with every restore pair. They do if
        later calls use them (evaluation, gradient accumulation), and if experts are a user's modules.
    are_present: whether the copies' ranks have the weights from an earlier call.

    Example: S4 -> "communicate", which sends the weights twice. S4 with ``stay`` -> "keep".
    """
    if are_present:
        return "present"
    return "communicate" if restore.dispatched == "communicate" and not stay else "keep"


_PAIRS = [
    Restore(dispatched, hidden) for dispatched in get_args(DispatchedFate) for hidden in get_args(HiddenFate)
]

ALL_PAIRS: tuple[Restore, ...] = tuple(pair for pair in _PAIRS if not pair.is_narrow)
"""The nine restore pairs that every layer can have, sorted by what becomes of T_DI, then of T_M."""

NARROW_PAIRS: tuple[Restore, ...] = tuple(pair for pair in _PAIRS if pair.is_narrow)
"""The seven restore pairs that keep T_DI as messages or T_M in e4m3. ``allow="e4m3"`` permits them."""


def parse_restore(memory_reuse: bool | str | Restore) -> Restore | bool:
    """Checks MoELayer's argument ``memory_reuse``, and replaces "S1" to "S4" by their restore pairs.

    False (no reuse), True (the cost model chooses) and restore pairs are returned unchanged.

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


def pairs_to_choose(allow: AllowName | None, *, has_budget: bool, has_messages: bool) -> tuple[Restore, ...]:
    """Returns the restore pairs among which pmoe chooses, for ``memory_reuse=True`` and for `pmoe plan`.

    With a budget these are all pairs of `ALL_PAIRS`. If ``allow`` permits them, pairs of `NARROW_PAIRS`
    follow, which keep T_DI or T_M in fewer bytes. Without a budget, pairs with the fate "keep" are left out
    of both groups: S1 to S4 remain of the first.

    allow: MoELayer's argument; None leaves all narrow pairs out.
    has_budget: whether a memory budget limits the choice.
    has_messages: whether the layer receives rows as messages. If not, pairs with the fate "message" are left
        out.
    """
    exact = ALL_PAIRS if has_budget else tuple(STRATEGIES.values())
    if allow is None:
        return exact
    narrow = [pair for pair in NARROW_PAIRS if has_messages or pair.dispatched != "message"]
    narrow = [pair for pair in narrow if has_budget or "keep" not in (pair.dispatched, pair.hidden)]
    return (*exact, *narrow)


def without_messages(restore: Restore) -> Restore:
    """Returns the restore pair of a layer on one rank: the fate "message" is replaced by "communicate".

    A single rank receives no messages, so it cannot keep messages. With "communicate", backward copies the
    rows from T_I again.

    restore: the pair that the options ask for.
    """
    return Restore("communicate", restore.hidden) if restore.dispatched == "message" else restore

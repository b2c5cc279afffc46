"""Checks whether a layer can keep activations for backward in the forms that restore pairs name.

The activations are T_DI, the rows that a rank's experts received, and T_M, their hidden activation. The forms
are: T_DI in the messages in which the rows arrived, and T_M rounded to e4m3 (a float8 format).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pmoe.experts.stacked import StackedExperts
from pmoe.schedule.restore import Restore, without_messages

if TYPE_CHECKING:
    from pmoe.call.modules import LayerModules


def possible_pairs(modules: LayerModules, pairs: Sequence[Restore]) -> tuple[Restore, ...]:
    """Returns the restore pairs that a layer can have: some of ``pairs``, or with one rank, changed pairs.

    On one rank no messages arrive, so a pair cannot keep the message that brought T_DI. The value "message"
    of a pair is then replaced by "communicate", which on one rank copies the rows from T_I again.

    If the layer cannot keep T_M in e4m3, the pairs with "e4m3" are left out. But if no pair would be left,
    all pairs are returned, and `check_narrow` raises the error for them.

    modules: the layer's modules and options.
    pairs: the pairs that the options allow.
    """
    if modules.wires is None:
        pairs = tuple(dict.fromkeys(map(without_messages, pairs)))
    exact = tuple(pair for pair in pairs if not pair.rounds)
    return exact if exact and _rounding_problem(modules) is not None else tuple(pairs)


def check_narrow(modules: LayerModules, pair: Restore) -> None:
    """Raises ValueError if a restore pair asks for something that the layer cannot do.

    The layer may be unable to keep the messages in which T_DI arrived, because it sends rows as they are
    (wire=None), or to keep T_M in e4m3.

    modules: the layer's modules and options.
    pair: the restore pair that was asked for.
    """
    if pair.dispatched == "message" and modules.options.wire is None:
        raise ValueError(
            f"memory_reuse ({pair}) must not keep T_DI in messages with wire (None), which sends rows as "
            'they are: set wire="e4m3", or keep T_DI'
        )
    problem = _rounding_problem(modules) if pair.rounds else None
    if problem is not None:
        raise ValueError(
            f"memory_reuse ({pair}) must not keep T_M in e4m3 {problem}: keep, offload or recompute T_M"
        )


def _rounding_problem(modules: LayerModules) -> str | None:
    """Returns why a layer cannot keep its hidden activation T_M in e4m3, in words; None if it can.

    modules: the layer's modules and options.
    """
    experts = modules.experts
    if not isinstance(experts, StackedExperts):
        return f"where experts ({type(experts).__name__}) are no pmoe.experts.StackedExperts"
    from pmoe.comm.wire import E4M3_DTYPES

    dtype = next((each.dtype for each in experts.parameters() if each.is_floating_point()), None)
    return None if dtype is None or dtype in E4M3_DTYPES else f"for rows of {dtype}"

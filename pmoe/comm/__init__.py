"""Collectives of the layer: the exchange of row counts, and the all-to-alls that send rows.

Each kind of all-to-all has a file of its own.

Letters that the files of this folder use in shapes:

    N   rows
    M   columns of a row, d_model
    W   ranks that share the layer's experts
    L   ranks that share each expert: each holds a part of its hidden columns; 1 unless experts are sharded
    P   ranks among which rows are dispatched, W / L
    F   bins: equal ranges of a rank's tokens, by which rows are counted. A chunk (micro-batch) consists of
        neighbouring bins
    A   nodes

Words:

    group      a process group of torch.distributed; the default group has all processes
    store      the key-value store of torch.distributed, which every rank can read and write at any time
    peers      the other ranks of a group
    fault      a mistake on one rank. Its number (`Fault`) is sent with the row counts: all ranks then raise
    ring slot  a buffer of fixed size, which the chunks of a pass use in turn
    copy       the weights of a busy expert, on another rank, which computes some of the expert's rows
    relay      to pass on rows for other ranks, as a rank does in a hierarchical all-to-all
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from pmoe.comm.base import Combine, Dispatch, Exchange, FlatAllToAll, Traffic

if TYPE_CHECKING:
    from pmoe.comm.hierarchical import HierarchicalExchange

__all__ = ["Combine", "Dispatch", "Exchange", "Traffic", "make_exchanges"]

ExchangeName = Literal["flat", "hierarchical_1d", "hierarchical_2d"]
"""Names that MoELayer's arguments ``dispatch`` and ``combine`` accept. ``dispatch`` also accepts "auto".

Instead of a name, both arguments accept a module.
"""

NAMES: tuple[ExchangeName, ...] = get_args(ExchangeName)


def make_exchanges(
    dispatch: ExchangeName | Dispatch,
    combine: ExchangeName | Combine | None,
    nodes: int | Sequence[int] | None,
) -> tuple[Dispatch, Combine]:
    """Returns the modules for MoELayer's arguments ``dispatch`` and ``combine``.

    Args:
        dispatch: name of an exchange, or a module, which is returned unchanged.
        combine: name of an exchange, or a module, which is returned unchanged. None for the name in
            ``dispatch``, or for "flat" if ``dispatch`` is a module.
        nodes: which ranks share a node: the number of ranks on each node, an id of its node for each rank, or
            None for the number in LOCAL_WORLD_SIZE. Only hierarchical exchanges made by name use it.

    Raises ValueError for an unknown name, and TypeError for a value that is neither a name nor a module.
    """
    combine = (dispatch if isinstance(dispatch, str) else "flat") if combine is None else combine
    for name, value, kind in (("dispatch", dispatch, Dispatch), ("combine", combine, Combine)):
        names = ", ".join(NAMES + ("auto",) * (name == "dispatch"))
        rule = f"{name} ({value!r}) must be a pmoe.{kind.__name__} or one of {names}"
        if isinstance(value, str) and value not in NAMES:
            raise ValueError(rule)
        if not isinstance(value, str | kind):
            raise TypeError(rule)
    return (
        _exchange_by(dispatch, nodes) if isinstance(dispatch, str) else dispatch,
        _exchange_by(combine, nodes) if isinstance(combine, str) else combine,
    )


def _exchange_by(
    name: ExchangeName, nodes: int | Sequence[int] | None
) -> FlatAllToAll | HierarchicalExchange:
    """Returns a new exchange (a kind of all-to-all) of the given name.

    nodes: which ranks share a node: the number of ranks on each node, an id of its node for each rank, or
        None for the number in LOCAL_WORLD_SIZE. Only hierarchical exchanges use it.
    """
    if name == "flat":
        return FlatAllToAll()
    from pmoe.comm.hierarchical_1d import HierarchicalAllToAll1D
    from pmoe.comm.hierarchical_2d import HierarchicalAllToAll2D

    return (HierarchicalAllToAll1D if name == "hierarchical_1d" else HierarchicalAllToAll2D)(nodes)

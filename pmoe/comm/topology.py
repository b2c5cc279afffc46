"""Which ranks share a node, the process groups that follow from it, and what both hierarchical all-to-alls do
alike.

Letters: N rows, W ranks of the layer's group, A nodes, L ranks of a node, F bins of rows, M columns.
"""

from __future__ import annotations

import abc
import itertools
import math
import os
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.agree import gathered
from pmoe.comm.base import Exchange, Traffic
from pmoe.comm.flat import all_to_all
from pmoe.comm.ranks import Ranks

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""The environment variable in which torchrun and others tell how many processes they started on a node."""

Nodes = int | Sequence[Hashable] | None
"""Ranks a node, counted over all processes as LOCAL_WORLD_SIZE does; or, for each rank of the group, an id of
its node; or None: what the launcher says, one node where it says nothing."""


@dataclass(frozen=True)
class Topology:
    """The nodes of a group's ranks. Ranks are numbered as in the group, nodes by their first rank.

    members: the ranks of each node, by their place in it; places follow the global ranks, as in the process
    groups made of them. global_ranks: of each rank. origin: the argument or variable that said so, with its
    value, for errors.

    Example: nodes [0, 1, 0, 1] -> members ((0, 2), (1, 3)); rank 3 is at place 1 of node 1.
    """

    members: tuple[tuple[int, ...], ...]
    global_ranks: tuple[int, ...]
    origin: str = field(default="nodes", compare=False)
    _node: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _place: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = {r: (a, i) for a, ranks in enumerate(self.members) for i, r in enumerate(ranks)}
        object.__setattr__(self, "_node", tuple(where[r][0] for r in range(len(where))))
        object.__setattr__(self, "_place", tuple(where[r][1] for r in range(len(where))))

    @staticmethod
    def of_nodes(ids: Sequence[Hashable], global_ranks: Sequence[int], origin: str = "nodes") -> Topology:
        """ids: of each rank's node."""
        members: dict[Hashable, list[int]] = {}
        for rank, node in enumerate(ids):
            members.setdefault(node, []).append(rank)
        by_place = (tuple(sorted(ranks, key=global_ranks.__getitem__)) for ranks in members.values())
        return Topology(tuple(by_place), tuple(global_ranks), origin)

    @property
    def num_nodes(self) -> int:
        return len(self.members)

    @property
    def most_local(self) -> int:
        """Ranks of the largest node."""
        return max(len(ranks) for ranks in self.members)

    @property
    def is_level(self) -> bool:
        """Whether there is only one level: a single node, or a single rank on each."""
        return self.num_nodes == 1 or self.most_local == 1

    def node(self, rank: int) -> int:
        return self._node[rank]

    def place(self, rank: int) -> int:
        return self._place[rank]

    def inside(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's node, in the order of their process group."""
        return self.members[self.node(rank)]

    def across(self, rank: int) -> tuple[int, ...]:
        """The ranks at this rank's place of every node that has it, in the order of their process group."""
        place = self.place(rank)
        ranks = (node[place] for node in self.members if place < len(node))
        return tuple(sorted(ranks, key=self.global_ranks.__getitem__))

    def check_even(self, what: str) -> None:
        """Raises ValueError where nodes have different numbers of ranks."""
        sizes = {len(ranks) for ranks in self.members}
        if len(sizes) > 1:
            raise ValueError(
                f"{self.origin} must put equally many of the group's {len(self.global_ranks)} ranks on each "
                f"node for {what}, not {' or '.join(map(str, sorted(sizes)))}"
            )


def find_topology(ranks: Ranks, nodes: Nodes = None) -> Topology:
    """The topology of ``ranks``. A collective where there are several: what each rank was told is compared.

    Raises ValueError or TypeError, on every rank alike, where that differs or cannot be.
    """
    name = LOCAL_WORLD_SIZE if nodes is None else "nodes"
    told = repr(os.environ.get(LOCAL_WORLD_SIZE) if nodes is None else nodes)
    global_ranks = [0]
    if ranks.group is not None:
        global_ranks = dist.get_process_group_ranks(ranks.group)
        _check_alike(f"{name} ({told})", ranks)
    return Topology.of_nodes(_node_ids(nodes, global_ranks), global_ranks, f"{name} ({told})")


def _check_alike(told: str, ranks: Ranks) -> None:
    everyone = gathered(ranks, told, stage="comparing the nodes of ranks")
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise ValueError(
                f"{everyone[0]} must be the same on every rank of the group: rank {rank} has {other}"
            )


def _node_ids(nodes: Nodes, global_ranks: Sequence[int]) -> list[Hashable]:
    """Of each rank's node."""
    if nodes is None:
        text = os.environ.get(LOCAL_WORLD_SIZE)
        if text is None:
            return [0] * len(global_ranks)
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{LOCAL_WORLD_SIZE} ({text!r}) must be a number of ranks, at least 1")
        nodes = int(text)
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        if nodes < 1:
            raise ValueError(f"nodes ({nodes}) must be at least 1 rank a node")
        return [rank // nodes for rank in global_ranks]
    if not isinstance(nodes, Sequence) or isinstance(nodes, str):
        raise TypeError(f"nodes ({nodes!r}) must be a number of ranks, or an id of its node for each rank")
    if len(nodes) != len(global_ranks):
        raise ValueError(f"nodes ({nodes!r}) must have {len(global_ranks)} entries, one a rank of the group")
    return list(nodes)


# ---- process groups -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Links:
    """A rank's process groups: with its node, and with its place on the other nodes; None where no node, or
    no place, has several ranks. Every rank has as many as every other."""

    inside: dist.ProcessGroup | None
    across: dist.ProcessGroup | None


_links: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Topology, Links]] = weakref.WeakKeyDictionary()
"""By a layer's group: all layers of it share them, and both directions do."""


def connect(group: dist.ProcessGroup, topology: Topology) -> Links:
    """The links of this rank, made at the first call, which is a collective of ``group``.

    They stay until torch.distributed is shut down. Where ``group`` has all processes, each makes all links,
    in one order, as torch documents it. Where it has some, the others cannot be asked to take part: its
    members make only their own (use_local_synchronization). Torch then names a group after its ranks and the
    number of groups that the process is in. Ranks with different numbers would hang (pytorch issue 173608),
    and a name that comes again would find in the store what the first left: links are never destroyed.

    Raises ValueError, on every rank of the group, where those numbers differ.
    """
    known = _links.setdefault(group, {})
    if topology not in known:
        options: dict[str, Any] = {"backend": dist.get_backend(group), "timeout": timeout_of(group)}
        if len(topology.global_ranks) < dist.get_world_size():
            options["use_local_synchronization"] = True
            _check_number_of_groups(Ranks(group))
        places = [topology.across(rank) for rank in max(topology.members, key=len)]
        inside = _make_groups(topology.members, topology, options) if topology.most_local > 1 else None
        across = _make_groups(places, topology, options) if topology.num_nodes > 1 else None
        known[topology] = Links(inside, across)
    return known[topology]


def _make_groups(
    members: Sequence[Sequence[int]], topology: Topology, options: dict[str, Any]
) -> dist.ProcessGroup:
    """The one of the groups that this process is in."""
    own, found = dist.get_rank(), None
    for ranks in members:
        global_ranks = [topology.global_ranks[rank] for rank in ranks]
        if own in global_ranks:
            found = dist.new_group(global_ranks, **options)  # to others, torch returns no group
        elif "use_local_synchronization" not in options:
            dist.new_group(global_ranks, **options)
    assert isinstance(found, dist.ProcessGroup)
    return found


def _check_number_of_groups(ranks: Ranks) -> None:
    known = len(dist.distributed_c10d._world.pg_names)
    numbers = gathered(ranks, known, stage="comparing the numbers of process groups")
    if len(set(numbers)) > 1:
        raise ValueError(
            f"group ({ranks.size} of {dist.get_world_size()} processes) must be of processes that are in "
            f"equally many process groups, not in {numbers}: a hierarchical all-to-all makes more of them"
        )


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The group's own: new groups would have torch's default. None where the backend does not tell."""
    try:
        backend: Any = group._get_backend(group._device_types[0])
        timeout: timedelta = backend.options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None
    return timeout


# ---- what both hierarchical all-to-alls share -----------------------------------------------------


class HierarchicalExchange(Exchange):
    """An irregular all-to-all whose rows go by way of other ranks of a node, in several collectives.

    The result is that of `pmoe.comm.flat`, bit by bit. Where all ranks are on one node, or each on its own,
    one flat collective remains. It has process groups of its own, so another thread may use the layer's group
    meanwhile. Rows wait between steps in memory that torch allocates, up to two copies of what a rank relays.

    Counts in `relay_counts` must be those of the rows that will travel.
    """

    in_steps = True
    topology: Topology

    def __init__(self, nodes: Nodes = None) -> None:
        self._nodes = nodes

    def bind(self, ranks: Ranks, traffic: Traffic) -> None:
        """A collective. Raises ValueError or TypeError on every rank alike, before any group is made."""
        super().bind(ranks, traffic)
        self.topology = find_topology(ranks, self._nodes)
        self.check_topology()
        if ranks.size > 1:
            self.connect()

    def check_topology(self) -> None:
        """Raises ValueError for nodes that it cannot serve."""

    def connect(self) -> Links:
        """Process groups are looked up, not held, so that layers can be copied and pickled: an unpickled one
        makes its own at its first exchange of counts."""
        assert self.ranks.group is not None
        return connect(self.ranks.group, self.topology)

    def relay_counts(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor | None:
        if self.ranks.size == 1:
            return None
        self.connect()
        return None if self.topology.is_level else self.relay(send_FW, recv_FW)

    @abc.abstractmethod
    def relay(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor:
        """`relay_counts` where there are two levels."""

    @abc.abstractmethod
    def check_relayed(
        self, send_rows: Sequence[int], recv_rows: Sequence[int], relayed: Sequence[int]
    ) -> bool:
        """Whether ``relayed`` can be the counts of these rows."""

    @abc.abstractmethod
    def carry(
        self,
        rows: Tensor,
        send_rows: Sequence[int],
        out: Tensor,
        recv_rows: Sequence[int],
        relayed: Sequence[int],
    ) -> None:
        """`exchange` where there are two levels."""

    def exchange(
        self,
        rows: Tensor,
        send_rows: Sequence[int],
        out: Tensor,
        recv_rows: Sequence[int],
        relayed: Sequence[int] = (),
    ) -> None:
        """Ends before it returns; on CUDA the current stream waits, not the host."""
        size, level = self.ranks.size, self.topology.is_level
        check_rows("rows", rows, "send_rows", send_rows, size)
        check_rows("out", out, "recv_rows", recv_rows, size)
        if rows.dtype != out.dtype or rows.shape[1:] != out.shape[1:]:
            raise ValueError(
                f"out ({out.dtype}, {list(out.shape)}) must be of the type and width of rows "
                f"({rows.dtype}, {list(rows.shape)})"
            )
        if not level and not self.check_relayed(send_rows, recv_rows, relayed):
            raise ValueError(
                f"relayed ({len(relayed)} numbers) must be what relay_counts returned for send_rows "
                f"({list(send_rows)}) and recv_rows ({list(recv_rows)})"
            )
        if rows.is_floating_point() and rows.element_size() == 1:
            rows, out = rows.view(torch.uint8), out.view(torch.uint8)  # not everything knows float8
        if size == 1:
            out.copy_(rows)
        elif level:
            across = self.topology.most_local == 1
            peers = (self.topology.across if across else self.topology.inside)(self.ranks.rank)
            sent = [send_rows[rank] for rank in peers]
            self.last_step(in_order(rows, send_rows, peers), sent, out, recv_rows, peers, across=across)
        else:
            self.carry(rows, send_rows, out, recv_rows, relayed)

    def step(
        self,
        rows: Tensor,
        send_rows: Sequence[int],
        recv_rows: Sequence[int],
        out: Tensor | None = None,
        *,
        across: bool,
    ) -> Tensor:
        """One collective, inside the node or across nodes; the received rows, in ``out`` if it is given."""
        links, topology, own = self.connect(), self.topology, self.ranks.rank
        group = links.across if across else links.inside
        assert group is not None
        peers = topology.across(own) if across else topology.inside(own)
        sent = (
            (sum(send_rows) - send_rows[peers.index(own)]) * math.prod(rows.shape[1:]) * rows.element_size()
        )
        if rows.dim() == 1:
            self.traffic.scalars += sent
        else:
            self.traffic.rows += sent
        if not across:
            self.traffic.inside += sent
        if out is None:
            out = rows.new_empty((sum(recv_rows), *rows.shape[1:]))
        work = all_to_all(rows, send_rows, out, recv_rows, group)
        assert work is not None
        work.wait()
        return out

    def last_step(
        self,
        rows: Tensor,
        send_rows: Sequence[int],
        out: Tensor,
        recv_rows: Sequence[int],
        sources: Sequence[int],
        *,
        across: bool,
    ) -> None:
        """A step that brings rows from all ranks, in the order of ``sources``; they go to ``out`` in order
        of rank. recv_rows: from each rank."""
        sizes = [recv_rows[rank] for rank in sources]
        pieces = _runs(sizes, sorted(range(len(sources)), key=sources.__getitem__))
        peers = (self.topology.across if across else self.topology.inside)(self.ranks.rank)
        shares = len(sources) // len(peers)
        received = [sum(sizes[i * shares : (i + 1) * shares]) for i in range(len(peers))]
        straight = len(pieces) < 2
        got = self.step(rows, send_rows, received, out if straight else None, across=across)
        if not straight:
            torch.cat([got[start:end] for start, end in pieces], out=out)


def check_rows(name: str, rows: Tensor, counts_name: str, counts: Sequence[int], size: int) -> None:
    """Raises ValueError unless ``rows`` is contiguous, (N,) or (N, M), and ``counts`` cuts all of it."""
    if rows.dim() not in (1, 2) or not rows.is_contiguous():
        raise ValueError(
            f"{name} (shape {list(rows.shape)}, strides {rows.stride()}) must be contiguous, (N,) or (N, M)"
        )
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows.shape[0]:
        raise ValueError(
            f"{counts_name} ({list(counts)}) must be {size} numbers of at least 0 that add up to the rows of "
            f"{name} ({rows.shape[0]})"
        )


def in_order(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Blocks of rows, one of each of ``sizes``, in another order, which names each once. The very same tensor
    where nothing moves; else one copy, whatever the number of blocks.

    Example: rows a bb c with sizes (1, 2, 1) in order (1, 0, 2) -> bb a c.
    """
    pieces = _runs(sizes, order)
    return rows if len(pieces) < 2 else torch.cat([rows[start:end] for start, end in pieces])


def _runs(sizes: Sequence[int], order: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of the pieces to copy one behind the other; neighbours that stay so are one piece."""
    starts = list(itertools.accumulate(sizes, initial=0))
    runs: list[tuple[int, int]] = []
    for block in order:
        start, end = starts[block], starts[block + 1]
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        elif end > start:
            runs.append((start, end))
    return runs

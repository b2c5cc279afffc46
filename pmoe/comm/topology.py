"""Which ranks share a node, process groups inside a node and across nodes, and the grid of a device mesh."""

from __future__ import annotations

import os
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pmoe.arguments import check_kind, is_int
from pmoe.comm.agreement import gathered
from pmoe.comm.ranks import Grid, Ranks


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Of a group's collectives; a new group would have torch's default. None where it cannot be read."""
    timeout: timedelta | None = getattr(backend_options(group), "_timeout", None)
    return timeout


def share_timeout(group: dist.ProcessGroup, others: Iterable[dist.ProcessGroup]) -> None:
    """Gives other groups the timeout of ``group``, where it can be read."""
    timeout = timeout_of(group)
    if timeout is not None:
        for each in others:
            dist.distributed_c10d._set_pg_timeout(timeout, each)


def backend_options(group: dist.ProcessGroup) -> Any:
    """What a group's backend was made with; None where it cannot be read."""
    try:
        backend: Any = group._get_backend(group._device_types[0])
        return backend.options
    except (AttributeError, IndexError, RuntimeError):
        return None


def options_like(group: dist.ProcessGroup) -> dict[str, Any]:
    """Arguments of torch.distributed.new_group, for ranks of ``group`` with its backend and timeout.

    Where the group has some of all processes, the others cannot be asked to take part.
    """
    options: dict[str, Any] = {"backend": dist.get_backend(group), "timeout": timeout_of(group)}
    some = dist.get_world_size(group) < dist.get_world_size()
    return options | ({"use_local_synchronization": True} if some else {})


# ---- a layer's grid of ranks from a device mesh: "ep" across nodes, "esp" inside them (FSMoE's EP and ESP)


ACROSS, INSIDE = "ep", "esp"
"""Names of a mesh's dimensions."""


def dimensions_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Their names. Raises TypeError for what is no mesh."""
    check_kind(DeviceMesh, "a torch.distributed.device_mesh.DeviceMesh", mesh=mesh)
    return mesh.mesh_dim_names or ()


def grid_of_mesh(mesh: DeviceMesh) -> Grid:
    """Of a mesh with the dimensions "ep" and "esp", in either order, or one of them.

    Raises ValueError for other dimensions, TypeError for what is no mesh.
    """
    names = dimensions_of(mesh)
    if not names or not set(names) <= {ACROSS, INSIDE}:
        raise ValueError(
            f"mesh (dimensions {names or 'without names'}) must have the dimensions "
            f'"{ACROSS}" and "{INSIDE}", such as mesh["{ACROSS}", "{INSIDE}"]'
        )
    across = Ranks(mesh.get_group(ACROSS)) if ACROSS in names else Ranks.single()
    inside = Ranks(mesh.get_group(INSIDE)) if INSIDE in names else Ranks.single()
    if inside.size == 1 and across.group is not None:
        return Grid.of_group(across)
    ranks = Ranks((mesh._flatten() if mesh.ndim > 1 else mesh).get_group())
    ranks.takes_default = False  # the mesh's other groups would not follow
    if mesh.ndim > 1 and ranks.group is not None and ranks.group is not dist.group.WORLD:
        share_timeout(mesh.get_group(names[0]), [ranks.group])
    place = {rank: at for at, rank in enumerate(ranks.members)}
    by_inside = mesh.mesh.permute([names.index(name) for name in (INSIDE, ACROSS) if name in names])
    return Grid(ranks, across, inside, tuple(place[int(rank)] for rank in by_inside.flatten()))


# ---- which ranks share a node


LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""The environment variable in which torchrun and others tell how many processes they started on a node."""

Nodes = int | Sequence[Hashable] | None
"""Ranks a node, counted over all processes as LOCAL_WORLD_SIZE does; or, for each rank of the group, an id of
its node; or None, for the number that the launcher gives, and one node where it gives none."""


@dataclass(frozen=True)
class Topology:
    """The nodes of a group's ranks. Ranks are numbered as in the group, nodes by their first rank.

    members: the ranks of each node, by their place in it; places follow the global ranks, as in the process
        groups made of them.
    global_ranks: of each rank.
    origin: the argument or variable from which it was made, with its value, for errors.

    Example: nodes [0, 1, 0, 1] -> members ((0, 2), (1, 3)); rank 3 is at place 1 of node 1.
    """

    members: tuple[tuple[int, ...], ...]
    global_ranks: tuple[int, ...]
    origin: str = field(default="nodes", compare=False)

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
    def max_local(self) -> int:
        """Ranks of the largest node."""
        return max(len(ranks) for ranks in self.members)

    @property
    def is_level(self) -> bool:
        """Whether there is only one level: a single node, or a single rank on each."""
        return self.num_nodes == 1 or self.max_local == 1

    @cached_property
    def _where(self) -> dict[int, tuple[int, int]]:
        """Of each rank its node, and its place there."""
        return {r: (a, i) for a, ranks in enumerate(self.members) for i, r in enumerate(ranks)}

    def node(self, rank: int) -> int:
        return self._where[rank][0]

    def place(self, rank: int) -> int:
        return self._where[rank][1]

    def inside(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's node, in the order of their process group."""
        return self.members[self.node(rank)]

    def across(self, rank: int) -> tuple[int, ...]:
        """The ranks at this rank's place of every node that has it, in the order of their process group."""
        place = self.place(rank)
        ranks = (node[place] for node in self.members if place < len(node))
        return tuple(sorted(ranks, key=self.global_ranks.__getitem__))


def find_topology(ranks: Ranks, nodes: Nodes = None) -> Topology:
    """The topology of ``ranks``. A collective where there are several: their arguments are compared.

    Raises ValueError or TypeError, on every rank, where these differ or cannot be.
    """
    name = LOCAL_WORLD_SIZE if nodes is None else "nodes"
    origin = f"{name} ({os.environ.get(LOCAL_WORLD_SIZE) if nodes is None else nodes!r})"
    first, *others = gathered(ranks, origin, stage="comparing the nodes of ranks")
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(f"{first} must be the same on every rank of the group: rank {rank} has {other}")
    global_ranks = ranks.members or [0]
    return Topology.of_nodes(node_ids(nodes, global_ranks), global_ranks, origin)


def node_ids(nodes: Nodes, global_ranks: Sequence[int]) -> list[Hashable]:
    """Of each rank's node."""
    if nodes is None:
        text = os.environ.get(LOCAL_WORLD_SIZE)
        if text is None:
            return [0] * len(global_ranks)
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{LOCAL_WORLD_SIZE} ({text!r}) must be a number of ranks, at least 1")
        nodes = int(text)
    if is_int(nodes):
        if nodes < 1:
            raise ValueError(f"nodes ({nodes}) must be at least 1 rank a node")
        return [rank // int(nodes) for rank in global_ranks]
    if not isinstance(nodes, Sequence) or isinstance(nodes, str):
        raise TypeError(f"nodes ({nodes!r}) must be a number of ranks, or an id of its node for each rank")
    if len(nodes) != len(global_ranks):
        raise ValueError(f"nodes ({nodes!r}) must have {len(global_ranks)} entries, one a rank of the group")
    return list(nodes)


# ---- process groups inside a node and across nodes


class NodeGroups(NamedTuple):
    """A rank's process groups: inside its node, and across nodes with the ranks at its place. None, on every
    rank, where no node, or no place, has several ranks."""

    inside: dist.ProcessGroup | None
    across: dist.ProcessGroup | None


_node_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Topology, NodeGroups]]
_node_groups = weakref.WeakKeyDictionary()
"""By a layer's group: all layers of it share them, and both directions do."""


def connect(group: dist.ProcessGroup, topology: Topology) -> NodeGroups:
    """The groups of this rank, made at the first call, which is a collective of ``group``.

    They stay until torch.distributed is shut down. Where ``group`` has all processes, each makes all groups,
    in one order, as torch documents it. Where it has some, its members make only their own
    (use_local_synchronization). Torch then names a group after its ranks and the number of groups that the
    process is in: ranks with different numbers would hang (pytorch issue 173608), and a name that comes again
    would find the first one's keys in the store: no group is ever destroyed.

    Raises ValueError, on every rank of the group, where those numbers differ.
    """
    known = _node_groups.setdefault(group, {})
    if topology not in known:
        options = options_like(group)
        if "use_local_synchronization" in options:
            _check_number_of_groups(Ranks(group))
        places = [topology.across(rank) for rank in max(topology.members, key=len)]
        inside = _make_groups(topology.members, topology, options) if topology.max_local > 1 else None
        across = _make_groups(places, topology, options) if topology.num_nodes > 1 else None
        known[topology] = NodeGroups(inside, across)
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

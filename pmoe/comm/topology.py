"""The nodes that ranks are on, process groups inside and across nodes, and the grid of a device mesh."""

from __future__ import annotations

import os
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pmoe.arguments import check_kind, is_int, ranks_in_environment
from pmoe.comm.agreement import gathered
from pmoe.comm.grid import Grid
from pmoe.comm.group_options import options_like, share_timeout
from pmoe.comm.ranks import Ranks

# ---- a layer's grid of ranks from a device mesh: "ep" across nodes, "esp" inside them (FSMoE's EP and ESP)


ACROSS, INSIDE = "ep", "esp"
"""Names of a mesh's dimensions: experts are distributed over "ep", and each expert is split over "esp".

The ranks of "ep" may be on different nodes; the ranks of "esp" are on one node.
"""


def dimensions_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns the names of a mesh's dimensions; () if the dimensions have no names.

    Raises TypeError if ``mesh`` is not a DeviceMesh.
    """
    check_kind(DeviceMesh, "a torch.distributed.device_mesh.DeviceMesh", mesh=mesh)
    return mesh.mesh_dim_names or ()


def grid_of_mesh(mesh: DeviceMesh) -> Grid:
    """Returns the grid of ranks that a mesh describes.

    mesh: a mesh with the dimension "ep", over which experts are spread, the dimension "esp", over which each
        expert is split, or both. The two dimensions may have any order.

    Raises ValueError for other dimensions, and TypeError if ``mesh`` is not a DeviceMesh.
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
    ranks.takes_default = False  # a new default group could not replace the mesh's other groups
    if mesh.ndim > 1 and ranks.group is not None and ranks.group is not dist.group.WORLD:
        share_timeout(mesh.get_group(names[0]), [ranks.group])
    place = {rank: at for at, rank in enumerate(ranks.members)}
    by_inside = mesh.mesh.permute([names.index(name) for name in (INSIDE, ACROSS) if name in names])
    return Grid(ranks, across, inside, tuple(place[int(rank)] for rank in by_inside.flatten()))


# ---- which ranks share a node


LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Environment variable with the number of processes on a node, set by torchrun and other launchers."""

Nodes = int | Sequence[Hashable] | None
"""Which ranks share a node. One of:

    int        number of processes of the job on each node, as in LOCAL_WORLD_SIZE
    sequence   for each rank of the group, an id of its node
    None       the number in LOCAL_WORLD_SIZE; one node for all ranks if it is not set
"""


@dataclass(frozen=True)
class Topology:
    """The nodes of a group's ranks.

    Ranks are numbered as in the group. Nodes are numbered in the order of their first ranks, so rank 0 is on
    node 0.

    members: the ranks of each node, in the order of their global ranks, which is also torch's order in new
        process groups. A rank's index among them is its place in the node.
    global_ranks: the global rank of each rank of the group.
    origin: the argument or variable from which the topology was made, with its value, for errors.

    Example: nodes [0, 1, 0, 1] -> members ((0, 2), (1, 3)); rank 3 is at place 1 of node 1.
    """

    members: tuple[tuple[int, ...], ...]
    global_ranks: tuple[int, ...]
    origin: str = field(default="nodes", compare=False)

    @staticmethod
    def of_nodes(ids: Sequence[Hashable], global_ranks: Sequence[int], origin: str = "nodes") -> Topology:
        """Returns the topology of a group from the nodes of its ranks.

        ids: for each rank of the group, an id of its node. Ranks with equal ids share a node.
        global_ranks: for each rank of the group, its global rank.
        origin: the source of the ids, for errors.
        """
        members: dict[Hashable, list[int]] = {}
        for rank, node in enumerate(ids):
            members.setdefault(node, []).append(rank)
        by_place = (tuple(sorted(ranks, key=global_ranks.__getitem__)) for ranks in members.values())
        return Topology(tuple(by_place), tuple(global_ranks), origin)

    @property
    def num_nodes(self) -> int:
        """A, the number of nodes."""
        return len(self.members)

    @property
    def max_local(self) -> int:
        """The largest number of ranks on any node."""
        return max(len(ranks) for ranks in self.members)

    @property
    def is_level(self) -> bool:
        """Whether one flat collective is enough: there is only one node, or each node has only one rank."""
        return self.num_nodes == 1 or self.max_local == 1

    @cached_property
    def _where(self) -> dict[int, tuple[int, int]]:
        """The number of each rank's node, and the rank's place in that node."""
        return {r: (a, i) for a, ranks in enumerate(self.members) for i, r in enumerate(ranks)}

    def node(self, rank: int) -> int:
        """Returns the number of the node that a rank is on."""
        return self._where[rank][0]

    def place(self, rank: int) -> int:
        """Returns the index of a rank among the ranks of its node, from 0."""
        return self._where[rank][1]

    def inside(self, rank: int) -> tuple[int, ...]:
        """Returns all ranks on the same node as ``rank``, in the order of the node's process group."""
        return self.members[self.node(rank)]

    def across(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that have the same place in their nodes as ``rank``, in group order.

        A rank's place is its number among the ranks of its node. A node with too few ranks has no rank at
        that place.
        """
        place = self.place(rank)
        ranks = (node[place] for node in self.members if place < len(node))
        return tuple(sorted(ranks, key=self.global_ranks.__getitem__))


def find_topology(ranks: Ranks, nodes: Nodes = None) -> Topology:
    """Returns the topology of ``ranks``, after ``nodes`` was compared between ranks.

    With several ranks the call is a collective.

    nodes: which ranks share a node (`Nodes`): the number of ranks on each node, an id of its node for each
        rank, or None for the number in LOCAL_WORLD_SIZE.

    Raises ValueError or TypeError, on every rank, if ``nodes`` differs between ranks or is invalid.
    """
    first, *others = gathered(ranks, origin_of(nodes), stage="comparing the nodes of ranks")
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(f"{first} must be the same on every rank of the group: rank {rank} has {other}")
    return own_topology(ranks, nodes)


def own_topology(ranks: Ranks, nodes: Nodes = None) -> Topology:
    """Returns the topology of ``ranks`` as this rank's argument ``nodes`` describes it. Not a collective.

    nodes: which ranks share a node (`Nodes`).

    Raises ValueError or TypeError if ``nodes`` is invalid.
    """
    global_ranks = ranks.members or [0]
    return Topology.of_nodes(node_ids(nodes, global_ranks), global_ranks, origin_of(nodes))


def origin_of(nodes: Nodes) -> str:
    """Returns the argument ``nodes`` in words, or the environment variable that is used if it is None.

    Example: 2 -> "nodes (2)"
    """
    if nodes is None:
        return f"{LOCAL_WORLD_SIZE} ({os.environ.get(LOCAL_WORLD_SIZE)!r})"
    return f"nodes ({nodes!r})"


def node_ids(nodes: Nodes, global_ranks: Sequence[int]) -> list[Hashable]:
    """Returns for each rank of a group an id of its node. Ranks with equal ids share a node.

    nodes: the user's argument: the number of ranks on each node, an id of its node for each rank, or None for
        the number in LOCAL_WORLD_SIZE.
    global_ranks: the global rank of each rank of the group.

    Raises ValueError or TypeError if ``nodes`` is invalid.
    """
    if nodes is None:
        # Without the variable, all ranks are on one node.
        nodes = ranks_in_environment(LOCAL_WORLD_SIZE, max(global_ranks) + 1)
    if is_int(nodes):
        if nodes < 1:
            raise ValueError(f"nodes ({nodes}) must be at least 1 rank a node")
        return [rank // int(nodes) for rank in global_ranks]
    if not isinstance(nodes, Sequence) or isinstance(nodes, str):
        raise TypeError(f"nodes ({nodes!r}) must be a number of ranks, or an id of its node for each rank")
    if len(nodes) != len(global_ranks):
        raise ValueError(
            f"nodes ({nodes!r}) must have {len(global_ranks)} entries, one for each rank of the group"
        )
    return list(nodes)


# ---- process groups inside a node and across nodes


class NodeGroups(NamedTuple):
    """One rank's two process groups: the ranks of its node, and the ranks at its place in all nodes.

    A rank's place is its number among the ranks of its node.

    inside: the ranks of its node. None on every rank, if no node has several ranks.
    across: the ranks that have the same place in their nodes. None on every rank, if there is one node.
    """

    inside: dist.ProcessGroup | None
    across: dist.ProcessGroup | None


_node_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Topology, NodeGroups]]
_node_groups = weakref.WeakKeyDictionary()
"""The process groups inside and across nodes, by the group of a layer. Layers of a group share them."""


def connect(group: dist.ProcessGroup, topology: Topology) -> NodeGroups:
    """Returns this rank's process groups inside its node and across nodes.

    The first call for a topology makes these groups, and is a collective of ``group``:

    - If ``group`` has all processes, each process makes the groups of all processes, in the same order,
      because torch requires this.
    - If ``group`` has only some of the processes, each member makes only its own two groups
      (use_local_synchronization). Torch then names a new group by its ranks and by the number of groups that
      the process already belongs to. Processes with different numbers would hang (pytorch issue 173608).

    The groups exist until torch.distributed is shut down. Later calls for the same topology return the same
    groups.

    The topology must be the same on all ranks. A layer has compared its ``nodes`` between ranks before.

    Raises ValueError on every rank of ``group``, before any group is made, if ``group`` has only some of the
    processes and its members belong to different numbers of groups.
    """
    known = _node_groups.setdefault(group, {})
    # Kept for good: a group made later could get the name of a deleted one, and find its keys in the store.
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
    """Makes process groups, and returns the group that this process is in.

    members: for each new group, its ranks, numbered as in ``topology``.
    options: arguments of torch.distributed.new_group.
    """
    own_rank = dist.get_rank()
    own_group = None
    for ranks in members:
        global_ranks = [topology.global_ranks[rank] for rank in ranks]
        if own_rank in global_ranks:
            own_group = dist.new_group(global_ranks, **options)  # torch gives a group only to its members
        elif "use_local_synchronization" not in options:
            dist.new_group(global_ranks, **options)
    assert isinstance(own_group, dist.ProcessGroup)
    return own_group


def _check_number_of_groups(ranks: Ranks) -> None:
    """Raises ValueError on every rank if processes belong to different numbers of process groups.

    If a new group has only some of the processes, torch puts this number into the group's name. With
    different names the processes would hang.
    """
    known = len(dist.distributed_c10d._world.pg_names)
    numbers = gathered(ranks, known, stage="comparing the numbers of process groups")
    if len(set(numbers)) > 1:
        raise ValueError(
            f"group ({ranks.size} of {dist.get_world_size()} processes) must have processes that are in "
            f"equally many process groups, not in {numbers}: a hierarchical all-to-all makes new groups, and "
            "torch would hang if these numbers differ. Make equally many groups on all of its processes"
        )

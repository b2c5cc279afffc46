"""Process groups inside a node and across nodes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pmoe.comm.agree import gathered
from pmoe.comm.ranks import Ranks, timeout_of
from pmoe.comm.topology import Topology


@dataclass(frozen=True)
class NodeGroups:
    """A rank's process groups: inside its node, and across nodes with the ranks at its place.

    None where no node, or no place, has several ranks. Every rank has as many as every other.
    """

    inside: dist.ProcessGroup | None
    across: dist.ProcessGroup | None


_node_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Topology, NodeGroups]] = (
    weakref.WeakKeyDictionary()
)
"""By a layer's group: all layers of it share them, and both directions do."""


def connect(group: dist.ProcessGroup, topology: Topology) -> NodeGroups:
    """The groups of this rank, made at the first call, which is a collective of ``group``.

    They stay until torch.distributed is shut down. Where ``group`` has all processes, each makes all groups,
    in one order, as torch documents it. Where it has some, the others cannot be asked to take part: its
    members make only their own (use_local_synchronization). Torch then names a group after its ranks and the
    number of groups that the process is in. Ranks with different numbers would hang (pytorch issue 173608),
    and a name that comes again would find the first one's keys in the store: no group is ever destroyed.

    Raises ValueError, on every rank of the group, where those numbers differ.
    """
    known = _node_groups.setdefault(group, {})
    if topology not in known:
        options: dict[str, Any] = {"backend": dist.get_backend(group), "timeout": timeout_of(group)}
        if len(topology.global_ranks) < dist.get_world_size():
            options["use_local_synchronization"] = True
            _check_number_of_groups(Ranks(group))
        places = [topology.across(rank) for rank in max(topology.members, key=len)]
        inside = _make_groups(topology.members, topology, options) if topology.most_local > 1 else None
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

"""Groups of hosts: which ranks with copies of an expert pass its weights on to each other.

The owner of an expert is the rank that has its parameters. A host, in this file, is a rank that has a copy of
the expert, so the owner is no host. The owner sends the weights once to each group of hosts: a different part
to each host of the group. Then the hosts of the group send each other their parts. Gradients take the
opposite way. Usually all hosts of an expert are one group. If some hosts are on the owner's node and all
others on one other node, the hosts of each node may be a group of their own. With two groups, only the owner
sends the expert to the other node, and only once. Two examples for nodes of 2 ranks, with rank 0 as the
owner:

    hosts     groups       messages between nodes
    1, 2, 3   {1} {2, 3}   rank 0 sends one half of the expert to rank 2, the other half to rank 3
    2, 4, 6   {2, 4, 6}    rank 0 sends a third to each host, then each host sends its third to both others

In the first line, one whole expert is sent between the nodes. With a single group, two whole experts (six
thirds) would be sent: rank 0 sends a third to rank 2 and a third to rank 3, rank 1 sends its third to both,
and ranks 2 and 3 send their thirds to rank 1. In the second line, a group for each node would make rank 0
send the whole expert three times.

An expert with two groups is sent twice. A rank owns at most one expert with two groups, so its messages need
room for only one expert more than it owns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def host_groups(
    hosts: Mapping[int, Sequence[tuple[int, int]]], nodes: Sequence[int]
) -> dict[int, list[list[int]]]:
    """Divides the hosts of each expert with copies into groups that pass the weights on among themselves.

    hosts: for each expert with copies, pairs (rank, rows that the rank computes): first the owner, then the
        expert's hosts (`CopyPlan.hosts`).
    nodes: (W,) the node of each of W ranks.

    Returns: for each of these experts, its groups, usually one. A group is a list of hosts in rising order of
    rank. The owner is in no group.
    """
    groups = {}
    has_two = set()
    for expert in sorted(hosts):
        (owner, _), *copies = hosts[expert]
        ranks = sorted(rank for rank, _ in copies)
        near = [rank for rank in ranks if nodes[rank] == nodes[owner]]
        far = [rank for rank in ranks if nodes[rank] != nodes[owner]]
        if near and len({nodes[rank] for rank in far}) == 1 and owner not in has_two:
            has_two.add(owner)
            groups[expert] = [near, far]
        else:
            groups[expert] = [ranks]
    return groups


def messages_between_nodes(
    pairs: Collection[tuple[int, int]], owners: Sequence[int], nodes: Sequence[int]
) -> int:
    """Estimates how many experts the busiest rank sends to other nodes, or receives from other nodes.

    A rank receives one expert for each copy that it hosts of an expert of another node. A rank sends each of
    its experts once if all hosts on other nodes are on the same node. If they are on several nodes, the
    expert counts twice, because its hosts also pass parts on to each other between these nodes. The result is
    the largest of these numbers of all ranks. Other parts that hosts pass on between nodes are not counted,
    so the result is an estimate.

    pairs: the copies that are sent, as pairs (expert, rank).
    owners: (E,) the rank that owns each of E experts.
    nodes: (W,) the node of each of W ranks.
    """
    received = [0] * len(nodes)
    nodes_of_expert: dict[int, set[int]] = {}
    for expert, rank in pairs:
        node = nodes[rank]
        if node != nodes[owners[expert]]:
            received[rank] += 1
            nodes_of_expert.setdefault(expert, set()).add(node)
    if not nodes_of_expert:
        return 0
    sent = [0] * len(nodes)
    for expert, others in nodes_of_expert.items():
        sent[owners[expert]] += min(len(others), 2)
    return max(*received, *sent)

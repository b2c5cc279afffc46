"""Chooses the all-to-all of dispatch="auto": the fastest by the link speeds that `pmoe profile` measured."""

from __future__ import annotations

import torch

from pmoe.call.options import LayerOptions
from pmoe.comm import NAMES, ExchangeName
from pmoe.comm.agreement import from_first
from pmoe.comm.grid import Grid
from pmoe.comm.topology import Nodes, Topology, find_topology
from pmoe.measure.bench import identity
from pmoe.measure.profile import load_profile, profile_path
from pmoe.measure.store import read_or_default
from pmoe.planner.cluster import links_of, message_line
from pmoe.planner.profile import Profile
from pmoe.schedule.wire import message_bytes
from pmoe.warn import log

TOKENS = 4096
"""Number of tokens per rank for which the all-to-alls are compared.

The all-to-all is chosen when the layer is built, before it has a batch, so this number is a guess. The tokens
are cut into as many chunks (micro-batches) as the options fix, or into 4 if the options leave the number
open. The command `pmoe plan` compares all-to-alls for any number of tokens."""

ONLY_FLAT = ("memory_budget", "pad_to_capacity", "fused")
"""Names of layer options that work only with the flat all-to-all: each row goes directly to its rank."""


def fastest_dispatch(
    spec: LayerOptions, grid: Grid, nodes: Nodes, device: torch.device | str | None, dtype: torch.dtype | None
) -> ExchangeName:
    """Returns the name of the fastest all-to-all (flat or hierarchical), the same on every rank. Collective.

    A flat all-to-all sends each row directly to its rank. A hierarchical all-to-all sends rows in steps,
    inside a node and between nodes, so that fewer and larger messages cross the slow link between nodes. The
    ranks exchange the names of their nodes. Rank 0 then compares the all-to-alls by its stored profile (link
    speeds that `pmoe profile` measured), and logs the reason of its choice. The flat all-to-all is taken
    without a comparison in these cases:

    - there is one node, or each node has one rank, or nodes have different numbers of ranks;
    - an option of the layer works with the flat all-to-all only (`ONLY_FLAT`);
    - no stored profile has both the speed between nodes and the speed inside a node.

    spec: the options of the layer.
    grid: the ranks of the layer.
    nodes: the layer's argument ``nodes``, which says on which node each rank is.
    device, dtype: device and dtype of the rows that will be sent.

    Raises ValueError or TypeError on every rank if ``nodes`` is wrong.
    """
    topology = find_topology(grid.ep, nodes)
    like = torch.empty(0, device=device, dtype=dtype)
    choice_of_first = _by_profile(spec, grid, topology, like) if grid.all.rank == 0 else (NAMES[0], "")
    name: ExchangeName
    name, why = from_first(grid.all, choice_of_first, stage="choosing the all-to-all")
    log.info('dispatch="auto" takes "%s": %s', name, why)
    return name


def _by_profile(
    spec: LayerOptions, grid: Grid, topology: Topology, like: torch.Tensor
) -> tuple[ExchangeName, str]:
    """Returns the name of the all-to-all that is fastest according to the stored profile, and the reason.

    The profile is this rank's file with the link speeds that `pmoe profile` measured. If there is no profile,
    or no comparison is possible (`fastest_dispatch` lists the cases), the result is the flat all-to-all,
    which sends each row directly to its rank.

    spec: the options of the layer.
    grid: the ranks of the layer.
    topology: the node of each rank.
    like: an empty tensor with the device and dtype of the rows that will be sent.
    """
    if topology.is_level:
        return NAMES[0], "no machine has several ranks beside other machines"
    if len(set(map(len, topology.members))) > 1:
        return NAMES[0], "machines have different numbers of ranks"
    for option in ONLY_FLAT:
        if getattr(spec, option):
            return NAMES[0], f"{option} ({getattr(spec, option)!r}) needs it"

    def stored() -> Profile:
        who = identity(grid.all, like.device, like.dtype)
        return load_profile(profile_path(who), expected=who)

    profile = read_or_default(None, 'dispatch="auto"', stored)
    links = {} if profile is None else links_of(profile)
    if profile is None or len(links) < 2:
        return NAMES[0], "no stored profile of these ranks has both links: `pmoe profile` measures them"
    rows = TOKENS * spec.top_k * (1 - 1 / grid.ep.size) / (spec.fixed_degree or 4)
    lines = {name: message_line(name, topology.num_nodes, topology.max_local, links) for name in NAMES}
    row_bytes = message_bytes(spec.wire, spec.row_columns, like.element_size())
    seconds = {name: line(rows * row_bytes) for name, line in lines.items()}
    times = ", ".join(f"{name} {took * 1e3:.3g} ms" for name, took in seconds.items())
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest, f"an all-to-all takes {times}, by the profile of {profile.when}"

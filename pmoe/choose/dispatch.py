"""Chooses the all-to-all for dispatch="auto": the fastest by the speeds that `pmoe profile` measured."""

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
"""Number of tokens of a rank for which the all-to-alls are compared, because the layer has no batch yet.

The tokens are cut into as many chunks (micro-batches) as the options fix, or into 4 if the options leave the
number open. `pmoe plan` compares all-to-alls for any number of tokens."""

ONLY_FLAT = ("memory_budget", "pad_to_capacity", "fused")
"""Options that need the flat all-to-all, which sends each row straight to its destination."""


def fastest_dispatch(
    spec: LayerOptions, grid: Grid, nodes: Nodes, device: torch.device | str | None, dtype: torch.dtype | None
) -> ExchangeName:
    """Returns the name of the fastest all-to-all, the same on every rank. Collective.

    Ranks tell each other on which nodes they are. Rank 0 then chooses by its stored profile (the speeds of
    links that `pmoe profile` measured), and the reason is logged. The flat all-to-all, in which each row is
    sent directly to its rank, is taken in these cases:

    - there is one node, or each node has one rank, or nodes have different numbers of ranks;
    - an option of the layer works with the flat all-to-all only (`ONLY_FLAT`);
    - no stored profile has the speeds between nodes and inside them.

    spec: the options of the layer.
    grid: the ranks of the layer.
    nodes: the layer's argument ``nodes``, which says on which node each rank is.
    device, dtype: device and dtype of the rows.

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
    """Returns the name of the fastest all-to-all by this rank's stored profile, and the reason.

    spec: the options of the layer.
    grid: the ranks of the layer.
    topology: the node of each rank.
    like: an empty tensor with device and dtype of the rows.
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

"""Converts a layer's weights: from and to other systems, to fewer experts, and from a dense network.

state_dicts     converts other systems' state dicts to pmoe's and back, bit for bit
fewer_experts   prunes and merges the experts of a state dict
upcycling       copies a dense feed-forward network into the experts of a layer
"""

from __future__ import annotations

from pmoe.convert.fewer_experts import (
    busiest_experts,
    group_experts,
    merge_experts,
    prune_experts,
    restore_experts,
)
from pmoe.convert.state_dicts import AXES, LAYOUTS, Layout, LayoutName, from_pmoe, parts_of, to_pmoe
from pmoe.convert.upcycling import copy_into_experts

__all__ = [
    "AXES",
    "LAYOUTS",
    "Layout",
    "LayoutName",
    "busiest_experts",
    "copy_into_experts",
    "from_pmoe",
    "group_experts",
    "merge_experts",
    "parts_of",
    "prune_experts",
    "restore_experts",
    "to_pmoe",
]

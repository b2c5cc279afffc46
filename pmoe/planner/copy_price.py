"""The price of a copy of a busy expert: how many rows a rank could compute while the copy is sent.

A copy pays if it saves the busiest rank more rows than its price (`pmoe.planner.copies`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pmoe.planner.costs import LineCost
from pmoe.planner.profile import Profile


def prices_of_copy(profile: Profile, links: Mapping[str, LineCost], **layer: Any) -> tuple[int, int]:
    """Returns the price of a copy on the node of its owner, and of a copy on another node, in rows.

    profile: measured rates.
    links: the costs of a message inside a node ("inside") and between nodes ("outside"). If one of them is
        missing, both prices use the profile's cost of messages.
    layer: sizes of the layer, and whether it is trained: all keyword arguments of `copy_price` except
        ``link``.
    """
    has_both = {"inside", "outside"} <= set(links)
    near, far = (
        copy_price(profile, link=links[name] if has_both else profile.message, **layer)
        for name in ("inside", "outside")
    )
    return min(near, far), far


def copy_price(
    profile: Profile,
    *,
    link: LineCost,
    expert_elements: int,
    d_model: int,
    element_size: int,
    num_ranks: int,
    trains: bool,
    learned: float = 1.0,
) -> int:
    """Returns the price of a copy: the rows that a rank could compute while the copy's weights are sent.

    The time of a row is the time of its products, or of its messages if these take longer. The time of a copy
    is the time to send its weights, and also its gradients if a backward pass follows. It is assumed that no
    computation hides the time of a copy.

    profile: measured rates.
    link: the cost of a message on the link over which the weights are sent.
    expert_elements: elements of an expert's weights. This is also the number of multiply-adds of a row.
    d_model: M, the columns of a row.
    element_size: bytes of an element.
    num_ranks: number of ranks. One of ``num_ranks`` rows is assumed to stay on its rank, without a message.
    trains: whether a backward pass follows.
    learned: the fraction of an expert's weights whose gradients are sent in backward; 0 if experts are
        frozen.
    """
    passes = 2 if trains else 1
    products = expert_elements * profile.compute.beta_seconds * (3 if trains else 1)
    crossing = (num_ranks - 1) / num_ranks
    messages = 2 * passes * d_model * element_size * profile.message.beta_seconds * crossing
    expert_bytes = expert_elements * element_size
    copy_seconds = link(expert_bytes)
    if trains and learned:
        copy_seconds += link(learned * expert_bytes)
    row_seconds = max(products, messages)
    return math.ceil(copy_seconds / row_seconds) if row_seconds else 0

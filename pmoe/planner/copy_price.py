"""The price of a copy of a busy expert: how many rows a rank could compute while the copy is sent.

A copy pays if it saves the busiest rank more rows than its price (`pmoe.planner.copies`). A training step
sends these messages for a copy and for a row. V, VG, S, R and SI are kinds of tasks
(`pmoe.schedule.tasks.Kind`):

    pass       messages of a copy                         messages of a row
    forward    V: the weights of the expert               S, R: to the rank of the expert, and back
    backward   V, unless the weights were kept            S, R: the gradient of the result, and back
               VG: the gradients of the trained weights   SI, if the restore pair sends T_DI again

`pmoe.schedule.restore.fate_of_copies` says whether the weights are kept between the passes. Copies that later
calls use again are kept with every restore pair, so V sends them once. Later calls do not send them, so their
price is then 0 (``present`` of `pmoe.planner.copies.plan_copies`).

A copy on the node of its owner is sent over the link inside the node, any other copy over the link between
nodes. If an expert has several hosts, they pass parts of the weights (VR) and of the gradients (VGR) on to
each other. V and VG then carry only the other parts, so a host still receives and sends each byte once.

    price = seconds of the copy's messages / seconds of a row
    seconds of a row = max(seconds of its products, seconds of its messages)

It is assumed that no computation hides the messages of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pmoe.planner.costs import LineCost
from pmoe.planner.profile import Profile
from pmoe.schedule.restore import KEEP, Restore, fate_of_copies
from pmoe.schedule.tasks import Stages


def copy_prices(
    profile: Profile,
    links: Mapping[str, LineCost],
    *,
    multiply_adds: float,
    row_bytes: float,
    expert_bytes: float,
    num_ranks: int,
    trains: bool,
    learned: float = 1.0,
    restore: Restore = KEEP,
    stay: bool = False,
) -> tuple[int, int]:
    """Returns the price of a copy on the node of its owner, and of a copy on another node, in rows.

    The second price is at least the first. Both are 0 if the profile says that rows take no time.

    profile: measured rates: seconds of matrix products, and seconds of an all-to-all of rows.
    links: the cost of a message to one rank, by its bytes: to a rank of the same node ("inside") and to a
        rank of another node ("outside"). If one of the two is missing, the other is used for both. If both
        are missing, the cost of the profile's all-to-all is used.
    multiply_adds: multiply-adds of a row in the forward pass.
    row_bytes: bytes of a row that is sent.
    expert_bytes: bytes of the weights of one expert.
    num_ranks: number of ranks. One of ``num_ranks`` rows is assumed to stay on its rank, without a message.
    trains: whether a backward pass follows.
    learned: the fraction of an expert's weights that are trained; 0 if experts are frozen.
    restore: the restore pair, which says whether backward sends the experts' inputs (T_DI) again.
    stay: whether the copies are kept for later calls, so that backward does not send them again with any
        restore pair.

    Example: 2 ranks, KEEP, all messages take 1 s per byte, products take no time. Half of the rows are sent.
    So in training, a row of 1 byte takes 4 / 2 = 2 s for its 4 messages. A copy of 30 bytes takes 30 s for
    the weights and 30 s for the gradients. Both prices are 60 / 2 = 30 rows.
    """
    num_products = 2 + learned if trains else 1  # of forward; of the gradients of rows and of weights
    num_messages = 4 + (restore.dispatched == "communicate") if trains else 2
    weights = Stages(local=True, remote=True, copies=fate_of_copies(restore, stay=stay))
    crossing = (num_ranks - 1) / num_ranks
    row_seconds = max(
        num_products * multiply_adds * profile.compute.beta_seconds,
        num_messages * row_bytes * crossing * profile.message.beta_seconds,
    )
    if not row_seconds:
        return 0, 0

    def price(link: LineCost) -> int:
        copy_seconds = link(expert_bytes)
        if trains and weights.sends_copies("backward"):
            copy_seconds += link(expert_bytes)
        if trains and learned:
            copy_seconds += link(learned * expert_bytes)
        return math.ceil(copy_seconds / row_seconds)

    inside = links.get("inside") or links.get("outside") or profile.message
    outside = links.get("outside") or inside
    near = price(inside)
    return near, max(near, price(outside))

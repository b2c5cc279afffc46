"""Sums gradients over ranks, in place.

Each rank has a part of the sum. Examples are an expert of which several ranks hold copies, and a parameter
that all experts share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from pmoe.comm.failures import at_stage, wait_for
from pmoe.comm.group_record import collectives
from pmoe.comm.ranks import Ranks


def sum_over_ranks(ranks: Ranks, stage: str, gradients: Sequence[Tensor]) -> None:
    """Sums gradients of any shape over ranks, in place. Collective: all ranks pass gradients of equal shapes.

    stage: what the ranks do, in words, for error messages.
    """
    if not gradients:
        return
    ranks.reconnect()
    if ranks.size == 1:
        return
    with at_stage(stage, ranks):
        collectives.begun += len(gradients)
        works = [dist.all_reduce(gradient, group=ranks.group, async_op=True) for gradient in gradients]
        for work in works:
            wait_for(work, ranks.group, gradients[0].is_cuda)

"""Buckets: the gradients that one message reduces over ranks, and when this message begins.

A data-parallel wrapper does not reduce gradients one by one. It divides them into buckets, in the order in
which they came in the first backward pass. One message reduces a bucket. It begins when all gradients of the
bucket exist, and the messages of all buckets before it have begun. Example:

    bucket 0: head.weight, block.bias      bucket 1: block.weight

    gradient that begins to exist    head.weight    block.weight    block.bias
    messages that begin              none           none            those of buckets 0 and 1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Bucket = Mapping[str, float]
"""The gradients that one message reduces over ranks: {name of a gradient: predicted seconds}.

The seconds of the message are the sum of these seconds.
"""


def bucket_limits(wrapper: DistributedDataParallel) -> list[int]:
    """Returns the bytes at which a wrapper closes its buckets: entry i for bucket i.

    The last entry is the limit of all further buckets.

    wrapper: its option ``bucket_cap_mb`` (default 25) says the bytes. With the default, the first bucket has
        a smaller limit, so that its message begins early.
    """
    limits = list(getattr(wrapper, "bucket_bytes_cap_list", ()))
    if limits:
        return limits
    other_limit = wrapper.bucket_bytes_cap
    if not wrapper.bucket_bytes_cap_default:
        return [other_limit]
    first_limit: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    return [first_limit, other_limit]


def divide_into_buckets(num_bytes: Mapping[str, int], limits: Sequence[int]) -> list[list[str]]:
    """Returns the names of the gradients of each bucket, in the order in which buckets are sent.

    A bucket takes gradients until their bytes reach its limit.

    num_bytes: {name of a gradient: its bytes}, in the order in which gradients came in the first backward
        pass.
    limits: entry i is the limit of bucket i in bytes. The last entry is the limit of all further buckets.
    """
    buckets = list[list[str]]()
    names = list[str]()
    filled_bytes = 0
    for name, size in num_bytes.items():
        names.append(name)
        filled_bytes += size
        if filled_bytes >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(names)
            names = []
            filled_bytes = 0
    return [*buckets, names] if names else buckets


class UnsentBuckets:
    """Follows a backward pass, and says which messages begin when a gradient exists."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """Begins a pass in which no gradient exists yet.

        buckets: the buckets, in the order in which they are sent.
        """
        self._unsent = deque(buckets)
        self._existing = set[str]()

    def add(self, name: str) -> list[Bucket]:
        """Notes that a gradient exists. Returns the buckets that are sent now, in their order.

        A bucket is sent when all of its gradients exist, and all buckets before it have been sent.

        name: the name of the gradient. It may be in no bucket.
        """
        self._existing.add(name)
        sent = list[Bucket]()
        while self._unsent and self._existing.issuperset(self._unsent[0]):
            sent.append(self._unsent.popleft())
        return sent


def send_seconds(buckets: Sequence[Bucket]) -> float:
    """Returns the seconds of the messages that reduce these buckets."""
    return sum(sum(bucket.values()) for bucket in buckets)

"""The interface of a slow link, and a measurement of the cost of all-to-alls on it."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from bench.timing import interleaved

INFINITE = float("inf")


class Link(Protocol):
    """A slow link. `launch` passes it to a rank's function as the first argument."""

    def set_rate(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        """Sets the rate of the link between nodes. The links inside nodes keep theirs.

        All ranks must call it, while no message is being sent.

        bytes_per_second: see `bench.links`; float("inf") removes the limit.
        latency_seconds: seconds for which each message to a peer occupies the link in addition to its bytes.
            Must be 0 on the real link, which cannot add any.
        """

    def set_rates(
        self,
        *,
        inter: float,
        intra: float,
        inter_latency_seconds: float = 0.0,
        intra_latency_seconds: float = 0.0,
    ) -> None:
        """Sets the rates of the links between nodes (inter) and inside them (intra), as `set_rate` does."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other nodes since the last reset.

        The modelled link counts the payload of all-to-alls. The real link returns the counter of the network
        interface, which contains all collectives, acknowledgements and headers (one header for a segment of
        up to 64 KiB): 0.3 % more in all. That counter is a little late; a barrier before reading it brings it
        up to date. The ranks of a node share one interface, and each rank counts the bytes of all of them.
        """

    @property
    def bytes_sent_inside(self) -> int:
        """Bytes that this rank has sent to other ranks of its node since the last reset.

        They are counted as those of `bytes_sent`.
        """

    def reset_bytes_sent(self) -> None: ...


class LinkCost(NamedTuple):
    """The cost of an all-to-all: seconds = alpha_seconds + bytes that this rank sends / bytes_per_second."""

    alpha_seconds: float
    bytes_per_second: float


class LinkUnavailableError(RuntimeError):
    """This machine cannot make the link. The message is one line with the reason."""


def measure_rate(sizes_bytes: tuple[int, int] = (1 << 20, 1 << 23), rounds: int = 3) -> LinkCost:
    """Measures the cost of all-to-alls on the default group, from two sizes. Collective.

    sizes_bytes: bytes that each rank sends to others, rounded down to equal parts. The defaults take 1.2 s at
        30 MB/s.

    On the real link alpha may be a fraction of a millisecond below 0: after a pause the bucket lets
    `real.BURST_BYTES` pass at once. Raises ValueError on a single rank, RuntimeError if the larger size was
    not slower (no limit, and noise).
    """
    world = dist.get_world_size()
    if world < 2:
        raise ValueError(f"measure_rate needs at least 2 ranks to send anything, not {world}")
    small, large = (size // (world - 1) for size in sizes_bytes)
    if not 0 < small < large:
        raise ValueError(f"sizes_bytes {sizes_bytes} must grow and give every peer at least one byte")

    def exchange(part: int) -> Callable[[], None]:
        rows, received = torch.zeros(2, world * part, dtype=torch.uint8)
        return lambda: dist.all_to_all_single(received, rows)

    timings = interleaved({"small": exchange(small), "large": exchange(large)}, rounds=rounds)
    small_seconds, large_seconds = timings["small"].median, timings["large"].median
    if large_seconds <= small_seconds:
        raise RuntimeError(f"{sizes_bytes} bytes took {small_seconds} and {large_seconds} s: no rate in that")
    seconds_per_byte = (large_seconds - small_seconds) / ((large - small) * (world - 1))
    return LinkCost(small_seconds - small * (world - 1) * seconds_per_byte, 1 / seconds_per_byte)


def check_rate(bytes_per_second: float) -> None:
    if not bytes_per_second > 0:
        raise ValueError(f"bytes_per_second ({bytes_per_second}) must be positive; infinity means no limit")


def refuse_latency(latency_seconds: float) -> None:
    if latency_seconds:
        raise ValueError(f"latency_seconds ({latency_seconds}) must be 0 on the real link: it cannot add any")

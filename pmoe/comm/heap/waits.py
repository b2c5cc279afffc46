"""Waits of kernels for their peers: how long they may last, and what an error says of them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pmoe.comm.ranks import Ranks, timeout_of

WAIT_SECONDS = "PMOE_WAIT_SECONDS"
"""The environment variable: for how long a kernel waits for a peer."""

DEFAULT_WAIT_SECONDS, MOST_WAIT_SECONDS = 30.0, 86400.0

WAITS = ("nothing", "grant", "arrival", "tiles", "returned")
"""`Wait` of cuda/comet/watch.h, in words."""


@dataclass(frozen=True)
class Awaited:
    """A wait in vain: `Report` and `Wait` of cuda/comet/watch.h.

    wait: one of WAITS. rank: who waited. peer: for whom. epoch: the heap's round.
    expert, part: one of this rank's experts, and the piece of the peer's rows for it; or part is the chunk of
        columns.
    """

    wait: str
    rank: int
    peer: int
    expert: int
    part: int
    epoch: int

    @staticmethod
    def of_report(words: Sequence[int]) -> Awaited | None:
        """None where nothing is reported."""
        code, peer, expert, part, epoch, rank = words[:6]
        if code == 0:
            return None
        name = WAITS[code] if 0 < code < len(WAITS) else f"wait {code}"
        return Awaited(name, rank, peer, expert, part, epoch % 2**32)

    def __str__(self) -> str:
        """Example: "rank 1: the arrival of piece 2 of its rows for expert 3 of rank 0, in round 7"."""
        known = {
            "grant": f"rank {self.peer}: the grant of room for rank {self.rank}'s rows for its experts",
            "arrival": f"rank {self.peer}: the arrival of piece {self.part} of its rows for expert "
            f"{self.expert} of rank {self.rank}",
            "tiles": f"rank {self.peer} itself: the tiles of column chunk {self.part}",
            "returned": f"rank {self.peer}: the return of column chunk {self.part} of the rows of rank "
            f"{self.rank}'s tokens",
        }
        what = known.get(self.wait, f"rank {self.peer}: {self.wait}, expert {self.expert}, part {self.part}")
        return f"{what}, in round {self.epoch}"


class HeapError(RuntimeError):
    """A wait that lasted too long, or use of a heap that is broken or closed.

    awaited: the wait, where it is known.
    """

    def __init__(self, message: str, awaited: Awaited | None = None) -> None:
        super().__init__(message)
        self.awaited = awaited


def wait_seconds(ranks: Ranks) -> float:
    """For how long kernels of this rank wait: $PMOE_WAIT_SECONDS, else 30 s, at most the group's timeout.

    Raises ValueError for a variable that is not a number of seconds.
    """
    text = os.environ.get(WAIT_SECONDS)
    seconds = DEFAULT_WAIT_SECONDS
    if text is not None:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MOST_WAIT_SECONDS:
            raise ValueError(
                f"{WAIT_SECONDS} ({text!r}) must be a number of seconds, more than 0 and at most "
                f"{MOST_WAIT_SECONDS:g}"
            )
    timeout = None if ranks.group is None else timeout_of(ranks.group)
    return seconds if timeout is None else min(seconds, timeout.total_seconds())

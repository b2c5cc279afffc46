"""Measures in rounds, and uses those in which other processes left the machine alone (Linux).

Benchmarks that compare times need all cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.passes import PARTS, Run
from bench.timing import Progress, Timing, busy_seconds

QUIET = 0.1
"""Largest fraction of the machine that other processes may use in a round that counts."""


class Neighbours:
    """Measures how many of the machine's cores are used by processes outside of the benchmark (Linux)."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), busy_seconds(), time.process_time()

    def share(self) -> float:
        """Returns the fraction of all cores that other processes used since `start`. Collective.

        The processes of the benchmark are those of all ranks.
        """
        own = torch.tensor([time.process_time() - self._own], dtype=torch.float64)
        dist.all_reduce(own)
        seconds = time.monotonic() - self._began
        return max(0.0, (busy_seconds() - self._busy - own.item()) / (seconds * (os.cpu_count() or 1)))

    def wait(self, patience_seconds: float, max_share: float = 0.1) -> None:
        """Waits, on all ranks, until other processes use little of the machine. Collective.

        patience_seconds: the longest wait.
        max_share: the fraction of all cores that they may use.
        """
        end = time.monotonic() + patience_seconds
        while dist.get_rank() == 0 and time.monotonic() < end:
            self._began, self._busy = time.monotonic(), busy_seconds()
            time.sleep(2)
            if (busy_seconds() - self._busy) / (2 * (os.cpu_count() or 1)) <= max_share:
                break
        dist.barrier()


@dataclass(frozen=True)
class Measured:
    """The result of `measure_quietly`.

    times: times of the slowest rank, in the rounds that count.
    neighbours: the fraction of the machine that other processes used, in every round.
    rounds: numbers of the rounds that count.
    """

    times: dict[str, dict[str, Timing]]
    neighbours: list[float]
    rounds: list[int]


def measure_quietly(runs: Mapping[str, Run], rounds: int, patience_seconds: float) -> Measured:
    """Times every run once in each round, and lets only quiet rounds count. Each round begins with another
    run.

    It takes up to twice as many rounds as asked for. Those count in which other processes used at most
    `QUIET` of the machine. If these are too few, those rounds count in which other processes used least.
    """
    every, neighbours = list(runs.values()), Neighbours()
    shares: list[float] = []
    taken: list[torch.Tensor] = []
    for run in every:
        run()
    progress = Progress()
    while len(shares) < 2 * rounds and sum(share <= QUIET for share in shares) < rounds:
        progress.at(f"round {len(shares) + 1} of {rounds} or more")
        neighbours.wait(patience_seconds)
        samples = torch.zeros(len(runs), len(PARTS), dtype=torch.float64)
        neighbours.start()
        for turn in range(len(every)):
            i = (turn + len(shares)) % len(every)
            times = every[i]()
            samples[i] = torch.tensor([times[part] for part in PARTS])
        shares.append(neighbours.share())
        shared = torch.tensor(shares[-1:], dtype=torch.float64)
        dist.broadcast(shared, 0)  # ranks measure different shares, but must all decide the same
        shares[-1] = shared.item()
        dist.all_reduce(samples, op=dist.ReduceOp.MAX)
        taken.append(samples)
    kept = sorted(sorted(range(len(shares)), key=lambda at: shares[at])[:rounds])
    times = {
        name: {part: Timing(tuple(float(taken[at][i, j]) for at in kept)) for j, part in enumerate(PARTS)}
        for i, name in enumerate(runs)
    }
    return Measured(times, shares, kept)

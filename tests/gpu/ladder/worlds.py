"""The fused kernels on integers whose results are known to the bit.

One rank runs them, or several virtual ranks in one launch.
"""

from __future__ import annotations

import torch

from tests.gpu.integers import Integers

TURNS = 3


def check_world(num_ranks: str) -> None:
    """By the kernels that this device runs."""
    torch.cuda.set_device(0)
    wrong = play(Integers(int(num_ranks)))
    assert not wrong, "; ".join(wrong)


def play(world: Integers, turns: int = TURNS) -> list[str]:
    """What is wrong, by turn. Raises HeapError where a rank waits in vain."""
    found: list[str] = []
    for number in range(turns):
        wrong = world.play(world.turn(number))
        world.virtual.check()
        if bool(wrong):
            late = " (and not before: flags or slots of a round that is over)" if number and not found else ""
            found.append(f"round {number}: y, or a gradient of tokens or weights, is another{late}")
    world.virtual.close()
    return found

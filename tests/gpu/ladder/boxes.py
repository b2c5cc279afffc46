"""Products whose tiles the tensor memory accelerator stores as boxes of 16 rows x 64 columns.

First one expert, whose operands encode their places, then experts of uneven sizes, with small integers. The
accelerator stores whole boxes, so what may go wrong with several experts is a box at the end of one that also
writes rows of the next.
"""

from __future__ import annotations

import itertools

from pmoe.kernels.grouped_gemm.launch import AS_BOXES
from tests.gpu.ladder.epilogues import Drawn, biased_and_weighted, gated_hidden, weight_gradient
from tests.gpu.ladder.machine import Machine, this_machine
from tests.gpu.ladder.tiles import FORMS, demand_nothing, find_tile, side_of, tile

UNEVEN = (131, 0, 5, 16, 129, 0, 1)
"""Rows of seven experts: more than a tile of 128, none, less than a box, a box, and one row."""


def check_boxes(path: str) -> None:
    """Weight gradients also share B. A side of 264 ends with 8 rows, which do not fill a box."""
    machine = this_machine(path)
    for form, sharing in [*itertools.product(FORMS, (1, 3)), ("weight", 2)]:
        demand_nothing(find_tile(machine, form, sharing, side=side_of(sharing), storing=AS_BOXES))
    for sharing in (1, 3):
        demand_nothing(find_gathered_weights(machine, sharing))
    demand_nothing(find_uneven_experts(machine))


def find_gathered_weights(machine: Machine, sharing: int = 1) -> dict[str, str | None]:
    """Weight gradients that gather the rows of B while they load them."""
    wrong = tile(
        machine, "weight", "b", side=side_of(sharing), sharing=sharing, gathered=True, storing=AS_BOXES
    )
    return {f"weight, rows of b gathered, sharing {sharing}": wrong}


def find_uneven_experts(
    machine: Machine, side: int = 128, counts: tuple[int, ...] = UNEVEN
) -> dict[str, str | None]:
    """All products that are stored as boxes: plain ones, SwiGLU's hidden columns, weight gradients."""
    drawn = Drawn(machine, side, counts)
    found: dict[str, str | None] = {}
    for product in (biased_and_weighted, gated_hidden, weight_gradient):
        found |= product(machine, drawn, AS_BOXES)
    return {f"{name}, as boxes, of uneven experts": told for name, told in found.items()}

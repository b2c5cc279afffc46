"""One tile of each product on operands whose elements encode their places.

Tiles are also computed by pairs of blocks, and from gathered rows.

Letters: N rows, m and n the result's sizes, k the summed one.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels.grouped_gemm.launch import ALONE, IN_TURNS
from tests.gpu.ladder.decode import name_difference
from tests.gpu.ladder.machine import Machine, this_machine

FORMS = {"forward": 0, "input": 1, "weight": 2}
BF16 = torch.bfloat16
SIDE = 128
"""Rows and columns of every operand: a tile, or a pair of them. bfloat16 holds integers up to 256."""


def launch(
    machine: Machine, form: str, a: Tensor, b: Tensor, d: Tensor, ends: Tensor, **options: Any
) -> None:
    """a, b: matrices, or an expert's each. d: the result. options: what the extension takes beside them."""
    fields: dict[str, Any] = {
        "device": machine.device.index or 0, "stream": machine.stream, "hopper": machine.hopper,
        "element": 0, "form": FORMS[form], "a": a.data_ptr(), "a_rows": a.shape[0], "a_stride": a.stride(0),
        "b": b.data_ptr(), "d": d.data_ptr(), "d_stride": d.stride(-2), "ends": ends.data_ptr(),
        "experts": ends.numel(), "rows": a.shape[0], "n": d.shape[-1], "sharing": 1,
    }  # fmt: skip
    if form == "weight":
        fields |= {"b_rows": b.shape[0], "b_stride": b.stride(0), "m": d.shape[-2]}
    else:
        fields["k"] = a.shape[1]
    machine.module.grouped_gemm(**fields | options)


def side_of(sharing: int) -> int:
    """Of two tiles: of 128 rows each where blocks share B (2), of 256 columns where they share A (3)."""
    return {1: SIDE, 2: 2 * SIDE, 3: 2 * SIDE + 8}[sharing]


def code(number: Tensor, side: int) -> Tensor:
    return number if side <= 256 else number % 251


def numbered(side: int, axis: int) -> Tensor:
    """(side, side): 1 + the row, or the column, of each element; 0 is left for what was never summed.

    bf16 holds 0 to 256: of a longer side numbers come again."""
    number = 1.0 + code(torch.arange(side), side)
    return number.unsqueeze(1 - axis).expand(side, side)


def places(form: str, operand: str, side: int) -> tuple[Tensor, Tensor]:
    """Returns (row, column) of the operand's element that each element of the result must be.

    The other operand is the unit matrix.
    """
    down, right = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    as_given = {("forward", "a"), ("input", "a"), ("input", "b"), ("weight", "b")}
    return (down, right) if (form, operand) in as_given else (right, down)


def tile(
    machine: Machine,
    form: str,
    operand: str,
    *,
    side: int = SIDE,
    sharing: int = 1,
    gathered: bool = False,
    storing: int = ALONE,
) -> str | None:
    """What is wrong with how the kernel reads that operand; None where nothing is.

    gathered: rows of A of the forward form, or of B of the weight form, stand elsewhere: row r in row
        slot[r] / 2.
    storing: a value of `pmoe.kernels.grouped_gemm.launch.STORING`.
    """
    unit = machine.put(torch.eye(side), BF16)
    ends = machine.put(torch.tensor([side], dtype=torch.int32))
    row, column = places(form, operand, side)
    options: dict[str, Any] = {"sharing": sharing, "storing": storing}
    slot = torch.randperm(2 * side, generator=torch.Generator().manual_seed(5))[:side]
    if gathered:
        slots = machine.put(slot, torch.int32)
        which = "b_gathered" if form == "weight" else "a_gathered"
        options |= {which: True, "slot": slots.data_ptr(), "top_k": 2}
        row = (slot // 2)[row]
    seen = []
    for axis in range(2):
        coded, d = machine.put(numbered(side, axis), BF16), machine.poisoned(side, side)
        a, b = (coded, unit) if operand == "a" else (unit, coded)
        launch(machine, form, a, b, d, ends, **options)
        seen.append(machine.fetch(d) - 1)
    return name_difference((code(row, side), code(column, side)), (seen[0], seen[1]), (side, side))


def demand_nothing(found: dict[str, str | None]) -> None:
    """Raises AssertionError with all that is wrong."""
    wrong = {name: told for name, told in found.items() if told is not None}
    assert not wrong, "\n" + "\n".join(f"{name}: {told}" for name, told in wrong.items())


# ---- steps


def check_tile(path: str, form: str, sharing: str = "1") -> None:
    machine = this_machine(path)
    demand_nothing(find_tile(machine, form, int(sharing), side=side_of(int(sharing))))


def find_tile(machine: Machine, form: str, sharing: int = 1, **options: Any) -> dict[str, str | None]:
    return {
        f"{form}, operand {each} as it is read": tile(machine, form, each, sharing=sharing, **options)
        for each in "ab"
    }


def check_pairs(path: str, form: str) -> None:
    machine = this_machine(path)
    found: dict[str, str | None] = {}
    for sharing, operand in ((2, "B"), (3, "A")):
        tiles = find_tile(machine, form, sharing, side=side_of(sharing))
        found |= {f"sharing {operand}: {name}": told for name, told in tiles.items()}
    demand_nothing(found)


def check_turns(path: str) -> None:
    machine = this_machine(path)
    for form, sharing in itertools.product(("forward", "input"), (1, 3)):
        demand_nothing(find_tile(machine, form, sharing, side=side_of(sharing), storing=IN_TURNS))


def check_gathers(path: str) -> None:
    machine = this_machine(path)
    demand_nothing(find_gathers(machine))


def find_gathers(machine: Machine, **options: Any) -> dict[str, str | None]:
    return {"forward, rows of a gathered": tile(machine, "forward", "a", gathered=True, **options)}

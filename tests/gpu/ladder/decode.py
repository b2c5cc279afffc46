"""Names what a product did wrong with an operand whose elements tell where they stand.

The operand's elements were numbered by their row in one launch and by their column in another; the other
operand held unit vectors, so that each element of the result is one element of the operand. Wanted and seen
are then two maps of places: (row, column) in the operand's memory, columns being neighbours there.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

CHUNK = 8
"""Elements of 2 bytes in the 16 bytes that a swizzle moves as one."""

SWIZZLES = {"none": (0, 1), "32 bytes": (1, 4), "64 bytes": (3, 2), "128 bytes": (7, 1)}
"""(mask, rows that share a value): chunk c of row r stands at c ^ ((r / rows) & mask)."""


def swizzled(row: Tensor, column: Tensor, kind: str) -> Tensor:
    """The column at which an element stands under a swizzle."""
    mask, rows = SWIZZLES[kind]
    return ((column // CHUNK) ^ ((row // rows) & mask)) * CHUNK + column % CHUNK


def name_difference(
    wanted: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor], size: tuple[int, int]
) -> str | None:
    """None where they are the same. wanted: (row, column) integers; seen: the same as floating point, NaN
    where nothing was written, -1 where nothing was summed. size: the operand's rows and columns."""
    row, column = (each.double() for each in wanted)
    seen_row, seen_column = (each.double() for each in seen)
    if torch.equal(row, seen_row) and torch.equal(column, seen_column):
        return None
    wrong = (row != seen_row) | (column != seen_column)
    return f"{name_kind(wanted, seen, size)}; {examples(wanted, seen, wrong)}"


def name_kind(wanted: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor], size: tuple[int, int]) -> str:
    """Of elements that are none of the operand's, how they came; and of all others, their permutation."""
    both = torch.stack([each.double() for each in seen])
    nothing, never = both.isnan().any(0), (both < 0).any(0)
    one = (both == both.round()).all(0) & (both[0] < size[0]) & (both[1] < size[1]) & ~never
    told = []
    if nothing.any():
        told.append(f"elements were not written: {int(nothing.sum())}, or NaN was summed")
    if never.any():
        told.append(f"elements were not summed: {int(never.sum())}: too few steps, or bytes of zeros")
    if not (one | nothing | never).all():
        told.append("sums of several elements: a step was summed twice, or unit rows were read as others")
    if one.any():
        told += name_places(*(each[one].long() for each in (*wanted, *seen)), size=size)
    return "; ".join(told)


def name_places(
    row: Tensor, column: Tensor, seen_row: Tensor, seen_column: Tensor, size: tuple[int, int]
) -> list[str]:
    if torch.equal(row, seen_row) and torch.equal(column, seen_column):
        return []
    return [
        name_transpose(row, column, seen_row, seen_column)
        or name_offset(row, column, seen_row, seen_column, size)
        or name_swizzle(row, column, seen_row, seen_column)
        or name_groups(row, column, seen_row, seen_column)
        or "no permutation that has a name here"
    ]


def name_transpose(row: Tensor, column: Tensor, seen_row: Tensor, seen_column: Tensor) -> str | None:
    if torch.equal(row, seen_column) and torch.equal(column, seen_row):
        return "transposed: the operand's major-ness bit of the instruction descriptor, or .trans of ldmatrix"
    return None


def name_offset(
    row: Tensor, column: Tensor, seen_row: Tensor, seen_column: Tensor, size: tuple[int, int]
) -> str | None:
    """The same shift everywhere, around the operand's ends."""
    down, right = ((seen_row - row) % size[0]).unique(), ((seen_column - column) % size[1]).unique()
    if down.numel() == right.numel() == 1:
        return f"shifted by {int(down)} rows, {int(right)} columns: start address, or coordinates of a box"
    return None


def name_swizzle(row: Tensor, column: Tensor, seen_row: Tensor, seen_column: Tensor) -> str | None:
    """Written under one swizzle and read under another."""
    if not torch.equal(row, seen_row):
        return None
    for written, read in itertools.combinations(SWIZZLES, 2):
        expected = swizzled(row, swizzled(row, column, written), read)
        if torch.equal(expected, seen_column):
            return (
                f"swizzle: {written} on one side, {read} on the other (written and read differ): "
                "the tensor map's swizzle, or the descriptor's layout type"
            )
    return None


def name_groups(row: Tensor, column: Tensor, seen_row: Tensor, seen_column: Tensor) -> str | None:
    """Groups of rows or columns that changed places whole; the largest group is named."""
    rows_right, columns_right = torch.equal(row, seen_row), torch.equal(column, seen_column)
    for group in (64, 16, 8):
        if not rows_right and columns_right and torch.equal(row % group, seen_row % group):
            return f"groups of {group} rows changed places: the descriptor's stride byte offset (SBO)"
        if not columns_right and rows_right and torch.equal(column % group, seen_column % group):
            return f"groups of {group} columns changed places: leading byte offset (LBO), or a step's advance"
        if torch.equal(row % group, seen_row % group) and torch.equal(column % group, seen_column % group):
            return (
                f"groups of {group} rows and of {group} columns changed places: SBO or LBO of both operands"
            )
    if rows_right and torch.equal(column // CHUNK, seen_column // CHUNK):
        return "columns changed places within 16 bytes: fragments of the accumulators or of ldmatrix"
    if columns_right and torch.equal(row // 8, seen_row // 8):
        return "rows changed places within groups of 8: fragments, or a swizzle's rows"
    return None


def examples(wanted: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor], wrong: Tensor) -> str:
    at = wrong.nonzero()
    told = [
        f"D{list(place)} is of ({float(seen[0][place]):g}, {float(seen[1][place]):g}), "
        f"wanted ({int(wanted[0][place])}, {int(wanted[1][place])})"
        for place in map(tuple, at[:: max(1, len(at) // 4)][:4].tolist())
    ]
    return f"{len(at)} of {wrong.numel()} elements: " + "; ".join(told)

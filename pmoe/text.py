"""Tables as aligned text, the one way in which pmoe prints them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import zip_longest


def table(rows: Iterable[Sequence[str]], left: Container[int] = (0,)) -> str:
    """Rows of cells as aligned text: a line a row, two spaces between columns, none at the end of a line.

    Args:
        rows: the cells, with the header as the first row; short rows are filled up with empty cells.
        left: the numbers of the columns that are aligned to the left; all others are to the right.

    Example: [["name", "ms"], ["a", "12.5"]] -> "name    ms" and "a     12.5".
    """
    columns = zip_longest(*rows, fillvalue="")
    aligned = [_aligned(column, i in left) for i, column in enumerate(columns)]
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def _aligned(column: Sequence[str], left: bool) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in column]

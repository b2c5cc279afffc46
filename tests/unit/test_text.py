"""Tables as text: to which side a column is aligned, and cells that are missing."""

from __future__ import annotations

from pmoe.text import table

ROWS = [["name", "what", "ms"], ["a", "first", "12.5"], ["long one", "", "9"]]


def test_the_first_column_is_to_the_left_and_all_others_are_to_the_right() -> None:
    assert table(ROWS) == "name       what    ms\na         first  12.5\nlong one            9"


def test_columns_are_aligned_to_the_left_by_number() -> None:
    assert table(ROWS, left=range(2)) == "name      what     ms\na         first  12.5\nlong one            9"
    assert table(ROWS, left={2}) == "    name   what  ms\n       a  first  12.5\nlong one         9"


def test_no_line_ends_with_a_space() -> None:
    assert table([["a", "long"], ["b", ""]], left=range(2)) == "a  long\nb"


def test_short_rows_and_a_short_header_are_filled_up() -> None:
    assert table([["pair"], ["S1", "12"], ["S4"]]) == "pair\nS1    12\nS4"
    assert table([["pair", "MiB"], ["S1"]]) == "pair  MiB\nS1"


def test_no_rows_are_no_text() -> None:
    assert table([]) == ""

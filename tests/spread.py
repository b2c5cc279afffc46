"""Which cases of a large grid run in every test run: the others are marked slow, for `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pmoe import Restore


def spread(*axes: Sequence[Any], every: int) -> list[Any]:
    """All combinations, as pytest parameters. Of those, one in ``every`` is not marked slow, chosen along
    diagonals: any two values of two axes meet in some of them, where a third has ``every`` values.

    Raises ValueError where some value would be in slow cases alone: ``every`` is then too large."""
    cases = []
    fast = [values for is_fast, values in _combinations(axes, every) if is_fast]
    for i, axis in enumerate(axes):
        chosen = [values[i] for values in fast]
        missing = [value for value in axis if not any(each is value or each == value for each in chosen)]
        if missing:
            raise ValueError(f"every ({every}) must leave a case that is not slow to each of {missing}")
    for is_fast, values in _combinations(axes, every):
        flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
        cases.append(pytest.param(*flat, marks=() if is_fast else pytest.mark.slow))
    return cases


def parts(*axes: Sequence[Any], every: int) -> list[Any]:
    """The same choice for a test that goes through all combinations by itself: two lists of them."""
    found = list(_combinations(axes, every))
    some, others = ([values for is_fast, values in found if is_fast == wanted] for wanted in (True, False))
    return [pytest.param(some, id="some"), pytest.param(others, id="others", marks=pytest.mark.slow)]


def _combinations(axes: Sequence[Sequence[Any]], every: int) -> Iterator[tuple[bool, tuple[Any, ...]]]:
    # A multiple of ``every`` would leave its axis out of the choice.
    steps = [step for step in range(1, 2 * len(axes) + 1) if step % every]
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        is_fast = sum(place * step for place, step in zip(places, steps, strict=False)) % every == 0
        yield is_fast, tuple(axis[place] for axis, place in zip(axes, places, strict=True))


def named(value: Any) -> str | None:
    """For parametrize's ``ids``: restore pairs and options by what they are called, all else as pytest does.
    Never by an address: workers must collect the same names."""
    return _shown(value) if isinstance(value, Restore | dict) else None


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_shown(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if value is None or isinstance(value, bool | int | float | str | Restore):
        return str(value)
    return str(getattr(value, "__name__", type(value).__name__))

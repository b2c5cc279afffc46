"""Which cases of a large grid run in every test run: the others are marked slow, for `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def spread(*axes: Sequence[Any], every: int) -> list[Any]:
    """All combinations, as pytest parameters. Of those, one in ``every`` is not marked slow, chosen along
    diagonals: each two values of two axes come together in some of them."""
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
        fast = sum(place * (at + 1) for at, place in enumerate(places)) % every == 0
        cases.append(pytest.param(*flat, marks=() if fast else pytest.mark.slow))
    return cases

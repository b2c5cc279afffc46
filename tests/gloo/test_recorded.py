"""Every path of the layer does what was recorded: order of tasks, bits of results, bytes sent and held.

After an intended change, `python -m tests.recorded.write` writes the recordings again.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.pool import ranks
from tests.recorded import store
from tests.recorded.configurations import FAST, GROUPS
from tests.recorded.step import record

CASES = [
    pytest.param(group, name, marks=() if (group, name) in FAST else pytest.mark.slow)
    for group, configurations in GROUPS.items()
    for name in configurations
]


@functools.cache
def stored(group: str) -> dict[str, Any]:
    return store.read(group)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("group, name", CASES)
def test_it_does_what_was_recorded(group: str, name: str) -> None:
    configuration = GROUPS[group][name]
    recorded = stored(group)["configurations"].get(name)
    assert recorded is not None, f"{group}, {name} was never recorded"
    assert recorded["is"] == str(configuration), "another configuration was recorded"
    found = ranks(configuration.world).run(record, group, name, 1)
    if store.exceeds_memory(recorded, found):
        found = ranks(configuration.world).run(record, group, name, 8)
    lines = list(store.differences(recorded, found, stored(group)["machine"] == store.machine()))
    assert not lines, "\n".join([f"{group}, {name}:", *lines])


def test_all_that_is_recorded_is_compared() -> None:
    assert set(FAST) <= {(group, name) for group in GROUPS for name in GROUPS[group]}
    for group, configurations in GROUPS.items():
        assert set(stored(group)["configurations"]) == set(configurations), group

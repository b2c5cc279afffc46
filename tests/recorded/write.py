"""Records the layer as it is now, over what was recorded before.

    python -m tests.recorded.write                          everything
    python -m tests.recorded.write --group pairs ranks      of some files
    python -m tests.recorded.write --field passes pool      of some fields: the others stay

What changes is printed, a line for each value.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from tests.pool import ranks
from tests.recorded import store
from tests.recorded.configurations import GROUPS
from tests.recorded.step import record

COUNTED_STEPS = 2
FIELDS = (
    "passes",
    "steps",
    "results",
    "traffic",
    "tokens_per_expert",
    "ran",
    "pool",
    "traffic again",
    "memory",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--field", nargs="+", choices=FIELDS, default=list(FIELDS))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    for group in arguments.group:
        before = store.read(group)
        after = recorded(group, before, arguments.field)
        store.write(group, after)
    print(f"{time.perf_counter() - begin:.0f} s")


def recorded(group: str, before: dict[str, Any], chosen: list[str]) -> dict[str, Any]:
    """The content of a group's file. chosen: fields that are recorded now, the others are taken over."""
    same_machine = before["machine"] == store.machine()
    configurations = {}
    for name, configuration in GROUPS[group].items():
        found = ranks(configuration.world).run(record, group, name, COUNTED_STEPS, timeout=300)
        old = before["configurations"].get(name)
        if old is not None and old["is"] == str(configuration):
            for line in store.differences(old, found, same_machine):
                print(f"{group}, {name}, {line}")
            for now, then in zip(found, old["ranks"], strict=True):
                now |= {field: value for field, value in then.items() if field not in chosen}
        configurations[name] = {"is": str(configuration), "ranks": found}
    machine = store.machine() if "results" in chosen else before["machine"]
    return {"machine": machine, "configurations": configurations}


if __name__ == "__main__":
    main()

"""Runs commands of fairseq one after another in this process, which environment.py starts.

There are one or two such processes, one for each rank.

    python -m tests.fairseq.commands LIST.json    # [["train", "data", ...], ...]

A command behind `MEASURED` writes what its steps did (measured.py).
Rank 0 prints "COMMAND" before each and "ENDED" behind it, with the message of the ValueError that refused it.
It alone runs what has nothing to do with ranks. What the others print goes to LIST.json.rank1 and so on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from pmoe.integrations.fairseq.__main__ import leave_groups, main
from tests.fairseq.measured import MEASURED, measured

RANK = int(os.environ.get("RANK", "0"))


def refusal(arguments: list[str]) -> str:
    try:
        if arguments[0] == MEASURED:
            measured(Path(arguments[1]), arguments[2], arguments[3:], main)
        else:
            main(arguments)
    except ValueError as error:
        return str(error)
    return ""


def run_all(listed: Path) -> None:
    for i, arguments in enumerate(json.loads(listed.read_text(encoding="utf-8"))):
        done = listed.with_name(f"{listed.name}.{i}")
        if RANK == 0:
            print("COMMAND", flush=True)
            message = refusal(arguments)
            print("ENDED " + json.dumps(message), flush=True)
            done.touch()
        elif arguments[0] == "preprocess":
            while not done.exists():
                time.sleep(0.05)
        else:
            refusal(arguments)


def print_to(path: Path) -> None:
    with path.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


if __name__ == "__main__":
    if RANK > 0:
        print_to(Path(f"{sys.argv[1]}.rank{RANK}"))
    run_all(Path(sys.argv[1]))
    leave_groups()

"""What a step of the ladder is, and what becomes of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PASSED, FAILED, HUNG, CRASHED = "passed", "failed", "hung", "crashed"
SKIPPED, NOT_RUN = "skipped", "not run"
WRONG = (FAILED, HUNG, CRASHED)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step.

    run: "module:function", with arguments behind it: "module:function a 2".
    needs: steps without whose success this one would say nothing new.
    usual: seconds of a healthy run, its process's start among them. seconds: the limit.
    gpus: how many it takes. hopper: whether it is of kernels for sm_90a.
    means: what a failure says. look: where to look, and the finding of the review before the first run.
    """

    name: str
    run: str
    means: str
    look: str
    needs: tuple[str, ...] = ()
    usual: float = 9
    seconds: float = 20
    gpus: int = 1
    hopper: bool = False


@dataclass(kw_only=True)
class Outcome:
    """What became of a step. told: what it printed and how it ended."""

    name: str
    state: str
    seconds: float = 0.0
    told: str = ""
    means: str = ""
    look: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check_steps(steps: Sequence[Step]) -> None:
    """Raises ValueError where a step needs one that does not come before it, or has another's name."""
    seen: set[str] = set()
    for each in steps:
        missing = set(each.needs) - seen
        if missing:
            raise ValueError(f"step {each.name!r} needs {sorted(missing)}, not before it: order the steps")
        if each.name in seen:
            raise ValueError(f"step {each.name!r} is there twice: names must differ")
        if each.usual > each.seconds:
            raise ValueError(f"step {each.name!r} usually takes {each.usual} s, over its {each.seconds}")
        seen.add(each.name)

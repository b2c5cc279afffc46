"""The pipeline degree n: the number of micro-batches (chunks) that a layer's tokens are cut into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pmoe.arguments import MOST
from pmoe.schedule.restore import Restore

DEGREES = (1, 2, 4, 8, 16)
"""Degrees that pipeline=True chooses from. Each divides the next."""

SolveName = Literal["solve"]
SOLVE: SolveName = "solve"
"""Value of the argument ``pipeline`` that asks FSMoE's solver for the degrees."""


def check_pipeline(pipeline: bool | int | str) -> None:
    """Checks the argument ``pipeline``.

    Raises TypeError unless it is a bool, an int or "solve", and ValueError for an int below 1 or too large.
    """
    if isinstance(pipeline, str) and pipeline == SOLVE:
        return
    if not isinstance(pipeline, int):
        raise TypeError(f'pipeline ({pipeline!r}) must be False, True or an int, or "{SOLVE}"')
    if not isinstance(pipeline, bool) and not 1 <= pipeline <= MOST:
        raise ValueError(f"pipeline ({pipeline}) must be False, True or an int of at least 1, at most {MOST}")


def check_backward(pipeline: bool | int | str, pipeline_backward: int | None) -> None:
    """Checks the argument ``pipeline_backward`` beside ``pipeline``.

    Raises TypeError unless it is None or an int, and ValueError if neither degree divides the other, or if
    ``pipeline`` chooses both.
    """
    if pipeline_backward is None:
        return
    if not isinstance(pipeline_backward, int) or isinstance(pipeline_backward, bool):
        raise TypeError(f"pipeline_backward ({pipeline_backward!r}) must be None or an int")
    if pipeline is True or isinstance(pipeline, str):
        raise ValueError(
            f"pipeline_backward ({pipeline_backward}) must be None if pipeline is {pipeline}, "
            "which chooses both degrees"
        )
    n = int(pipeline) or 1
    if not 1 <= pipeline_backward <= MOST or (n % pipeline_backward and pipeline_backward % n):
        raise ValueError(
            f"pipeline_backward ({pipeline_backward}) must divide pipeline ({n}) or be a multiple of it"
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The way in which a layer runs a batch: n of both passes, and the restore pair.

    forward, backward: number of chunks of each pass.
    restore: what becomes of T_DI and T_M between the passes.
    """

    forward: int
    backward: int
    restore: Restore

    @property
    def rearranged(self) -> bool:
        """Whether backward has other chunks than forward."""
        return self.forward != self.backward


def all_choices(degrees: Iterable[tuple[int, int]], pairs: Sequence[Restore]) -> list[Choice]:
    """Returns every combination of (n forward, n backward) and restore pair."""
    return [Choice(forward=n, backward=m, restore=pair) for n, m in degrees for pair in pairs]

"""Runs steps in order, each in a process group of its own, which is killed where it does not end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gpu.ladder.step import CRASHED, FAILED, HUNG, NOT_RUN, PASSED, SKIPPED, WRONG, Outcome, Step

ROOT = Path(__file__).resolve().parents[3]
WALL_SECONDS = 479.0
"""Of all steps together: `make gpu`'s parts end within 8 minutes."""

TOLD = 6000
RAISED = 3
"""The exit code of a step whose body raised; any other than 0 is a crash."""

GRACE = 2.0
"""Seconds before a step's limit at which it writes its Python lines, and of waiting for a killed one."""


def climb(
    steps: Sequence[Step],
    *,
    gpus: int,
    hopper: bool,
    wall: float = WALL_SECONDS,
    tell: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """gpus, hopper: of this machine. What a step needs and has not, skips it and nothing else."""
    began, done = time.monotonic(), dict[str, Outcome]()
    for step in steps:
        left = wall - (time.monotonic() - began)
        why = why_not(step, done, gpus=gpus, hopper=hopper)
        if why is not None:
            outcome = Outcome(name=step.name, state=SKIPPED, told=why)
        elif left < min(step.usual, step.seconds):
            outcome = Outcome(name=step.name, state=NOT_RUN, told=f"{wall:g} s of the ladder are over")
        else:
            outcome = take(step, min(step.seconds, left))
        done[step.name] = outcome
        tell(outcome)
    return list(done.values())


def why_not(step: Step, done: dict[str, Outcome], *, gpus: int, hopper: bool) -> str | None:
    """None where the step is to be taken."""
    if step.gpus > gpus:
        return f"needs {step.gpus} GPUs, there are {gpus}"
    if step.hopper and not hopper:
        return "is of the kernels for sm_90a, which this machine does not run"
    without = [f"{name} ({done[name].state})" for name in step.needs if done[name].state != PASSED]
    return f"needs {', '.join(without)}" if without else None


def take(step: Step, seconds: float) -> Outcome:
    """One step, to its end or its limit."""
    command = [sys.executable, "-m", "tests.gpu.ladder.child", step.run, str(max(seconds - GRACE, 0.2))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as printed:  # a pipe's end may outlive the step
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        printed.seek(0)
        told = printed.read()[-TOLD:]
    state, ended = name_end(code, seconds)
    outcome = Outcome(
        name=step.name, state=state, seconds=round(time.monotonic() - began, 2), told=told + ended
    )
    if state in WRONG:
        outcome.means, outcome.look = step.means, step.look
    return outcome


def end(process: subprocess.Popen[bytes]) -> None:
    """The step's whole group, ranks that it started among it. A process inside the driver may stay."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def name_end(code: int | None, seconds: float) -> tuple[str, str]:
    """(state, what to write behind what the step printed)"""
    if code is None:
        return HUNG, f"\nended after {seconds:.0f} s: it hung"
    if code == 0:
        return PASSED, ""
    if code == RAISED:
        return FAILED, ""
    if code < 0:
        return CRASHED, f"\nended by {signal.Signals(-code).name}"
    return CRASHED, f"\nended with exit code {code}"

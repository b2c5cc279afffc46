"""Jobs of several machines: each is a network namespace with its own address, hostname and torchrun agent."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machines import ROOT, Machine, machines

SCRIPT = """
import sys, time
from pathlib import Path
import torch
sys.path.insert(0, {examples!r})
import train_lm

step, limit = train_lm.train_step, Path({limit!r})

def slower(run, stop_here):
    if run.step >= int(limit.read_text()):
        time.sleep(0.5)
    return step(run, stop_here)

train_lm.train_step = slower
torch.set_default_dtype(torch.float64)
train_lm.leave(train_lm.main())
"""
TINY = """
    --d-model 16 --d-hidden 36 --layers 2 --heads 2 --context 16 --warmup 2 --eval-bytes 256
    --final-eval-bytes 256 --eval-every 1000 --timeout 30
""".split()  # noqa: SIM905
DEATHS = 20
STEPS_A_DEATH = 30
"""More steps than run between two checkpoints."""
PATIENCE_SECONDS = 300


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Returns examples/train_lm.py in float64, in which only the order of sums may make a difference.

    It takes as much longer for a step as the file ``limit`` says, so that it is not done before the last
    machine dies.
    """
    path = tmp_path / "train_double.py"
    path.write_text(SCRIPT.format(examples=str(ROOT / "examples"), limit=str(tmp_path / "limit")))
    return path


def flags(out: Path, text: Path, steps: int, parts: int = 6) -> list[object]:
    """Returns arguments of the script.

    parts: number of parts of a batch, one sequence each, and number of experts.
    """
    sizes = ["--batch", parts, "--parts", parts, "--num-experts", parts]
    often = ["--steps", steps, "--checkpoint-every", 5, "--resume", "if-any"]
    return [*TINY, *sizes, *often, "--out", out, "--data", text]


def some_text(folder: Path) -> Path:
    path = folder / "text"
    path.write_text("".join(f"{i * i} is the square of {i}.\n" for i in range(4000)))
    return path


def last_step(out: Path) -> int:
    """Returns the step of the last complete checkpoint."""
    try:
        return int(json.loads((out / "checkpoints/latest.json").read_text())["folder"].removeprefix("step_"))
    except FileNotFoundError:
        return 0


def wait_until(done: Callable[[], bool], what: str, others: list[Machine]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not done():
        if time.monotonic() > end:
            logs = "\n".join(f"--- {each.log.name}\n{each.said()[-3000:]}" for each in others)
            pytest.fail(f"{what} did not come within {PATIENCE_SECONDS} s\n{logs}")
        time.sleep(0.05)


def losses(out: Path) -> list[float]:
    found: list[float] = json.loads((out / "metrics.json").read_text())["history"]["train_loss"]
    return found


def uninterrupted(folder: Path, script: Path, *same: int) -> list[float]:
    """Returns the losses of the same run on one rank without any interruption."""
    command = [sys.executable, script, *flags(folder / "alone", folder / "text", *same)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*map(str, command)], check=True, capture_output=True, env=variables)
    return losses(folder / "alone")


def survive(deaths: int, folder: Path, script: Path, seed: int) -> None:
    """Lets machines die at random moments, of training and of recovery, and come back at once or later."""
    chance, text, steps = random.Random(seed), some_text(folder), (deaths + 10) * STEPS_A_DEATH
    out, limit = folder / "out", folder / "limit"
    limit.write_text("0")
    with machines(3, folder) as (head, every):
        run = {each: each.join(head, "1:3", script, *flags(out, text, steps)) for each in every}
        for death in range(deaths):
            limit.write_text(str((death + 1) * STEPS_A_DEATH))
            if chance.random() < 0.75:  # else in the middle of a recovery, if it is not over yet
                wanted = death * STEPS_A_DEATH + 5 * chance.randint(1, 5)
                wait_until(lambda: last_step(out) >= wanted, f"step {wanted}", every)  # noqa: B023
            time.sleep(chance.uniform(0, 0.5))
            reached = last_step(out)
            assert reached < steps - STEPS_A_DEATH, "it was done before the last death"
            unlucky = chance.choice(every)
            unlucky.die()
            run[unlucky].wait()
            if chance.random() < 0.5:
                wait_until(lambda: last_step(out) > reached, f"a step after {reached}", every)  # noqa: B023
            run[unlucky] = unlucky.join(head, "1:3", script, *flags(out, text, steps))
        before = said(every).count("on 3 rank(s)")
        wait_until(lambda: said(every).count("on 3 rank(s)") > before, "all three machines", every)
        limit.write_text(str(steps))
        wait_until(lambda: all(each.poll() is not None for each in run.values()), "the end", every)
        assert [each.returncode for each in run.values()] == [0] * 3, said(every)[-6000:]
        assert "on 2 rank(s)" in said(every) or "on 1 rank(s)" in said(every)
    assert losses(out) == pytest.approx(uninterrupted(folder, script, steps), rel=1e-6)


def said(every: list[Machine]) -> str:
    return "".join(each.said() for each in every)


SLOW, FAST = 20e6, 400e6
"""Rates of each rank in bytes a second: between machines, and inside a machine."""


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [2, 4])
def test_a_job_of_several_machines_of_two_ranks(tmp_path, script, number):
    world, out = 2 * number, tmp_path / "out"
    (tmp_path / "limit").write_text("1000000")
    profile = tmp_path / "profile.json"
    with machines(number, tmp_path, between=SLOW, inside=FAST, ranks=2) as (head, every):
        finish(head, every, ROOT / "tests/machine_job.py", tmp_path)
        finish(head, every, script, *flags(out, some_text(tmp_path), 6, world))
        finish(head, every, "-m", "pmoe", "profile", "--quick", "--out", profile)
    for rank in range(world):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["hosts"] == sorted(f"machine{node}" for node in range(number) for _ in range(2))
        assert found["ranks a machine"] == 2 and found["loaded"] and found["difference"] < 1e-12
    assert losses(out) == pytest.approx(uninterrupted(tmp_path, script, 6, world), rel=1e-6)
    measured = json.loads(profile.read_text())
    assert (measured["num_ranks"], measured["num_nodes"]) == (world, number)
    between, inside = (
        measured["operations"][name]["line"]["beta_seconds"] for name in ("all_to_all", "all_gather")
    )
    assert between > 3 * inside, "one link is 20 times as fast as the other"
    assert json.loads((out / "run.json").read_text())["sessions"][0]["ranks"] == world
    with (out / "layers.csv").open() as file:
        row = next(csv.DictReader(file))
    assert int(row["num_slots"]) == world * 16 * 2  # each rank's sequence, to two experts a token
    page = subprocess.run([sys.executable, "-m", "pmoe", "report", out], check=True, capture_output=True)
    assert "blocks.1.ffn" in (out / "report.html").read_text(), page


def finish(head: Machine, every: list[Machine], *command: object) -> None:
    """Runs a job of all machines to its end; none of them may fail."""
    once = {"TRIES": 1, "RESTARTS": 0, "JOB": f"job{len(command)}"}
    run = [each.join(head, str(len(every)), *command, ranks=2, **once) for each in every]
    wait_until(lambda: all(each.poll() is not None for each in run), "the end", every)
    assert not any(each.returncode for each in run), said(every)[-6000:]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_twenty_deaths_of_machines_at_random_moments_lose_nothing(tmp_path, script):
    survive(DEATHS, tmp_path, script, seed=20)
